"""The cluster of a run: its nodes and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.spec.chips import CHIPS, Chip, GiB, chip_from_device_name
from meshwright.spec.fields import Bound, Positive
from meshwright.spec.network import NetworkSpec, NodeGroup

__all__ = ["CHIPS", "Chip", "ClusterSpec", "chip_from_device_name"]


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster of nodes with the same devices, except those listed in `groups`."""

    gpu: str = "cpu"
    """Chip name (`cpu` for ranks on this machine's processor)."""
    nodes: Positive = 1
    """Hosts."""
    gpus_per_node: Positive = 1
    """Ranks on each host, one per device."""
    memory_gib: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Memory of one device; none uses the chip's own, and on `cpu` a share of the host's.
    A run does not use more than this."""
    host_memory_gib: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Memory of one host, for offloaded data; none assumes 256 GiB per device.
    A run checks the memory that its host really has."""
    network: NetworkSpec | None = None
    """The network between devices; none uses the chip's reference machine."""
    host_mtbf_hours: Annotated[float, Bound(more_than=0)] = 6300.0
    """Mean time between failures of one host that end a job, in hours, for `checkpoint.every: auto`.
    The default is that of Llama 3's training (arXiv 2407.21783): 419 interruptions in 54 days on 2,048 hosts."""
    price_per_gpu_hour: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Price of one device for one hour, in any currency; none uses the table's (US dollars on demand), if it has one for the chip.
    Meshwright shows money from it; it changes no plan."""
    watts_per_gpu: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Power of one device with its share of host and network, in watts; none uses 1.8 times the device's limit."""
    groups: tuple[NodeGroup, ...] = ()
    """Nodes, included in `nodes`, that differ from the others."""
    emulate_nodes: Positive = 1
    """Nodes emulated by this one host: equal groups of consecutive ranks that communicate with each other only over TCP."""
    profile: str | None = None
    """File written by `meshwright profile` on such a machine.
    Its rates replace those of the datasheet and the fitted constants."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node; an emulated node counts as a node."""
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
        override = None if self.memory_gib is None else int(self.memory_gib * GiB)
        own = override or (chip.memory_bytes if chip else None)
        if own is None:
            return None
        return min([own, *(CHIPS[group.gpu].memory_bytes for group in self.groups if group.gpu in CHIPS)])
