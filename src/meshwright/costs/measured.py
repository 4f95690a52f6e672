"""Fits the cost model's constants to the measurements in a machine's profile, each formula by least squares.

A measured share is relative to the figure in the chip table. For a device that is not in the table, it is relative to
the best measured rate. If the run file states another bandwidth than the table, for example to predict links of twice
the speed, the measured share applies to the stated bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import log2

import numpy as np
from numpy.typing import NDArray

from meshwright.costs.compute import BACKWARD_RATIO, QUERY_BLOCK_KEYS, SMALL_HEAD, WIDE_HEAD, elements_in_waves
from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.costs.offload_costs import host_share
from meshwright.spec.blocks.attention import window_by_flash
from meshwright.spec.chips import CHIPS, Chip
from meshwright.spec.profile import AttentionTime, CollectiveTime, MachineProfile, MatmulTime
from meshwright.workload.model_shape import computed_span

RATE_OF_UNMEASURED_FORMAT = {"fp64": ("fp32", 0.5), "bf16": ("fp32", 1.0), "fp16": ("bf16", 1.0)}
"""Number format without a measurement → (the format whose measured rate represents it, factor on that rate)."""
DEFAULTS = ("slow", "start_us", "link_us", "attention", "flex", "flash")
"""Names of constants that a fit needs if the profile does not measure them.

