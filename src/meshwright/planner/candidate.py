"""One plan that the planner weighs, and what the rest of it asks of a run's pins."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.plan import RUNNABLE_AXES, Plan, PlanPins
from meshwright.spec.run import RunSpec

HEADROOM = 0.92
"""Share of a device's memory a plan may fill; the rest is left to fragmentation."""
ORDER = (
    "computes activations twice",
    "gathers weights twice",
    "shards across nodes",
    "smaller products to hide gathers under",
)
"""What each place of a candidate's order stands for."""


@dataclass(frozen=True)
class Candidate:
    """One plan, whether it fits, and its place in the order (lower is better)."""

    plan: Plan
    fits: bool
    order: tuple[float, ...]
    seconds: float | None = None
    """Step time by the cost model, where it decides."""
    simulated: bool = False
    """Whether `seconds` were simulated unit by unit, and not only estimated."""

    @property
    def key(self) -> tuple[object, ...]:
        return not self.fits, not self.simulated, self.seconds or 0.0, self.order

    def reason_over(self, other: Candidate) -> str:
        """Why this one was preferred to `other`: the first thing in the order in which they differ."""
        if self.fits and not other.fits:
            return "does not fit"
        if self.seconds and other.seconds:
            # An estimate need not agree with a simulation to the last percent; the estimate only chose what to simulate.
            return f"{other.seconds:.2f} s a step" + ("" if other.simulated else ", estimated")
        mine = (
            now
            for now, then in zip(ORDER, zip(self.order, other.order, strict=True), strict=True)
            if then[0] != then[1]
        )
        return next(mine, "equal")


def untrainable(plan: Plan) -> str | None:
    """What of the plan this release can plan and simulate but not train, or None."""
    axes = [f"{axis.axis} {axis.size}" for axis in plan.mesh if axis.size > 1 and axis.axis not in RUNNABLE_AXES]
    if not axes:
        return None
    return f"this release cannot train {', '.join(axes)}: it plans and simulates that; it trains {', '.join(RUNNABLE_AXES)}"


def peak_bytes(plan: Plan) -> int:
    """Predicted memory of the fullest rank; 0 when the plan does not say."""
    return plan.predicted.memory_peak_bytes if plan.predicted else 0


def pins_of(run: RunSpec) -> PlanPins:
    return run.plan if isinstance(run.plan, PlanPins) else PlanPins()
