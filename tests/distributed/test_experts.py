"""MoE models equal one device with every plan: loss, balance loss, gradient norm, gradients and updated weights.

The oracle is that of test_equality, whose balance loss weighs enough to be seen. A layer's experts are one stacked weight of its block's
unit, or lie on ranks of their own; ranks hold different numbers of valid tokens, and some experts get none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.models.convert import export_checkpoint
from meshwright.checkpoint.models.hf import import_hf
from meshwright.models.initial_values import initial_values
from meshwright.observe.metrics import read_metrics
from meshwright.spec.errors import BadConfig
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters
from meshwright.spec.plan import Plan, Precision
from tests.distributed import cases_training as cases
from tests.distributed import test_equality
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, BF16_BOUND, LLAMA, SEQ, batch, compare, one_device, sharded, worst
from tests.distributed.test_schedules import UNEVEN, Case, named
from tests.distributed.test_training import merge_tensors, same_bits, trained
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks, staged

STEPS = 2
MIXTRAL = replace(
    LLAMA, family="mixtral", layers=4, hidden=8, heads=2, kv_heads=1, experts=5, experts_per_token=2, expert_hidden=6
)
QWEN3_MOE = replace(
    MIXTRAL,
    family="qwen3_moe",
    qk_norm=True,
    experts=6,
    experts_per_token=3,
    first_dense_layers=1,
    normalised_routing=False,
    shared_expert_hidden=4,
)
CASES = [
    Case("1f1b", shard=2, recompute="selective", micro=2),
    Case("1f1b", replicate=2, shard=2),
    Case("1f1b", shard=2, micro=4),
    Case("1f1b", shard=2, recompute="full"),
    Case("1f1b", shard=4, micro=2, reshard=False),
    Case("breadth_first", shard=2, gradients="whole"),
    Case("1f1b", pipeline=2),
    Case("1f1b", pipeline=2, shard=2, recompute="full"),
    Case("zb_h1", pipeline=2, shard=2),
    Case("zbv", pipeline=2),
    Case("zbv", pipeline=2, replicate=2, recompute="selective"),
]
EVEN = replace(MIXTRAL, experts=8)
SHARED = replace(QWEN3_MOE, experts=8, heads=4, kv_heads=2, head_dim=2)
TIED = replace(EVEN, tied=True)
LATE = replace(SHARED, tied=True, first_dense_layers=2)
"""The first of two pipeline ranks has dense layers only, but takes part in the creation of the expert groups."""
SPREAD = [
    (EVEN, Case("1f1b", shard=2, expert=2, micro=4)),
    (EVEN, Case("1f1b", shard=4, expert=4, reshard=False)),
    (EVEN, Case("1f1b", replicate=2, shard=2, expert=2, gradients="whole")),
    (TIED, Case("breadth_first", shard=2, expert=2, gradients="whole", recompute="full")),
    (SHARED, Case("zbv", pipeline=2, shard=2, expert=2, recompute="selective")),
    (SHARED, Case("1f1b", shard=2, expert=2, recompute="full")),
    (SHARED, Case("1f1b", shard=4, expert=2, recompute="selective", micro=2)),
    (LATE, Case("1f1b", pipeline=2, shard=2, expert=2)),
    (EVEN, Case("zbv", pipeline=2, shard=2, expert=2, order=("shard", "pipeline", "replicate", "tensor"))),
    (SHARED, Case("1f1b", tensor=2, micro=4)),
    (EVEN, Case("1f1b", tensor=2, shard=2, micro=2, recompute="full")),
    (SHARED, Case("zb_h1", tensor=2, pipeline=2, recompute="selective")),
    (SHARED, Case("1f1b", tensor=2, shard=2, expert=2, recompute="selective")),
    (EVEN, Case("1f1b", tensor=2, shard=2, expert=2, order=("tensor", "replicate", "shard", "pipeline"))),
]
"""Experts on ranks of their own, tensor ranks among them."""
SPREAD_WIDER = [
    (TIED, Case("gpipe", pipeline=2, shard=2, expert=2, micro=2)),
    (EVEN, Case("interleaved", pipeline=2, shard=2, expert=2, micro=2)),
    (SHARED, Case("zb_h1", pipeline=2, shard=2, expert=2)),
    (EVEN, Case("zbv", pipeline=2, shard=2, expert=2)),
    (EVEN, Case("breadth_first", pipeline=2, shard=2, expert=2)),
    (replace(EVEN, layers=8), Case("1f1b", pipeline=2, shard=2, expert=2, stages=UNEVEN)),
    (EVEN, Case("1f1b", replicate=2, shard=4, expert=2)),
    (SHARED, Case("zbv", pipeline=2, replicate=2, shard=2, expert=2, recompute="full")),
    (replace(EVEN, experts=4), Case("1f1b", shard=8, expert=2)),
]
"""The last: four ranks share two experts, and split their rows."""
SPREAD_COMPILED = [
    (SHARED, Case("1f1b", shard=2, expert=2, compile=True, recompute="full")),
    (SHARED, Case("zbv", pipeline=2, tensor=2, compile=True, micro=2, recompute="selective")),
    (EVEN, Case("1f1b", shard=2, expert=2, compile=True, micro=2)),
]
PAIRED = [
    (SHARED, Case("paired", shard=2, expert=2)),
    (EVEN, Case("paired", tensor=2, recompute="selective")),
    (TIED, Case("paired", replicate=2, shard=2, expert=2, gradients="whole")),
    (SHARED, Case("paired", tensor=2, shard=2, expert=2, recompute="selective")),
    (EVEN, Case("paired", shard=4, expert=4, reshard=False)),
    (SHARED, Case("paired", shard=2, ulysses=2, expert=2, offload="optimizer")),
    (SHARED, Case("paired", shard=2, ring=2, expert=2)),
    (SHARED, Case("paired", shard=2, expert=2, compile=True, recompute="selective")),
]
"""Two micro-batches together; the exchange of one overlaps with the other's compute."""
COMPILED = [Case("1f1b", shard=2, compile=True, micro=4), Case("zbv", pipeline=2, compile=True, micro=2)]


