"""Predicts memory by category and the parts of the step time, for a plan on a run's cluster.

`reprice` is for comparing plans. `predict` is for printing, and leaves out seconds that depend on guessed rates.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.costs.machine_rates import is_guessed
from meshwright.costs.plan_costs import band, pricing
from meshwright.planner.candidate import slot_run
from meshwright.planner.checkpoint_cost import snapshot_bytes
from meshwright.planner.step_estimate import simulated_by_stages, simulated_by_units
from meshwright.simulator.step_simulation import memory_of, timing_of
from meshwright.simulator.timing import Timing
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import Breakdown, Plan, Predicted
from meshwright.spec.run import RunSpec
from meshwright.workload.dtypes import bytes_of
from meshwright.workload.plan_bytes import fullest
from meshwright.workload.rollout_memory import rollout_bytes

TIMED_AXES = ("pipeline", "shard", "replicate")
"""Axes whose communication has actions of its own in a schedule."""


def reprice(run: RunSpec, plan: Plan, *, by_units: bool = True, timing: Timing | None = None) -> Plan:
    """Return `plan` with new predictions in `predicted`.

    With `by_units` false, the step is simulated by whole stages, which is faster and is used to rank plans. `timing` is
    computed if it is None. Only memory is predicted if the cost model has no rates of the device. Raises BadInput if
    the schedule does not support the number of micro-batches.
    """
    # A plan can place samples of different lengths in slots of a fixed length. Its step is predicted for full slots.
    run = slot_run(run, plan)
    by_category = fullest(memory_of(run.model, run.train, plan, cpu=run.cluster.is_cpu))
    if snapshot := snapshot_bytes(run, plan):
        by_category = {**by_category, "snapshot": snapshot}
    if rollouts := rollout_bytes(run, plan.ranks, bytes_of(plan.precision.compute)):
        by_category = {**by_category, "rollouts": rollouts}
    predicted = Predicted(memory_peak_bytes=sum(by_category.values()), memory_bytes=by_category)
    if timing is None and pricing(run.model, run.train, plan, run.cluster) is None:
        return replace(plan, predicted=predicted)
    breakdown = _breakdown(run, plan, by_units, timing or timing_of(run.model, run.train, plan, run.cluster))
    seconds = breakdown.compute + sum(breakdown.exposed.values()) + breakdown.bubble + breakdown.host
    low, high = band(seconds, run.cluster, plan)
    tokens = run.train.global_batch * run.train.seq_len / seconds
    peak = run.cluster.peak_flops(plan.precision.compute)
    work = flops_per_token(run.model, run.train.seq_len, causal=True)
    predicted = replace(
        predicted,
        step_seconds=seconds,
        low_seconds=low,
        high_seconds=high,
        tokens_per_second=tokens,
        tokens_per_second_per_gpu=tokens / plan.ranks,
        mfu=work * tokens / plan.ranks / peak if peak else None,
        breakdown=breakdown,
    )
    return replace(plan, predicted=predicted)


def predict(run: RunSpec, plan: Plan) -> Plan:
    """Return `plan` with predictions for printing: only memory if the device's rates are guessed.

    Raises as `reprice`.
    """
    return without_guess(run, reprice(run, plan))


def without_guess(run: RunSpec, plan: Plan) -> Plan:
    """Return `plan` without predicted seconds if they depend on guessed rates (`costs.machine_rates.is_guessed`)."""
    predicted = plan.predicted
    if predicted is None or not is_guessed(run.cluster):
        return plan
    return replace(
        plan, predicted=Predicted(memory_peak_bytes=predicted.memory_peak_bytes, memory_bytes=predicted.memory_bytes)
    )


def _breakdown(run: RunSpec, plan: Plan, by_units: bool, timing: Timing) -> Breakdown:
    """Return the parts of the step time."""
    parts = (simulated_by_units if by_units else simulated_by_stages)(run, plan, timing)
    # The simulated compute actions include host time, and the exposed communication of tensor, context and expert
    # ranks.
    in_compute = dict(timing.exposed_in_compute)
    host = in_compute.pop("host", 0.0)
    exposed = in_compute | {axis: parts[axis] for axis in TIMED_AXES}
    # "closing" is the gradient norm and the optimizer, the last actions of a step.
    return Breakdown(
        compute=parts["compute"] + parts["closing"] - sum(in_compute.values()) - host,
        exposed={axis: seconds for axis, seconds in exposed.items() if seconds > 0},
        bubble=parts["idle"],
        host=host,
    )
