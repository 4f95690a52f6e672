"""Recorded loads in training: experts get exactly the file's tokens under every layout; gradients stay finite."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.models.hooks import BlockHooks
from meshwright.models.moe import MoELayer
from meshwright.observe.metrics import read_metrics
from meshwright.spec.model import ModelSpec, moe_of
from meshwright.training.stop import PREEMPT
from tests.distributed import cases_training
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, SEQ, TRAIN, batch
from tests.distributed.test_experts import SHARED, SMALL
from tests.distributed.test_schedules import Case
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks, staged

SIGMOID = replace(SHARED, router="sigmoid")
COPIES = BATCH * SEQ * SHARED.experts_per_token


def file_loads(spec: ModelSpec) -> np.ndarray:
    """Loads of two steps: random ones, and ones where an expert has all tokens and another none."""
    routed = sum(spec.routed(layer) for layer in range(spec.layers))
    random = np.random.default_rng(3)
    loads = np.array([random.multinomial(COPIES, [1 / spec.experts] * spec.experts, routed)] * 2)
    extreme = np.zeros(spec.experts, dtype=np.int64)
    extreme[0] = BATCH * SEQ
    extreme[2 : 2 + spec.experts_per_token - 1] = BATCH * SEQ
    loads[1] = extreme
    return loads


def replayed(
    world: Any, spec: ModelSpec, case: Case
) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
    """For each of two steps the loads, the step's figures and this rank's gradients."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.parallel.replayed_routing import replay_loads
    from meshwright.training.train_step import train_step

    plan = case.plan
    mesh = build_mesh(plan, world)
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True, balance_loss=0.3)
    routing = engine.executor.rank_model.routing
    assert routing is not None
    replay = replay_loads(engine.model, routing, file_loads(spec), plan, mesh, SEQ)
    optimizer, per_rank = Optimizer(engine.model, spec, TRAIN, engine.weights), BATCH // mesh.data_ranks
    first = mesh.data_rank * per_rank
    columns = [tensor[first : first + per_rank].split(plan.batch.micro_batch) for tensor in batch(0, spec)]
    batches = [MicroBatch(*parts, valid_tokens=int((parts[1] >= 0).sum())) for parts in zip(*columns, strict=True)]
    results = []
    for step in (1, 2):
        replay.begin_step(step)
        figures = train_step(
            engine, optimizer, mesh, batches, learning_rate=0.0, clip_norm=None, recorder=NullRecorder()
        )
        assert figures.loads is not None
        results.append((figures.loads, figures.values))
    return results


CASES = [
    Case("1f1b", shard=2, expert=2, recompute="full", micro=2),
    Case("1f1b", shard=2, expert=2, tensor=2, recompute="selective", micro=2),
    Case("zbv", pipeline=2, shard=2, recompute="selective"),
    Case("1f1b", ring=2, ulysses=2, expert=2, recompute="full", micro=2),
]


@pytest.mark.parametrize("spec", [pytest.param(SHARED, id="softmax"), pytest.param(SIGMOID, id="sigmoid")])
@pytest.mark.parametrize("case", quick_first(1, CASES), ids=str)
def test_experts_get_the_loads_of_the_file(pool: Pool, spec: ModelSpec, case: Case) -> None:
    expected = torch.from_numpy(file_loads(spec)).double()
    for results in pool.run(replayed, case.plan.ranks, spec, case):
        for (loads, figures), step_loads in zip(results, expected, strict=True):
            assert torch.equal(loads.cpu(), step_loads)
            assert figures.isfinite().all()
            assert figures[1] > 0, "a gradient norm"


