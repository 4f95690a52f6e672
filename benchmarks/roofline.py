"""Compares a step with its roofline by kernel class, and explains gaps above 1% of the step time.

The needed time is the work of model and plan (`workload.device_work`) over the rates of matmuls, attention, memory and
optimizer that a profile measured at the run's shapes (`meshwright profile --shapes-of`). Communication and host time
that other work hides count as zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kernel_times import Breakdown, ClassTime, Matmul
from kernel_trace import KERNEL_CLASSES

from meshwright.observe.number_text import duration
from meshwright.spec.errors import BadInput
from meshwright.spec.profile import CollectiveTime, MachineProfile, MatmulTime
from meshwright.workload.device_work import AttentionWork, LinearWork, Work

GAP_THRESHOLD = 0.01
"""Share of the step time above which a gap is explained."""
MAX_NAMED = 3
"""Most kernels or shapes that an explanation names."""
LONGEST_NAME = 60
"""Characters of a printed kernel name."""


@dataclass(frozen=True, kw_only=True)
class ClassGap:
    """The gap of a kernel class: seconds needed and taken, and the explanation of a gap above 1% of the step."""

    kind: str
    """The kernel class, or `idle`."""
    needed: float
    took: float
    why: str = ""

    @property
    def gap(self) -> float:
        return self.took - self.needed


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A step compared with its roofline; the sum of the lines' `took` is `seconds`."""

    seconds: float
    """Seconds of a step without the profiler."""
    traced_seconds: float
    """Seconds of the step whose kernels were recorded."""
    lines: tuple[ClassGap, ...]

    @property
    def needed(self) -> float:
        """Fewest seconds that a step can take."""
        return sum(line.needed for line in self.lines)


def roofline(work: Work, profile: MachineProfile, traced: Breakdown, seconds: float) -> Roofline:
    """Compares the traced step with the needs of `work`; `seconds` is the time of a step without the profiler.

    The profiler slows the host, not the kernels, so idle time is `seconds` minus the time of the traced kernels. Raises BadInput when
    `profile` lacks a rate that the work needs.
    """
    needed_seconds = seconds_needed(work, profile)
    classes = [
        kernel_class
        for kernel_class in KERNEL_CLASSES
        if kernel_class in traced.kinds or needed_seconds.get(kernel_class)
    ]
    class_seconds = {
        kernel_class: traced.kinds[kernel_class].seconds if kernel_class in traced.kinds else 0.0
        for kernel_class in classes
    }
    lines = [
        ClassGap(
            kind=kernel_class,
            needed=needed_seconds.get(kernel_class, 0.0),
            took=took,
            why=_explain_gap(kernel_class, needed_seconds, took, seconds, work, profile, traced),
        )
        for kernel_class, took in class_seconds.items()
    ]
    idle = seconds - sum(class_seconds.values())
    lines.append(
        ClassGap(
            kind="idle",
            needed=0.0,
            took=idle,
            why=_explain_idle(traced, idle) if idle > GAP_THRESHOLD * seconds else "",
        )
    )
    return Roofline(seconds=seconds, traced_seconds=traced.seconds, lines=tuple(lines))


def seconds_needed(work: Work, profile: MachineProfile) -> dict[str, float]:
    """Seconds that `work` needs, by kernel class. Raises BadInput when `profile` lacks a rate."""
    memory_rate, update_rate = profile.pass_bytes_per_s, profile.adamw_parameters_per_s
    if not memory_rate or not update_rate:
        raise BadInput(
            "the profile has no rate of device memory or of the optimizer; measure with `meshwright profile --shapes-of FOLDER`"
        )
    return {
        "gemm": sum(_linear_seconds(linear, profile) for linear in work.linears),
        "attention": _attention_seconds(work, profile),
        "elementwise": work.elementwise_bytes / memory_rate,
        "quantise": work.quantise_bytes / memory_rate,
        "loss": work.loss_bytes / memory_rate,
        "optimizer": work.parameters / update_rate + work.norm_bytes / memory_rate,
        "copies": work.copy_bytes / memory_rate,
    }


def idle_link_seconds(work: Work, profile: MachineProfile) -> float | None:
    """Seconds of the step's collectives on idle links; None where the profile does not have them."""
    collective_times = [
        _collective_seconds(collective.op, collective.ranks, collective.bytes, profile)
        for collective in work.collectives
    ]
    if any(seconds is None for seconds in collective_times):
        return None
    return sum(
        collective.count * (seconds or 0.0)
        for collective, seconds in zip(work.collectives, collective_times, strict=True)
    )


