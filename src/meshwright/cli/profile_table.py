"""The output of `meshwright profile`: for each measurement its range, and the fit of the cost model's formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec.profile import MachineProfile, MatmulTime


def table(profile: MachineProfile) -> list[str]:
    """Return the lines of the output."""
    head = (
        f"{profile.device}: {profile.devices} × {profile.gpu} a node, {profile.nodes} node{'s' * (profile.nodes > 1)}"
    )
    lines = [*_matmuls(profile), *_attention(profile), *_memory(profile), *_links(profile), *_beside(profile)]
    fits = list(_fits(profile))
    width = max(len(name) for name, _ in [*lines, *fits])
    measured = [f"  {name:<{width}}  {text}" for name, text in lines]
    return [head, *measured, "fit of the cost model:", *(f"  {name:<{width}}  {text}" for name, text in fits)]


def _matmuls(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    """Yield the range of measured matmul rates for each number format."""
    for number_format in dict.fromkeys(entry.format for entry in profile.products):
        matmuls = [entry for entry in profile.products if entry.format == number_format]
        rates = sorted(matmuls, key=_rate)
        burst = max(_rate(entry, burst=True) for entry in matmuls)
        shapes = " to ".join(
            f"{flops_text(_rate(entry))} ({entry.m} × {entry.k} × {entry.n})" for entry in (rates[0], rates[-1])
        )
        yield (
            f"matmuls {number_format}",
            f"{len(matmuls)} shapes: {shapes}; on a rested device up to {flops_text(burst)}",
        )


def _rate(entry: MatmulTime, *, burst: bool = False) -> float:
    """Return the FLOP/s of a matmul. With `burst`, as measured on a device that had rested."""
    return 2.0 * entry.m * entry.k * entry.n / (entry.burst_seconds if burst else entry.seconds)


def _attention(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    """Yield the range of measured attention rates, as 4 FLOPs per token, key and head dimension forward and 10 backward."""
    if profile.attention:
        rates = [
            14.0
            * entry.tokens
            * entry.span
            * entry.heads
            * entry.head_dim
            / (entry.forward_seconds + entry.backward_seconds)
            for entry in profile.attention
        ]
        yield (
            "attention",
            f"{len(rates)} shapes: {flops_text(min(rates))} to {flops_text(max(rates))}, causal, forward and backward",
        )


def flops_text(rate: float) -> str:
    """Return a rate in floating-point operations per second, as text."""
    return f"{rate / 1e12:.4g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.4g} GFLOP/s"


def _memory(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    """Yield the rates of memory, of the optimizer and of kernel launches."""
    for name, rate in (("copy", profile.copy_bytes_per_s), ("element-wise pass", profile.pass_bytes_per_s)):
        if rate:
            yield name, f"{rate / 1e9:.4g} GB/s"
    if profile.adamw_parameters_per_s:
        yield "AdamW", f"{profile.adamw_parameters_per_s / 1e9:.4g} billion parameters/s"
    if profile.launch_seconds:
        yield "launch", f"{profile.launch_seconds * 1e6:.3g} µs a kernel"


def _links(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    """Yield the largest measured rate of each collective by group of ranks, and the rates to and from the host."""
    groups = dict.fromkeys((entry.nodes, entry.ranks) for entry in profile.collectives)
    for nodes, ranks in groups:
        parts = []
        for op in dict.fromkeys(entry.op for entry in profile.collectives):
            entries = [
                entry for entry in profile.collectives if (entry.nodes, entry.ranks, entry.op) == (nodes, ranks, op)
            ]
            if entries:
                parts.append(f"{op} {max(entry.bytes / entry.seconds for entry in entries) / 1e9:.4g}")
        yield f"{ranks} ranks" + (f", {nodes} nodes" if nodes > 1 else ""), f"bytes ÷ time, GB/s: {', '.join(parts)}"
    for entry in profile.host_links:
        text = f"{entry.to_host / 1e9:.4g} GB/s out, {entry.to_device / 1e9:.4g} in"
        yield f"host link, {entry.devices} at once", text


def _beside(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    """Yield how much matmuls slow down while another operation runs at the same time."""
    for entry in profile.interference:
        cost = (entry.together_seconds - entry.compute_seconds) / entry.other_seconds
        where = f" over {entry.nodes} nodes" if entry.nodes > 1 else ""
        yield f"matmuls with {entry.op}{where}", f"{100 * cost:.0f}% of its time added to theirs"


def _fits(profile: MachineProfile) -> Sequence[tuple[str, str]]:
    """Return the constants that the cost model fits to these measurements, with the quality of each fit."""
    from meshwright.costs.constants import constants
    from meshwright.costs.measured import fits, reference_chip
    from meshwright.costs.plan_costs import STACK

    k = constants(reference_chip(profile).generation, STACK)
    fitted = fits(k, profile, "fp32" if profile.gpu == "cpu" else "bf16")
    return [
        (name, f"{', '.join(f'{key} {value:.4g}' for key, value in fit.values.items())}: {fit}")
        for name, fit in fitted.items()
    ]
