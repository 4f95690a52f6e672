"""Steps of samples of any length equal one device that sees each document alone: loss and every gradient, float64.

The oracle is a plain decoder that runs one document at a time, without mask, positions or padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.parallel.world import World
from meshwright.spec.plan import Plan, SamplePlan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import LLAMA, assemble_whole, compare
from tests.distributed.test_schedules import Case, named
from tests.slow import quick_first

SPEC = replace(LLAMA, layers=4)
LONGEST = SPEC.max_seq_len
BATCHES, TOKENS = 3, 90
CASES = [
    (Case("1f1b", shard=2), 20),
    (Case("1f1b"), 12),
    (Case("1f1b", shard=3, reshard=False, gradients="whole", recompute="full"), 12),
    (Case("breadth_first", shard=2, replicate=2), 30),
    (Case("1f1b", pipeline=2, shard=2), 20),
    (Case("zbv", pipeline=2), 20),
    (Case("1f1b", tensor=2, shard=2), 20),
    (Case("interleaved", pipeline=2), 12),
    (Case("1f1b", pipeline=2, tensor=2), 12),
    (Case("1f1b", ring=2, shard=2), 20),
    (Case("1f1b", ulysses=2, shard=2), 20),
    (Case("1f1b", replicate=2, recompute="all_but_attention", offload="activations"), 16),
]
"""Plans and capacities of a slot."""


class Documents:
    """Random documents by number, as the reader of steps uses a `DataSource`."""

    def documents(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        drawn = []
        for index in indices:
            random = np.random.default_rng(int(index))
            length = min(LONGEST, 1 + int(random.pareto(0.7) * 2))
            drawn.append(random.integers(0, SPEC.vocab_size, size=length + 1))
        return drawn

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.array([len(document) - 1 for document in self.documents(indices)])

    def begin_step(self, indices: np.ndarray) -> None:
        del indices

    def token_reader(self, indices: np.ndarray) -> Any:
        documents = self.documents(indices)
        return lambda sample, start, stop: documents[sample][start:stop]


@cache
def one_device() -> list[dict[str, Any]]:
    """The reference results of every step."""
    results, first = [], 0
    for _ in range(BATCHES):
        model = Decoder(SPEC, reference=True).double()
        initialise(model, SPEC, seed=0)
        taken = int(
            np.searchsorted(np.cumsum(Documents().lengths(range(first, first + TOKENS + 1))), TOKENS, side="right")
        )
        documents = [torch.from_numpy(text)[None] for text in Documents().documents(range(first, first + taken))]
        losses = [model(text[:, :-1], targets=text[:, 1:]) for text in documents]
        loss = torch.stack(losses).sum() / sum(text.shape[1] - 1 for text in documents)
        loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        results.append({"loss": loss.item(), "norm": norm.item(), "gradients": gradients})
        first += taken
    return results


def steps(world: World, plan: Plan) -> list[dict[str, Any]]:
    from meshwright.data.loader import Loader
    from meshwright.data.sample_steps import SampleSteps
    from meshwright.optim.clip import gradient_norm
    from meshwright.optim.shards import local_gradients
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.policies.sample_balance import rank_pool
    from meshwright.training.train_step import count_valid, loss_divisor

    mesh = build_mesh(plan, world)
    assert plan.samples is not None
    pool = rank_pool(plan.samples, mesh.data_ranks)
    source: Any = Documents()
    results = []
    with Loader(SampleSteps(source, tokens=TOKENS, pool=pool, rank=mesh.data_rank)) as loader:
        for _ in range(BATCHES):
            engine = build_engine(SPEC, plan, mesh, loss_chunk=5, seed=0, reference=True)
            batches = next(loader)
            assert loader.step is not None and loader.step.lengths is not None
            valid = count_valid(batches, mesh)
            assert valid[0] == loader.step.lengths.sum()
            schedule = engine.training_schedule(len(batches))
            loss = mesh.sum_over_all(engine.executor.play(schedule, batches, NullRecorder(), loss_divisor(valid)))
            norm = gradient_norm(
                local_gradients(engine.model, engine.duplicate_rows), mesh.model_copy_group, mesh.device
            )
            gradients = {name: weight.grad for name, weight in engine.model.named_parameters()}
            whole = assemble_whole(gradients, SPEC, mesh)
            results.append({"loss": loss.item(), "norm": norm.item(), "gradients": whole, "weights": {}})
    return results


@pytest.mark.parametrize(("case", "capacity"), quick_first(2, CASES, unpack=True), ids=named)
def test_each_document_is_as_if_alone(pool: Pool, case: Case, capacity: int) -> None:
    plan = replace(case.plan, samples=SamplePlan(capacity=capacity, alpha=1e-9, beta=1e-7, gamma=1e-5))
    compare(pool.run(steps, plan.ranks, plan), one_device(), 1e-9, weights=False)