def of_case(case: Case) -> ModelSpec:
    return MIXTRAL if case.shard == 4 or case.pipeline == 1 else QWEN3_MOE


@pytest.mark.slow
def test_bf16_stays_within_its_bound(pool: Pool) -> None:
    plan = replace(Case("1f1b", shard=2, expert=2, micro=2).plan, precision=Precision(compute="bf16", reduce="fp32"))
    compare(pool.run(sharded, plan.ranks, EVEN, plan, 1.0, 1), one_device(EVEN)[:1], BF16_BOUND, weights=False)


@pytest.mark.parametrize("case", quick_first(1, [*CASES, *COMPILED]), ids=str)
def test_float64_equals_one_device(pool: Pool, case: Case) -> None:
    spec = of_case(case)
    results = pool.run(sharded, case.plan.ranks, spec, case.plan, 1.0, STEPS)
    compare(results, one_device(spec)[:STEPS], 1e-9)


@pytest.mark.parametrize(
    ("spec", "case"),
    [
        *quick_first(2, SPREAD, unpack=True),
        *quick_first(1, PAIRED, unpack=True),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (*SPREAD_WIDER, *SPREAD_COMPILED)),
    ],
    ids=named,
)
def test_experts_on_ranks_of_their_own_equal_one_device(pool: Pool, spec: ModelSpec, case: Case) -> None:
    results = pool.run(sharded, case.plan.ranks, spec, case.plan, 1.0, STEPS)
    compare(results, one_device(spec)[:STEPS], 1e-9)


