"""Replays the recorded expert loads of a training with a placement policy, and computes how long its MoE layers take.

The policy decides on which ranks copies of experts are present. As in training, it sees only the loads of earlier steps. Each step's time
is computed with the step's own loads.
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
    """The simulated seconds and imbalance of each step and MoE layer; each array is `(steps, layers)`.

    Two steps of three layers, where computation, exchange and weights take one second each, so a step takes 3 · 3 seconds:

    >>> one = np.ones((2, 3))
    >>> PlayedLoads(one, one, one, one).step_seconds
    array([9., 9.])
    """

    compute: np.ndarray
    """Seconds of the experts' matmuls on the rank with the most rows (tokens sent to experts)."""
    exchange: np.ndarray
    """Seconds of the exchange of rows between ranks."""
    weights: np.ndarray
    """Exposed seconds of the exchange of copied weights."""
    imbalance: np.ndarray
    """Rows of the busiest rank relative to the mean over ranks."""

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
    """Simulate MoE layers over `steps`, each an array of counts `(layers, ranks, experts)`: how many rows a rank sends to an expert.

    - `owners` `(layers, experts)`: the rank that owns each expert.
    - `place`: decides which experts are present on which ranks. If it is None, the experts in `initial` `(layers, ranks, experts)` are
      present in all steps.
    - `slots`: the maximum number of copies that a rank can have.
    - `window`, `delay`: for step s, `place` sees the loads of `window` steps, of which step s - `delay` is the last. With a window of 3 and
      a delay of 2, it sees steps 5, 6 and 7 for step 9. The first `delay` steps are seen, but not simulated, so they are not in the result.
    """
    history = LoadWindow(window)
    present = initial
    times = []
    imbalances = []
    for seen_counts, counts in zip(steps, steps[delay:], strict=False):
        history.add(seen_counts)
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
