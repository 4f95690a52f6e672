"""Time of the experts' part of a step under a placement policy, played over recorded loads.

A step's placement is decided from the loads of the steps before it, as in training, and timed with its own loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.policies.expert_costs import ExpertCosts, LayerTimes
from meshwright.policies.expert_placement import PlacementProblem
from meshwright.policies.load_window import LoadWindow


@dataclass(frozen=True)
class PlayedLoads:
    """Figures of each step and layer, each `(steps, L)`.

    Two steps of three layers, with one second for computation, exchange and weights each:

    >>> one = np.ones((2, 3))
    >>> PlayedLoads(one, one, one, one).step_seconds
    array([9., 9.])
    """

    compute: np.ndarray
    """Seconds of the experts on the rank with most rows."""
    exchange: np.ndarray
    """Seconds of the exchange of rows."""
    weights: np.ndarray
    """Seconds of the exchange of weights that are not hidden."""
    imbalance: np.ndarray
    """Largest rows of a rank over the mean of all ranks."""

    @property
    def step_seconds(self) -> np.ndarray:
        """Seconds of all layers of each step, `(steps,)`."""
        return (self.compute + self.exchange + self.weights).sum(1)


def play_loads(
    steps: Sequence[np.ndarray],
    owners: np.ndarray,
    costs: ExpertCosts,
    *,
    place: Callable[[PlacementProblem], np.ndarray] | None = None,
    slots: int = 0,
    window: int = 1,
    initial: np.ndarray | None = None,
    delay: int = 1,
) -> PlayedLoads:
    """Play `steps`, each with counts `(L, R, E)`, with the experts present that `place` decides; without it `initial` in all steps.

    A step is decided from the `window` steps up to the one `delay` steps before it; the first `delay` steps only fill the window and are
    not in the figures. `initial` has the shape `(L, R, E)`; `slots` is the most copies on a rank.
    """
    history = LoadWindow(window)
    present = initial
    times = []
    imbalances = []
    for number, counts in enumerate(steps[delay:]):
        history.add(steps[number])
        problem = PlacementProblem(counts, owners, slots, costs)
        if place is not None:
            present = place(PlacementProblem(history.sums(), owners, slots, costs, len(history)))
        assert present is not None
        totals = problem.row_totals(present)
        times.append(problem.times(totals))
        imbalances.append(totals.computed.max(1) / totals.computed.mean(1))
    return _stacked(times, imbalances)


def _stacked(times: Sequence[LayerTimes], imbalances: Sequence[np.ndarray]) -> PlayedLoads:
    return PlayedLoads(
        np.array([step.compute for step in times]),
        np.array([step.exchange for step in times]),
        np.array([step.weights for step in times]),
        np.array(imbalances),
    )
