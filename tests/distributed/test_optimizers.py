"""Every optimizer on every axis equals its one-device form in float64, also from a checkpoint of another plan.

The oracle is a plain decoder with the published forms of the updates (tests/optim/published_forms.py) on whole weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.optimizers import LambSpec, MuonSpec, OptimizerSpec, SgdSpec
from meshwright.spec.plan import Plan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, CLIP, GPT, LLAMA, RATE, TRAIN, assemble_whole, batch, compare
from tests.distributed.test_experts import EVEN, SHARED
from tests.distributed.test_schedules import Case, named
from tests.distributed.test_training import merge_tensors, same_bits
from tests.distributed.test_training import trained as trainer
from tests.optim.published_forms import update
from tests.slow import quick_first
from tests.training.tiny import make_tiny, ranks

STEPS = 3
MUON, LAMB, SGD = MuonSpec(), LambSpec(), SgdSpec(nesterov=True)
ONE_HEAD = replace(LLAMA, kv_heads=1)
"""Its key and value heads are copied on every tensor rank."""
CASES: list[tuple[OptimizerSpec, ModelSpec, Case]] = [
    (MUON, ONE_HEAD, Case("1f1b", tensor=2, shard=2)),
    (LAMB, SHARED, Case("1f1b", pipeline=2, shard=2, expert=2)),
    (LAMB, ONE_HEAD, Case("1f1b", tensor=2, shard=2)),
    (MUON, SHARED, Case("1f1b", pipeline=2, shard=2, expert=2)),
    (SGD, LLAMA, Case("1f1b", shard=2)),
    (MUON, LLAMA, Case("1f1b", shard=4)),
    (LAMB, LLAMA, Case("1f1b", shard=4)),
    (MUON, LLAMA, Case("1f1b", replicate=2, shard=2)),
    (LAMB, LLAMA, Case("1f1b", replicate=2, shard=2)),
    (MUON, GPT, Case("1f1b", pipeline=2, shard=2)),
    (LAMB, GPT, Case("1f1b", pipeline=2, shard=2)),
    (MUON, SHARED, Case("1f1b", tensor=2, shard=2, expert=2)),
    (LAMB, SHARED, Case("1f1b", tensor=2, shard=2, expert=2)),
    (MUON, EVEN, Case("1f1b", shard=4, expert=2)),
    (LAMB, EVEN, Case("zbv", pipeline=2, shard=2, expert=2)),
    (MUON, LLAMA, Case("1f1b", shard=2, ring=2)),
    (LAMB, LLAMA, Case("1f1b", shard=2, ulysses=2)),
    (SGD, SHARED, Case("zb_h1", tensor=2, pipeline=2)),
]


@cache
def one_device(spec: ModelSpec, optimizer: OptimizerSpec) -> list[dict[str, Any]]:
    """Loss, norm, gradients and updated weights of every step."""
    model = Decoder(spec, reference=True).double()
    with torch.no_grad():
        initialise(model, spec, 0)
    specs = {parameter.name: parameter for parameter in parameters(spec)}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in specs}
    results = []
    for step in range(STEPS):
        tokens, targets, positions, documents = batch(step, spec)
        model.zero_grad()
        loss, balance, _ = model.losses(tokens, targets, positions=positions, documents=documents)
        loss = loss / (targets >= 0).sum()
        (loss + TRAIN.balance_loss * balance / BATCH).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                update(specs[name], weight, gradients[name], states[name], optimizer, RATE, TRAIN.weight_decay)
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        results.append({"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "weights": weights})
    return results


def trained(
    world,
    spec: ModelSpec,
    plan: Plan,
    optimizer_spec: OptimizerSpec,
    first: int = 0,
    stop: int = STEPS,
    folder: str = "",
) -> list[dict[str, Any]]:
    """Steps `first` to `stop` as the trainer runs them; with `folder`, from the checkpoint there and into one."""
    from meshwright.checkpoint.store import CheckpointStore
    from meshwright.data.loader import MicroBatch
    from meshwright.optim.clip import clip_factor, gradient_norm
    from meshwright.optim.shards import local_gradients
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.session import open_optimizer
    from meshwright.training.train_step import count_valid

    mesh = build_mesh(plan, world)
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True, balance_loss=TRAIN.balance_loss)
    model, optimizer = engine.model, open_optimizer(engine, spec, replace(TRAIN, optimizer=optimizer_spec), mesh)
    state = {parts.name: parts for parts in optimizer.state()}
    store = CheckpointStore(Path(folder), group=world.control) if folder else None
    if store is not None and first:
        assert store.load_newest(state) is not None
        optimizer.set_steps(first)
    samples, results = BATCH // mesh.data_ranks, []
    for step in range(first, stop):
        start = mesh.data_rank * samples
        columns = [tensor[start : start + samples].split(plan.batch.micro_batch) for tensor in batch(step, spec)]
        batches = [
            MicroBatch(*column, valid_tokens=int((column[1] >= 0).sum())) for column in zip(*columns, strict=True)
        ]
        loss = engine.executor.play(engine.training, batches, NullRecorder(), count_valid(batches, mesh)[0])
        loss = mesh.sum_over_all(loss)
        norm = gradient_norm(local_gradients(model, engine.duplicate_rows), mesh.model_copy_group, mesh.device)
        clip, named_parameters = clip_factor(norm, CLIP), list(model.named_parameters())
        whole = assemble_whole({name: weight.grad for name, weight in named_parameters}, spec, mesh)
        gradients = {name: gradient * clip for name, gradient in whole.items()}
        optimizer.step(RATE, norm, clip)
        last = named_parameters if step + 1 == stop else []
        weights = assemble_whole({name: weight.detach() for name, weight in last}, spec, mesh)
        results.append({"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "weights": weights})
    if store is not None:
        store.save(stop, {parts.name: parts for parts in optimizer.state()}, {}, {})
    return results


@pytest.mark.parametrize(("optimizer", "spec", "case"), quick_first(2, CASES, unpack=True), ids=named)
def test_float64_equals_one_device(pool: Pool, optimizer: OptimizerSpec, spec: ModelSpec, case: Case) -> None:
    compare(pool.run(trained, case.plan.ranks, spec, case.plan, optimizer), one_device(spec, optimizer), 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [MUON, LAMB, SGD], ids=lambda optimizer: optimizer.name)
def test_a_checkpoint_continues_under_another_plan(pool: Pool, tmp_path: Path, optimizer: OptimizerSpec) -> None:
    before, after = Case("1f1b", shard=2).plan, Case("1f1b", tensor=2, pipeline=2).plan
    truth, folder = one_device(LLAMA, optimizer), str(tmp_path)
    compare(pool.run(trained, 2, LLAMA, before, optimizer, 0, 2, folder), truth[:2], 1e-8)
    compare(pool.run(trained, 4, LLAMA, after, optimizer, 2, 3, folder), truth[2:], 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "lamb", "sgd"])
def test_a_run_with_asynchronous_checkpoints_resumes_bit_for_bit(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, optimizer: str
) -> None:
    """With a moving average of the weights; snapshots of every step are copied beside the next one."""
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    options = [
        *ranks(2),
        f"train.optimizer.name={optimizer}",
        "train.ema_decay=0.5",
        "checkpoint.mode=async",
        "checkpoint.every=1",
    ]
    whole = merge_tensors(trainer(pool, tiny, tmp_path / "whole", *options))
    trainer(pool, tiny, tmp_path / "parts", *options, stop_at=3)
    resumed = trainer(pool, tiny, tmp_path / "parts", *options)
    assert [result.began for result in resumed] == [3, 3]
    assert same_bits(merge_tensors(resumed), whole)
    assert not torch.equal(whole["ema.embed.weight"], whole["model.embed.weight"])
