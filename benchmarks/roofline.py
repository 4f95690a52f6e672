"""What a device needs for a step, by its own measured rates, against what the step took: by kind, and what each larger gap is.

Needed time is the work that model and plan ask for (`costs.work`) over the rates of products, attention, memory and optimizer that a
profile measured at the run's shapes (`meshwright profile --shapes-of`). Communication and the host need none of the device's time
where other work covers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kernel_times import Breakdown, KindTime, Product
from kernel_trace import KINDS

from meshwright.observe import figures
from meshwright.spec.errors import BadInput
from meshwright.spec.profile import CollectiveTime, MachineProfile, ProductTime
from meshwright.workload.device_work import LinearWork, Work

WORTH = 0.01
"""Share of the step above which a gap is explained."""
NAMED = 3
"""Kernels or shapes named in an explanation."""
LONGEST_NAME = 60


@dataclass(frozen=True, kw_only=True)
class Line:
    """One kind of work: seconds that the device needs and took, and what lies between where that is over 1% of the step."""

    kind: str
    needed: float
    took: float
    why: str = ""

    @property
    def gap(self) -> float:
        return self.took - self.needed


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A step held against its device; the lines' `took` add up to `seconds`."""

    seconds: float
    """Of a step without a profiler."""
    traced_seconds: float
    """Of the step whose kernels were recorded."""
    lines: tuple[Line, ...]

    @property
    def needed(self) -> float:
        """The least that a step can take."""
        return sum(line.needed for line in self.lines)


def roofline(work: Work, profile: MachineProfile, found: Breakdown, seconds: float) -> Roofline:
    """The step that `found` breaks down, of which others without a profiler took `seconds`, against what `work` needs on the device.

    The profiler slows the host, not the kernels: idle time is what `seconds` leaves beside them. Raises BadInput when `profile` lacks a
    rate that the work needs.
    """
    needs = needed(work, profile)
    kinds = [kind for kind in KINDS if kind in found.kinds or needs.get(kind)]
    taken = {kind: found.kinds[kind].seconds if kind in found.kinds else 0.0 for kind in kinds}
    lines = [
        Line(kind=kind, needed=needs.get(kind, 0.0), took=taken[kind], why=_why(kind, needs, taken[kind], seconds, work, profile, found))
        for kind in kinds
    ]  # fmt: skip
    idle = seconds - sum(taken.values())
    lines.append(Line(kind="idle", needed=0.0, took=idle, why=_of_idle(found, idle) if idle > WORTH * seconds else ""))
    return Roofline(seconds=seconds, traced_seconds=found.seconds, lines=tuple(lines))


def needed(work: Work, profile: MachineProfile) -> dict[str, float]:
    """Seconds by kind. Raises BadInput when `profile` lacks a rate."""
    memory, update = profile.pass_bytes_per_s, profile.adamw_parameters_per_s
    if not memory or not update:
        raise BadInput(
            "the profile has no rate of device memory or of the optimizer; measure with `meshwright profile --shapes-of FOLDER`"
        )
    return {
        "gemm": sum(_linear_seconds(linear, profile) for linear in work.linears),
        "attention": _attention_seconds(work, profile),
        "elementwise": work.elementwise_bytes / memory,
        "quantise": work.quantise_bytes / memory,
        "loss": work.loss_bytes / memory,
        "optimizer": work.parameters / update + work.norm_bytes / memory,
        "copies": work.copy_bytes / memory,
    }


def bare_communication(work: Work, profile: MachineProfile) -> float | None:
    """Seconds of the step's collectives alone on their links; None where the profile does not know them."""
    known = [_collective_seconds(one.op, one.ranks, one.bytes, profile) for one in work.collectives]
    if any(seconds is None for seconds in known):
        return None
    return sum(one.count * (seconds or 0.0) for one, seconds in zip(work.collectives, known, strict=True))


def told(held: Roofline) -> list[str]:
    """The table as lines of text, with the gaps worth a word below it."""
    rows = [f"{'':14s}{'needs ms':>10s}{'took ms':>10s}{'gap ms':>10s}{'of step':>9s}"]
    for line in held.lines:
        share = line.gap / held.seconds
        rows.append(
            f"{line.kind:14s}{1e3 * line.needed:10.2f}{1e3 * line.took:10.2f}{1e3 * line.gap:10.2f}{100 * share:8.1f}%"
        )
    gap = held.seconds - held.needed
    rows.append(
        f"{'step':14s}{1e3 * held.needed:10.2f}{1e3 * held.seconds:10.2f}{1e3 * gap:10.2f}{100 * gap / held.seconds:8.1f}%"
        f"   (traced step {1e3 * held.traced_seconds:.2f})"
    )
    return [*rows, *(f"  {line.kind}: {line.why}" for line in held.lines if line.why)]


def _linear_seconds(linear: LinearWork, profile: MachineProfile) -> float:
    """Of all layers like `linear`, at the rates of exactly its products."""
    m, k, n = linear.m, linear.k, linear.n
    shapes = [(m, k, n), (m, n, k), (n, m, k)] if linear.format == "fp8" else [(m, k, n)] * 3
    found = [_product(profile, shape, linear.format) for shape in shapes]
    if any(row is None for row in found):
        raise BadInput(
            f"the profile has no {linear.format} product {m} × {k} × {n}; measure with `meshwright profile --shapes-of FOLDER`"
        )
    return linear.count * sum(row.seconds for row in found if row is not None)


def _product(profile: MachineProfile, shape: tuple[int, int, int], number_format: str) -> ProductTime | None:
    return next(
        (row for row in profile.products if (row.m, row.k, row.n) == shape and row.format == number_format), None
    )


