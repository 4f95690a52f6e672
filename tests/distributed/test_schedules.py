"""Every schedule equals one device: loss, gradient norm, gradients and updated weights, over several steps.

The oracle is that of test_equality: a plain decoder, torch's own AdamW and clipping. Ranks hold different numbers of valid tokens,
documents begin anywhere, gradients are clipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from meshwright.events.span import NullRecorder
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BatchPlan, ExpertPlan, LayerStrategy, MeshAxis, Plan, Precision, SchedulePlan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import (
    BATCH,
    BF16_BOUND,
    GPT,
    LLAMA,
    RATE,
    TRAIN,
    batch,
    compare,
    one_device,
    sharded,
)
from tests.slow import quick_first

DEEP = replace(LLAMA, layers=8, hidden=8, heads=2, kv_heads=1)
DEEP_TIED = replace(GPT, layers=8, hidden=8, heads=2, kv_heads=2)
STEPS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "breadth_first")


@dataclass(frozen=True)
class Case:
    schedule: str
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    micro: int = 1
    reshard: bool = True
    gradients: str = "shard"
    recompute: str = "none"
    stages: tuple[tuple[str, ...], ...] = ()
    compile: bool = False
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    expert: int = 1
    offload: str = "none"
    order: tuple[str, ...] = ("pipeline", "replicate", "shard", "context_ring", "context_ulysses", "tensor")
    """Axes, outermost first."""

    @property
    def plan(self) -> Plan:
        sizes = {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "context_ring": self.ring,
            "context_ulysses": self.ulysses,
            "tensor": self.tensor,
        }
        data, shard_ranks = self.replicate * self.shard, self.shard * self.ring * self.ulysses
        axes = [MeshAxis(axis=name, size=sizes[name]) for name in self.order]  # type: ignore[arg-type]
        return Plan(
            mesh=tuple(axis for axis in axes if axis.size > 1 or axis.axis == "shard"),
            batch=BatchPlan(global_batch=BATCH, micro_batch=self.micro, accumulate=BATCH // (data * self.micro)),
            schedule=SchedulePlan(name=self.schedule, stages=self.stages),
            layers=(
                LayerStrategy(
                    reshard=self.reshard, gradients=self.gradients, recompute=self.recompute, offload=self.offload
                ),
            ),
            precision=Precision(compute="fp64", reduce="fp64"),
            experts=ExpertPlan(expert=self.expert, expert_shard=shard_ranks // self.expert)
            if self.expert > 1
            else None,
            compile=self.compile,
        )

    def __str__(self) -> str:
        default = Case(self.schedule)
        changed = [f"{key}={value}" for key, value in vars(self).items() if value != getattr(default, key)]
        return " ".join([self.schedule, *changed])


def named(value: object) -> str:
    """How a test's parameter is called: a model by its family."""
    return value.family if isinstance(value, ModelSpec) else str(value)


UNEVEN = (("0-4",), ("5-7",))
UNEVEN_V = (("0", "6-7"), ("1-2", "3-5"))
ONE_STAGE = [
    Case("breadth_first", shard=2, reshard=False, gradients="whole"),
    Case("breadth_first", replicate=2, shard=2, recompute="full"),
    Case("1f1b", replicate=2, shard=2, gradients="whole", micro=2),
    Case("breadth_first", shard=2),
    Case("1f1b", shard=2, gradients="whole"),
]
TWO_RANKS = [Case(name, pipeline=2) for name in SCHEDULES]
FOUR_RANKS = [
    Case("zbv", pipeline=2, replicate=2, stages=UNEVEN_V, gradients="whole", micro=2),
    Case("breadth_first", pipeline=2, shard=2, stages=tuple(tuple(str(s) for s in range(r, 8, 2)) for r in range(2))),
    Case("1f1b", pipeline=2, shard=2, stages=UNEVEN, recompute="full"),
    Case("zb_h1", pipeline=2, shard=2, stages=UNEVEN, recompute="selective"),
    *(Case(name, pipeline=2, shard=2) for name in SCHEDULES),
]
FOUR_RANKS_TIED = [
    *(
        Case(name, pipeline=2, shard=2, reshard=False, gradients="whole")
        for name in ("gpipe", "interleaved", "zb_h1", "zbv", "1f1b", "breadth_first")
    ),
    *(Case(name, pipeline=4) for name in SCHEDULES),
]
"""Tied ends are the harder case of every schedule; what they have in common with others need not run twice."""
EIGHT_RANKS = [
    Case("zb_h1", pipeline=4, shard=2),
    Case("1f1b", pipeline=8),
    Case("interleaved", pipeline=4, shard=2, reshard=False),
    Case("zbv", pipeline=2, replicate=2, shard=2, gradients="whole"),
    Case("zbv", pipeline=2, shard=2, ring=2),
    Case("gpipe", pipeline=4, shard=2),
    Case("breadth_first", pipeline=2, replicate=2, shard=2),
    Case("1f1b", pipeline=2, tensor=2, ring=2),
    Case("zbv", pipeline=2, tensor=2, ring=2),
]


