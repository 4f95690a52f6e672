"""Fits the cost model's constants to a machine's profile: a least-squares fit of each formula to its measurements.

Shares are relative to the chip table's figures, or for a device that is not in the table to the best measured rate. If the
run file states another bandwidth than the table, for example to predict twice the link speed, the measured share applies to that.
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
"""Unmeasured format → (measured format, rate relative to it)."""
DEFAULTS = ("slow", "start_us", "link_us", "attention", "flex", "flash")
"""Constants that a fit keeps, or to which it is relative, if the profile does not measure them."""
RING_OPERATIONS = ("all_gather", "reduce_scatter")
"""Operations to which link constants are fitted: those of sharded training."""


@dataclass(frozen=True)
class MeasuredFit:
    """Constants fitted to measurements of one type, the number of measurements, and the root mean square of relative errors."""

    values: dict[str, float]
    count: int
    residual: float

    def __str__(self) -> str:
        if self.count < 2:
            return "measured"
        return f"measured ({self.count} figures, the formula {100 * self.residual:.1f}% off)"


def with_profile(
    k: Constants, machine: Machine, profile: MachineProfile, number_format: str = "bf16"
) -> tuple[Constants, Machine, dict[str, str]]:
    """Constants and machine with the profile's values, and the source of each replaced constant.

    Values without a measurement do not change. `number_format` is the plan's; if it was not measured, the share of the nearest
    measured format applies.
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
    """Fits by type of measurement; types without measurements are absent."""
    return _fits(profile, number_format, tuple(_number(getattr(k, name)) for name in DEFAULTS))


@lru_cache(maxsize=64)
def _fits(profile: MachineProfile, number_format: str, defaults: tuple[float, ...]) -> dict[str, MeasuredFit]:
    """`fits`, where `defaults` are the constants of `DEFAULTS`, in their order."""
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
        # The measured rate is that of a device while all devices copy; the constant is the rate of a device alone.
        rate = min(all_devices.to_host, all_devices.to_device) / float(host_share(all_devices.devices))
        fitted["host link"] = MeasuredFit({"host": rate}, 1, 0.0)
    return fitted


def reference_chip(profile: MachineProfile) -> Chip:
    """The chip whose rates are the reference of measured shares."""
    chip = CHIPS.get(profile.gpu) or chip_of_profile(profile)
    return replace(chip, link=profile.link_bytes_per_s or chip.link, nic=profile.port_bytes_per_s or chip.nic)


def chip_of_profile(profile: MachineProfile) -> Chip:
    """A chip with the best measured rates as peaks, for a device that is not in the chip table."""
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
    """An unmeasured CPU rank with `cores` cores: guessed round rates, which suffice to compare plans."""
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
    """An unknown device with the given memory: guessed round rates of a PCIe card, which suffice to compare plans."""
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
    """Measured device time relative to the profile's prediction: median over the runs that were fed back, 1 without any."""
    return float(np.median([entry.factor for entry in profile.corrections])) if profile.corrections else 1.0


def _measured_format(profile: MachineProfile, number_format: str) -> str:
    """`number_format` if it was measured, else the measured format that represents it; fp8 is fitted separately."""
    measured = list(dict.fromkeys(entry.format for entry in profile.products if entry.format != "fp8"))
    if not measured or number_format in measured:
        return number_format
    return "bf16" if "bf16" in measured else measured[0]


def _fit_matmuls(entries: Sequence[MatmulTime], chip: Chip, peak: float, profile: MachineProfile) -> MeasuredFit:
    """Fits `gemm` and `narrow`: seconds × peak ÷ FLOPs = 1/gemm + narrow/gemm × the sum of the dimensions' inverses."""
    relative = np.array([entry.seconds * peak / _flops_in_waves(entry, chip) for entry in entries])
    inverses = np.array([1 / entry.m + 1 / entry.k + 1 / entry.n for entry in entries])
    (constant, slope), residual = _nonnegative_fit(np.stack([np.ones_like(inverses), inverses], axis=1), relative)
    values = {"gemm": 1 / constant, "narrow": slope / constant, "slow": correction(profile)}
    return MeasuredFit(values, len(entries), residual)


def _fit_fp8_matmuls(entries: Sequence[MatmulTime], chip: Chip, gemm: float, narrow: float) -> MeasuredFit:
    """Fits `gemm_low`, with `narrow` from the wider format."""
    relative = np.array([entry.seconds * chip.peak_flops["fp8"] / _flops_in_waves(entry, chip) for entry in entries])
    factor = np.array([1 + narrow * (1 / entry.m + 1 / entry.k + 1 / entry.n) for entry in entries])
    (constant,), residual = _nonnegative_fit(factor[:, None], relative)
    return MeasuredFit({"gemm_low": 1 / (constant * gemm)}, len(entries), residual)


def _flops_in_waves(entry: MatmulTime, chip: Chip) -> float:
    """FLOPs of a matmul rounded up to whole waves of tiles, as in the cost model."""
    return 2.0 * entry.k * float(elements_in_waves(entry.m, entry.n, chip.multiprocessors))