def moe(**changes: Any) -> MoELayer:
    torch.manual_seed(0)
    described = moe_of(replace(SHARED, **changes))
    layer = MoELayer(described, SHARED.hidden, reference=True, hooks=BlockHooks()).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return layer


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_routers_own_choice_replayed_changes_nothing(router: str, normalised: bool) -> None:
    layer = moe(router=router, normalised_routing=normalised)
    x = torch.randn(2, 5, SHARED.hidden, dtype=torch.float64)
    expected = layer(x)
    expected.x.square().sum().backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.grad is not None
    }
    logits = layer.router(x).flatten(0, 1)
    layer.replayed = logits.detach() if layer.choice_bias is None else logits.detach().sigmoid() + layer.choice_bias
    layer.zero_grad()
    result = layer(x)
    result.x.square().sum().backward()
    assert torch.equal(result.load, expected.load)
    assert torch.allclose(result.x, expected.x, rtol=1e-12)
    for name, parameter in layer.named_parameters():
        if name in gradients:
            assert parameter.grad is not None and torch.allclose(parameter.grad, gradients[name], rtol=1e-9), name


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_weights_are_finite_where_the_router_gives_an_expert_no_probability(router: str) -> None:
    """Logits 1,000 below the largest: their probabilities are 0, but the file sends tokens there."""
    layer = moe(router=router, normalised_routing=True).float()
    logits = torch.zeros(1, 3, SHARED.experts)
    logits[..., 0] = 500.0
    logits[..., 1:] = -500.0
    logits.requires_grad_()
    layer.replayed = torch.arange(float(SHARED.experts)).expand(3, -1)
    _, weights, chosen = layer._route(logits)
    assert (chosen[..., 0] == SHARED.experts - 1).all()
    assert torch.allclose(weights.sum(-1), torch.ones(1, 3))
    (weights * torch.arange(SHARED.experts_per_token)).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_an_expert_with_more_rows_than_tokens_is_refused(pool: Pool) -> None:
    assert SHARED.experts_per_token > 1
    (message,) = pool.run(refused, 1)
    assert message == (
        f"--replay-routing: an expert would get {COPIES:,} rows of {BATCH * SEQ:,} tokens; a token goes to "
        f"{SHARED.experts_per_token} different experts, so no expert may have more than 1/{SHARED.experts_per_token} of a layer's load"
    )


def refused(world: Any) -> str:
    from meshwright.parallel.mesh import build_mesh
    from meshwright.parallel.replayed_routing import ReplayedRouting
    from meshwright.spec.errors import BadInput

    loads = np.zeros((1, 1, SHARED.experts), dtype=np.int64)
    loads[..., 1] = 5
    plan = Case("1f1b").plan
    with pytest.raises(BadInput) as error:
        ReplayedRouting(loads, {0: moe()}, [0], plan, build_mesh(plan, world), SEQ)
    return str(error.value)


def test_every_part_of_a_step_has_nearly_equal_shares() -> None:
    """The stride spreads an expert's tokens: any 64 neighbouring tokens have its share within a few tokens."""
    from meshwright.parallel.replayed_routing import _scaled, _stride

    tokens = 1024
    stride = _stride(tokens)
    assert math.gcd(stride, tokens) == 1
    counts = _scaled(np.array([[[5, 3, 1, 1]]]), tokens)[0, 0]
    assert counts.tolist() == [512, 307, 103, 102]
    experts = np.searchsorted(counts.cumsum(), np.arange(tokens) * stride % tokens, side="right")
    for first in range(0, tokens, 64):
        part = np.bincount(experts[first : first + 64], minlength=4)
        assert np.abs(part - counts / 16).max() <= 3


@pytest.mark.slow
def test_a_run_replays_its_file_also_after_it_was_resumed_under_another_plan(pool: Pool, tmp_path: Path) -> None:
    """Steps 1 to 3 on two shards, 4 to 6 on two stages; the file has four steps and begins again at step 5."""
    tiny, runs, file = make_tiny(tmp_path / "data"), tmp_path / "runs", tmp_path / "loads.csv"
    overrides = [*SMALL, "train.steps=6"]
    train = prepared(tiny, runs, *ranks(2), *overrides).assignment.run.train
    tokens = train.global_batch * train.seq_len
    loads = np.random.default_rng(0).multinomial(2 * tokens, [0.4, 0.3, 0.2, 0.1], (4, 4))
    lines = [f"{layer},{step},{','.join(map(str, loads[step, layer]))}" for step in range(4) for layer in range(4)]
    file.write_text("\n".join(["layer,step,expert_0,expert_1,expert_2,expert_3", *lines]) + "\n")
    for plan, stop_at in ((ranks(2), 3), (staged(2, "zbv"), 0)):
        assignment = replace(prepared(tiny, runs, *plan, *overrides).assignment, replay_routing=str(file))
        pool.run(cases_training.run, 2, assignment, stop_at, 0, PREEMPT, "", 1)
    steps = [line for line in read_metrics(runs / "tiny" / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["expert_loads"] for line in steps] == [loads[step % 4].tolist() for step in range(6)]
