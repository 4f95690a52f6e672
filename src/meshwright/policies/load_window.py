"""The last loads of all layers of experts, from which the next step's placement of experts is decided."""

from __future__ import annotations

import numpy as np

WINDOW_STEPS = 5
"""Steps of a window (Hecate, arXiv 2502.02581, section 4.2)."""


class LoadWindow:
    """Counts of the last `steps` steps. `history` `(steps so far, L, R, E)` is all of its state, oldest first."""

    def __init__(self, steps: int = WINDOW_STEPS, history: np.ndarray | None = None) -> None:
        self._steps = steps
        self._counts: list[np.ndarray] = [] if history is None else list(history[-steps:])

    @property
    def history(self) -> np.ndarray:
        return np.array(self._counts)

    def add(self, counts: np.ndarray) -> None:
        """Add a step's rows by layer, source rank and expert `(L, R, E)`; the oldest step leaves."""
        self._counts = [*self._counts, counts][-self._steps :]

    def __len__(self) -> int:
        return len(self._counts)

    def sums(self) -> np.ndarray:
        """Counts summed over the window, `(L, R, E)`; sums are exact, unlike means. Raises ValueError before the first step."""
        if not self._counts:
            raise ValueError("a window of loads has no step yet")
        return np.sum(self._counts, axis=0)