def _fit_attention(
    entries: Sequence[AttentionTime], peak: float, attention: float, flex: float, flash: float
) -> MeasuredFit:
    """Fits rates of attention to forward and backward together: by kernel (`_kernel`), each also for wide heads.

    `attention`, `flex` and `flash` are the defaults of rates to which others are relative, where no entry measures them.
    """
    values = dict[str, float]()
    squares = 0.0
    for kernel, narrow in (("attention", attention), ("flex", flex), ("flash", flash)):
        of_kernel = [entry for entry in entries if _kernel(entry) == kernel]
        ratio = BACKWARD_RATIO
        if of_kernel and kernel != "attention":
            ratios = np.array([entry.backward_seconds / entry.forward_seconds for entry in of_kernel])
            values[f"{kernel}_backward"] = ratio = float(np.exp(np.mean(np.log(ratios))))
        # Other kernels' rates are relative to that of attention without a window, and those of wide heads to that of narrow ones.
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
    """The constant of the rate of the kernel that training uses: of a window that of flex attention or FlashAttention."""
    if not entry.window or not _has_window(entry):
        return "attention"
    return "flash" if window_by_flash(entry.head_dim, entry.window, None, entry.format) else "flex"


def _has_window(entry: AttentionTime) -> bool:
    return entry.window is not None and entry.window < entry.seq


def _ideal_forward(entry: AttentionTime, peak: float) -> float:
    """Seconds of attention's forward at the peak: its computed scores, with the cost model's factor for small heads."""
    span = entry.span
    if entry.window and _has_window(entry):
        span = computed_span(entry.window, entry.seq) + QUERY_BLOCK_KEYS
    flops = 4.0 * entry.tokens * span * entry.heads * entry.head_dim
    return flops * (1 + SMALL_HEAD / entry.head_dim) / peak


def _fit_memory(profile: MachineProfile, chip: Chip) -> dict[str, MeasuredFit]:
    """Fits `hbm`, and `update`: bytes that memory moves while the optimizer updates one parameter."""
    if profile.pass_bytes_per_s is None:
        return {}
    fitted = {"device memory": MeasuredFit({"hbm": profile.pass_bytes_per_s / chip.hbm}, 1, 0.0)}
    if profile.adamw_parameters_per_s:
        fitted["optimizer"] = MeasuredFit({"update": profile.pass_bytes_per_s / profile.adamw_parameters_per_s}, 1, 0.0)
    return fitted


def _fit_links(profile: MachineProfile, chip: Chip, start: float, link: float) -> dict[str, MeasuredFit]:
    """Fits latency and bandwidth of rings inside a node, then across nodes with the former known.

    `start` and `link` are the default latencies in seconds.
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
    """Fits `link`, `start_us` and `link_us`; if all groups have one size, the latencies keep the defaults' ratio."""
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
    """Fits `net`, the share of its members' ports that a ring across nodes reaches, and `net_us`, the latency of a step."""
    inside_seconds = np.array([start + (entry.ranks - entry.nodes) * link for entry in entries])
    seconds = np.array([entry.seconds for entry in entries])
    # The steps inside nodes may be priced above the measured total: at least a tenth of it counts for the network.
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
    """Fits `net_sum`, the bandwidth of all-reduces relative to gathers. `rate` is a port's in gathers, in bytes/s.

    `net`, `start` and `link` are latencies in seconds: a step across nodes, a collective, a step inside a node.
    """
    ring = np.array([2 * (start + (entry.ranks - entry.nodes) * link + (entry.nodes - 1) * net) for entry in entries])
    tree = np.array(
        [2 * (log2(entry.ranks / entry.nodes) * link + log2(entry.nodes) * net) + start for entry in entries]
    )
    latency = np.minimum(ring, tree)  # as in costs.collective_costs
    seconds = np.array([entry.seconds for entry in entries])
    wire = np.array(
        [2 * (entry.ranks - 1) / entry.ranks * entry.bytes / (entry.ranks / entry.nodes) / rate for entry in entries]
    )
    large = wire > seconds / 2  # latency dominates smaller sums
    large[np.argmax(wire)] = True
    network = np.maximum(seconds - latency, seconds / 10)[large]
    (relative_cost,), residual = _nonnegative_fit(wire[large][:, None], network, scale=seconds[large])
    return MeasuredFit({"net_sum": 1 / relative_cost}, int(large.sum()), residual)


def _fit_overlap(profile: MachineProfile) -> dict[str, MeasuredFit]:
    """Fits the slow-down of compute per second of communication beside it, inside a node and across nodes."""
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
    """The highest measured rate of a ring in bytes/s: through a rank's link inside a node, or through its port across nodes."""
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
    """Non-negative coefficients of the columns with the least squared relative error, and the root mean square of the errors.

    The fit tries every subset of at most three columns, with zero for the others. The first column is in every subset.
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
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
