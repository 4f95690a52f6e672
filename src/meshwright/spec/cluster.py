"""What a run runs on, and what its chips can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.spec.chips import CHIPS, Chip, GiB, chip_from_device_name
from meshwright.spec.fields import Bound, Positive
from meshwright.spec.network import NetworkSpec, NodeGroup

__all__ = ["CHIPS", "Chip", "ClusterSpec", "chip_from_device_name"]


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of devices, alike unless `groups` says otherwise."""

    gpu: str = "cpu"
    """Chip name (`cpu` for ranks on this machine's processor)."""
    nodes: Positive = 1
    """Hosts."""
    gpus_per_node: Positive = 1
    """Ranks on each host, one per device."""
    memory_gib: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Memory of one device; none takes the chip's own, and on `cpu` a share of what the host has. What a GPU has beyond it stays unused."""
    host_memory_gib: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Memory of one host, for what a plan lets wait there; none guesses 256 GiB a device, and a run is held to what its own host has."""
    network: NetworkSpec | None = None
    """What joins the devices; none takes the chip's reference machine."""
    groups: tuple[NodeGroup, ...] = ()
    """Nodes, of those counted above, that differ from the rest."""
    emulate_nodes: Positive = 1
    """Nodes that this one host plays: that many equal groups of its ranks, in order, that reach one another only over TCP."""
    profile: str | None = None
    """File that `meshwright profile` wrote on such a machine: its figures price plans in place of the datasheet's and fitted ones."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node, where an emulated node counts as one."""
        return self.gpus_per_node // self.emulate_nodes

    @property
    def is_cpu(self) -> bool:
        return self.gpu == "cpu"

    def peak_flops(self, precision: str) -> float | None:
        """Dense peak of one device in FLOP/s, or None when it is not in the table or not the same for all nodes."""
        if any(group.gpu not in (None, self.gpu) for group in self.groups):
            return None
        chip = CHIPS.get(self.gpu)
        return chip.peak_flops.get(precision) if chip else None

    def memory_bytes(self) -> int | None:
        """Memory of the smallest device, or None when it is not known."""
        chip = CHIPS.get(self.gpu)
        given = None if self.memory_gib is None else int(self.memory_gib * GiB)
        own = given or (chip.memory_bytes if chip else None)
        if own is None:
            return None
        return min([own, *(CHIPS[group.gpu].memory_bytes for group in self.groups if group.gpu in CHIPS)])
