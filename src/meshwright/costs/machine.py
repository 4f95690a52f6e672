"""A ClusterSpec as the cost model sees it: one rate of each kind, that of the slowest nodes, since a step waits for them."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costs.constants import Constants
from meshwright.costs.inputs import Machine
from meshwright.spec.chips import CHIPS, Chip
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.network import FABRIC_US, NetworkSpec

FORMATS = {"bf16": 0.0, "fp16": 0.0, "fp8": 1.0, "mxfp8": 2.0, "nvfp4": 3.0}
"""Number format of matrix products → Machine.low."""


def machine_of(cluster: ClusterSpec, number_format: str = "bf16") -> Machine:
    """The machine that `cluster` describes, for products in `number_format`.

    Raises BadInput for a chip that is not in the table, a format that one of the chips lacks, or groups of more nodes than there are.
    """
    network = cluster.network or NetworkSpec()
    chips = _chips(cluster, number_format)
    first = chips[0]
    ports = [network.port_gb_per_s or first.nic / 1e9]
    ports += [group.port_gb_per_s for group in cluster.groups if group.port_gb_per_s]
    inside = network.link_gb_per_s
    given = cluster.memory_bytes()
    others = [chip.memory_bytes for chip in chips[1:]]
    return Machine(
        peak=min(chip.peak_flops[number_format] for chip in chips),
        half_peak=min(_half(chip) for chip in chips),
        low=FORMATS[number_format],
        hbm=min(chip.hbm for chip in chips),
        memory=min([given or first.memory_bytes, *others]),
        link=inside * 1e9 if inside else min(chip.link for chip in chips),
        nic=min(ports) * 1e9,
        host=min(chip.host for chip in chips),
        domain=network.domain
        or max(cluster.gpus_per_node, first.domain if cluster.gpus_per_node == first.per_node else 1),
        per_node=cluster.gpus_per_node,
        oversubscribed=network.oversubscription,
        pod=network.pod_nodes * cluster.gpus_per_node if network.pod_nodes else float("inf"),
    )


def with_latencies(k: Constants, cluster: ClusterSpec) -> Constants:
    """Fitted constants with the latencies that the cluster states in place of the stack's."""
    network = cluster.network or NetworkSpec()
    port = network.port_us or (FABRIC_US[network.fabric] if network.fabric else k.net_us)
    return replace(k, net_us=port, link_us=network.link_us or k.link_us)


def _chips(cluster: ClusterSpec, number_format: str) -> list[Chip]:
    if sum(group.nodes for group in cluster.groups) > cluster.nodes:
        raise BadInput(
            f"cluster.groups: they have more nodes than cluster.nodes = {cluster.nodes}; it counts all nodes"
        )
    differing = [group.gpu or cluster.gpu for group in cluster.groups]
    rest = sum(group.nodes for group in cluster.groups) < cluster.nodes
    chips = []
    for name in dict.fromkeys([*([cluster.gpu] if rest else []), *differing]):
        if name not in CHIPS:
            raise BadInput(f"cluster.gpu: {name} is not in the chip table; known: {', '.join(CHIPS)}")
        if number_format not in FORMATS or number_format not in CHIPS[name].peak_flops:
            known = ", ".join(kind for kind in CHIPS[name].peak_flops if kind in FORMATS)
            raise BadInput(f"cluster.gpu: {name} has no {number_format} products; it has {known}")
        chips.append(CHIPS[name])
    return chips


def _half(chip: Chip) -> float:
    return chip.peak_flops.get("bf16") or chip.peak_flops["fp16"]