def lopsided_values(seed: int, parameter: ParameterSpec, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Routers that send every token to two of the first four experts, whichever of them its direction asks for."""
    if not parameter.name.endswith("router.weight"):
        return initial_values(seed, parameter, first, count, device)
    scales = torch.tensor([4.0, -4.0, 3.0, -3.0, 0.1, -0.1, 0.0, 0.0], dtype=torch.float64)
    direction = initial_values(seed, parameter, 0, parameter.shape[1], device).double()
    return (scales[:, None] * direction).flatten()[first : first + count]


def lopsided(world: Any, spec: ModelSpec, plan: Plan) -> list[dict[str, Any]]:
    from meshwright.parallel import apply

    apply.initial_values = lopsided_values
    try:
        return sharded(world, spec, plan, 1.0, STEPS)
    finally:
        apply.initial_values = initial_values


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", shard=4, expert=4, recompute="full"),
        pytest.param(Case("1f1b", tensor=2, shard=2, expert=2, recompute="selective"), marks=pytest.mark.slow),
        pytest.param(Case("1f1b", shard=2, expert=2, micro=2), marks=pytest.mark.slow),
        pytest.param(Case("1f1b", shard=2, expert=2, compile=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_and_ranks_without_tokens(pool: Pool, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """The later half of the experts gets nothing: of two ranks the second, and of four the last two, only send."""
    monkeypatch.setattr(test_equality, "initial_values", lopsided_values)
    truth = one_device.__wrapped__(EVEN)[:STEPS]
    idle = truth[0]["gradients"]["layers.1.moe.experts.down"].flatten(1).norm(dim=1) == 0
    assert idle.tolist() == [False] * 4 + [True] * 4
    compare(pool.run(lopsided, case.plan.ranks, EVEN, case.plan), truth, 1e-9)


def doubly_counted(world: Any, case: Case) -> list[dict[str, Any]]:
    """A step whose gradients of distributed experts, and no others, have an error of a thousandth."""
    from meshwright.parallel import stages

    original = stages._shard

    def wrong(*arguments: Any) -> Any:
        unit = original(*arguments)
        if len(unit.groups) > 1:  # its experts are the first
            unit.groups[0]._group.gradient_divide_factor = 0.999
        return unit

    stages._shard = wrong
    try:
        return sharded(world, EVEN, case.plan, 1.0, 1)
    finally:
        stages._shard = original


def test_a_wrong_factor_of_the_experts_gradients_is_noticed(pool: Pool) -> None:
    results = pool.run(doubly_counted, 4, Case("1f1b", shard=4, expert=2))
    truth = one_device(EVEN)[:1]
    with pytest.raises(AssertionError):
        compare(results, truth, 1e-9)
    for actual in (rank[0] for rank in results):
        factor = (actual["norm"] + 1e-6) / (truth[0]["norm"] + 1e-6)  # what clipping has made of it
        errors = {
            name: worst(gradient * factor, truth[0]["gradients"][name])
            for name, gradient in actual["gradients"].items()
        }
        assert {name for name, error in errors.items() if error > 1e-9} == {
            name for name in errors if ".moe.experts." in name
        }


def slightly_wrong(world: Any, case: Case) -> list[dict[str, Any]]:
    from tests.distributed import test_equality

    original = test_equality.TRAIN
    test_equality.TRAIN = replace(original, balance_loss=original.balance_loss * 1.001)
    try:
        return sharded(world, MIXTRAL, case.plan, 1.0, 1)
    finally:
        test_equality.TRAIN = original


def test_a_wrong_weight_of_the_balance_loss_is_noticed(pool: Pool) -> None:
    """By a thousandth, of a loss that is not part of the one reported."""
    results = pool.run(slightly_wrong, 2, Case("1f1b", shard=2))
    with pytest.raises(AssertionError, match="gradients"):
        compare(
            [[{**step, "norm": one_device(MIXTRAL)[0]["norm"]} for step in rank] for rank in results],
            one_device(MIXTRAL)[:1],
            1e-9,
        )


LOSSES = {"balance_loss": 0.3, "z_loss": 0.02, "router_z_loss": 0.03}


def routed(world: Any, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """After two equal steps: balance losses and tokens of each expert, by layer and summed over ranks, and the step's figures."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step
    from tests.distributed.test_equality import TRAIN

    plan = case.plan
    mesh = build_mesh(plan, world)
    engine = build_engine(SHARED, plan, mesh, loss_chunk=5, seed=0, reference=True, **LOSSES)
    optimizer, samples_per_rank = Optimizer(engine.model, SHARED, TRAIN, engine.weights), BATCH // mesh.data_ranks
    first = mesh.data_rank * samples_per_rank
    micro_batches = [
        tensor[first : first + samples_per_rank].split(plan.batch.micro_batch) for tensor in batch(0, SHARED)
    ]
    batches = [
        MicroBatch(*columns, valid_tokens=int((columns[1] >= 0).sum())) for columns in zip(*micro_batches, strict=True)
    ]
    for _ in range(2):
        figures = train_step(
            engine, optimizer, mesh, batches, learning_rate=0.0, clip_norm=None, recorder=NullRecorder()
        )
    assert engine.executor.rank_model.routing is not None
    return engine.executor.rank_model.routing.sums[:, 0], engine.executor.rank_model.routing.sums[:, 2:], figures.values


@pytest.fixture(scope="module")
def routed_alone(pool: Pool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return pool.run(routed, 1, Case("1f1b", micro=8))[0]


COUNTED = [
    Case("1f1b", shard=2, expert=2, tensor=2, recompute="selective", micro=2),
    Case("zbv", pipeline=2, shard=2, recompute="selective"),
    Case("1f1b", ring=2, ulysses=2, expert=2, recompute="full", micro=2),
    Case("1f1b", shard=2, recompute="full"),
    Case("1f1b", shard=2, expert=2, recompute="full"),
]


@pytest.mark.parametrize("case", quick_first(1, COUNTED), ids=str)
def test_routing_is_counted_once(
    pool: Pool, routed_alone: tuple[torch.Tensor, torch.Tensor, torch.Tensor], case: Case
) -> None:
    """Over data, micro-batches, stages and parts of a sequence, and not again in recompute or by the step before."""
    one_rank = routed_alone
    for balance, load, values in pool.run(routed, case.plan.ranks, case):
        assert torch.equal(load, one_rank[1])
        assert torch.allclose(balance, one_rank[0], rtol=1e-12)
        assert torch.allclose(values, one_rank[2], rtol=1e-9)
    balance, load, values = one_rank
    assert load.sum(1).tolist() == [0.0] + [BATCH * SEQ * SHARED.experts_per_token] * 3
    assert values[6] == pytest.approx(float(balance.sum()) / (3 * BATCH))
    assert values[7] == pytest.approx(float((load[1:].amax(1) / load[1:].mean(1)).max()))
    assert (values[8:] > 1).all(), "router z-loss and z-loss are of every token"


SHALLOW = [
    "model.family=mixtral",
    "model.experts=4",
    "model.experts_per_token=2",
    "model.expert_hidden=16",
    "train.steps=20",
    "data.validation_tokens=128",
]
SMALL = [*SHALLOW, "model.layers=4"]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (["plan.expert=3"], "a divisor of model.experts = 4"),
        (
            ["plan.tensor=2", "model.experts=3"],
            "a divisor of model.experts = 3, as tensor ranks hold different experts",
        ),
        (["plan.tensor=2", "model.shared_expert_hidden=3"], "a divisor of model.shared_expert_hidden = 3"),
    ],
)
def test_sizes_that_ranks_cannot_divide_are_refused_before_the_start(
    tmp_path: Path, pins: list[str], message: str
) -> None:
    tiny = make_tiny(tmp_path / "data")
    with pytest.raises(BadConfig, match=message):
        prepared(tiny, tmp_path / "runs", "cluster.gpus_per_node=2", *SMALL, *pins)
    assert not (tmp_path / "runs").exists()


