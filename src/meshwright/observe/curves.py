"""Arithmetic of charts: smoothing, thinning of long curves, axis ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.observe import number_text

Values = Sequence[float | None]
MOST_REACH = 500
"""Most values on each side of the centre of the trend's window."""
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Factors of a power of ten by which ticks are spaced."""
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Distances of ticks on a time axis in seconds, from a second to a day."""


def trend(values: Values, indices: Sequence[int]) -> list[float | None]:
    """The curve without noise and spikes, at `indices`: means of the middle half of the neighbouring values.

    The window is centred, so the trend does not lag. It reaches 1/20 of the way back to the start (a loss falls fast
    early and slowly later), at most 1/40 of the curve. None where the window has no number.
    """
    means: list[float | None] = []
    for index in indices:
        reach = min(index, max(2, min(index // 20, len(values) // 40, MOST_REACH)))
        numbers = sorted(value for value in values[index - reach : index + reach + 1] if value is not None)
        middle_half = numbers[len(numbers) // 4 : len(numbers) - len(numbers) // 4]
        means.append(sum(middle_half) / len(middle_half) if middle_half else None)
    return means


def indices_of_extremes(length: int, curves: Sequence[Values], limit: int) -> list[int]:
    """Indices, ascending and at most `limit`, that keep each curve's lows and highs, so that spikes stay visible.

    The indices are divided into equal buckets; of each bucket every curve keeps its minimum and maximum. The first and
    last index are kept.
    """
    if length <= limit:
        return list(range(length))
    bucket_count = max(1, (limit - 2) // (2 * max(1, len(curves))))
    selected = {0, length - 1}
    for number in range(bucket_count):
        indices = range(number * length // bucket_count, (number + 1) * length // bucket_count)
        for curve in curves:
            numbers = [(value, index) for index in indices if (value := curve[index]) is not None]
            if numbers:
                selected |= {min(numbers)[1], max(numbers)[1]}
    return sorted(selected)


def bucket_means(values: Values, buckets: int) -> list[float | None]:
    """Means of equal segments of the curve; None for a segment without a number."""
    length = len(values)
    means = []
    for bucket in range(min(buckets, length)):
        bounds = (bucket * length // min(buckets, length), (bucket + 1) * length // min(buckets, length))
        numbers = [value for value in values[bounds[0] : bounds[1]] if value is not None]
        means.append(sum(numbers) / len(numbers) if numbers else None)
    return means


def median(values: Sequence[float]) -> float:
    """The middle value (the lower one of two)."""
    return sorted(values)[(len(values) - 1) // 2]


def value_range(values: Values, *, from_zero: bool, outliers: bool = False) -> tuple[float, float]:
    """Limits of a y axis: around all values with a margin, or around 98% of them if the others are far higher.

    Otherwise a spike or a first step with compilation would flatten the curve; with `outliers` all values are inside.
    An axis for a single value is centred on it.
    """
    numbers = sorted(value for value in values if value is not None)
    if not numbers:
        return 0.0, 1.0
    low = numbers[0]
    high = numbers[-1]
    most_high = numbers[int(0.98 * (len(numbers) - 1))]
    floor = 0.0 if from_zero else numbers[int(0.02 * len(numbers))]
    if not outliers and len(numbers) >= 20 and high - floor > 3 * (most_high - floor) > 0:
        high = floor + 1.25 * (most_high - floor)
    if from_zero:
        low = min(0.0, low)
        high = max(0.0, high)
    margin = 0.06 * (high - low)
    if margin <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 0.5
    return (low if from_zero and low == 0.0 else low - margin), high + margin


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most about `count` round numbers inside [low, high], spaced by 1, 2, 2.5 or 5 times a power of ten.

    `low` must be less than `high` by more than rounding error.
    """
    step = _nice_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def time_ticks(high: float, count: int = 6) -> list[float]:
    """Round seconds, minutes, hours or days inside [0, high]."""
    if high < 5:
        return ticks(0.0, high, count)
    step = next((seconds for seconds in _TIME_STEPS if high / seconds <= count), None) or 86400 * math.ceil(
        high / count / 86400
    )
    return [float(step * index) for index in range(int(high / step) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels with enough decimals to distinguish the ticks, and with k, M, B or T for large numbers."""
    largest = max(map(abs, values), default=0.0)
    scale, suffix = next(((s, t) for s, t in number_text.SUFFIXES if largest >= s), (1.0, ""))
    if 0 < largest < 1e-2:
        return [_power(value) for value in values]
    for decimals in range(10):
        labels = [f"{value / scale:.{decimals}f}" for value in values]
        exact = all(
            math.isclose(float(label), value / scale, rel_tol=1e-3) or abs(value) < 1e-9 * largest
            for label, value in zip(labels, values, strict=True)
        )
        if exact and len(set(labels)) == len(labels):
            break
    return [f"{label}{suffix}" if float(label) else "0" for label in labels]


def time_labels(values: Sequence[float]) -> list[str]:
    """Labels in one unit for the whole axis: s, min, h or d."""
    largest = max(values, default=0.0)
    unit, name = next(((u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "min")) if largest >= 2 * u), (1, "s"))
    return [f"{value / unit:g} {name}" if value else "0" for value in values]


def _power(value: float) -> str:
    """A small number by its power of ten: 0.00025 → "2.5e-4"."""
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(nice for nice in _NICE if nice * power >= rough * (1 - 1e-9))
