"""Where one step's device time went, by kind of kernel: what it worked on, what communication stood bare, and when it had nothing to do.

A moment with several kinds at work is charged to the first of them in the order of `KINDS`, so the kinds and idle time add up to the step,
and what communication is charged is what no other work hides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernel_trace import KINDS, Kernel, Kind, Shape, read_trace

from meshwright.spec.errors import BadInput

__all__ = ["Breakdown", "breakdown", "read_trace"]

NAMED = 5
"""Kernels of a kind, and gaps, that are named, the longest first."""
BRIEF = 5e-6
"""Seconds of a gap below which it is what lies between any two kernels."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """All calls of one kernel in the step."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class KindTime:
    """One kind in the step."""

    seconds: float
    """That the step is charged with."""
    busy_seconds: float
    """That it was at work, beside other kinds too."""
    kernels: int
    longest: tuple[Named, ...]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A time in which the device did nothing."""

    seconds: float
    before: str
    """The kernel that ended it."""
    op: str
    """The host operation that launched that."""
    host: bool
    """Whether the device waited for the host, which had not launched the next kernel when the last one ended."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """All gaps of the step."""

    seconds: float
    host_seconds: float
    """Of gaps in which the device waited for its host."""
    brief_seconds: float
    """Of gaps under 5 µs."""
    gaps: int
    """Longer ones."""
    longest: tuple[Gap, ...]


@dataclass(frozen=True, kw_only=True)
class Product:
    """All matrix products of one shape in the step."""

    m: int
    k: int
    n: int
    format: str
    calls: int
    seconds: float
    flops: float
    """Of all calls."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """One step of one rank; `kinds` and `idle` add up to `seconds`."""

    seconds: float
    """From the end of the update before to the end of this step's, on the device."""
    kinds: dict[str, KindTime]
    idle: Idle
    products: tuple[Product, ...]
    """Those whose shape the trace tells, the longest first."""
    unknown_product_seconds: float
    """Of products whose shape it does not tell."""

    @property
    def hidden_communication_seconds(self) -> float:
        """Communication under other work."""
        found = self.kinds.get("communication")
        return found.busy_seconds - found.seconds if found else 0.0


def breakdown(kernels: Sequence[Kernel]) -> Breakdown:
    """The last whole step in a trace's kernels. Raises BadInput when they do not hold a step from end to end."""
    begin, end = last_step(kernels)
    inside = [kernel for kernel in kernels if kernel.end > begin and kernel.start < end]
    charged = _charged(inside, begin, end)
    by_kind: dict[Kind, list[Kernel]] = defaultdict(list)
    for kernel in inside:
        by_kind[kernel.kind].append(kernel)
    return Breakdown(
        seconds=end - begin,
        kinds={kind: _kind_time(by_kind[kind], charged[kind], begin, end) for kind in KINDS if kind in by_kind},
        idle=_idle(inside, begin, end),
        products=_products(by_kind["gemm"]),
        unknown_product_seconds=sum(k.end - k.start for k in by_kind["gemm"] if k.product is None),
    )


def last_step(kernels: Sequence[Kernel]) -> tuple[float, float]:
    """Begin and end of the last step, by the ends of two updates. Raises BadInput when there are fewer."""
    ends: list[float] = []
    fresh = True
    for kernel in kernels:
        if kernel.kind == "gemm":
            fresh = True
        elif kernel.kind == "optimizer" and "adam" in kernel.name.lower():
            ends = [*ends, kernel.end] if fresh else [*ends[:-1], max(ends[-1], kernel.end)]
            fresh = False
    if len(ends) < 2:
        raise BadInput(
            f"the trace holds the end of {len(ends)} optimizer steps; expected two or more: record two steps, as in --profile-steps 30:31"
        )
    return ends[-2], ends[-1]


def _charged(kernels: Iterable[Kernel], begin: float, end: float) -> dict[Kind, float]:
    """Seconds by kind, every moment once."""
    order = list(KINDS)
    marks: list[tuple[float, int, Kind]] = sorted(
        mark
        for kernel in kernels
        for mark in ((max(kernel.start, begin), 1, kernel.kind), (min(kernel.end, end), -1, kernel.kind))
    )
    working: Counter[Kind] = Counter()
    charged: dict[Kind, float] = dict.fromkeys(order, 0.0)
    before = begin
    for moment, change, kind in marks:
        first = next((one for one in order if working[one] > 0), None)
        if first is not None:
            charged[first] += moment - before
        before = moment
        working[kind] += change
    return charged


def _kind_time(kernels: Sequence[Kernel], charged: float, begin: float, end: float) -> KindTime:
    sums: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        sums[kernel.name].append(kernel.end - kernel.start)
    ordered = sorted(sums.items(), key=lambda item: -sum(item[1]))
    return KindTime(
        seconds=charged,
        busy_seconds=sum(stop - start for start, stop in _joined(kernels, begin, end)),
        kernels=len(kernels),
        longest=tuple(Named(name=name, calls=len(took), seconds=sum(took)) for name, took in ordered[:NAMED]),
    )


def _joined(kernels: Iterable[Kernel], begin: float, end: float) -> list[tuple[float, float]]:
    """The times at which any of the kernels ran, inside the step."""
    joined: list[tuple[float, float]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        start, stop = max(kernel.start, begin), min(kernel.end, end)
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _idle(kernels: Sequence[Kernel], begin: float, end: float) -> Idle:
    starts = sorted(kernels, key=lambda kernel: kernel.start)
    gaps, brief, before, next_one = [], 0.0, begin, 0
    for start, stop in _joined(kernels, begin, end):
        while starts[next_one].start < start and next_one + 1 < len(starts):
            next_one += 1
        length, kernel = start - before, starts[next_one]
        if length > BRIEF:
            host = kernel.launched is not None and kernel.launched > before
            gaps.append(Gap(seconds=length, before=kernel.name, op=kernel.op, host=host))
        else:
            brief += max(0.0, length)
        before = stop
    return Idle(
        seconds=brief + sum(gap.seconds for gap in gaps),
        host_seconds=sum(gap.seconds for gap in gaps if gap.host),
        brief_seconds=brief,
        gaps=len(gaps),
        longest=tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:NAMED]),
    )


def _products(kernels: Iterable[Kernel]) -> tuple[Product, ...]:
    seconds: dict[Shape, float] = defaultdict(float)
    calls: dict[Shape, set[int]] = defaultdict(set)
    for kernel in kernels:
        if kernel.product is not None:
            seconds[kernel.product] += kernel.end - kernel.start
            calls[kernel.product].add(kernel.call)
    return tuple(
        Product(
            m=shape.m,
            k=shape.k,
            n=shape.n,
            format=shape.format,
            calls=len(calls[shape]),
            seconds=took,
            flops=shape.flops * len(calls[shape]),
        )
        for shape, took in sorted(seconds.items(), key=lambda item: -item[1])
    )
