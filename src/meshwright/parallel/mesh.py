"""The Plan's mesh as process groups: made once from the layout and passed down.

Every group comes from one operation, the division of all ranks into parts: one split of the world's communicator for an axis, however many
groups the axis has, and no barrier. So a rank makes O(axes) splits on any number of ranks (MegaScale, Jiang et al. 2024, §3.5, on what
group creation costs otherwise). Axes get theirs at once, in the plan's order; other groups are made on first use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.world import World, world_group
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Division, Layout, Part
from meshwright.spec.plan import SHARD_AXES, Plan

Parts = tuple[tuple[int, ...], ...]
"""All ranks, each in one part."""


class Mesh:
    """The job's ranks arranged by the plan's axes, and the groups along them.

    What is made on first use (`shards`, `group_over`, `pair`, `split`) is collective over all ranks of the job: all must ask for the same
    things in the same order. An axis of one rank costs nothing.
    """

    def __init__(self, layout: Layout, world: World) -> None:
        self.layout = layout
        self.world = world
        self.coordinates = layout.coordinates(world.rank)
        self._made: dict[Parts, dist.ProcessGroup] = {}
        self._along: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._shards: DeviceMesh | None = None
        self._expert_shards: DeviceMesh | None = None
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
        """Which part of the batch this rank reads."""
        return self.layout.data_index(self.rank)

    @property
    def data_ranks(self) -> int:
        return self.layout.data_ranks

    def axis_size(self, axis: str) -> int:
        """Ranks along `axis`; 1 when the mesh lacks it."""
        return self.layout.size(axis)

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`; 0 when the mesh lacks it."""
        return self.coordinates.get(axis, 0)

    def part(self, axis: str) -> Part:
        """Which part of what `axis` divides is this rank's."""
        return Part(self.coordinate(axis), self.axis_size(axis))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one only along `axis`, in axis order; None when that is this rank alone."""
        return self.group_over((axis,))

    def group_over(self, axes: Sequence[str]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `axes` only, in rank order; None when that is this rank alone."""
        long = tuple(axis for axis in axes if self.layout.size(axis) > 1)
        if (
            long and long not in self._along
        ):  # every layer asks, and all ranks of a large job are many to sort into groups
            self._along[long] = self.split(self.layout.groups(*long), " × ".join(long))
        return self._along.get(long)

    @property
    def division(self) -> Division:
        """Which parts are this rank's of what tensor and expert ranks divide."""
        together = next(group for group in self.layout.expert_groups() if self.rank in group)
        return Division(self.part("tensor"), Part(together.index(self.rank), len(together)))

    @property
    def experts(self) -> dist.ProcessGroup | None:
        """The ranks that hold a layer's experts together, in the order of their parts; None when that is this rank alone."""
        return self._joint(self.layout.expert_groups(), "experts")

    @property
    def one_copy(self) -> dist.ProcessGroup | None:
        """The ranks that hold one copy of the model together: those that differ along any axis but `replicate`."""
        return self.group_over([axis for axis, _ in self.layout.axes if axis != "replicate"])

    def neighbours(self, axis: str, count: int) -> dist.ProcessGroup:
        """This rank's block of `count` consecutive ranks along `axis`; collective over all ranks. `count` divides the axis."""
        blocks: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self.layout.ranks):
            place = self.layout.coordinates(rank)
            blocks.setdefault(tuple({**place, axis: place[axis] // count}.items()), []).append(rank)
        return self.split(tuple(map(tuple, blocks.values())), f"{count} along {axis}")

    def pair(self, pipeline_a: int, pipeline_b: int) -> dist.ProcessGroup | None:
        """This rank and the one at the same place of the other pipeline rank, for what two stages share (tied weights).

        Collective over all ranks; None on the pipeline ranks that are neither.
        """
        found = self.split(pairs_along_pipeline(self.layout, ((pipeline_a, pipeline_b),)), "pair")
        return found if self.coordinate("pipeline") in (pipeline_a, pipeline_b) else None

    def split(self, parts: Parts, what: str) -> dist.ProcessGroup:
        """This rank's group when `parts` divides all ranks; made once, then kept. Collective over all ranks."""
        if parts not in self._made:
            self._made[parts] = world_group() if len(parts) == 1 else self.world.split(parts, what)
        return self._made[parts]

    @property
    def shards(self) -> DeviceMesh:
        """torch's device mesh of the ranks that share parameters, for FSDP2: data shards and context ranks."""
        if self._shards is None:
            self._shards = self._for_fsdp(self.group_over(SHARD_AXES))
        return self._shards

    @property
    def expert_shards(self) -> DeviceMesh:
        """The same of the ranks that hold the same experts of one copy of the model, and split their weights."""
        if self._expert_shards is None:
            self._expert_shards = self._for_fsdp(self._joint(self.layout.expert_shard_groups(), "expert shards"))
        return self._expert_shards

    def _joint(self, parts: Parts, what: str) -> dist.ProcessGroup | None:
        return self.split(parts, what) if len(parts) < self.layout.ranks else None

    def _for_fsdp(self, group: dist.ProcessGroup | None) -> DeviceMesh:
        return DeviceMesh.from_group(group or self._alone(), self.device.type, mesh_dim_names=("shard",))

    def _alone(self) -> dist.ProcessGroup:
        """A group of this rank: FSDP2 wants one even where there is nobody to talk to."""
        return self.split(tuple((rank,) for rank in range(self.layout.ranks)), "alone")

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` in place over all ranks of the job."""
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
    return Mesh(Layout.of(plan, world.ranks_per_node), world)


def pairs_along_pipeline(layout: Layout, pairs: Sequence[tuple[int, int]]) -> Parts:
    """All ranks divided into the given disjoint pairs of pipeline ranks, one for each place beside them; the rest are alone.

    They too get a group: torch names groups after how many a rank has made, and members must agree on the name.
    """
    partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    found: dict[tuple[int, ...], None] = {}
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        here = place.get("pipeline", 0)
        other = layout.rank({**place, "pipeline": partner.get(here, here)})
        found[tuple(sorted({rank, other}))] = None
    return tuple(found)
