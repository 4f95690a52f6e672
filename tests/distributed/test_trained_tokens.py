"""The loss is the mean over the trained tokens of the whole global batch, on every layout, with few or none to train.

The oracle is a plain decoder on one device in float64, and the division of its summed loss.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.parallel.world import World
from meshwright.spec.plan import Plan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, LLAMA, assemble_whole, batch, compare
from tests.distributed.test_schedules import Case, named
from tests.slow import quick_first

COUNTS = {"few": (0, 0, 1, 9, 0, 0, 3, 0), "one": (0, 0, 0, 0, 0, 1, 0, 0), "none": (0,) * BATCH}
"""Trained tokens of each sequence: whole micro-batches and ranks have none."""
CASES = [
    Case("1f1b", pipeline=2, shard=2, micro=1),
    Case("1f1b", replicate=2, tensor=2, micro=2),
    Case("1f1b", shard=2, micro=1),
    Case("zb_h1", pipeline=2, micro=2),
    Case("1f1b", ring=2, micro=2),
    Case("1f1b", ulysses=2, shard=2, micro=1),
]


def masked_batch(counts: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Tokens, targets, positions, documents; of sequence i the first `counts[i]` even positions are trained on."""
    tokens, _, positions, documents = batch(0, LLAMA)
    targets = torch.full_like(tokens, -1)
    for sequence, count in enumerate(counts):
        where = torch.arange(tokens.shape[1])[torch.arange(tokens.shape[1]) % 12 >= 12 - count]
        targets[sequence, where] = tokens[sequence, where - 1]
    return tokens, targets, positions, documents


@cache
def one_device(counts: tuple[int, ...]) -> dict[str, Any]:
    model = Decoder(LLAMA, reference=True).double()
    initialise(model, LLAMA, seed=0)
    tokens, targets, positions, documents = masked_batch(counts)
    loss = model(tokens, targets=targets, positions=positions, documents=documents) / max(sum(counts), 1)
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    return {"loss": loss.item(), "norm": norm.item(), "gradients": gradients}


def one_step(world: World, plan: Plan, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    from meshwright.data.loader import MicroBatch
    from meshwright.optim.clip import gradient_norm
    from meshwright.optim.shards import local_gradients
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import count_valid, loss_divisor

    mesh = build_mesh(plan, world)
    engine = build_engine(LLAMA, plan, mesh, loss_chunk=5, seed=0, reference=True)
    share = BATCH // mesh.data_ranks
    own = slice(mesh.data_rank * share, (mesh.data_rank + 1) * share)
    columns = zip(*(tensor[own].split(plan.batch.micro_batch) for tensor in masked_batch(counts)), strict=True)
    batches = [MicroBatch(*column, valid_tokens=int((column[1] >= 0).sum())) for column in columns]
    valid = count_valid(batches, mesh)
    assert valid[0] == sum(counts)
    loss = mesh.sum_over_all(engine.executor.play(engine.training, batches, NullRecorder(), loss_divisor(valid)))
    norm = gradient_norm(local_gradients(engine.model, engine.duplicate_rows), mesh.model_copy_group, mesh.device)
    gradients = assemble_whole({name: weight.grad for name, weight in engine.model.named_parameters()}, LLAMA, mesh)
    return [{"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "weights": {}}]


def steps(world: World, plan: Plan) -> list[list[dict[str, Any]]]:
    return [one_step(world, plan, counts) for counts in COUNTS.values()]


@pytest.mark.parametrize("case", quick_first(1, CASES), ids=named)
def test_the_loss_counts_trained_tokens_only(pool: Pool, case: Case) -> None:
    by_rank = pool.run(steps, case.plan.ranks, case.plan)
    for counts, results in zip(COUNTS.values(), zip(*by_rank, strict=True), strict=True):
        truth = one_device(counts)
        assert (truth["loss"] > 1) == (sum(counts) > 0), "the reference is not zero where tokens are trained on"
        if sum(counts):
            compare(list(results), [truth], 1e-9, weights=False)
        else:
            assert all(step["loss"] == step["norm"] == 0 for (step,) in results)
