"""Simulates the step of a run's plan, or says why its seconds are not predicted."""

from __future__ import annotations

from meshwright.costs.machine_rates import is_guessed, unpredicted_message
from meshwright.costs.plan_costs import pricing
from meshwright.simulator.step_simulation import simulate_plan
from meshwright.simulator.timeline import Timeline
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec


def predicted_step(run: RunSpec, plan: Plan, *, guessed: bool = False) -> tuple[Timeline | None, str | None]:
    """Return (the simulated step, None), or (None, the reason why there is none). With `guessed`, guessed device rates are enough."""
    if is_guessed(run.cluster) and not guessed:
        return None, unpredicted_message(run.cluster)
    try:
        if pricing(run.model, run.train, plan, run.cluster) is None:
            return None, f"the cost model has no figures for {run.cluster.gpu} in {plan.precision.compute}"
        return simulate_plan(run.model, run.train, plan, run.cluster), None
    except BadInput as refusal:
        return None, str(refusal)
