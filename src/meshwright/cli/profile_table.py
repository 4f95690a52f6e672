"""What `meshwright profile` prints: a line for each kind of figure, its best and worst, and how well the cost model's formula fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec.profile import MachineProfile, ProductTime


def table(profile: MachineProfile) -> list[str]:
    """Lines of text."""
    head = (
        f"{profile.device}: {profile.devices} × {profile.gpu} a node, {profile.nodes} node{'s' * (profile.nodes > 1)}"
    )
    rows = [*_products(profile), *_attention(profile), *_memory(profile), *_links(profile), *_beside(profile)]
    fits = list(_fits(profile))
    width = max(len(name) for name, _ in [*rows, *fits])
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    return [head, *lines, "what the cost model makes of it:", *(f"  {name:<{width}}  {text}" for name, text in fits)]


def _products(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    for kind in dict.fromkeys(row.format for row in profile.products):
        rows = [row for row in profile.products if row.format == kind]
        rates = sorted(rows, key=_rate)
        burst = max(_rate(row, burst=True) for row in rows)
        shapes = " to ".join(f"{_flops(_rate(row))} ({row.m} × {row.k} × {row.n})" for row in (rates[0], rates[-1]))
        yield f"products {kind}", f"{len(rows)} shapes: {shapes}; in a rested device up to {_flops(burst)}"


def _rate(row: ProductTime, *, burst: bool = False) -> float:
    return 2.0 * row.m * row.k * row.n / (row.burst_seconds if burst else row.seconds)


def _attention(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    if profile.attention:
        rates = [
            14.0 * row.tokens * row.span * row.heads * row.head_dim / (row.forward_seconds + row.backward_seconds)
            for row in profile.attention
        ]
        yield (
            "attention",
            f"{len(rates)} shapes: {_flops(min(rates))} to {_flops(max(rates))}, causal, forward and backward",
        )


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.4g} GFLOP/s"


def _memory(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    for name, rate in (("copy", profile.copy_bytes_per_s), ("element-wise pass", profile.pass_bytes_per_s)):
        if rate:
            yield name, f"{rate / 1e9:.4g} GB/s"
    if profile.adamw_parameters_per_s:
        yield "AdamW", f"{profile.adamw_parameters_per_s / 1e9:.4g} billion parameters/s"
    if profile.launch_seconds:
        yield "launch", f"{profile.launch_seconds * 1e6:.3g} µs a kernel"


def _links(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    groups = dict.fromkeys((row.nodes, row.ranks) for row in profile.collectives)
    for nodes, ranks in groups:
        parts = []
        for op in dict.fromkeys(row.op for row in profile.collectives):
            rows = [row for row in profile.collectives if (row.nodes, row.ranks, row.op) == (nodes, ranks, op)]
            if rows:
                parts.append(f"{op} {max(row.bytes / row.seconds for row in rows) / 1e9:.4g}")
        yield f"{ranks} ranks" + (f", {nodes} nodes" if nodes > 1 else ""), f"bytes ÷ time, GB/s: {', '.join(parts)}"
    for row in profile.host_links:
        text = f"{row.to_host / 1e9:.4g} GB/s out, {row.to_device / 1e9:.4g} in"
        yield f"host link, {row.devices} at once", text


def _beside(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    for row in profile.interference:
        cost = (row.together_seconds - row.compute_seconds) / row.other_seconds
        where = f" over {row.nodes} nodes" if row.nodes > 1 else ""
        yield f"products beside {row.op}{where}", f"{100 * cost:.0f}% of its time added to theirs"


def _fits(profile: MachineProfile) -> Sequence[tuple[str, str]]:
    from meshwright.costs.constants import constants
    from meshwright.costs.measured import fits, reference_chip
    from meshwright.costs.plan_costs import STACK

    k = constants(reference_chip(profile).generation, STACK)
    found = fits(k, profile, "fp32" if profile.gpu == "cpu" else "bf16")
    return [
        (name, f"{', '.join(f'{key} {value:.4g}' for key, value in fit.values.items())}: {fit}")
        for name, fit in found.items()
    ]
