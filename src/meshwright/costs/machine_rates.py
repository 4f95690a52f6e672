"""Rates of a ClusterSpec for the cost model: those of its slowest nodes, because a step takes as long as its slowest rank."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import BLOCKWISE, FOUR_BIT, TENSORWISE, Machine
from meshwright.costs.measured import chip_of_profile, guessed_device, guessed_processor, reference_chip, with_profile
from meshwright.spec.chips import CHIPS, Chip, GiB
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.host_limits import usable_cores
from meshwright.spec.network import NetworkSpec
from meshwright.spec.nodes import node_type_runs
from meshwright.spec.profile import MachineProfile

FORMATS = {
    "bf16": 0.0,
    "fp16": 0.0,
    "fp32": 0.0,
    "fp64": 0.0,
    "fp8": TENSORWISE,
    "int8": TENSORWISE,
    "mxfp8": BLOCKWISE,
    "nvfp4": FOUR_BIT,
    "mxfp4": FOUR_BIT,
}
"""Number format of matmuls → Machine.matmul_format. Only serving costs, which read the peak alone, have int8."""
KERNEL_US = 10.0
"""Microseconds that a CPU spends per operation outside its arithmetic and bytes: a guess."""
GUESSED_BAND = (-1.1, 1.1)
MEASURED_BAND = (-0.3, 0.9)
CORRECTED_BAND = (-0.2, 0.2)
"""Logarithms of the ends of the 80% band: device rates guessed, measured, or corrected by a run on the device."""


def chip_of(cluster: ClusterSpec) -> Chip | None:
    """The device of `cluster`: from the chip table, with measured rates, or guessed; None if nothing is known.

    Rates are guessed for a CPU, and for a device of which the cluster states the memory only. A guessed CPU has this host's
    cores, shared by the node's ranks. Raises BadInput if the profile cannot be read.
    """
    if cluster.gpu in CHIPS:
        return CHIPS[cluster.gpu]
    if cluster.profile is not None:
        return chip_of_profile(_profile_of(cluster.profile))
    if cluster.is_cpu:
        return guessed_processor(usable_cores() // cluster.gpus_per_node)
    return None if cluster.memory_gib is None else guessed_device(cluster.gpu, int(cluster.memory_gib * GiB))


def _profile_of(file: str) -> MachineProfile:
    """The profile in a file; the module that validates it is imported by those who have one, as a rank has none."""
    from meshwright.config.profile_file import load_profile

    return load_profile(file)


def is_guessed(cluster: ClusterSpec) -> bool:
    """Whether the device's rates are guessed: a CPU, or a device not in the chip table, without a profile.

    Guessed rates suffice to compare plans, not to predict seconds.
    """
    return cluster.gpu not in CHIPS and cluster.profile is None


def unpredicted_message(cluster: ClusterSpec) -> str:
    """The message that replaces predicted seconds if `is_guessed`."""
    if cluster.is_cpu:
        return "CPU times are not predicted without a profile (`meshwright profile --out FILE` measures this machine)"
    return f"rates of {cluster.gpu} are not known (`meshwright profile --out FILE` on it measures them)"


def hand_set_band(cluster: ClusterSpec) -> tuple[float, float] | None:
    """Logarithms of the ends of the 80% band for a device without fitted runs; None for devices of the chip table.

    The bands are set by hand and wide: a guessed rate may be off by a factor of three, and a step's many small operations may not
    reach the measured rates of large operations.
    """
    if cluster.gpu in CHIPS:
        return None
    if cluster.profile is None:
        return GUESSED_BAND
    return CORRECTED_BAND if _profile_of(cluster.profile).corrections else MEASURED_BAND


def fast_domain(cluster: ClusterSpec) -> int:
    """Devices connected by fast links: the network's `domain`, else a node's devices, or more if the chip's links span nodes."""
    chip = chip_of(cluster)
    per_node = cluster.gpus_per_node
    stated = cluster.network.domain if cluster.network else None
    return stated or (max(per_node, chip.domain) if chip and per_node == chip.per_node else per_node)


def network_rates(cluster: ClusterSpec) -> tuple[float, float]:
    """Bytes/s of the slowest device's links inside its node, and of the slowest port to other nodes."""
    nodes = [node for node, _ in node_type_runs(cluster)]
    links = [node.link_gb_per_s * 1e9 if node.link_gb_per_s else _chip(cluster, node.gpu).link for node in nodes]
    ports = [node.port_gb_per_s * 1e9 if node.port_gb_per_s else _chip(cluster, node.gpu).nic for node in nodes]
    return min(links), min(ports)


