"""Divisors of the sizes of a model and a cluster, for the nearest valid values in messages."""

from __future__ import annotations

from math import isqrt


def divisors(of: int) -> list[int]:
    """Return every divisor of `of`, in ascending order."""
    small = [n for n in range(1, isqrt(of) + 1) if of % n == 0]
    return small + [of // n for n in reversed(small) if n * n != of]


def nearest_divisor(of: int, size: int) -> int:
    """Return the divisor of `of` that is nearest to `size`; of two equally near, the smaller one."""
    return min(divisors(of), key=lambda n: (abs(n - size), n))
