"""Fields that `idle_fields` names: without them a plan takes as many seconds and bytes, or no more where they have no advantage."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.golden.facts import drawn_plan
from tests.slow import quick_first

from meshwright.costs.plan_costs import plan_time
from meshwright.planner.candidate import idle_fields
from meshwright.planner.reprice import reprice
from meshwright.simulator.step_simulation import memory_of
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import Plan, Precision, SchedulePlan
from meshwright.spec.run import RunSpec

SECONDS = 2e-3
"""Relative difference of simulated seconds: events that do not matter may change places."""
PLAIN = Plan(mesh=(), batch=drawn_plan("0")[1].batch)
PLANS = (17, 24, 25, 29, *range(60))
"""Numbers of drawn plans, those first that named a field that had an effect."""


def drawn(number: int) -> tuple[RunSpec, Plan]:
    """A drawn plan with further fields that a mesh may leave without an effect."""
    run, plan, _ = drawn_plan(f"i{number}")
    draw = random.Random(number)
    layer = replace(plan.layers[0], gradients=draw.choice(("shard", "whole")))
    sums: dict[str, Any] = {
        "reduce": draw.choice(("fp32", "fp32", "bf16")),
        "reduce_replicas": draw.choice((None, None, "bf16", "fp32")),
    }
    fields: dict[str, Any] = {
        "gather_transport": draw.choice(("nccl", "copy_engine")),
        "tensor_transport": draw.choice(("nccl", "copy_engine")),
        "offload_staging": draw.choice((0.0, 2.0)),
        "accumulation": draw.choice(("device", "device", "bf16", "host")),
        "mlp_tile": draw.choice((0, 1024)),
    }
    return run, replace(plan, layers=(layer,), precision=replace(plan.precision, **sums), **fields)


def without(plan: Plan, key: str) -> Plan:
    """The plan with the default of one field."""
    if key == "schedule":
        return replace(plan, schedule=SchedulePlan())
    if key == "gradients":
        return replace(plan, layers=tuple(replace(layer, gradients="shard") for layer in plan.layers))
    if key == "reduce_replicas":
        return replace(plan, precision=replace(plan.precision, reduce_replicas=Precision().reduce_replicas))
    return replace(plan, **{key: getattr(PLAIN, key)})


def cost(run: RunSpec, plan: Plan) -> tuple[list[float], tuple[dict[str, int], ...]]:
    """Seconds of a step by formulas and simulated by stages and by units; bytes of each pipeline rank."""
    formula = plan_time(run.model, run.train, plan, run.cluster)
    priced = [reprice(run, plan, by_units=by_units).predicted for by_units in (False, True)]
    assert formula is not None
    seconds = [each.step_seconds for each in priced if each is not None and each.step_seconds is not None]
    return [formula.seconds, *seconds], memory_of(run.model, run.train, plan, cpu=False)


@pytest.mark.parametrize("number", quick_first(5, dict.fromkeys(PLANS)))
def test_what_has_no_effect_has_none_on_seconds_and_bytes(number: int) -> None:
    run, plan = drawn(number)
    try:
        given, given_bytes = cost(run, plan)
    except BadInput:
        return
    for sentence in idle_fields(plan):
        key = sentence.split()[0].removeprefix("plan.")
        seconds, ranks = cost(run, without(plan, key))
        assert len(seconds) == 3
        if "no advantage" in sentence:
            # Whole stages hide collectives a little otherwise than their units do.
            assert all(mine >= (1 - SECONDS) * plain for mine, plain in zip(given[::2], seconds[::2], strict=True)), (
                sentence
            )
            assert sum(given_bytes[0].values()) >= sum(ranks[0].values()), sentence
        else:
            assert "no effect" in sentence
            assert given == pytest.approx(seconds, rel=SECONDS), sentence
            assert given_bytes == ranks, sentence


def test_sums_of_one_rank_in_another_format_have_an_effect() -> None:
    """Whole gradients of one rank are summed in the format of `reduce`, others in that of `accumulation`."""
    _, plan, _ = drawn_plan("0")
    plan = replace(plan, mesh=(), layers=(replace(plan.layers[0], gradients="whole"),), accumulation="device")
    narrow = replace(plan, precision=replace(plan.precision, reduce="bf16"))
    named = [any("gradients = whole" in text for text in idle_fields(each)) for each in (plan, narrow)]
    assert named == [True, False]
    assert not any("gradients" in text for text in idle_fields(replace(plan, accumulation="bf16")))