def machine_of(cluster: ClusterSpec, number_format: str = "bf16") -> Machine:
    """The rates of `cluster`, for matmuls in `number_format`.

    Raises BadInput for a chip that is not in the table, a format that a chip lacks, or groups with more nodes than the cluster.
    """
    network = cluster.network or NetworkSpec()
    chips = _chips(cluster, number_format)
    first_chip = chips[0]
    link, port = network_rates(cluster)
    stated_memory = cluster.memory_bytes()
    other_memories = [chip.memory_bytes for chip in chips[1:]]
    return Machine(
        peak=min(chip.peak_flops[number_format] for chip in chips),
        half_peak=min(_half_peak(chip, number_format) for chip in chips),
        matmul_format=FORMATS[number_format],
        hbm=min(chip.hbm for chip in chips),
        memory=min([stated_memory or first_chip.memory_bytes, *other_memories]),
        link=link,
        nic=port,
        host=min(chip.host for chip in chips),
        domain=fast_domain(cluster),
        per_node=cluster.gpus_per_node,
        oversubscribed=network.oversubscription,
        pod=network.pod_nodes * cluster.gpus_per_node if network.pod_nodes else float("inf"),
        sustained=min(chip.sustained for chip in chips),
        multiprocessors=float(first_chip.multiprocessors),
    )


def with_latencies(k: Constants, cluster: ClusterSpec) -> Constants:
    """Fitted constants, with the latencies that the cluster states instead of the stack's."""
    network = cluster.network or NetworkSpec()
    stated_us = [node.port_us for node, _ in node_type_runs(cluster) if node.port_us is not None]
    port_us = max(stated_us) if stated_us else k.net_us
    return replace(k, net_us=port_us, link_us=network.link_us or k.link_us)


def with_measurements(
    k: Constants, machine: Machine, cluster: ClusterSpec, number_format: str = "bf16"
) -> tuple[Constants, Machine]:
    """Constants and machine, updated with the profile's measurements and the latencies of the cluster."""
    if cluster.is_cpu:
        k = cpu_constants(k)
    if cluster.network:
        k = with_latencies(k, cluster)
    if cluster.profile is None:
        return k, machine
    profile = _profile_of(cluster.profile)
    k, machine, _ = with_profile(k, machine, profile, number_format)
    network = cluster.network or NetworkSpec()  # a stated latency overrides a measured latency
    return replace(k, net_us=network.port_us or k.net_us, link_us=network.link_us or k.link_us), machine


def measured_port(cluster: ClusterSpec) -> float | None:
    """The reference rate of a port in GB/s for measured shares, if the profile spans nodes.

    Emulated nodes have this bandwidth unless the cluster states another.
    """
    profile = _profile_of(cluster.profile) if cluster.profile else None
    return reference_chip(profile).nic / 1e9 if profile and profile.nodes > 1 else None


def cpu_constants(k: Constants) -> Constants:
    """Constants of CPU ranks: compute and launches share the processor, so host time and fixed step cost are 0."""
    zero = 0.0
    return replace(
        k,
        slow=1.0,
        gemm=1.0,
        attention=1.0,
        attention_wide=1.0,
        flex=1.0,
        flex_wide=1.0,
        flex_capped=1.0,
        flex_backward=2.5,
        flash_windows=zero,
        hbm=1.0,
        link=1.0,
        net=1.0,
        tail_us=KERNEL_US,
        host_us=zero,
        host_tensor_us=zero,
        host_micro_us=zero,
        step_ms=zero,
        fixed_order=zero,
    )


def _chips(cluster: ClusterSpec, number_format: str) -> list[Chip]:
    if sum(group.nodes for group in cluster.groups) > cluster.nodes:
        raise BadInput(
            f"cluster.groups: they have more nodes than cluster.nodes = {cluster.nodes}; cluster.nodes counts all nodes"
        )
    group_gpus = [group.gpu or cluster.gpu for group in cluster.groups]
    has_ungrouped_nodes = sum(group.nodes for group in cluster.groups) < cluster.nodes
    chips = []
    for name in dict.fromkeys([*([cluster.gpu] if has_ungrouped_nodes else []), *group_gpus]):
        chip = _chip(cluster, name)
        if number_format not in FORMATS or number_format not in chip.peak_flops:
            available = ", ".join(name for name in chip.peak_flops if name in FORMATS)
            raise BadInput(f"cluster.gpu: {name} has no {number_format} matmuls; it has {available}")
        chips.append(chip)
    return chips


def _chip(cluster: ClusterSpec, name: str) -> Chip:
    chip = chip_of(cluster) if name == cluster.gpu else CHIPS.get(name)
    if chip is None:
        raise BadInput(
            f"cluster.gpu: {name} is not in the chip table, and cluster.profile names no file that `meshwright profile` wrote on it; "
            f"known: {', '.join(CHIPS)}"
        )
    return chip


def _half_peak(chip: Chip, number_format: str) -> float:
    """Peak rate of attention and head: in 16 bit if matmuls are narrower, else in the format of the matmuls."""
    if number_format in ("fp32", "fp64"):
        return chip.peak_flops[number_format]
    return chip.half_peak
