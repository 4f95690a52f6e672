"""Arithmetic of charts: smoothing, thinning of long curves, axis ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.observe import number_text

Values = Sequence[float | None]
MOST_REACH = 500
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


class Smoother:
    """Exponential moving average with bias correction, so that the first value is unchanged; None does not change it."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float | None) -> float | None:
        if value is not None and math.isfinite(value):
            self._sum = self._keep * self._sum + (1 - self._keep) * value
            self._weight = self._keep * self._weight + (1 - self._keep)
        return self._sum / self._weight if self._weight else None


def trend(values: Values, indices: Sequence[int]) -> list[float | None]:
    """The curve without noise and spikes, at `indices`: means of the middle half of the neighbouring values.

    The window is centred, so the trend does not lag. It reaches 1/20 of the way back to the start (a loss falls fast
    early and slowly later), at most 1/40 of the curve. None where the window has no number.
    """
    means: list[float | None] = []
    for index in indices:
        reach = min(index, max(2, min(index // 20, len(values) // 40, MOST_REACH)))
        known = sorted(value for value in values[index - reach : index + reach + 1] if value is not None)
        middle = known[len(known) // 4 : len(known) - len(known) // 4]
        means.append(sum(middle) / len(middle) if middle else None)
    return means


def kept_indices(length: int, shapes: Sequence[Values], limit: int) -> list[int]:
    """Indices, ascending and at most `limit`, that keep each curve's lows and highs, so that spikes stay visible.

    The indices are divided into equal buckets; of each bucket every curve keeps its minimum and maximum. The first and
    last index are kept.
    """
    if length <= limit:
        return list(range(length))
    buckets = max(1, (limit - 2) // (2 * max(1, len(shapes))))
    kept = {0, length - 1}
    for bucket in range(buckets):
        indices = range(bucket * length // buckets, (bucket + 1) * length // buckets)
        for shape in shapes:
            known = [(value, index) for index in indices if (value := shape[index]) is not None]
            if known:
                kept |= {min(known)[1], max(known)[1]}
    return sorted(kept)


def bucket_means(values: Values, buckets: int) -> list[float | None]:
    """Means of equal segments of the curve; None for a segment without a number."""
    length, means = len(values), []
    for bucket in range(min(buckets, length)):
        edges = (bucket * length // min(buckets, length), (bucket + 1) * length // min(buckets, length))
        known = [value for value in values[edges[0] : edges[1]] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def median(values: Sequence[float]) -> float:
    """The middle value (the lower one of two)."""
    return sorted(values)[(len(values) - 1) // 2]


def value_range(values: Values, *, from_zero: bool) -> tuple[float, float]:
    """Limits of a y axis: around all values with a margin, or around most if a few are far higher.

    Otherwise a spike or a first step with compilation would flatten the curve. A single value gets an axis around it.
    """
    known = sorted(value for value in values if value is not None)
    if not known:
        return 0.0, 1.0
    low, high = known[0], known[-1]
    body, floor = known[int(0.98 * (len(known) - 1))], 0.0 if from_zero else known[int(0.02 * len(known))]
    if len(known) >= 20 and high - floor > 3 * (body - floor) > 0:
        high = floor + 1.25 * (body - floor)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    air = 0.06 * (high - low)
    if air <= 1e-9 * max(abs(low), abs(high)):
        air = abs(high) / 2 or 0.5
    return (low if from_zero and low == 0.0 else low - air), high + air


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most about `count` round numbers inside [low, high], spaced by 1, 2, 2.5 or 5 times a power of ten.

    `low` must be less than `high` by more than rounding error.
    """
    step = _nice_step((high - low) / count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def time_ticks(high: float, count: int = 6) -> list[float]:
    """Round seconds, minutes, hours or days inside [0, high]."""
    if high < 5:
        return ticks(0.0, high, count)
    step = next((s for s in _TIME_STEPS if high / s <= count), None) or 86400 * math.ceil(high / count / 86400)
    return [float(step * index) for index in range(int(high / step) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels with enough decimals to distinguish the ticks, and with k, M, B or T for large numbers."""
    top = max(map(abs, values), default=0.0)
    scale, suffix = next(((s, t) for s, t in number_text.SUFFIXES if top >= s), (1.0, ""))
    if 0 < top < 1e-2:
        return [_power(value) for value in values]
    for decimals in range(10):
        labels = [f"{value / scale:.{decimals}f}" for value in values]
        exact = all(
            math.isclose(float(a), b / scale, rel_tol=1e-3) or abs(b) < 1e-9 * top
            for a, b in zip(labels, values, strict=True)
        )
        if exact and len(set(labels)) == len(labels):
            break
    return [f"{label}{suffix}" if float(label) else "0" for label in labels]


def time_labels(values: Sequence[float]) -> list[str]:
    """Labels in one unit for the whole axis: s, min, h or d."""
    top = max(values, default=0.0)
    unit, name = next(((u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "min")) if top >= 2 * u), (1, "s"))
    return [f"{value / unit:g} {name}" if value else "0" for value in values]


def _power(value: float) -> str:
    """A small number by its power of ten: 0.00025 → "2.5e-4"."""
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(nice for nice in _NICE if nice * power >= rough * (1 - 1e-9))
