"""Rates of a ClusterSpec for the cost model.

They are the rates of the slowest nodes, because a step takes as long as its slowest rank.
"""

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
"""Number format of matmuls → `Machine.matmul_format`.

Of "int8", only the peak is used: training has no int8 matmuls, and the serving costs do not read `matmul_format`.
"""
KERNEL_US = 10.0
"""Microseconds that a CPU needs per operation in addition to its arithmetic and bytes: a guess."""
GUESSED_BAND = (-1.1, 1.1)
"""80% band of the step time if the device's rates are guessed: ln(measured ÷ predicted) at the lower and the upper end.
"""
MEASURED_BAND = (-0.3, 0.9)
"""As `GUESSED_BAND`, if the device's rates were measured by `meshwright profile`."""
CORRECTED_BAND = (-0.2, 0.2)
"""As `GUESSED_BAND`, if the profile was also corrected by a run on the device."""


def chip_of(cluster: ClusterSpec) -> Chip | None:
    """Return the device of `cluster`: from the chip table, from its profile, or guessed.

    The result is None if nothing is known about it.

    Rates are guessed in two cases: for a CPU without a profile, and for an unknown device whose memory the cluster
    states. The ranks of a node divide the cores of this host; a guessed CPU has the cores of one rank. Raises BadInput
    if the profile cannot be read.
    """
    if cluster.gpu in CHIPS:
        return CHIPS[cluster.gpu]
    if cluster.profile is not None:
        return chip_of_profile(_profile_of(cluster.profile))
    if cluster.is_cpu:
        return guessed_processor(usable_cores() // cluster.gpus_per_node)
    return None if cluster.memory_gib is None else guessed_device(cluster.gpu, int(cluster.memory_gib * GiB))


def _profile_of(file: str) -> MachineProfile:
    """Return the profile in a file.

    The import is here because the module that validates profiles is only needed by callers with a profile; ranks never
    have one.
    """
    from meshwright.config.profile_file import load_profile

    return load_profile(file)


def is_guessed(cluster: ClusterSpec) -> bool:
    """Return whether the device's rates are guessed: it has no profile, and is a CPU or not in the chip table.

    Guessed rates are good enough to compare plans, but not to predict seconds.
    """
    return cluster.gpu not in CHIPS and cluster.profile is None


def unpredicted_message(cluster: ClusterSpec) -> str:
    """Return the message that is printed instead of predicted seconds if `is_guessed`."""
    if cluster.is_cpu:
        return "CPU times are not predicted without a profile (`meshwright profile --out FILE` measures this machine)"
    return f"rates of {cluster.gpu} are not known (`meshwright profile --out FILE` on it measures them)"


def hand_set_band(cluster: ClusterSpec) -> tuple[float, float] | None:
    """Return the 80% band of a device without fitted runs, as ln(measured ÷ predicted) of its ends.

    The result is None for devices of the chip table.

    These bands are set by hand and wide: a guessed rate may be wrong by a factor of three, and the many small
    operations of a step may not reach the rates that were measured with large ones.
    """
    if cluster.gpu in CHIPS:
        return None
    if cluster.profile is None:
        return GUESSED_BAND
    return CORRECTED_BAND if _profile_of(cluster.profile).corrections else MEASURED_BAND


def fast_domain(cluster: ClusterSpec) -> int:
    """Return the number of devices that fast links connect.

    It is the `domain` of the network if the cluster states it. Otherwise it is the number of devices in a node, or the
    chip's own domain if that is larger and a node has as many devices as in the chip's reference machine (NVL72: 4
    devices per node, 64 per domain).
    """
    chip = chip_of(cluster)
    per_node = cluster.gpus_per_node
    stated = cluster.network.domain if cluster.network else None
    return stated or (max(per_node, chip.domain) if chip and per_node == chip.per_node else per_node)


def network_rates(cluster: ClusterSpec) -> tuple[float, float]:
    """Return the bytes/s of the slowest device's links inside its node, and of the slowest device's port to other
    nodes.
    """
    nodes = [node for node, _ in node_type_runs(cluster)]
    links = [node.link_gb_per_s * 1e9 if node.link_gb_per_s else _chip(cluster, node.gpu).link for node in nodes]
    ports = [node.port_gb_per_s * 1e9 if node.port_gb_per_s else _chip(cluster, node.gpu).nic for node in nodes]
    return min(links), min(ports)


def machine_of(cluster: ClusterSpec, number_format: str = "bf16") -> Machine:
    """Return the rates of `cluster` for matmuls in `number_format`. Each rate is the lowest of all node types.

    Raises BadInput for a chip that is not in the table, for a format that a chip lacks, and if the groups have more
    nodes than the cluster.
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
    """Return the constants with the latencies that the cluster states; a latency that it does not state is the stack's."""
    network = cluster.network or NetworkSpec()
    stated_us = [node.port_us for node, _ in node_type_runs(cluster) if node.port_us is not None]
    port_us = max(stated_us) if stated_us else k.net_us
    return replace(k, net_us=port_us, link_us=network.link_us or k.link_us)


def with_measurements(
    k: Constants, machine: Machine, cluster: ClusterSpec, number_format: str = "bf16"
) -> tuple[Constants, Machine]:
    """Return constants and machine, updated with the measurements of the cluster's profile and the latencies that the
    cluster states.

    A latency that the cluster states overrides a measured one. Without a profile, only the stated latencies change; a
    CPU has the constants of `cpu_constants`. Raises BadInput if the profile cannot be read.
    """
    if cluster.is_cpu:
        k = cpu_constants(k)
    if cluster.network:
        k = with_latencies(k, cluster)
    if cluster.profile is None:
        return k, machine
    profile = _profile_of(cluster.profile)
    k, machine, _ = with_profile(k, machine, profile, number_format)
    network = cluster.network or NetworkSpec()  # a latency that the cluster states overrides a measured one
    return replace(k, net_us=network.port_us or k.net_us, link_us=network.link_us or k.link_us), machine


def measured_port(cluster: ClusterSpec) -> float | None:
    """Return the port rate in GB/s that is the reference of the profile's network measurements.

    The result is None if the profile is of one node.

    Emulated nodes have this bandwidth, unless the cluster states another one.
    """
    profile = _profile_of(cluster.profile) if cluster.profile else None
    return reference_chip(profile).nic / 1e9 if profile and profile.nodes > 1 else None


def cpu_constants(k: Constants) -> Constants:
    """Return the constants of CPU ranks.

    Host time and the fixed time of a step are 0, because computing and launching share one processor. Shares are 1,
    because the rates of a CPU are guessed or measured and have no datasheet.
    """
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
    """Return the different chips of the cluster: first `cluster.gpu`, unless all nodes are in groups; then the chips of
    the groups.

    Raises BadInput as `machine_of` does.
    """
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
    """Return the chip with this name. Raises BadInput if nothing is known about it."""
    chip = chip_of(cluster) if name == cluster.gpu else CHIPS.get(name)
    if chip is None:
        raise BadInput(
            f"cluster.gpu: {name} is not in the chip table, and cluster.profile names no file that `meshwright profile` wrote on it; "
            f"known: {', '.join(CHIPS)}"
        )
    return chip


def _half_peak(chip: Chip, number_format: str) -> float:
    """Return the peak in FLOP/s of attention and head.

    They compute in the format of the matmuls, but not narrower than 16 bits.
    """
    if number_format in ("fp32", "fp64"):
        return chip.peak_flops[number_format]
    return chip.half_peak
