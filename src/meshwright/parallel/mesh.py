"""Process groups along the axes of a Plan's mesh, for all modules that communicate between ranks.

Each set of groups is a partition of all ranks. One split of the world's communicator creates all groups of a partition, without a barrier.
A rank therefore makes O(axes) splits for any number of ranks (MegaScale, Jiang et al. 2024, §3.5, measures the cost of creating each group
separately). The groups of the axes are created at construction, in the plan's order; other groups are created at first use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.world import World, world_group
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import AxisPart, Division, Layout
from meshwright.spec.plan import SHARD_AXES, Plan

Parts = tuple[tuple[int, ...], ...]
"""A partition of all ranks: each rank is in exactly one part."""


class Mesh:
    """The job's ranks as a mesh with the plan's axes, and the process groups along the axes.

    Creating a group at first use (`shards`, `group_over`, `pair`, `split`) is collective over all ranks of the job: every rank
    makes the same calls in the same order. An axis of size 1 has no group.
    """

    def __init__(self, layout: Layout, world: World) -> None:
        self.layout = layout
        self.world = world
        self.coordinates = layout.coordinates(world.rank)
        self._groups_by_parts: dict[Parts, dist.ProcessGroup] = {}
        self._groups_by_axes: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._shards: DeviceMesh | None = None
        self._expert_shards: DeviceMesh | None = None
        self._expert_copies: dist.ProcessGroup | None = None
        for axis, size in layout.axes:
            if size > 1:
                self.group_over((axis,))

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def data_rank(self) -> int:
        """Index of the part of the batch that this rank reads."""
        return self.layout.data_index(self.rank)

    @property
    def data_ranks(self) -> int:
        return self.layout.data_ranks

    def axis_size(self, axis: str) -> int:
        """Number of ranks along `axis`; 1 if the mesh has no such axis."""
        return self.layout.size(axis)

    def coordinate(self, axis: str) -> int:
        """This rank's index along `axis`; 0 if the mesh has no such axis."""
        return self.coordinates.get(axis, 0)

    def part(self, axis: str) -> AxisPart:
        """This rank's index along `axis`, and the number of ranks along it."""
        return AxisPart(self.coordinate(axis), self.axis_size(axis))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """This rank's group along `axis`, in axis order; None if the axis has one rank."""
        return self.group_over((axis,))

    def group_over(self, axes: Sequence[str]) -> dist.ProcessGroup | None:
        """This rank's group of the ranks that differ from it along `axes` only, in rank order; None if the group has one rank."""
        used_axes = tuple(axis for axis in axes if self.layout.size(axis) > 1)
        # Cached by axes: every layer calls this, and computing the partition takes time on a large job.
        if used_axes and used_axes not in self._groups_by_axes:
            self._groups_by_axes[used_axes] = self.split(self.layout.groups(*used_axes), " × ".join(used_axes))
        return self._groups_by_axes.get(used_axes)

    @property
    def division(self) -> Division:
        """This rank's index and the number of ranks, over tensor ranks and over expert ranks; it tells the rank's part of each weight."""
        expert_group = next(group for group in self.layout.expert_groups() if self.rank in group)
        return Division(self.part("tensor"), AxisPart(expert_group.index(self.rank), len(expert_group)))

    @property
    def experts(self) -> dist.ProcessGroup | None:
        """The group of ranks over which a layer's experts are distributed, in the order of the experts; None if it has one rank."""
        return self._group_of_several(self.layout.expert_groups(), "experts")

    @property
    def expert_copies(self) -> dist.ProcessGroup:
        """A second group with the ranks of `experts`, for copies of experts' weights; created once. Collective over all ranks."""
        if self._expert_copies is None:
            # Not `self.split`, which would return the cached group that exchanges tokens: weights would wait for tokens.
            self._expert_copies = self.world.split(self.layout.expert_groups(), "copies of experts")
        return self._expert_copies

    @property
    def model_copy_group(self) -> dist.ProcessGroup | None:
        """The group of ranks that together have one copy of the model: they have the same index along `replicate`."""
        return self.group_over([axis for axis, _ in self.layout.axes if axis != "replicate"])

    def consecutive_group(self, axis: str, count: int) -> dist.ProcessGroup:
        """This rank's group of `count` consecutive ranks along `axis`. `count` must divide the axis. Collective over all ranks."""
        blocks: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self.layout.ranks):
            coordinates = self.layout.coordinates(rank)
            block = tuple({**coordinates, axis: coordinates[axis] // count}.items())
            blocks.setdefault(block, []).append(rank)
        return self.split(tuple(map(tuple, blocks.values())), f"{count} along {axis}")

    def pair(self, pipeline_a: int, pipeline_b: int) -> dist.ProcessGroup | None:
        """The group of the two ranks on these pipeline ranks that share this rank's other coordinates; it sums tied weights.

        None if this rank is on a third pipeline rank. Collective over all ranks.
        """
        group = self.split(pairs_along_pipeline(self.layout, ((pipeline_a, pipeline_b),)), "pair")
        return group if self.coordinate("pipeline") in (pipeline_a, pipeline_b) else None

    def split(self, parts: Parts, description: str) -> dist.ProcessGroup:
        """This rank's group in the partition `parts`; created once, then cached. Collective over all ranks."""
        if parts not in self._groups_by_parts:
            self._groups_by_parts[parts] = world_group() if len(parts) == 1 else self.world.split(parts, description)
        return self._groups_by_parts[parts]

    @property
    def shards(self) -> DeviceMesh:
        """Device mesh for FSDP2 over the ranks that shard the parameters: shard and context ranks."""
        if self._shards is None:
            self._shards = self._device_mesh(self.group_over(SHARD_AXES))
        return self._shards

    @property
    def expert_shards(self) -> DeviceMesh:
        """Device mesh for FSDP2 over the ranks that shard the same experts of one copy of the model."""
        if self._expert_shards is None:
            self._expert_shards = self._device_mesh(
                self._group_of_several(self.layout.expert_shard_groups(), "expert shards")
            )
        return self._expert_shards

    def _group_of_several(self, parts: Parts, description: str) -> dist.ProcessGroup | None:
        """As `split`, but None if every part is a single rank."""
        return self.split(parts, description) if len(parts) < self.layout.ranks else None

    def _device_mesh(self, group: dist.ProcessGroup | None) -> DeviceMesh:
        return DeviceMesh.from_group(group or self._group_of_one(), self.device.type, mesh_dim_names=("shard",))

    def _group_of_one(self) -> dist.ProcessGroup:
        """A group with this rank only, because FSDP2 requires a group on a single rank too."""
        return self.split(tuple((rank,) for rank in range(self.layout.ranks)), "single rank")

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` in place over all ranks of the job."""
        dist.all_reduce(values)
        return values


def build_mesh(plan: Plan, world: World) -> Mesh:
    """Create the process groups of the plan's axes. Collective over all ranks.

    Raises BadInput if the plan is for another number of ranks.
    """
    if plan.ranks != world.ranks:
        raise BadInput(
            f"the plan is for {plan.ranks} ranks and the job has {world.ranks}; plan again or change plan.mesh"
        )
    return Mesh(Layout.of(plan, world.ranks_per_node), world)


def pairs_along_pipeline(layout: Layout, pairs: Sequence[tuple[int, int]]) -> Parts:
    """Partition all ranks into pairs that differ along the pipeline axis only.

    `pairs` are disjoint pairs of pipeline ranks. A rank in no pair becomes a part with one rank: torch names a group by the number of
    groups that a rank has created before, and all members of a group need the same name.
    """
    partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    parts: dict[tuple[int, ...], None] = {}
    for rank in range(layout.ranks):
        coordinates = layout.coordinates(rank)
        pipeline_rank = coordinates.get("pipeline", 0)
        counterpart = layout.rank({**coordinates, "pipeline": partner.get(pipeline_rank, pipeline_rank)})
        parts[tuple(sorted({rank, counterpart}))] = None
    return tuple(parts)
