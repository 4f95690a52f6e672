"""Divisors of the sizes of a model and a cluster, for the nearest valid values in messages."""

from __future__ import annotations

from math import isqrt


def divisors(of: int) -> list[int]:
    """Every divisor of `of`, smallest first."""
    small = [n for n in range(1, isqrt(of) + 1) if of % n == 0]
    return small + [of // n for n in reversed(small) if n * n != of]


def nearest_divisor(of: int, size: int) -> int:
    """The divisor of `of` that is closest to `size`, the smaller of two."""
    return min(divisors(of), key=lambda n: (abs(n - size), n))
