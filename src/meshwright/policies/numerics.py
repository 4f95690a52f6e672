"""Detection of a step's numerical failures: a value that is not finite, or a spike above a running median.

Every decision is a function of reduced values, which all ranks have. The limits of step n follow from good steps up to
n - 2, because a rank reads the values of a step when the next one is already launched.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WINDOW_STEPS = 128
"""Most good steps whose median counts."""
FEWEST_STEPS = 20
"""Fewest such steps: with fewer nothing is a spike."""
LAG_STEPS = 2
"""A step's limits follow from the steps up to this many before it."""
MOST_SKIPS = 10
"""Skipped updates in a row after which the run ends."""
MOST_ROLLBACKS = 3
"""Rollbacks to one step after which the run ends."""

Verdict = Literal["good", "nonfinite", "spike"]


@dataclass(frozen=True)
class GoodStep:
    """Loss and gradient norm of a step that was neither skipped nor rolled back."""

    step: int
    loss: float
    norm: float


@dataclass(frozen=True)
class SpikeLimits:
    """Values above which a loss or a gradient norm is a spike."""

    loss: float = math.inf
    norm: float = math.inf


def spike_limits(history: Sequence[GoodStep], step: int, factor: float) -> SpikeLimits:
    """`factor` times the medians over the last `WINDOW_STEPS` good steps up to `step` - `LAG_STEPS`."""
    window = [good for good in history if good.step <= step - LAG_STEPS][-WINDOW_STEPS:]
    if len(window) < FEWEST_STEPS:
        return SpikeLimits()
    return SpikeLimits(
        factor * statistics.median(good.loss for good in window),
        factor * statistics.median(good.norm for good in window),
    )


def judge(loss: float, norm: float, limits: SpikeLimits) -> Verdict:
    """The verdict on a step."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "nonfinite"
    return "spike" if loss > limits.loss or norm > limits.norm else "good"