A fit either keeps such a constant, or states another constant relative to it.
"""
RING_OPERATIONS = ("all_gather", "reduce_scatter")
"""Collectives to which the constants of links are fitted: the two that sharded training uses most."""


@dataclass(frozen=True)
class MeasuredFit:
    """Constants that were fitted to the measurements of one kind, for example of matmuls."""

    values: dict[str, float]
    """Fitted values by name of the constant."""
    count: int
    """Number of measurements; 0 if a constant was only corrected."""
    residual: float
    """Root mean square of the relative errors: 0.03 if the formula is typically 3% wrong."""

    def __str__(self) -> str:
        if self.count < 2:
            return "measured"
        return f"measured ({self.count} figures, the formula {100 * self.residual:.1f}% off)"


def with_profile(
    k: Constants, machine: Machine, profile: MachineProfile, number_format: str = "bf16"
) -> tuple[Constants, Machine, dict[str, str]]:
    """Return constants and machine with the values of the profile, and the source of each replaced constant as text.

    Constants without a measurement do not change. `number_format` is the format of the plan's matmuls. If it was not
    measured, the share of another measured format applies (`_measured_format`).
    """
    fitted = fits(k, profile, number_format)
    values = {name: value for fit in fitted.values() for name, value in fit.values.items()}
    sources = {name: str(fit) for fit in fitted.values() for name in fit.values}
    if profile.corrections:
        runs = len(profile.corrections)
        sources["slow"] = f"corrected by {runs} run{'s' * (runs > 1)}"
    host = values.pop("host", None)
    return replace(k, **values), (machine if host is None else replace(machine, host=host)), sources


def fits(k: Constants, profile: MachineProfile, number_format: str = "bf16") -> dict[str, MeasuredFit]:
    """Return the fits by kind of measurement ("matmuls", "network", …). Kinds without measurements are absent."""
    return _fits(profile, number_format, tuple(_number(getattr(k, name)) for name in DEFAULTS))


@lru_cache(maxsize=64)
def _fits(profile: MachineProfile, number_format: str, defaults: tuple[float, ...]) -> dict[str, MeasuredFit]:
    """Return `fits`; `defaults` are the values of the constants named in `DEFAULTS`, in that order."""
    slow, start_us, link_us, *attention_rates = defaults
    chip = reference_chip(profile)
    measured_format = _measured_format(profile, number_format)
    entries = [entry for entry in profile.products if entry.format == measured_format]
    fitted: dict[str, MeasuredFit] = {}
    if entries:
        fitted["matmuls"] = _fit_matmuls(entries, chip, chip.peak_flops[measured_format], profile)
        narrow, gemm = (fitted["matmuls"].values[name] for name in ("narrow", "gemm"))
        if fp8_entries := [entry for entry in profile.products if entry.format == "fp8"]:
            fitted["fp8 matmuls"] = _fit_fp8_matmuls(fp8_entries, chip, gemm, narrow)
    elif profile.corrections:
        fitted["matmuls"] = MeasuredFit({"slow": slow * correction(profile)}, 0, 0.0)
    if attention_entries := [entry for entry in profile.attention if entry.format == measured_format]:
        fitted["attention"] = _fit_attention(attention_entries, chip.peak_flops[measured_format], *attention_rates)
    fitted |= _fit_memory(profile, chip)
    fitted |= _fit_links(profile, chip, start_us * 1e-6, link_us * 1e-6)
    fitted |= _fit_overlap(profile)
    if profile.host_links:
        all_devices = max(profile.host_links, key=lambda entry: entry.devices)
        # The profile measures a device's rate while all devices of the node copy. The constant is the rate of a
        # device that copies alone.
        rate = min(all_devices.to_host, all_devices.to_device) / float(host_share(all_devices.devices))
        fitted["host link"] = MeasuredFit({"host": rate}, 1, 0.0)
    return fitted


def reference_chip(profile: MachineProfile) -> Chip:
    """Return the chip to whose rates the measured shares of this profile are relative."""
    chip = CHIPS.get(profile.gpu) or chip_of_profile(profile)
    return replace(chip, link=profile.link_bytes_per_s or chip.link, nic=profile.port_bytes_per_s or chip.nic)


def chip_of_profile(profile: MachineProfile) -> Chip:
    """Return a chip whose peaks are the best measured rates, for a device that is not in the chip table.

    Rates that were not measured are guesses (`guessed_processor`).
    """
    peaks: dict[str, float] = {}
    for entry in profile.products:
        rate = 2.0 * entry.m * entry.k * entry.n / min(entry.seconds, entry.burst_seconds)
        peaks[entry.format] = max(peaks.get(entry.format, 0.0), rate)
    for name, (measured_name, ratio) in RATE_OF_UNMEASURED_FORMAT.items():
        if name not in peaks and measured_name in peaks:
            peaks[name] = ratio * peaks[measured_name]
    sharing_devices = profile.devices if profile.gpu == "cpu" else 1
    guessed = guessed_processor(profile.cores // profile.devices)
    host_rates = [min(entry.to_host, entry.to_device) for entry in profile.host_links]
    return Chip(
        profile.gpu,
        "cpu" if profile.gpu == "cpu" else "unknown",
        profile.memory_bytes // sharing_devices,
        peaks or guessed.peak_flops,
        hbm=max(profile.copy_bytes_per_s or 0.0, profile.pass_bytes_per_s or 0.0) or guessed.hbm,
        link=_best_ring_rate(profile, across_nodes=False) or guessed.link,
        nic=_best_ring_rate(profile, across_nodes=True) or guessed.nic,
        per_node=profile.devices,
        domain=profile.devices,
        host=max(host_rates, default=guessed.host),
    )


def guessed_processor(cores: int) -> Chip:
    """Return the chip of a CPU rank with `cores` cores that was not measured.

    Its round rates are guesses, good enough to compare plans.
    """
    rate = 40e9 * max(1, cores)
    return Chip(
        "cpu",
        "cpu",
        (4 << 30) * max(1, cores),
        {"fp32": rate, "bf16": rate, "fp64": rate / 2},
        hbm=10e9,
        link=2e9,
        nic=1e9,
        per_node=1,
        domain=1,
        host=10e9,
    )


def guessed_device(name: str, memory_bytes: int) -> Chip:
    """Return the chip of an unknown device with `memory_bytes` of memory.

    Its round rates are guesses for a PCIe card, good enough to compare plans.
    """
    return Chip(
        name,
        "unknown",
        memory_bytes,
        {"bf16": 1e14, "fp16": 1e14, "fp32": 2e13, "fp8": 2e14},
        hbm=1e12,
        link=25e9,
        nic=12.5e9,
    )


def correction(profile: MachineProfile) -> float:
    """Return the measured device time relative to the profile's prediction: the median over all runs that were fed
    back, or 1 if there are none.
    """
    return float(np.median([entry.factor for entry in profile.corrections])) if profile.corrections else 1.0


def _measured_format(profile: MachineProfile, number_format: str) -> str:
    """Return the measured format whose share applies to `number_format`: itself if it was measured, else bf16, else the
    first measured format.

    fp8 does not represent other formats; it has a fit of its own (`_fit_fp8_matmuls`).
    """
    measured = list(dict.fromkeys(entry.format for entry in profile.products if entry.format != "fp8"))
    if not measured or number_format in measured:
        return number_format
    return "bf16" if "bf16" in measured else measured[0]


def _fit_matmuls(entries: Sequence[MatmulTime], chip: Chip, peak: float, profile: MachineProfile) -> MeasuredFit:
    """Fit `gemm` and `narrow` to matmuls (m, k) × (k, n).

    The formula is linear in 1/gemm and narrow/gemm: seconds × peak ÷ FLOPs = 1/gemm + narrow/gemm × (1/m + 1/k + 1/n).
    """
    relative = np.array([entry.seconds * peak / _flops_in_waves(entry, chip) for entry in entries])
    inverses = np.array([1 / entry.m + 1 / entry.k + 1 / entry.n for entry in entries])
    (constant, slope), residual = _nonnegative_fit(np.stack([np.ones_like(inverses), inverses], axis=1), relative)
    values = {"gemm": 1 / constant, "narrow": slope / constant, "slow": correction(profile)}
    return MeasuredFit(values, len(entries), residual)


def _fit_fp8_matmuls(entries: Sequence[MatmulTime], chip: Chip, gemm: float, narrow: float) -> MeasuredFit:
    """Fit `gemm_low` to fp8 matmuls, with `gemm` and `narrow` from the wider format."""
    relative = np.array([entry.seconds * chip.peak_flops["fp8"] / _flops_in_waves(entry, chip) for entry in entries])
    factor = np.array([1 + narrow * (1 / entry.m + 1 / entry.k + 1 / entry.n) for entry in entries])
    (constant,), residual = _nonnegative_fit(factor[:, None], relative)
    return MeasuredFit({"gemm_low": 1 / (constant * gemm)}, len(entries), residual)


def _flops_in_waves(entry: MatmulTime, chip: Chip) -> float:
    """Return the FLOPs of a matmul whose result is rounded up to whole waves of tiles, as in the cost model
    (`costs.compute`).
    """
    return 2.0 * entry.k * float(elements_in_waves(entry.m, entry.n, chip.multiprocessors))


def _fit_attention(
    entries: Sequence[AttentionTime], peak: float, attention: float, flex: float, flash: float
) -> MeasuredFit:
    """Fit the rates of attention, for each kernel (`_kernel`) and separately for wide heads, to forward and backward
    together.

    `attention`, `flex` and `flash` are the default rates. If the profile does not measure the rate to which another is
    relative, the default takes its place.
    """
    values = dict[str, float]()
    squares = 0.0
    for kernel, narrow in (("attention", attention), ("flex", flex), ("flash", flash)):
        of_kernel = [entry for entry in entries if _kernel(entry) == kernel]
        ratio = BACKWARD_RATIO
        if of_kernel and kernel != "attention":
            ratios = np.array([entry.backward_seconds / entry.forward_seconds for entry in of_kernel])
            values[f"{kernel}_backward"] = ratio = float(np.exp(np.mean(np.log(ratios))))
        # The rates of flex attention and FlashAttention are relative to the rate of attention without a window. A
        # rate of wide heads is relative to the rate of the same kernel with narrow heads.
        base = 1.0 if kernel == "attention" else values.get("attention", attention)
        for name, group in (
            (kernel, [entry for entry in of_kernel if entry.head_dim <= WIDE_HEAD]),
            (f"{kernel}_wide", [entry for entry in of_kernel if entry.head_dim > WIDE_HEAD]),
        ):
            if not group:
                continue
            ideal = np.array([[(1 + ratio) * _ideal_forward(entry, peak)] for entry in group])
            seconds = np.array([entry.forward_seconds + entry.backward_seconds for entry in group])
            (constant,), residual = _nonnegative_fit(ideal, seconds)
            squares += len(group) * residual**2
            values[name] = 1 / constant / base / (1.0 if name == kernel else values.get(kernel, narrow))
    return MeasuredFit(values, len(entries), float(np.sqrt(squares / len(entries))))


def _kernel(entry: AttentionTime) -> str:
    """Return the name of the constant with the rate of the kernel that training uses for this measurement.

    Without a window: "attention". With a window: "flash" if FlashAttention computes it (`window_by_flash`), otherwise
    "flex".
    """
    if not entry.window or not _has_window(entry):
        return "attention"
    return "flash" if window_by_flash(entry.head_dim, entry.window, None, entry.format) else "flex"


def _has_window(entry: AttentionTime) -> bool:
    """Return whether the window is shorter than the sequence, so that it leaves out some scores."""
    return entry.window is not None and entry.window < entry.seq


def _ideal_forward(entry: AttentionTime, peak: float) -> float:
    """Return the seconds of attention's forward at the peak rate, for the scores that are computed.

    Small heads take longer by the factor of the cost model (`SMALL_HEAD`).
    """
    span = entry.span
    if entry.window and _has_window(entry):
        span = computed_span(entry.window, entry.seq) + QUERY_BLOCK_KEYS
    flops = 4.0 * entry.tokens * span * entry.heads * entry.head_dim
    return flops * (1 + SMALL_HEAD / entry.head_dim) / peak


def _fit_memory(profile: MachineProfile, chip: Chip) -> dict[str, MeasuredFit]:
    """Fit `hbm`, and also `update`: the bytes that device memory could move in the time in which the optimizer updates
    one parameter.
    """
    if profile.pass_bytes_per_s is None:
        return {}
    fitted = {"device memory": MeasuredFit({"hbm": profile.pass_bytes_per_s / chip.hbm}, 1, 0.0)}
    if profile.adamw_parameters_per_s:
        fitted["optimizer"] = MeasuredFit({"update": profile.pass_bytes_per_s / profile.adamw_parameters_per_s}, 1, 0.0)
    return fitted


def _fit_links(profile: MachineProfile, chip: Chip, start: float, link: float) -> dict[str, MeasuredFit]:
    """Fit latency and bandwidth of rings inside a node, then of rings across nodes with the values inside a node fixed.

    `start` and `link` are default latencies in seconds: of starting a collective, and of a step inside a node.
    """
    inside = [entry for entry in profile.collectives if entry.nodes == 1 and entry.op in RING_OPERATIONS]
    across = [entry for entry in profile.collectives if entry.nodes > 1 and entry.op in RING_OPERATIONS]
    fitted: dict[str, MeasuredFit] = {}
    if inside:
        fitted["links inside a node"] = fit = _fit_node_links(inside, chip.link, start, link)
        start = fit.values["start_us"] * 1e-6
        link = fit.values["link_us"] * 1e-6
    if across:
        fitted["network"] = fit = _fit_network(across, chip.nic, start, link)
        sums = [entry for entry in profile.collectives if entry.nodes > 1 and entry.op == "all_reduce"]
        if sums:
            fitted["sums over the network"] = _fit_all_reduce(
                sums, fit.values["net"] * chip.nic, fit.values["net_us"] * 1e-6, start, link
            )
    return fitted


def _fit_node_links(entries: Sequence[CollectiveTime], reference: float, start: float, link: float) -> MeasuredFit:
    """Fit `link`, `start_us` and `link_us` to collectives inside a node.

    `reference` is the bandwidth to which `link` is relative, in bytes/s.

    Groups of one size cannot tell `start_us` from `link_us`. Then both are the defaults, multiplied by one fitted
    factor.
    """
    seconds = np.array([entry.seconds for entry in entries])
    wire = np.array([(entry.ranks - 1) / entry.ranks * entry.bytes for entry in entries])
    hops = np.array([entry.ranks - 1.0 for entry in entries])
    if len(set(hops)) > 1:
        (seconds_per_byte, start, link), residual = _nonnegative_fit(
            np.stack([wire, np.ones_like(hops), hops], axis=1), seconds
        )
    else:
        default_latency = start + hops[0] * link
        (seconds_per_byte, latency_factor), residual = _nonnegative_fit(
            np.stack([wire, np.full_like(hops, default_latency)], axis=1), seconds
        )
        start = latency_factor * start
        link = latency_factor * link
    values = {"link": 1 / (seconds_per_byte * reference), "start_us": start * 1e6, "link_us": link * 1e6}
    return MeasuredFit(values, len(entries), residual)


def _fit_network(entries: Sequence[CollectiveTime], reference: float, start: float, link: float) -> MeasuredFit:
    """Fit `net` and `net_us` to collectives across nodes.

    `net` is the share of its ranks' ports that a ring across nodes reaches; `reference` is the bandwidth of a port in
    bytes/s. `net_us` is the latency of a step between nodes. `start` and `link` are known latencies in seconds.
    """
    inside_seconds = np.array([start + (entry.ranks - entry.nodes) * link for entry in entries])
    seconds = np.array([entry.seconds for entry in entries])
    # The formula may predict more seconds for the steps inside nodes than the whole collective took. So at least a
    # tenth of the measured time counts as network time.
    network = np.maximum(seconds - inside_seconds, seconds / 10)
    wire = np.array([(entry.ranks - 1) / entry.ranks * entry.bytes / (entry.ranks / entry.nodes) for entry in entries])
    hops = np.array([entry.nodes - 1.0 for entry in entries])
    (seconds_per_byte, latency), _ = _nonnegative_fit(np.stack([wire, hops], axis=1), network, scale=seconds)
    predicted = inside_seconds + wire * seconds_per_byte + hops * latency
    values = {"net": 1 / (seconds_per_byte * reference), "net_ring": 1.0, "net_us": latency * 1e6}
    return MeasuredFit(values, len(entries), _root_mean_square(predicted / seconds - 1))


def _fit_all_reduce(
    entries: Sequence[CollectiveTime], rate: float, net: float, start: float, link: float
) -> MeasuredFit:
    """Fit `net_sum`, the bandwidth of all-reduces across nodes relative to gathers.

    `rate` is the bandwidth of a port in gathers, in bytes/s. The latencies are in seconds: `net` of a step across
    nodes, `start` of starting a collective, and `link` of a step inside a node.
    """
    ring = np.array([2 * (start + (entry.ranks - entry.nodes) * link + (entry.nodes - 1) * net) for entry in entries])
    tree = np.array(
        [2 * (log2(entry.ranks / entry.nodes) * link + log2(entry.nodes) * net) + start for entry in entries]
    )
    latency = np.minimum(ring, tree)  # the same formula as in costs.collective_costs.all_reduce
    seconds = np.array([entry.seconds for entry in entries])
    wire = np.array(
        [2 * (entry.ranks - 1) / entry.ranks * entry.bytes / (entry.ranks / entry.nodes) / rate for entry in entries]
    )
    large = wire > seconds / 2  # Latency dominates smaller all-reduces, so the fit leaves them out.
    large[np.argmax(wire)] = True
    network = np.maximum(seconds - latency, seconds / 10)[large]
    (relative_cost,), residual = _nonnegative_fit(wire[large][:, None], network, scale=seconds[large])
    return MeasuredFit({"net_sum": 1 / relative_cost}, int(large.sum()), residual)


def _fit_overlap(profile: MachineProfile) -> dict[str, MeasuredFit]:
    """Fit the slow-down of compute per second of communication that overlaps with it, once inside a node and once
    across nodes.

    Example: compute takes 10 ms alone and 11 ms while a collective of 4 ms runs. The slow-down is (11 - 10) / 4 = 0.25.
    """
    fitted: dict[str, MeasuredFit] = {}
    for name, constant, crosses in (("overlap", "overlap_tax", False), ("overlap across nodes", "net_tax", True)):
        entries = [
            entry for entry in profile.interference if entry.op in RING_OPERATIONS and (entry.nodes > 1) == crosses
        ]
        if entries:
            slowdowns = [(entry.together_seconds - entry.compute_seconds) / entry.other_seconds for entry in entries]
            tax = min(1.0, max(0.0, float(np.mean(slowdowns))))
            predicted = np.array(
                [(entry.compute_seconds + tax * entry.other_seconds) / entry.together_seconds for entry in entries]
            )
            fitted[name] = MeasuredFit({constant: tax}, len(entries), _root_mean_square(predicted - 1))
    return fitted


def _best_ring_rate(profile: MachineProfile, *, across_nodes: bool) -> float | None:
    """Return the highest measured bytes/s of a ring; None without measurements.

    Inside a node it is the rate through the link of a rank. Across nodes it is the rate through the port of a rank: the
    ranks of a node share what crosses the network.
    """
    entries = [
        entry for entry in profile.collectives if (entry.nodes > 1) == across_nodes and entry.op in RING_OPERATIONS
    ]
    rates = [(entry.ranks - 1) / entry.ranks * entry.bytes / entry.seconds for entry in entries]
    return max(
        (rate * (entry.nodes / entry.ranks if across_nodes else 1) for rate, entry in zip(rates, entries, strict=True)),
        default=None,
    )


def _nonnegative_fit(
    columns: NDArray[np.float64], seconds: NDArray[np.float64], scale: NDArray[np.float64] | None = None
) -> tuple[list[float], float]:
    """Return the non-negative coefficients with the least squared relative error, and the root mean square of the
    relative errors.

    `columns` has shape (measurements, n) with n at most 3; `seconds` has shape (measurements,). The prediction is
    `columns @ coefficients`. An error is relative to `scale`, by default to `seconds`.

    The first coefficient is positive. The function tries to set every subset of the other coefficients to zero, and
    solves for the rest.
    """
    weights = 1 / (seconds if scale is None else scale)
    target = seconds * weights
    weighted = columns * weights[:, None]
    best: tuple[float, NDArray[np.float64]] | None = None
    optional_columns = range(1, columns.shape[1])
    for size in range(columns.shape[1]):
        for extra_columns in combinations(optional_columns, size):
            column_indices = [0, *extra_columns]
            solution = np.linalg.lstsq(weighted[:, column_indices], target, rcond=None)[0]
            if solution[0] <= 0 or np.any(solution < 0):
                continue
            coefficients = np.zeros(columns.shape[1])
            coefficients[column_indices] = solution
            error = float(np.sum((weighted @ coefficients - target) ** 2))
            if best is None or error < best[0]:
                best = error, coefficients
    assert best is not None, "a positive column fits positive figures"
    return [float(value) for value in best[1]], _root_mean_square(weighted @ best[1] - target)


def _root_mean_square(errors: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _number(value: object) -> float:
    """Return a number, or the first element of an array, as a float."""
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