def _attention_seconds(work: Work, profile: MachineProfile) -> float:
    one = work.attention
    shape = (one.seq, one.heads, one.kv_heads, one.head_dim, one.tokens, one.window)
    for row in profile.attention:
        if (row.seq, row.heads, row.kv_heads, row.head_dim, row.tokens, row.window) == shape:
            return one.count * (row.forward_seconds + row.backward_seconds)
    raise BadInput(
        f"the profile has no attention of {one.seq} tokens, {one.heads} heads; measure with `meshwright profile --shapes-of FOLDER`"
    )


def _collective_seconds(op: str, ranks: int, size: float, profile: MachineProfile) -> float | None:
    """By the measured sizes around it; beyond the largest in proportion."""
    rows = sorted(
        (row for row in profile.collectives if row.op == op and row.ranks == ranks), key=lambda row: row.bytes
    )
    if not rows:
        return None
    if size >= rows[-1].bytes:
        return rows[-1].seconds * size / rows[-1].bytes
    above = next(place for place, row in enumerate(rows) if row.bytes > size)
    return _between(rows[max(0, above - 1)], rows[above], size)


def _between(low: CollectiveTime, high: CollectiveTime, size: float) -> float:
    if low is high or size <= low.bytes:
        return low.seconds
    return low.seconds + (high.seconds - low.seconds) * (size - low.bytes) / (high.bytes - low.bytes)


def _why(
    kind: str,
    needs: Mapping[str, float],
    took: float,
    seconds: float,
    work: Work,
    profile: MachineProfile,
    found: Breakdown,
) -> str:
    """What a kind's gap is, where it is worth a word; from the trace's own kernels."""
    gap, time = took - needs.get(kind, 0.0), found.kinds.get(kind)
    if time is None or abs(gap) <= WORTH * seconds:
        return ""
    if gap < 0:
        return f"took {took / needs[kind]:.3f} of the time that the profile's rates ask for"
    if kind == "gemm":
        return _of_products(work, profile, found)
    if kind == "communication":
        return _of_communication(work, profile, time)
    least = needs.get(kind, 0.0)
    times = f"{took / least:.2f} times the fewest bytes' time; " if least and kind != "attention" else ""
    return times + _longest(time)


def _of_products(work: Work, profile: MachineProfile, found: Breakdown) -> str:
    """Executed FLOPs over needed ones, and the shapes that lose most against the sustained rate of their format."""
    executed = sum(product.flops for product in found.products)
    said = [f"{len(found.products)} shapes"]
    if executed and abs(executed / work.product_flops - 1) > WORTH:
        said.append(f"{executed / work.product_flops:.3f} times the needed FLOPs")
    if found.unknown_product_seconds:
        said.append(f"{figures.duration(found.unknown_product_seconds)} of unknown shape")
    losses = sorted(((_lost(product, profile), product) for product in found.products), key=lambda pair: -pair[0])
    return "; ".join([*said, *(_slow(product, lost, profile) for lost, product in losses[:NAMED] if lost > 0)])


def _lost(product: Product, profile: MachineProfile) -> float:
    rate = sustained(product, profile)
    return product.seconds - product.flops / rate if rate else 0.0


def sustained(product: Product, profile: MachineProfile) -> float | None:
    """FLOP/s measured for this shape, in whatever order of its sides, or else for its format over all shapes."""
    rows = [row for row in profile.products if row.format == product.format]
    sides = sorted((product.m, product.k, product.n))
    same = [row for row in rows if sorted((row.m, row.k, row.n)) == sides] or rows
    if not same:
        return None
    return sum(2.0 * row.m * row.k * row.n for row in same) / sum(row.seconds for row in same)


def _slow(product: Product, lost: float, profile: MachineProfile) -> str:
    rate, reached = sustained(product, profile) or 0.0, product.flops / product.seconds
    return (
        f"{product.m}×{product.k}×{product.n} {product.format}, {product.calls} calls, {reached / 1e12:.0f} of {rate / 1e12:.0f} TFLOP/s "
        f"sustained, loses {figures.duration(lost)}"
    )


def _of_communication(work: Work, profile: MachineProfile, time: KindTime) -> str:
    bare = bare_communication(work, profile)
    alone = f", {figures.duration(bare)} on idle links" if bare else ""
    return f"not covered by compute: {figures.duration(time.seconds)} of {figures.duration(time.busy_seconds)}{alone}; {_longest(time)}"


def _of_idle(found: Breakdown, idle: float) -> str:
    """Of the traced step: what the device waited for."""
    gaps = found.idle
    said = [
        f"{figures.duration(idle)} without the profiler, {figures.duration(gaps.seconds)} with it: {figures.duration(gaps.host_seconds)} "
        f"waiting for the host, {figures.duration(gaps.brief_seconds)} between kernels, {gaps.gaps} gaps over 5 µs"
    ]
    return "; ".join([*said, *(_gap_words(gap.seconds, gap.before, gap.op) for gap in gaps.longest[:NAMED])])


def _gap_words(seconds: float, before: str, op: str) -> str:
    return f"{figures.duration(seconds)} before {_short(before)}" + (f" ({op})" if op else "")


def _longest(time: KindTime) -> str:
    return "longest: " + ", ".join(_calls(time))


def _calls(time: KindTime) -> Iterator[str]:
    for one in time.longest[:NAMED]:
        yield f"{_short(one.name)} {figures.duration(one.seconds)} in {one.calls} calls"


def _short(name: str) -> str:
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").partition("(")[0] or name
    return plain if len(plain) <= LONGEST_NAME else plain[: LONGEST_NAME - 1] + "…"
