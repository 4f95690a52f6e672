"""Detects numerical failures of a step: a value that is not finite, or a spike above a running median.

Every decision is a function of reduced values, which all ranks have. The limits for step n are computed from good steps up to n − 2,
because a rank reads the values of a step only when it has already launched the next one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WINDOW_STEPS = 128
"""Number of newest good steps that are used for the median, at most."""
FEWEST_STEPS = 20
"""With fewer good steps than this, nothing is called a spike."""
LAG_STEPS = 2
"""The limits for a step use only steps that are at least this many before it."""
MOST_SKIPS = 10
"""The run ends after this many successive skipped updates."""
MOST_ROLLBACKS = 3
"""The run ends after this many rollbacks to the same step."""

Verdict = Literal["good", "nonfinite", "spike"]


@dataclass(frozen=True)
class GoodStep:
    """Loss and gradient norm of a step that was not skipped or rolled back."""

    step: int
    loss: float
    norm: float


@dataclass(frozen=True)
class SpikeLimits:
    """Values above which a loss or a gradient norm is a spike."""

    loss: float = math.inf
    norm: float = math.inf


def spike_limits(history: Sequence[GoodStep], step: int, factor: float) -> SpikeLimits:
    """`factor` times the medians of loss and norm, over the last `WINDOW_STEPS` good steps up to `step` − `LAG_STEPS`."""
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
