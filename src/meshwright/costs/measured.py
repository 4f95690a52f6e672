"""Fits the constants of the cost model to a machine's profile: least squares of each measured type on its formula.

Shares are of the chip table's figures, or for a device that is not in it of the best that was measured, so that a
cluster which states another bandwidth (what would twice the links buy?) takes the measured share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import log2

import numpy as np
from numpy.typing import NDArray

from meshwright.costs.compute import in_waves
from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.costs.offload_costs import host_share
from meshwright.spec.chips import CHIPS, Chip
from meshwright.spec.profile import AttentionTime, CollectiveTime, MachineProfile, ProductTime

BACKWARD = 2.5
"""Attention's backward over its forward: five products for two (Dao et al. 2022)."""
SHORT = 32.0
"""Head size at which attention takes twice as long for its FLOPs (costs.compute)."""
HALF_RATE = {"fp64": ("fp32", 0.5), "bf16": ("fp32", 1.0), "fp16": ("bf16", 1.0)}
"""Rate of a format that was not measured, by one that was."""
RINGS = ("all_gather", "reduce_scatter")
"""Operations that links are fitted on: what sharded training sends."""


@dataclass(frozen=True)
class Fit:
    """Constants that one kind of measurement gave, from how many, and the typical relative error that is left."""

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
    """Constants and machine with what `profile` says in their place, and for each replaced constant where it comes from.

    What was not measured stays. `number_format` is the plan's; where it was not measured the share of the nearest format is taken.
    """
    found = fits(k, profile, number_format)
    values = {name: value for fit in found.values() for name, value in fit.values.items()}
    said = {name: str(fit) for fit in found.values() for name in fit.values}
    if profile.corrections:
        runs = len(profile.corrections)
        said["slow"] = f"corrected by {runs} run{'s' * (runs > 1)}"
    host = values.pop("host", None)
    return replace(k, **values), (machine if host is None else replace(machine, host=host)), said


def fits(k: Constants, profile: MachineProfile, number_format: str = "bf16") -> dict[str, Fit]:
    """What each kind of measurement says, by kind; kinds without measurements are absent."""
    return _fits(profile, number_format, _number(k.slow), _number(k.start_us), _number(k.link_us))


@lru_cache(maxsize=64)
def _fits(profile: MachineProfile, number_format: str, slow: float, start_us: float, link_us: float) -> dict[str, Fit]:
    chip = reference_chip(profile)
    base = _base(profile, number_format)
    entries = [entry for entry in profile.products if entry.format == base]
    found: dict[str, Fit] = {}
    if entries:
        found["matrix products"] = _products(entries, chip, chip.peak_flops[base], profile)
        narrow, gemm = (found["matrix products"].values[name] for name in ("narrow", "gemm"))
        if low := [entry for entry in profile.products if entry.format == "fp8"]:
            found["fp8 products"] = _low_products(low, chip, gemm, narrow)
    elif profile.corrections:
        found["matrix products"] = Fit({"slow": slow * correction(profile)}, 0, 0.0)
    if shapes := [entry for entry in profile.attention if entry.format == base]:
        found["attention"] = _attention(shapes, chip.peak_flops[base])
    found |= _memory(profile, chip)
    found |= _links(profile, chip, start_us * 1e-6, link_us * 1e-6)
    found |= _overlap(profile)
    if profile.host_links:
        widest = max(profile.host_links, key=lambda entry: entry.devices)
        # What was measured is the share of a link that a device gets while so many copy.
        rate = min(widest.to_host, widest.to_device) / float(host_share(widest.devices))
        found["host link"] = Fit({"host": rate}, 1, 0.0)
    return found


def reference_chip(profile: MachineProfile) -> Chip:
    """What measured rates are shares of."""
    chip = CHIPS.get(profile.gpu) or chip_of_profile(profile)
    return replace(chip, link=profile.link_bytes_per_s or chip.link, nic=profile.port_bytes_per_s or chip.nic)


