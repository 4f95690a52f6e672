"""Names of plans in common terms."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from meshwright.spec.plan import BatchPlan, ExpertPlan, LayerStrategy, MeshAxis, Plan, ScheduleName, SchedulePlan
from meshwright.spec.plan_name import SCHEDULE_NAMES, plan_name

KEPT, AGAIN = LayerStrategy(reshard=False), LayerStrategy(reshard=True)
WHOLE = LayerStrategy(reshard=False, gradients="whole")


def plan_on(schedule: ScheduleName = "1f1b", layers: tuple[LayerStrategy, ...] = (AGAIN,), **mesh: int) -> Plan:
    axes = tuple(MeshAxis(axis=axis, size=size) for axis, size in mesh.items())  # type: ignore[arg-type]
    batch = BatchPlan(global_batch=1024, micro_batch=2, accumulate=8)
    return Plan(mesh=axes, batch=batch, schedule=SchedulePlan(name=schedule), layers=layers)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (plan_on(), "one device"),
        (plan_on(shard=1), "one device"),
        (plan_on(shard=8), "FSDP 8 (ZeRO-3)"),
        (plan_on(shard=8, layers=(KEPT,)), "FSDP 8 (ZeRO-2)"),
        (plan_on(shard=8, layers=(WHOLE,)), "FSDP 8 (ZeRO-1)"),
        (plan_on(shard=8, layers=(AGAIN, KEPT)), "FSDP 8 (ZeRO-2 and 3)"),
        (plan_on(replicate=8, shard=1), "DDP 8"),
        (plan_on(replicate=2, shard=4), "HSDP 2×4 (ZeRO-3)"),
        (plan_on(hybrid=4, tensor=2), "HDP 4 (ZeRO-3) × TP 2"),
        (plan_on("zbv", pipeline=2, shard=4), "PP 2 × FSDP 4 (ZeRO-3), zero-bubble V (zbv)"),
        (plan_on(replicate=2, pipeline=4, shard=8, tensor=2), "HSDP 2×8 (ZeRO-3) × PP 4 × TP 2, 1F1B"),
        (plan_on(shard=1, context_ring=4), "CP 4 (ring, ZeRO-3)"),
        (plan_on(replicate=2, context_ring=2, context_ulysses=2), "DDP 2 × CP 2 (ring, ZeRO-3) × CP 2 (Ulysses)"),
        (plan_on(shard=2, context_ring=2, context_ulysses=4), "FSDP 2 (ZeRO-3) × CP 2 (ring) × CP 4 (Ulysses)"),
        (plan_on("breadth_first", shard=4), "FSDP 4 (ZeRO-3), layered accumulation (breadth_first)"),
    ],
)
def test_plan_names_use_the_terms_of_papers(plan: Plan, name: str) -> None:
    assert plan_name(plan) == f"{name}, micro-batch 2"


def test_experts_on_several_ranks_are_named() -> None:
    plan = plan_on(shard=16)
    for expert, suffix in ((8, ", EP 8"), (1, "")):
        moe = replace(plan, experts=ExpertPlan(expert=expert, expert_shard=16 // expert))
        assert plan_name(moe) == f"FSDP 16 (ZeRO-3){suffix}, micro-batch 2"


def test_every_schedule_has_a_name() -> None:
    assert set(SCHEDULE_NAMES) == set(get_args(ScheduleName))
