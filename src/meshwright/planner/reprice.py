"""A plan with `predicted` as it is on a run's cluster: memory by kind and the step's seconds by part.

`repriced` is for comparing plans; `predicted` is for people and leaves out seconds that rest on a guess.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.costs.machine_rates import is_guessed
from meshwright.costs.plan_costs import band, pricing
from meshwright.planner.step_estimate import played_by_stages, played_by_units
from meshwright.simulator.step_simulation import memory_of, timing_of
from meshwright.simulator.timing import Timing
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import Breakdown, Plan, Predicted
from meshwright.spec.run import RunSpec
from meshwright.workload.plan_bytes import fullest

TIMED_AXES = ("pipeline", "shard", "replicate")
"""Axes whose communication has actions of its own in a schedule."""


def repriced(run: RunSpec, plan: Plan, *, by_units: bool = True, timing: Timing | None = None) -> Plan:
    """`plan` with what is predicted of it, whatever it said before; without `by_units` quicker, for ranking. `timing` is made when it is
    not there yet.

    Only memory where the cost model has no figures of the device. Raises BadInput when its schedule cannot be made for its micro-batches.
    """
    kinds = fullest(memory_of(run.model, run.train, plan, cpu=run.cluster.is_cpu))
    said = Predicted(memory_peak_bytes=sum(kinds.values()), memory_bytes=kinds)
    if timing is None and pricing(run.model, run.train, plan, run.cluster) is None:
        return replace(plan, predicted=said)
    breakdown = _breakdown(run, plan, by_units, timing or timing_of(run.model, run.train, plan, run.cluster))
    seconds = breakdown.compute + sum(breakdown.exposed.values()) + breakdown.bubble + breakdown.host
    low, high = band(seconds, run.cluster, plan)
    tokens = run.train.global_batch * run.train.seq_len / seconds
    peak = run.cluster.peak_flops(plan.precision.compute)
    work = flops_per_token(run.model, run.train.seq_len, causal=True)
    said = replace(
        said, step_seconds=seconds, low_seconds=low, high_seconds=high, tokens_per_second=tokens,
        tokens_per_second_per_gpu=tokens / plan.ranks, mfu=work * tokens / plan.ranks / peak if peak else None,
        breakdown=breakdown,
    )  # fmt: skip
    return replace(plan, predicted=said)


def predicted(run: RunSpec, plan: Plan) -> Plan:
    """`plan` repriced for people to read: only memory where the device's rates are a guess. Raises as `repriced`."""
    return without_guess(run, repriced(run, plan))


def without_guess(run: RunSpec, plan: Plan) -> Plan:
    """`plan` with only memory predicted where its seconds rest on a guess (`costs.machine_rates.is_guessed`)."""
    said = plan.predicted
    if said is None or not is_guessed(run.cluster):
        return plan
    return replace(plan, predicted=Predicted(memory_peak_bytes=said.memory_peak_bytes, memory_bytes=said.memory_bytes))


def _breakdown(run: RunSpec, plan: Plan, by_units: bool, timing: Timing) -> Breakdown:
    parts = (played_by_units if by_units else played_by_stages)(run, plan, timing)
    inside = dict(timing.inside)
    host = inside.pop("host", 0.0)
    exposed = inside | {axis: parts[axis] for axis in TIMED_AXES}
    return Breakdown(
        compute=parts["compute"] + parts["closing"] - sum(inside.values()) - host,
        exposed={axis: seconds for axis, seconds in exposed.items() if seconds > 0},
        bubble=parts["idle"],
        host=host,
    )
