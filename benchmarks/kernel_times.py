"""Breaks the device time of a step down by kernel class, with exposed communication and idle time.

When kernels of several classes run at once, the time counts for the first in the order of `KERNEL_CLASSES`. So classes and idle time add up
to the step, and the time of communication is its exposed time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernel_trace import KERNEL_CLASSES, Kernel, KernelClass, Shape, read_trace

from meshwright.spec.errors import BadInput

__all__ = ["Breakdown", "breakdown", "read_trace"]

MAX_LISTED = 5
"""Most kernels of a class, and most gaps, in the result, the longest first."""
BRIEF_GAP_SECONDS = 5e-6
"""Longest gap that counts as the usual one between two kernels."""


@dataclass(frozen=True, kw_only=True)
class KernelCalls:
    """Number and total time of a kernel's calls in the step."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ClassTime:
    """A kernel class in the step."""

    seconds: float
    """Seconds that count for this class."""
    busy_seconds: float
    """Seconds in which kernels of this class ran, also beside other classes."""
    kernels: int
    longest: tuple[KernelCalls, ...]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A time in which no kernel ran."""

    seconds: float
    before: str
    """Name of the first kernel after the gap."""
    op: str
    """The host operation that launched that kernel."""
    host: bool
    """Whether the host launched the next kernel only after the last one had ended."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """All gaps of the step."""

    seconds: float
    host_seconds: float
    """Seconds of gaps in which the device waited for the host."""
    brief_seconds: float
    """Seconds of gaps under 5 µs."""
    gaps: int
    """Number of longer gaps."""
    longest: tuple[Gap, ...]


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """All matmuls of one shape in the step."""

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
    """The device time of a step on a rank; `kinds` (kernel classes) and `idle` add up to `seconds`."""

    seconds: float
    """Seconds from the end of the previous optimizer update to the end of this one, on the device."""
    kinds: dict[str, ClassTime]
    idle: Idle
    products: tuple[Matmul, ...]
    """Matmuls whose shape is in the trace, the longest first."""
    unknown_matmul_seconds: float
    """Seconds of matmuls whose shape is not in the trace."""

    @property
    def hidden_communication_seconds(self) -> float:
        """Seconds of communication hidden by other work."""
        communication = self.kinds.get("communication")
        return communication.busy_seconds - communication.seconds if communication else 0.0


def breakdown(kernels: Sequence[Kernel]) -> Breakdown:
    """The breakdown of the last complete step in a trace. Raises BadInput when it has none."""
    begin, end = last_step(kernels)
    step_kernels = [kernel for kernel in kernels if kernel.end > begin and kernel.start < end]
    seconds_by_class = _class_seconds(step_kernels, begin, end)
    by_class: dict[KernelClass, list[Kernel]] = defaultdict(list)
    for kernel in step_kernels:
        by_class[kernel.kernel_class].append(kernel)
    return Breakdown(
        seconds=end - begin,
        kinds={
            kernel_class: _class_time(by_class[kernel_class], seconds_by_class[kernel_class], begin, end)
            for kernel_class in KERNEL_CLASSES
            if kernel_class in by_class
        },
        idle=_idle_time(step_kernels, begin, end),
        products=_matmuls(by_class["gemm"]),
        unknown_matmul_seconds=sum(kernel.end - kernel.start for kernel in by_class["gemm"] if kernel.matmul is None),
    )


def last_step(kernels: Sequence[Kernel]) -> tuple[float, float]:
    """Begin and end of the last step, by the ends of two updates. Raises BadInput when there are fewer."""
    step_ends: list[float] = []
    new_step = True
    for kernel in kernels:
        if kernel.kernel_class == "gemm":
            new_step = True
        elif kernel.kernel_class == "optimizer" and "adam" in kernel.name.lower():
            step_ends = [*step_ends, kernel.end] if new_step else [*step_ends[:-1], max(step_ends[-1], kernel.end)]
            new_step = False
    if len(step_ends) < 2:
        raise BadInput(
            f"the trace holds the end of {len(step_ends)} optimizer steps; expected two or more: "
            "record two steps, as in --profile-steps 30:31"
        )
    return step_ends[-2], step_ends[-1]


def _class_seconds(kernels: Iterable[Kernel], begin: float, end: float) -> dict[KernelClass, float]:
    """Seconds by kernel class, counting overlapping time once."""
    order = list(KERNEL_CLASSES)
    events: list[tuple[float, int, KernelClass]] = sorted(
        mark
        for kernel in kernels
        for mark in (
            (max(kernel.start, begin), 1, kernel.kernel_class),
            (min(kernel.end, end), -1, kernel.kernel_class),
        )
    )
    working: Counter[KernelClass] = Counter()
    charged: dict[KernelClass, float] = dict.fromkeys(order, 0.0)
    before = begin
    for moment, change, kernel_class in events:
        charged_class = next((kernel_class for kernel_class in order if working[kernel_class] > 0), None)
        if charged_class is not None:
            charged[charged_class] += moment - before
        before = moment
        working[kernel_class] += change
    return charged


def _class_time(kernels: Sequence[Kernel], charged: float, begin: float, end: float) -> ClassTime:
    sums: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        sums[kernel.name].append(kernel.end - kernel.start)
    ordered = sorted(sums.items(), key=lambda entry: -sum(entry[1]))
    return ClassTime(
        seconds=charged,
        busy_seconds=sum(stop - start for start, stop in _busy_intervals(kernels, begin, end)),
        kernels=len(kernels),
        longest=tuple(
            KernelCalls(name=name, calls=len(durations), seconds=sum(durations))
            for name, durations in ordered[:MAX_LISTED]
        ),
    )


def _busy_intervals(kernels: Iterable[Kernel], begin: float, end: float) -> list[tuple[float, float]]:
    """Intervals of the step in which any of the kernels ran."""
    joined: list[tuple[float, float]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        start, stop = max(kernel.start, begin), min(kernel.end, end)
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _idle_time(kernels: Sequence[Kernel], begin: float, end: float) -> Idle:
    starts = sorted(kernels, key=lambda kernel: kernel.start)
    gaps, brief, before, next_index = [], 0.0, begin, 0
    for start, stop in _busy_intervals(kernels, begin, end):
        while starts[next_index].start < start and next_index + 1 < len(starts):
            next_index += 1
        length, kernel = start - before, starts[next_index]
        if length > BRIEF_GAP_SECONDS:
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
        longest=tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:MAX_LISTED]),
    )


def _matmuls(kernels: Iterable[Kernel]) -> tuple[Matmul, ...]:
    seconds: dict[Shape, float] = defaultdict(float)
    calls: dict[Shape, set[int]] = defaultdict(set)
    for kernel in kernels:
        if kernel.matmul is not None:
            seconds[kernel.matmul] += kernel.end - kernel.start
            calls[kernel.matmul].add(kernel.call)
    return tuple(
        Matmul(
            m=shape.m,
            k=shape.k,
            n=shape.n,
            format=shape.format,
            calls=len(calls[shape]),
            seconds=total,
            flops=shape.flops * len(calls[shape]),
        )
        for shape, total in sorted(seconds.items(), key=lambda entry: -entry[1])
    )