INSIDE, BETWEEN = ("replicate", "shard", "pipeline"), ("replicate", "pipeline", "shard")
ORDERS = [
    Case("zbv", pipeline=2, replicate=2, order=BETWEEN),
    Case("1f1b", pipeline=2, shard=2, order=INSIDE),
    Case("interleaved", pipeline=2, replicate=2, shard=2, order=BETWEEN),
    Case("1f1b", pipeline=2, replicate=2, shard=2, order=("shard", "pipeline", "replicate")),
]
"""Axes in other orders on the network: stages inside a node, copies or shards across."""


def check(pool: Pool, case: Case, tied: bool) -> None:
    spec = DEEP_TIED if tied else DEEP
    results = pool.run(sharded, case.plan.ranks, spec, case.plan, 1.0, STEPS)
    compare(results, one_device(spec)[:STEPS], 1e-9)


@pytest.mark.parametrize("tied", quick_first(1, [False, True]), ids=["llama", "gpt2-tied"])
@pytest.mark.parametrize("case", quick_first(1, ONE_STAGE), ids=str)
def test_one_stage(pool: Pool, case: Case, tied: bool) -> None:
    check(pool, case, tied)


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_two_ranks(pool: Pool, case: Case) -> None:
    check(pool, case, tied=False)


@pytest.mark.parametrize("case", quick_first(2, FOUR_RANKS), ids=str)
def test_four_ranks(pool: Pool, case: Case) -> None:
    check(pool, case, tied=False)


@pytest.mark.parametrize("case", quick_first(1, FOUR_RANKS_TIED), ids=str)
def test_four_ranks_tied(pool: Pool, case: Case) -> None:
    check(pool, case, tied=True)


@pytest.mark.parametrize("case", quick_first(1, [Case("zbv", pipeline=2), Case("1f1b", pipeline=2, shard=2)]), ids=str)
def test_bf16_stays_within_its_bound(pool: Pool, case: Case) -> None:
    plan = replace(case.plan, precision=Precision(compute="bf16", reduce="fp32"))
    compare(pool.run(sharded, plan.ranks, DEEP, plan, 1.0, 1), one_device(DEEP)[:1], BF16_BOUND, weights=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", ORDERS, ids=str)
def test_axes_in_any_order(pool: Pool, case: Case) -> None:
    check(pool, case, tied=True)


def test_every_schedule_has_a_case_of_eight_ranks() -> None:
    assert {case.schedule for case in EIGHT_RANKS} == set(SCHEDULES)
    assert {case.plan.ranks for case in EIGHT_RANKS} == {8}


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT_RANKS, ids=str)
def test_eight_ranks(pool: Pool, case: Case) -> None:
    check(pool, case, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(name, pipeline=2, compile=True) for name in ("1f1b", "zbv", "breadth_first")], ids=str
)
def test_compiled(pool: Pool, case: Case) -> None:
    check(pool, case, tied=False)


def test_a_wrong_factor_is_noticed(pool: Pool) -> None:
    case = Case("zbv", pipeline=2, shard=2)
    results = pool.run(sharded, 4, DEEP, case.plan, 2.0, 1)
    with pytest.raises(AssertionError):
        compare(results, one_device(DEEP)[:1], 1e-9, weights=False)


def left_to_the_collector(world, plan: Plan) -> list[str]:
    """Tensors of a step, its batches among them, that lie in cycles behind it: nothing frees them but Python's collector."""
    import gc

    from meshwright.data.loader import MicroBatch
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, world)
    engine = build_engine(DEEP, plan, mesh, loss_chunk=5, seed=0, reference=True)
    optimizer = Optimizer(engine.model, DEEP, TRAIN, engine.weights, engine.host_offloaded)

    def one_step(number: int) -> None:
        micro_batches = [
            tensor[: BATCH // mesh.data_ranks].split(plan.batch.micro_batch) for tensor in batch(number, DEEP)
        ]
        batches = [
            MicroBatch(*columns, valid_tokens=int((columns[1] >= 0).sum()))
            for columns in zip(*micro_batches, strict=True)
        ]
        train_step(
            engine,
            optimizer,
            mesh,
            batches,
            learning_rate=RATE,
            clip_norm=1.0,
            recorder=NullRecorder(),
            stop_flag=lambda: 0,
        )

    one_step(0)
    gc.collect()
    gc.disable()
    try:
        one_step(1)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [str(tuple(garbage.shape)) for garbage in gc.garbage if isinstance(garbage, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    "case", quick_first(1, [Case("zbv", pipeline=2), Case("1f1b", shard=2), Case("zb_h1", pipeline=2)]), ids=str
)
def test_a_step_leaves_no_tensor_to_the_collector(pool: Pool, case: Case) -> None:
    assert pool.run(left_to_the_collector, case.plan.ranks, case.plan) == [[]] * case.plan.ranks


def refusal_text(world, plan: Plan) -> str:
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    try:
        build_engine(DEEP, plan, build_mesh(plan, world), loss_chunk=5, seed=0)
    except BadInput as error:
        return str(error)
    return ""