def chip_of_profile(profile: MachineProfile) -> Chip:
    """A chip whose peaks are the best that was measured, for a device that is not in the table."""
    peaks: dict[str, float] = {}
    for entry in profile.products:
        rate = 2.0 * entry.m * entry.k * entry.n / min(entry.seconds, entry.burst_seconds)
        peaks[entry.format] = max(peaks.get(entry.format, 0.0), rate)
    for name, (other, ratio) in HALF_RATE.items():
        if name not in peaks and other in peaks:
            peaks[name] = ratio * peaks[other]
    share = profile.devices if profile.gpu == "cpu" else 1
    guess = guessed_processor(profile.cores // profile.devices)
    hosts = [min(entry.to_host, entry.to_device) for entry in profile.host_links]
    return Chip(
        profile.gpu, "cpu" if profile.gpu == "cpu" else "unknown", profile.memory_bytes // share, peaks or guess.peak_flops,
        hbm=max(profile.copy_bytes_per_s or 0.0, profile.pass_bytes_per_s or 0.0) or guess.hbm,
        link=_best(profile, across=False) or guess.link,
        nic=_best(profile, across=True) or guess.nic,
        per_node=profile.devices, domain=profile.devices, host=max(hosts, default=guess.host),
    )  # fmt: skip


def guessed_processor(cores: int) -> Chip:
    """A processor rank of `cores` cores that nobody measured: a round guess, so that plans can be compared at all."""
    rate = 40e9 * max(1, cores)
    return Chip(
        "cpu", "cpu", (4 << 30) * max(1, cores), {"fp32": rate, "bf16": rate, "fp64": rate / 2}, hbm=10e9, link=2e9, nic=1e9,
        per_node=1, domain=1, host=10e9,
    )  # fmt: skip


def guessed_device(name: str, memory_bytes: int) -> Chip:
    """A guessed device of a given memory: round rates of a card on PCIe, so that plans can be compared."""
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
    """Times that device time is what the profile's own figures say, by the runs that were fed back: their median."""
    return float(np.median([entry.factor for entry in profile.corrections])) if profile.corrections else 1.0


def _base(profile: MachineProfile, number_format: str) -> str:
    """The measured format that represents `number_format`: itself, or another for narrow formats and those not measured."""
    measured = list(dict.fromkeys(entry.format for entry in profile.products if entry.format != "fp8"))
    if not measured or number_format in measured:
        return number_format
    return "bf16" if "bf16" in measured else measured[0]


def _products(entries: Sequence[ProductTime], chip: Chip, peak: float, profile: MachineProfile) -> Fit:
    """`gemm` and `narrow`: seconds × peak ÷ FLOPs is 1/gemm + narrow/gemm × the sum of the dimensions' inverses."""
    slower = np.array([entry.seconds * peak / _flops_in_waves(entry, chip) for entry in entries])
    inverses = np.array([1 / entry.m + 1 / entry.k + 1 / entry.n for entry in entries])
    (constant, slope), residual = _fitted(np.stack([np.ones_like(inverses), inverses], axis=1), slower)
    values = {"gemm": 1 / constant, "narrow": slope / constant, "slow": correction(profile)}
    return Fit(values, len(entries), residual)


def _low_products(entries: Sequence[ProductTime], chip: Chip, gemm: float, narrow: float) -> Fit:
    """`gemm_low`, with the narrowness of the wider format."""
    slower = np.array([entry.seconds * chip.peak_flops["fp8"] / _flops_in_waves(entry, chip) for entry in entries])
    factor = np.array([1 + narrow * (1 / entry.m + 1 / entry.k + 1 / entry.n) for entry in entries])
    (constant,), residual = _fitted(factor[:, None], slower)
    return Fit({"gemm_low": 1 / (constant * gemm)}, len(entries), residual)


def _flops_in_waves(entry: ProductTime, chip: Chip) -> float:
    """FLOPs of a product in whole waves, as the cost model prices it."""
    return 2.0 * entry.k * float(in_waves(entry.m, entry.n, chip.multiprocessors))


def _attention(entries: Sequence[AttentionTime], peak: float) -> Fit:
    """`attention`, of forward and backward together: causal FLOPs, short heads at their discount."""
    flops = np.array([4.0 * entry.tokens * entry.span * entry.heads * entry.head_dim for entry in entries])
    ideal = (1 + BACKWARD) * flops * (1 + SHORT / np.array([entry.head_dim for entry in entries])) / peak
    taken = np.array([entry.forward_seconds + entry.backward_seconds for entry in entries])
    (constant,), residual = _fitted(ideal[:, None], taken)
    return Fit({"attention": 1 / constant}, len(entries), residual)


def _memory(profile: MachineProfile, chip: Chip) -> dict[str, Fit]:
    if profile.pass_bytes_per_s is None:
        return {}
    found = {"device memory": Fit({"hbm": profile.pass_bytes_per_s / chip.hbm}, 1, 0.0)}
    if profile.adamw_parameters_per_s:
        found["optimizer"] = Fit({"update": profile.pass_bytes_per_s / profile.adamw_parameters_per_s}, 1, 0.0)
    return found


def _links(profile: MachineProfile, chip: Chip, start: float, link: float) -> dict[str, Fit]:
    """Latency and bandwidth of rings inside a node, then across nodes with the former known; defaults `start` and `link`."""
    inside = [entry for entry in profile.collectives if entry.nodes == 1 and entry.op in RINGS]
    across = [entry for entry in profile.collectives if entry.nodes > 1 and entry.op in RINGS]
    found: dict[str, Fit] = {}
    if inside:
        found["links inside a node"] = fit = _inside(inside, chip.link, start, link)
        start, link = fit.values["start_us"] * 1e-6, fit.values["link_us"] * 1e-6
    if across:
        found["network"] = fit = _across(across, chip.nic, start, link)
        sums = [entry for entry in profile.collectives if entry.nodes > 1 and entry.op == "all_reduce"]
        if sums:
            found["sums over the network"] = _sums(
                sums, fit.values["net"] * chip.nic, fit.values["net_us"] * 1e-6, start, link
            )
    return found


def _inside(entries: Sequence[CollectiveTime], reference: float, start: float, link: float) -> Fit:
    """`link`, `start_us` and `link_us`; with groups of one size only, both latencies keep the ratio of those given."""
    taken = np.array([entry.seconds for entry in entries])
    wire = np.array([(entry.ranks - 1) / entry.ranks * entry.bytes for entry in entries])
    hops = np.array([entry.ranks - 1.0 for entry in entries])
    if len(set(hops)) > 1:
        (cost, start, link), residual = _fitted(np.stack([wire, np.ones_like(hops), hops], axis=1), taken)
    else:
        known = start + hops[0] * link
        (cost, times), residual = _fitted(np.stack([wire, np.full_like(hops, known)], axis=1), taken)
        start, link = times * start, times * link
    values = {"link": 1 / (cost * reference), "start_us": start * 1e6, "link_us": link * 1e6}
    return Fit(values, len(entries), residual)


def _across(entries: Sequence[CollectiveTime], reference: float, start: float, link: float) -> Fit:
    """`net` and `net_us`: a ring uses the ports of its members; `net` is the share that rings over such nodes reach."""
    inner = np.array([start + (entry.ranks - entry.nodes) * link for entry in entries])
    taken = np.array([entry.seconds for entry in entries])
    # What the inside steps would take alone may be more than the whole took: a tenth stays for the network.
    left = np.maximum(taken - inner, taken / 10)
    wire = np.array([(entry.ranks - 1) / entry.ranks * entry.bytes / (entry.ranks / entry.nodes) for entry in entries])
    hops = np.array([entry.nodes - 1.0 for entry in entries])
    (cost, latency), _ = _fitted(np.stack([wire, hops], axis=1), left, scale=taken)
    predicted = inner + wire * cost + hops * latency
    values = {"net": 1 / (cost * reference), "net_ring": 1.0, "net_us": latency * 1e6}
    return Fit(values, len(entries), _typical(predicted / taken - 1))


def _sums(entries: Sequence[CollectiveTime], rate: float, late: float, start: float, link: float) -> Fit:
    """`net_sum`: bandwidth of all-reduces over that of gathers (`rate`, bytes/s of a port), latencies being known."""
    ring = np.array([2 * (start + (entry.ranks - entry.nodes) * link + (entry.nodes - 1) * late) for entry in entries])
    tree = np.array(
        [2 * (log2(entry.ranks / entry.nodes) * link + log2(entry.nodes) * late) + start for entry in entries]
    )
    inner = np.minimum(ring, tree)  # as costs.collective_costs has it
    taken = np.array([entry.seconds for entry in entries])
    wire = np.array(
        [2 * (entry.ranks - 1) / entry.ranks * entry.bytes / (entry.ranks / entry.nodes) / rate for entry in entries]
    )
    large = wire > taken / 2  # of small ones the latency decides
    large[np.argmax(wire)] = True
    left = np.maximum(taken - inner, taken / 10)[large]
    (cost,), residual = _fitted(wire[large][:, None], left, scale=taken[large])
    return Fit({"net_sum": 1 / cost}, int(large.sum()), residual)


def _overlap(profile: MachineProfile) -> dict[str, Fit]:
    """What a second of communication adds to the compute beside it, inside a node and across nodes."""
    found: dict[str, Fit] = {}
    for name, constant, crosses in (("overlap", "overlap_tax", False), ("overlap across nodes", "net_tax", True)):
        entries = [entry for entry in profile.interference if entry.op in RINGS and (entry.nodes > 1) == crosses]
        if entries:
            taxes = [(entry.together_seconds - entry.compute_seconds) / entry.other_seconds for entry in entries]
            tax = min(1.0, max(0.0, float(np.mean(taxes))))
            predicted = np.array(
                [(entry.compute_seconds + tax * entry.other_seconds) / entry.together_seconds for entry in entries]
            )
            found[name] = Fit({constant: tax}, len(entries), _typical(predicted - 1))
    return found


def _best(profile: MachineProfile, *, across: bool) -> float | None:
    """The most bytes a second that a ring moved past one rank: by its link inside a node, or by its own port across nodes."""
    entries = [entry for entry in profile.collectives if (entry.nodes > 1) == across and entry.op in RINGS]
    rates = [(entry.ranks - 1) / entry.ranks * entry.bytes / entry.seconds for entry in entries]
    return max(
        (rate * (entry.nodes / entry.ranks if across else 1) for rate, entry in zip(rates, entries, strict=True)),
        default=None,
    )


def _fitted(
    columns: NDArray[np.float64], taken: NDArray[np.float64], scale: NDArray[np.float64] | None = None
) -> tuple[list[float], float]:
    """Coefficients ≥ 0 of the columns with the least squared relative error, and the typical error.

    At most three columns: every subset is tried, as what is left out is zero. The first column always takes part.
    """
    weights = 1 / (taken if scale is None else scale)
    wanted, entries = taken * weights, columns * weights[:, None]
    best: tuple[float, NDArray[np.float64]] | None = None
    others = range(1, columns.shape[1])
    for size in range(columns.shape[1]):
        for chosen in combinations(others, size):
            used = [0, *chosen]
            part = np.linalg.lstsq(entries[:, used], wanted, rcond=None)[0]
            if part[0] <= 0 or np.any(part < 0):
                continue
            found = np.zeros(columns.shape[1])
            found[used] = part
            error = float(np.sum((entries @ found - wanted) ** 2))
            if best is None or error < best[0]:
                best = error, found
    assert best is not None, "one positive column fits positive figures"
    return [float(value) for value in best[1]], _typical(entries @ best[1] - wanted)


def _typical(errors: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _number(value: object) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
