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
    """A cluster of nodes with the same devices, except for the nodes in `groups`."""

    gpu: str = "cpu"
    """Name of the chip (`cpu` for ranks on the processor of this machine)."""
    nodes: Positive = 1
    """Number of hosts."""
    gpus_per_node: Positive = 1
    """Number of ranks on each host, one per device."""
    memory_gib: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Memory of one device; none is the chip's own, and on `cpu` a share of the host's memory.

    A run does not use more than this.
    """
    host_memory_gib: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Memory of one host, for offloaded data; none assumes 256 GiB per device.

    A run checks the memory that its host really has.
    """
    network: NetworkSpec | None = None
    """The network between devices; none is the network of the chip's reference machine."""
    host_mtbf_hours: Annotated[float, Bound(more_than=0)] = 6300.0
    """Mean time between failures of one host that end a job, in hours, for `checkpoint.every: auto`.

    The default comes from Llama 3's training (arXiv 2407.21783): 419 interruptions in 54 days on 2,048 hosts.
    """
    price_per_gpu_hour: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Price of one device for one hour, in any currency; none is the price in the table (US dollars on demand), if it
    has one for the chip. It only changes the amounts of money that are shown, not the plan.
    """
    watts_per_gpu: Annotated[float, Bound(more_than=0, at_most=1e6)] | None = None
    """Power of one device with its share of host and network, in watts; none is 1.8 times the device's power limit."""
    groups: tuple[NodeGroup, ...] = ()
    """Nodes that differ from the others; `nodes` counts them too."""
    emulate_nodes: Positive = 1
    """Number of nodes that this one host emulates: equal groups of consecutive ranks, which communicate with each other
    only over TCP.
    """
    profile: str | None = None
    """File that `meshwright profile` wrote on such a machine.

    Its rates replace the datasheet's rates and the fitted constants.
    """

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on a node; an emulated node counts as a node."""
        return self.gpus_per_node // self.emulate_nodes

    @property
    def is_cpu(self) -> bool:
        """Return whether the ranks compute on a processor."""
        return self.gpu == "cpu"

    def peak_flops(self, precision: str) -> float | None:
        """Return the dense peak of one device in FLOP/s for a number format.

        None if the table does not have it, or if it is not the same for all nodes.
        """
        if any(group.gpu not in (None, self.gpu) for group in self.groups):
            return None
        chip = CHIPS.get(self.gpu)
        return chip.peak_flops.get(precision) if chip else None

    def memory_bytes(self) -> int | None:
        """Return the memory of the smallest device; None if it is not known."""
        chip = CHIPS.get(self.gpu)
        override = None if self.memory_gib is None else int(self.memory_gib * GiB)
        own = override or (chip.memory_bytes if chip else None)
        if own is None:
            return None
        return min([own, *(CHIPS[group.gpu].memory_bytes for group in self.groups if group.gpu in CHIPS)])
