"""Arithmetic for charts: smoothing, fewer points for long curves, axis ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.observe import number_text

Values = Sequence[float | None]
"""The values of a curve; None where it has no number."""
MOST_REACH = 500
"""Largest half-width of the trend's window, in values."""
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Distances between ticks, as factors of a power of ten."""
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Distances between ticks on a time axis, in seconds: from a second to a day."""


def trend(values: Values, indices: Sequence[int]) -> list[float | None]:
    """Return the smoothed curve at `indices`. Each value is the mean of the middle half of the values in a window.

    Leaving out the highest and lowest quarter removes spikes. The window is centred on the index, so the trend does not
    lag. Its half-width is 1/20 of the index, because a loss falls fast early and slowly later, and at most 1/40 of the
    curve. Example: on a curve of 1,000 values, the window of index 400 has the values 380 to 420. A value is None if
    the window has no number.
    """
    means: list[float | None] = []
    for index in indices:
        reach = min(index, max(2, min(index // 20, len(values) // 40, MOST_REACH)))
        numbers = sorted(value for value in values[index - reach : index + reach + 1] if value is not None)
        middle_half = numbers[len(numbers) // 4 : len(numbers) - len(numbers) // 4]
        means.append(sum(middle_half) / len(middle_half) if middle_half else None)
    return means


def indices_of_extremes(length: int, curves: Sequence[Values], limit: int) -> list[int]:
    """Return at most `limit` ascending indices that keep the lows and highs of each curve, so that spikes stay visible.

    Every curve has `length` values. Their indices are divided into equal buckets. In each bucket, every curve keeps its
    minimum and its maximum. The first and the last index are kept too.
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
    """Return the means of `buckets` equal segments of the curve; None for a segment without a number."""
    length = len(values)
    means = []
    for bucket in range(min(buckets, length)):
        bounds = (bucket * length // min(buckets, length), (bucket + 1) * length // min(buckets, length))
        numbers = [value for value in values[bounds[0] : bounds[1]] if value is not None]
        means.append(sum(numbers) / len(numbers) if numbers else None)
    return means


def median(values: Sequence[float]) -> float:
    """Return the middle value; the lower of the two middle values if their number is even."""
    return sorted(values)[(len(values) - 1) // 2]


def value_range(values: Values, *, from_zero: bool, outliers: bool = False) -> tuple[float, float]:
    """Return (low, high) of a y axis with margins.

    The axis covers all values, or only the lower 98% if the others are far higher. Otherwise a spike, or a first step
    that compiles, would flatten the curve. With `outliers` it always covers all values. `from_zero` includes 0. An axis
    for a single value is centred on it.
    """
    numbers = sorted(value for value in values if value is not None)
    if not numbers:
        return 0.0, 1.0
    low = numbers[0]
    high = numbers[-1]
    # At most 2% of the values are above `most_high`, and at most 2% are below `floor`.
    most_high = numbers[int(0.98 * (len(numbers) - 1))]
    floor = 0.0 if from_zero else numbers[int(0.02 * len(numbers))]
    if not outliers and len(numbers) >= 20 and high - floor > 3 * (most_high - floor) > 0:
        high = floor + 1.25 * (most_high - floor)
    if from_zero:
        low = min(0.0, low)
        high = max(0.0, high)
    margin = 0.06 * (high - low)
    # All values are equal, or nearly.
    if margin <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 0.5
    return (low if from_zero and low == 0.0 else low - margin), high + margin


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers in [low, high]. Their distance is 1, 2, 2.5 or 5 times a power of ten.

    `high` must be greater than `low` by more than rounding errors.
    """
    step = _nice_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def time_ticks(high: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers of seconds, minutes, hours or days in [0, high], in seconds."""
    if high < 5:
        return ticks(0.0, high, count)
    step = next((seconds for seconds in _TIME_STEPS if high / seconds <= count), None) or 86400 * math.ceil(
        high / count / 86400
    )
    return [float(step * index) for index in range(int(high / step) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return labels with enough decimals to tell the ticks apart. Large numbers are shown with k, M, B or T."""
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
    """Return labels in one unit for all ticks: s, min, h or d. `values` are in seconds."""
    largest = max(values, default=0.0)
    unit, name = next(((u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "min")) if largest >= 2 * u), (1, "s"))
    return [f"{value / unit:g} {name}" if value else "0" for value in values]


def _power(value: float) -> str:
    """Return a small number with its power of ten: 0.00025 becomes "2.5e-4"."""
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(nice for nice in _NICE if nice * power >= rough * (1 - 1e-9))