def table_lines(step: Roofline) -> list[str]:
    """The table as lines of text, followed by the explanations of gaps."""
    lines = [f"{'':14s}{'needs ms':>10s}{'took ms':>10s}{'gap ms':>10s}{'of step':>9s}"]
    for line in step.lines:
        share = line.gap / step.seconds
        lines.append(
            f"{line.kind:14s}{1e3 * line.needed:10.2f}{1e3 * line.took:10.2f}{1e3 * line.gap:10.2f}{100 * share:8.1f}%"
        )
    gap = step.seconds - step.needed
    lines.append(
        f"{'step':14s}{1e3 * step.needed:10.2f}{1e3 * step.seconds:10.2f}{1e3 * gap:10.2f}{100 * gap / step.seconds:8.1f}%"
        f"   (traced step {1e3 * step.traced_seconds:.2f})"
    )
    return [*lines, *(f"  {line.kind}: {line.why}" for line in step.lines if line.why)]


def _linear_seconds(linear: LinearWork, profile: MachineProfile) -> float:
    """Seconds of all layers like `linear`, at the measured rates of its matmuls."""
    m, k, n = linear.m, linear.k, linear.n
    shapes = [(m, k, n), (m, n, k), (n, m, k)] if linear.format == "fp8" else [(m, k, n)] * 3
    times = [_matmul(profile, shape, linear.format) for shape in shapes]
    if any(time is None for time in times):
        raise BadInput(
            f"the profile has no {linear.format} matmul {m} × {k} × {n}; measure with `meshwright profile --shapes-of FOLDER`"
        )
    return linear.count * sum(time.seconds for time in times if time is not None)


def _matmul(profile: MachineProfile, shape: tuple[int, int, int], number_format: str) -> MatmulTime | None:
    return next(
        (time for time in profile.products if (time.m, time.k, time.n) == shape and time.format == number_format), None
    )


def _attention_seconds(work: Work, profile: MachineProfile) -> float:
    return sum(_seconds_of(attention, profile) for attention in work.attention)


def _seconds_of(attention: AttentionWork, profile: MachineProfile) -> float:
    shape = (attention.seq, attention.heads, attention.kv_heads, attention.head_dim, attention.tokens, attention.window)
    for time in profile.attention:
        if (time.seq, time.heads, time.kv_heads, time.head_dim, time.tokens, time.window) == shape:
            return attention.count * (time.forward_seconds + time.backward_seconds)
    raise BadInput(
        f"the profile has no attention of {attention.seq} tokens, {attention.heads} heads; "
        "measure with `meshwright profile --shapes-of FOLDER`"
    )


def _collective_seconds(op: str, ranks: int, size: float, profile: MachineProfile) -> float | None:
    """Seconds of a collective, interpolated between measured sizes; in proportion above the largest."""
    times = sorted(
        (time for time in profile.collectives if time.op == op and time.ranks == ranks), key=lambda time: time.bytes
    )
    if not times:
        return None
    if size >= times[-1].bytes:
        return times[-1].seconds * size / times[-1].bytes
    above = next(index for index, time in enumerate(times) if time.bytes > size)
    return _interpolate_seconds(times[max(0, above - 1)], times[above], size)


def _interpolate_seconds(low: CollectiveTime, high: CollectiveTime, size: float) -> float:
    if low is high or size <= low.bytes:
        return low.seconds
    return low.seconds + (high.seconds - low.seconds) * (size - low.bytes) / (high.bytes - low.bytes)


def _explain_gap(
    kernel_class: str,
    needed_seconds: Mapping[str, float],
    class_seconds: float,
    seconds: float,
    work: Work,
    profile: MachineProfile,
    traced: Breakdown,
) -> str:
    """The explanation of a class's gap from the kernels of the trace; empty for small gaps."""
    gap, class_time = class_seconds - needed_seconds.get(kernel_class, 0.0), traced.kinds.get(kernel_class)
    if class_time is None or abs(gap) <= GAP_THRESHOLD * seconds:
        return ""
    if gap < 0:
        return (
            f"took {class_seconds / needed_seconds[kernel_class]:.3f} of the time that follows from the profile's rates"
        )
    if kernel_class == "gemm":
        return _explain_matmuls(work, profile, traced)
    if kernel_class == "communication":
        return _explain_communication(work, profile, class_time)
    needed = needed_seconds.get(kernel_class, 0.0)
    ratio_text = (
        f"{class_seconds / needed:.2f} times the time of the required memory traffic; "
        if needed and kernel_class != "attention"
        else ""
    )
    return ratio_text + _longest_kernels_text(class_time)


