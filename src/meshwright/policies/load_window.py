"""Keeps the expert loads of the last steps, from which the placement of experts in the next step is decided."""

from __future__ import annotations

import numpy as np

WINDOW_STEPS = 5
"""Number of steps in a window (Hecate, arXiv 2502.02581, section 4.2)."""


class LoadWindow:
    """Counts of the last `steps` steps. Its whole state is `history` `(steps so far, L, R, E)`, oldest first."""

    def __init__(self, steps: int = WINDOW_STEPS, history: np.ndarray | None = None) -> None:
        self._steps = steps
        self._counts: list[np.ndarray] = [] if history is None else list(history[-steps:])

    @property
    def history(self) -> np.ndarray:
        return np.array(self._counts)

    def add(self, counts: np.ndarray) -> None:
        """Add a step's rows by layer, source rank and expert, `(L, R, E)`. If the window is full, the oldest step is dropped."""
        self._counts = [*self._counts, counts][-self._steps :]

    def __len__(self) -> int:
        return len(self._counts)

    def sums(self) -> np.ndarray:
        """Sums of the counts over the window, `(L, R, E)`. Sums are exact; means would not be. Raises ValueError before the first step."""
        if not self._counts:
            raise ValueError("a window of loads has no step yet")
        return np.sum(self._counts, axis=0)
