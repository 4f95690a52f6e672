"""The Plan's mesh as process groups: made once from the layout and passed down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.parallel.world import World
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """The job's ranks arranged by the plan's axes.

    `devices` is torch's view with one dimension per axis, outermost first.
    """

    layout: Layout
    rank: int
    device: torch.device
    devices: DeviceMesh

    @property
    def data_rank(self) -> int:
        """Which part of the batch this rank reads."""
        return self.layout.data_index(self.rank)

    @property
    def data_ranks(self) -> int:
        return self.layout.data_ranks

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of `axis` this rank belongs to, or None when the mesh lacks the axis."""
        names = self.devices.mesh_dim_names or ()
        return self.devices.get_group(axis) if axis in names else None

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` in place over all ranks that read data (all ranks, while every axis is a data axis)."""
        dist.all_reduce(values)
        return values


def build_mesh(plan: Plan, world: World) -> Mesh:
    """Make the groups of the plan's axes; collective over all ranks.

    Raises BadInput when the plan is for another number of ranks.
    """
    if plan.ranks != world.ranks:
        raise BadInput(
            f"the plan is for {plan.ranks} ranks and the job has {world.ranks}; plan again or change plan.mesh"
        )
    layout = Layout.of(plan, world.place.local_ranks)
    names, sizes = zip(*layout.axes, strict=True)
    devices = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
    return Mesh(layout, world.rank, world.device, devices)
