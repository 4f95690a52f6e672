"""The ranks that divide the parameters of one pipeline stage, and the boxes (rectangular regions) of each parameter on them."""

from __future__ import annotations

from functools import cache

from meshwright.parallel.mesh import Mesh
from meshwright.spec.layout import AxisPart, Box, Division, Layout, local_boxes
from meshwright.spec.model import ParameterSpec
from meshwright.spec.plan import SHARD_AXES
from meshwright.state.shared_ranks import SharedRanks

STAGE_AXES = (*SHARD_AXES, "tensor")
"""The axes along which the ranks of a stage differ, in one copy of the model: all axes except pipeline and replicate."""


def ranks_of_stage(mesh: Mesh) -> SharedRanks:
    """Return the ranks of this rank's stage in its copy of the model. Collective over all ranks of the job."""
    ranks = mesh.layout.group_of(mesh.rank, *STAGE_AXES)
    divisions = [rank_division(mesh.layout, rank) for rank in ranks]

    @cache
    def boxes(parameter: ParameterSpec) -> list[tuple[Box, ...]]:
        return [local_boxes(parameter, division, parts[parameter.expert]) for division, *parts in divisions]

    return SharedRanks(mesh.group_over(STAGE_AXES), ranks.index(mesh.rank), boxes)


def rank_division(layout: Layout, rank: int) -> tuple[Division, AxisPart, AxisPart]:
    """Return three things about `rank`: its part of divided weights, its shard of dense weights, and its shard of experts."""
    coordinates = layout.coordinates(rank)
    experts, expert_shards = (
        _part(rank, next(group for group in groups if rank in group))
        for groups in (layout.expert_groups(), layout.expert_shard_groups())
    )
    tensor = AxisPart(coordinates.get("tensor", 0), layout.size("tensor"))
    return Division(tensor, experts), _part(rank, layout.group_of(rank, *SHARD_AXES)), expert_shards


def _part(rank: int, group: tuple[int, ...]) -> AxisPart:
    return AxisPart(group.index(rank), len(group))
