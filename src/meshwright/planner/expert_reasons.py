"""Predicts what uneven expert loads cost, and writes the planner's sentence about it."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from meshwright.costs.machine_rates import is_guessed
from meshwright.planner.explain import seconds_text
from meshwright.planner.reprice import reprice
from meshwright.simulator.copied_experts import copy_effects
from meshwright.spec.job import EQUAL_LOADS
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.expected_loads import expected_busiest
from meshwright.workload.groups import copies_experts, experts_over, moves_experts


def uneven_loads_seconds(run: RunSpec, plan: Plan) -> float:
    """Return the seconds of a step with the run's expected loads, minus those with equal loads.

    The result is 0 if the device's rates are unknown.
    """
    equal = replace(run, train=replace(run.train, expert_load=EQUAL_LOADS))
    seconds = [
        predicted.step_seconds
        for priced in (run, equal)
        if (predicted := reprice(priced, plan, by_units=False).predicted) and predicted.step_seconds is not None
    ]
    return seconds[0] - seconds[1] if len(seconds) == 2 else 0.0


def uneven_loads_reason(run: RunSpec, plan: Plan) -> str:
    """Return a sentence about the cost of uneven loads.

    The result is empty for a dense model, for equal loads and for an unknown device.
    """
    source = run.train.expert_load
    if not run.model.experts or source == EQUAL_LOADS or (run.cluster.is_cpu and is_guessed(run.cluster)):
        return ""
    ranks = experts_over(plan) * plan.axis_size("tensor")
    where = (
        "assumed; train.expert_load gives recorded loads" if source is None else f"loads of {os.path.relpath(source)}"
    )
    if ranks == 1:
        return (
            ""
            if source is None
            else "uneven loads of experts cost nothing: each rank computes all experts of its tokens"
        )
    alone = float(np.asarray(expected_busiest(run.model, run.train, ranks).imbalance))
    means = [name for name, used in (("copies", copies_experts(plan)), ("moved experts", moves_experts(plan))) if used]
    if means and source is not None:
        present = copy_effects(run.model, run.train, plan, run.cluster).imbalance
        return (
            f"uneven loads of experts: with {' and '.join(means)} the busiest of {ranks} ranks computes {present:.2f} times the mean, "
            f"without {alone:.2f} ({where})"
        )
    return (
        f"uneven loads of experts cost {seconds_text(uneven_loads_seconds(run, plan))} a step: the busiest of {ranks} ranks computes "
        f"{alone:.2f} times the mean ({where})"
    )
