"""Mixtures of experts under every plan equal one device: loss, balance loss, gradient norm, every gradient and every updated weight.

The oracle is that of test_equality, whose balance loss weighs enough to be seen. A layer's experts are one stacked weight of its block's
unit; ranks hold different numbers of valid tokens, and some experts get none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.convert import export_checkpoint
from meshwright.checkpoint.hf import import_hf
from meshwright.observe.metrics import read_metrics
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec, parameters
from tests.distributed import cases_training as cases
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, LLAMA, SEQ, batch, compare, one_device, sharded
from tests.distributed.test_schedules import Case
from tests.distributed.test_training import held, trained
from tests.train.tiny import make_tiny, prepared, ranks, staged

STEPS = 2
MIXTRAL = replace(
    LLAMA, family="mixtral", layers=4, hidden=8, heads=2, kv_heads=1, experts=5, experts_per_token=2, expert_hidden=6
)
QWEN3_MOE = replace(
    MIXTRAL, family="qwen3_moe", qk_norm=True, experts=6, experts_per_token=3, first_dense_layers=1, normalised_routing=False,
    shared_expert_hidden=4,
)  # fmt: skip
CASES = [
    Case("1f1b", shard=2, micro=4),
    Case("1f1b", shard=2, recompute="full"),
    Case("1f1b", shard=2, recompute="selective", micro=2),
    Case("1f1b", shard=4, micro=2, reshard=False),
    Case("1f1b", replicate=2, shard=2),
    Case("breadth_first", shard=2, gradients="whole"),
    Case("1f1b", pipeline=2),
    Case("1f1b", pipeline=2, shard=2, recompute="full"),
    Case("zb_h1", pipeline=2, shard=2),
    Case("zbv", pipeline=2),
    Case("zbv", pipeline=2, replicate=2, recompute="selective"),
]
COMPILED = [Case("1f1b", shard=2, compile=True, micro=4), Case("zbv", pipeline=2, compile=True, micro=2)]


def of_case(case: Case) -> ModelSpec:
    return MIXTRAL if case.shard == 4 or case.pipeline == 1 else QWEN3_MOE


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in COMPILED)], ids=str)
def test_float64_equals_one_device(pool: Pool, case: Case) -> None:
    spec = of_case(case)
    results = pool.run(sharded, case.plan.ranks, spec, case.plan, 1.0, STEPS)
    compare(results, one_device(spec)[:STEPS], 1e-9)


def slightly_wrong(world: Any, case: Case) -> list[dict[str, Any]]:
    from tests.distributed import test_equality

    kept = test_equality.TRAIN
    test_equality.TRAIN = replace(kept, balance_loss=kept.balance_loss * 1.001)
    try:
        return sharded(world, MIXTRAL, case.plan, 1.0, 1)
    finally:
        test_equality.TRAIN = kept


def test_a_wrong_weight_of_the_balance_loss_is_noticed(pool: Pool) -> None:
    """By a thousandth, of a loss that is not part of the one reported."""
    results = pool.run(slightly_wrong, 2, Case("1f1b", shard=2))
    with pytest.raises(AssertionError, match="gradients"):
        compare(
            [[{**step, "norm": one_device(MIXTRAL)[0]["norm"]} for step in rank] for rank in results],
            one_device(MIXTRAL)[:1],
            1e-9,
        )


def routed(world: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By layer and summed over ranks: balance losses and tokens of each expert, and the figures of the step, after two steps of one."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.optim.adamw import AdamW
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.train.step import train_step
    from tests.distributed.test_equality import TRAIN

    plan = case.plan
    mesh = build_mesh(plan, world)
    engine = build_engine(QWEN3_MOE, plan, mesh, loss_chunk=5, seed=0, plain=True, balance_loss=0.3)
    optimizer, share = AdamW(engine.model, QWEN3_MOE, TRAIN), BATCH // mesh.data_ranks
    first = mesh.data_rank * share
    mine = [tensor[first : first + share].split(plan.batch.micro_batch) for tensor in batch(0, QWEN3_MOE)]
    batches = [MicroBatch(*parts, valid_tokens=int((parts[1] >= 0).sum())) for parts in zip(*mine, strict=True)]
    for _ in range(2):
        figures = train_step(
            engine, optimizer, mesh, batches, learning_rate=0.0, clip_norm=None, stop_flag=0, recorder=NullRecorder()
        )
    assert engine.executor.routing is not None
    return engine.executor.routing.sums[:, 0], engine.executor.routing.sums[:, 1:], figures.values


@pytest.mark.parametrize(
    "case",
    [Case("1f1b", shard=2, recompute="full"), Case("zbv", pipeline=2, shard=2, recompute="selective")],
    ids=str,
)
def test_routing_is_counted_once(pool: Pool, case: Case) -> None:
    """Over data, micro-batches and stages, and not again in recompute or by the step before."""
    alone = pool.run(routed, 1, Case("1f1b", micro=8))[0]
    for balance, load, values in pool.run(routed, case.plan.ranks, case):
        assert torch.equal(load, alone[1])
        assert torch.allclose(balance, alone[0], rtol=1e-12)
        assert torch.allclose(values, alone[2], rtol=1e-9)
    balance, load, values = alone
    assert load.sum(1).tolist() == [0.0] + [BATCH * SEQ * QWEN3_MOE.experts_per_token] * 3
    assert values[5] == pytest.approx(float(balance.sum()) / (3 * BATCH))
    assert values[6] == pytest.approx(float((load[1:].amax(1) / load[1:].mean(1)).max()))


SMALL = [
    "model.family=mixtral", "model.layers=4", "model.experts=4", "model.experts_per_token=2", "model.expert_hidden=16",
    "train.steps=20", "train.validate_batches=1",
]  # fmt: skip


def test_experts_spread_over_ranks_are_refused_before_start(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "data")
    with pytest.raises(BadInput, match="cannot train expert 2"):
        prepared(tiny, tmp_path / "runs", *ranks(2), "plan.expert=2", *SMALL)
    assert not (tmp_path / "runs").exists()


def test_a_run_learns_resumes_under_another_plan_and_leaves_as_a_folder(pool: Pool, tmp_path: Path) -> None:
    tiny, runs = make_tiny(tmp_path / "data"), tmp_path / "runs"
    first = trained(pool, tiny, runs, *ranks(2), "plan.recompute=full", *SMALL, stop_at=10)
    pipeline = [*staged(2, "zbv"), *SMALL]
    opened = pool.run(cases.opened, 2, prepared(tiny, runs, *pipeline).assignment)
    found = {name: tensor for step, tensors in opened for name, tensor in tensors.items() if step == 10}
    exact = held(first)
    assert found.keys() == exact.keys() and any(".moe.experts." in name for name in exact)
    assert all(torch.equal(found[name], exact[name]) for name in exact), "weights and moments, bit for bit"
    second = trained(pool, tiny, runs, *pipeline)
    losses = first[0].losses + second[0].losses
    assert len(losses) == 20 and sum(losses[15:]) / 5 < sum(losses[:5]) / 5 - 0.5
    steps = [line for line in read_metrics(runs / "tiny" / "metrics.jsonl") if line["kind"] == "step"]
    assert all(1 <= line["expert_load"] <= 4 and 0.9 < line["balance_loss"] < 4 for line in steps)
    export_checkpoint(runs / "tiny", tmp_path / "hf", dtype="fp32")
    spec, reader = import_hf(tmp_path / "hf")
    final = held(second)
    for row in parameters(spec):
        assert torch.equal(reader.read(row), final[f"model.{row.name}"])
