"""Formats numbers for people. The progress line and the report use the same functions."""

from __future__ import annotations

SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
"""(factor, suffix), the largest first."""
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def short(value: float, digits: int = 3) -> str:
    """Return `digits` significant digits with k, M, B or T: 48213 becomes "48.2k"."""
    for size, suffix in SUFFIXES:
        # A value that would round up to 1,000 gets the next suffix: 999,600 is "1.00M", not "1000k".
        if abs(value) >= size * (1 - 0.5 * 10**-digits):
            return f"{_significant(value / size, digits)}{suffix}"
    return _significant(value, digits)


def size(count: float) -> str:
    """Return bytes with a decimal unit, as plans show them: 2147483648 becomes "2.15 GB"."""
    unit = 0
    while abs(count) >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{_significant(count, 3)} {_BYTE_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Return a duration with at most two units: "820 ms", "12.4 s", "3m 05s", "2h 07m", "3d 04h"."""
    if seconds < 1e-3:
        return f"{_significant(seconds * 1e6, 3)} µs"
    if seconds < 1:
        return f"{_significant(seconds * 1e3, 3)} ms"
    if seconds < 59.95:
        return f"{_significant(seconds, 3)} s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60}m {rounded % 60:02d}s"
    if rounded < 86400:
        return f"{rounded // 3600}h {rounded % 3600 // 60:02d}m"
    return f"{rounded // 86400}d {rounded % 86400 // 3600:02d}h"


def clock(seconds: float) -> str:
    """Return elapsed or remaining time in a short form: "0:07", "12:45", "3:07:45", "2d 03:07"."""
    rounded = max(0, round(seconds))
    hours = rounded // 3600
    minutes = rounded % 3600 // 60
    seconds_left = rounded % 60
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def percent(fraction: float) -> str:
    """Return a percentage with one decimal: 0.4131 becomes "41.3%"."""
    return f"{100 * fraction:.1f}%"


def rate(value: float) -> str:
    """Return three significant digits, but all digits before the decimal point: 16.364 becomes "16.4", 1042.3 "1,042"."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def scientific(value: float) -> str:
    """Return a number with an exponent, as for learning rates: 0.0003 becomes "3.00e-4"."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _significant(value: float, digits: int) -> str:
    """Return `digits` significant digits without an exponent. Digits before the decimal point are never cut."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    whole_digits = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 0
    if whole_digits >= digits:
        return f"{value:.0f}"
    if whole_digits == 0 and abs(rounded) < 1e-4:
        return scientific(value)
    return f"{rounded:.{digits - whole_digits if whole_digits else _leading_zeros(rounded) + digits}f}"


def _leading_zeros(value: float) -> int:
    return max(0, -int(f"{value:e}".partition("e")[2]) - 1)