def opened_under(pool: Pool, tiny: Path, runs: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """Weights and moments that the ranks of a plan hold together when the run is opened under it."""
    assignment = prepared(tiny, runs, *overrides).assignment
    return {
        name: tensor
        for _, tensors in pool.run(cases.opened, assignment.plan.ranks, assignment)
        for name, tensor in tensors.items()
    }


LAID = {
    "two expert ranks": [*ranks(2), "plan.expert=2"],
    "none": [*ranks(4), "plan.expert=1"],
    "two that split halves": [*ranks(4), "plan.expert=2"],
    "context": ["cluster.gpus_per_node=4", "plan.shard=2", "plan.context_ring=2", "plan.expert=2"],
    "tensor": ["cluster.gpus_per_node=4", "plan.shard=2", "plan.tensor=2", "plan.expert=2"],
}
CHAINS = [
    [("two expert ranks", ["none"]), ("tensor", ["two expert ranks"])],
    [
        ("two expert ranks", ["none"]),
        ("none", ["two expert ranks"]),
        ("context", ["tensor", "two that split halves"]),
        ("tensor", ["two expert ranks"]),
    ],
]
"""Plans under which a run goes on, each with those under which what it wrote is opened."""


@pytest.mark.parametrize("chain", quick_first(1, CHAINS), ids=["short", "long"])
def test_experts_change_ranks_between_two_starts(
    pool: Pool, tmp_path: Path, chain: list[tuple[str, list[str]]]
) -> None:
    """Bit for bit."""
    tiny, runs = make_tiny(tmp_path / "data"), tmp_path / "runs"
    final: dict[str, torch.Tensor] = {}
    for number, (name, other_names) in enumerate(chain):
        final = merge_tensors(trained(pool, tiny, runs, *LAID[name], *SHALLOW, stop_at=2 + number))
        for name in other_names:
            assert same_bits(opened_under(pool, tiny, runs, *LAID[name], *SHALLOW), final)
    export_checkpoint(runs / "tiny", tmp_path / "hf", dtype="fp32")
    spec, reader = import_hf(tmp_path / "hf")
    assert all(torch.equal(reader.read(parameter), final[f"model.{parameter.name}"]) for parameter in parameters(spec))


@pytest.mark.slow
def test_a_run_learns_resumes_under_another_plan_and_leaves_as_a_folder(pool: Pool, tmp_path: Path) -> None:
    tiny, runs = make_tiny(tmp_path / "data"), tmp_path / "runs"
    settings = [*SMALL, "train.z_loss=1e-4", "train.router_z_loss=1e-3"]
    first = trained(pool, tiny, runs, *ranks(2), "plan.recompute=full", *settings, stop_at=10)
    pipeline = [*staged(2, "zbv"), *settings]
    opened = pool.run(cases.opened, 2, prepared(tiny, runs, *pipeline).assignment)
    resumed = {name: tensor for step, tensors in opened for name, tensor in tensors.items() if step == 10}
    exact = merge_tensors(first)
    assert resumed.keys() == exact.keys() and any(".moe.experts." in name for name in exact)
    assert all(torch.equal(resumed[name], exact[name]) for name in exact), "weights and moments, bit for bit"
    second = trained(pool, tiny, runs, *pipeline)
    losses = first[0].losses + second[0].losses
    assert len(losses) == 20 and sum(losses[15:]) / 5 < sum(losses[:5]) / 5 - 0.5
    steps = [line for line in read_metrics(runs / "tiny" / "metrics.jsonl") if line["kind"] == "step"]
    assert all(1 <= line["expert_load"] <= 4 and 0.9 < line["balance_loss"] < 4 for line in steps)
    export_checkpoint(runs / "tiny", tmp_path / "hf", dtype="fp32")
    spec, reader = import_hf(tmp_path / "hf")
    even = [math.log(choices) ** 2 for choices in (spec.vocab_size, spec.experts)]
    assert [steps[0][key] for key in ("z_loss", "router_z_loss")] == pytest.approx(even, rel=0.1), "near equal logits"
    final = merge_tensors(second)
    for parameter in parameters(spec):
        assert torch.equal(reader.read(parameter), final[f"model.{parameter.name}"])