def _explain_matmuls(work: Work, profile: MachineProfile, traced: Breakdown) -> str:
    """Executed over needed FLOPs, and the shapes that lose most time against the sustained rate of their dtype."""
    executed = sum(matmul.flops for matmul in traced.products)
    facts = [f"{len(traced.products)} shapes"]
    if executed and abs(executed / work.matmul_flops - 1) > GAP_THRESHOLD:
        facts.append(f"{executed / work.matmul_flops:.3f} times the needed FLOPs")
    if traced.unknown_matmul_seconds:
        facts.append(f"{duration(traced.unknown_matmul_seconds)} of unknown shape")
    losses = sorted(((_lost_seconds(matmul, profile), matmul) for matmul in traced.products), key=lambda pair: -pair[0])
    return "; ".join(
        [
            *facts,
            *(
                _matmul_text(matmul, lost_seconds, profile)
                for lost_seconds, matmul in losses[:MAX_NAMED]
                if lost_seconds > 0
            ),
        ]
    )


def _lost_seconds(matmul: Matmul, profile: MachineProfile) -> float:
    rate = sustained_rate(matmul, profile)
    return matmul.seconds - matmul.flops / rate if rate else 0.0


def sustained_rate(matmul: Matmul, profile: MachineProfile) -> float | None:
    """Measured FLOP/s of this shape with its sides in any order, or else the mean of its dtype over all shapes."""
    times = [time for time in profile.products if time.format == matmul.format]
    sides = sorted((matmul.m, matmul.k, matmul.n))
    same_shape = [time for time in times if sorted((time.m, time.k, time.n)) == sides] or times
    if not same_shape:
        return None
    return sum(2.0 * time.m * time.k * time.n for time in same_shape) / sum(time.seconds for time in same_shape)


def _matmul_text(matmul: Matmul, lost_seconds: float, profile: MachineProfile) -> str:
    rate, reached = sustained_rate(matmul, profile) or 0.0, matmul.flops / matmul.seconds
    return (
        f"{matmul.m}×{matmul.k}×{matmul.n} {matmul.format}, {matmul.calls} calls, {reached / 1e12:.0f} of {rate / 1e12:.0f} TFLOP/s "
        f"sustained, loses {duration(lost_seconds)}"
    )


def _explain_communication(work: Work, profile: MachineProfile, time: ClassTime) -> str:
    idle_link = idle_link_seconds(work, profile)
    longest = _longest_kernels_text(time)
    idle_link_text = f", {duration(idle_link)} on idle links" if idle_link else ""
    return (
        f"not covered by compute: {duration(time.seconds)} of {duration(time.busy_seconds)}{idle_link_text}; {longest}"
    )


def _explain_idle(traced: Breakdown, idle: float) -> str:
    """Why the device was idle in the traced step."""
    gaps = traced.idle
    facts = [
        f"{duration(idle)} without the profiler, {duration(gaps.seconds)} with it: {duration(gaps.host_seconds)} "
        f"waiting for the host, {duration(gaps.brief_seconds)} between kernels, {gaps.gaps} gaps over 5 µs"
    ]
    return "; ".join([*facts, *(_gap_text(gap.seconds, gap.before, gap.op) for gap in gaps.longest[:MAX_NAMED])])


def _gap_text(seconds: float, before: str, op: str) -> str:
    return f"{duration(seconds)} before {_short_name(before)}" + (f" ({op})" if op else "")


def _longest_kernels_text(time: ClassTime) -> str:
    return "longest: " + ", ".join(_kernel_texts(time))


def _kernel_texts(time: ClassTime) -> Iterator[str]:
    for kernel in time.longest[:MAX_NAMED]:
        yield f"{_short_name(kernel.name)} {duration(kernel.seconds)} in {kernel.calls} calls"


def _short_name(name: str) -> str:
    shortened = name.removeprefix("void ").replace("(anonymous namespace)::", "").partition("(")[0] or name
    return shortened if len(shortened) <= LONGEST_NAME else shortened[: LONGEST_NAME - 1] + "…"
