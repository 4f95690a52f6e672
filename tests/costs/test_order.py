"""The order of costs: more work, a slower network or less memory never makes a step faster, by formulas and by simulation.

Plans are drawn with other sizes, schedules, models and clusters. Offload is left out: recompute leaves less to copy to the host, and may
gain more than it costs; and what takes longer may hide slightly more of an optimizer's copies than it takes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshwright.costs.plan_costs import plan_time
from meshwright.planner.reprice import reprice
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import Plan, Recompute
from meshwright.spec.run import RunSpec
from tests.golden.facts import drawn_plan
from tests.slow import quick_first

TOLERANCE = 1e-3
PLANS = (36, 88, 72, *range(250))
"""Numbers of drawn plans, those first that were once faster with recompute."""
Case = tuple[RunSpec, Plan]


def drawn(number: int) -> Case:
    """A drawn plan without offload, on nodes of one to eight devices."""
    run, plan, _ = drawn_plan(f"x{number}")
    draw = random.Random(number)
    if draw.random() < 0.6:
        devices = draw.choice([size for size in (1, 2, 4, 8) if plan.ranks % size == 0])
        run = replace(run, cluster=replace(run.cluster, gpus_per_node=devices, nodes=plan.ranks // devices))
    return run, replace(plan, layers=(replace(plan.layers[0], offload="none"),))


def on_network(run: RunSpec, *, ports: float = 1.0, links: float = 1.0, **network: object) -> RunSpec:
    """The run on ports and links with these shares of the chip's rates."""
    chip = CHIPS[run.cluster.gpu]
    rates = {"port_gb_per_s": ports * chip.nic / 1e9, "link_gb_per_s": links * chip.link / 1e9}
    changed = replace(run.cluster.network or NetworkSpec(), **rates, **network)
    return replace(run, cluster=replace(run.cluster, network=changed))


def with_recompute(plan: Plan, mode: Recompute) -> Plan:
    return replace(plan, layers=(replace(plan.layers[0], recompute=mode),))


def changes(run: RunSpec, plan: Plan) -> Iterator[tuple[str, Case, Case]]:
    """(name, a run and plan, the same with more work or less of something)."""
    for network, networked in (("", run), ("over TCP, ", on_network(run, ports=0.05, fabric="tcp"))):
        recomputed = [(networked, with_recompute(plan, mode)) for mode in ("none", "selective", "full")]
        yield f"{network}selective recompute", recomputed[0], recomputed[1]
        yield f"{network}full recompute", recomputed[1], recomputed[2]
    yield "longer sequences", (run, plan), (replace(run, train=replace(run.train, seq_len=4608)), plan)
    yield "slower ports", (on_network(run), plan), (on_network(run, ports=0.8), plan)
    yield "slower links", (on_network(run), plan), (on_network(run, links=0.8), plan)
    yield "later messages", (on_network(run, port_us=5.0), plan), (on_network(run, port_us=20.0), plan)
    memory, half = (replace(run, cluster=replace(run.cluster, memory_gib=gib)) for gib in (1000, 500))
    yield "less memory", (memory, plan), (half, plan)


def seconds(case: Case, *, by_units: bool) -> list[float]:
    """Seconds of a step: by formulas, simulated by stages, and with `by_units` also by units."""
    run, plan = case
    formula = plan_time(run.model, run.train, plan, run.cluster)
    priced = [reprice(run, plan, by_units=mode) for mode in ((False, True) if by_units else (False,))]
    assert formula is not None
    found = [formula.seconds]
    for each in priced:
        assert each.predicted is not None and each.predicted.step_seconds is not None
        found.append(each.predicted.step_seconds)
    return found


@pytest.mark.parametrize("number", quick_first(4, dict.fromkeys(PLANS)))
def test_more_work_and_less_of_anything_is_never_faster(number: int) -> None:
    run, plan = drawn(number)
    for name, before, after in changes(run, plan):
        try:
            pairs = zip(*(seconds(case, by_units=number >= 8) for case in (before, after)), strict=True)
        except BadInput:
            continue
        for kind, (fewer, more) in zip(("formulas", "stages", "units"), pairs, strict=False):
            assert more >= fewer * (1 - TOLERANCE), f"{name} by {kind}: {fewer} s, then {more} s"
