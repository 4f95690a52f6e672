"""Ranks and coordinates are inverse, groups partition the ranks, shards partition the rows."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.layout import Layout, shard_rows
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan

LAYOUTS = st.builds(
    lambda replicate, shard, outer_shard, per_node: Layout(
        (("shard", shard), ("replicate", replicate)) if outer_shard else (("replicate", replicate), ("shard", shard)),
        per_node,
    ),
    st.integers(1, 5),
    st.integers(1, 6),
    st.booleans(),
    st.integers(1, 8),
)


@given(LAYOUTS)
def test_rank_and_coordinates_are_inverse(layout: Layout) -> None:
    assert [layout.rank(layout.coordinates(rank)) for rank in range(layout.ranks)] == list(range(layout.ranks))
    places = {tuple(layout.coordinates(rank).items()) for rank in range(layout.ranks)}
    assert len(places) == layout.ranks


@given(LAYOUTS)
def test_the_last_axis_is_innermost(layout: Layout) -> None:
    sizes = [range(size) for _, size in layout.axes]
    names = [name for name, _ in layout.axes]
    expected = [dict(zip(names, place, strict=True)) for place in itertools.product(*sizes)]
    assert [layout.coordinates(rank) for rank in range(layout.ranks)] == expected


@given(LAYOUTS, st.sampled_from(["replicate", "shard"]))
def test_groups_partition_the_ranks(layout: Layout, axis: str) -> None:
    groups = {layout.group(axis, rank) for rank in range(layout.ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
    assert {len(group) for group in groups} == {dict(layout.axes)[axis]}
    for rank in range(layout.ranks):
        group = layout.group(axis, rank)
        assert group[layout.coordinates(rank)[axis]] == rank


@given(LAYOUTS)
def test_every_rank_reads_its_own_part_of_the_batch(layout: Layout) -> None:
    assert sorted(layout.data_index(rank) for rank in range(layout.ranks)) == list(range(layout.data_ranks))


def test_a_layout_of_a_plan_and_its_nodes() -> None:
    mesh = (MeshAxis(axis="replicate", size=2, crosses="node"), MeshAxis(axis="shard", size=4))
    layout = Layout.of(Plan(mesh=mesh, batch=BatchPlan(global_batch=8, micro_batch=1, accumulate=1)), 4)
    assert [layout.node(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layout.group("shard", 6) == (4, 5, 6, 7)
    assert layout.group("replicate", 6) == (2, 6)
    assert layout.rank({"replicate": 1}) == 4


@given(st.integers(0, 200), st.integers(1, 17))
def test_shards_partition_the_rows_as_torch_chunks_them(rows: int, parts: int) -> None:
    shards = [shard_rows(rows, parts, index) for index in range(parts)]
    assert [row for shard in shards for row in shard] == list(range(rows))
    sizes = [len(shard) for shard in shards]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == -(-rows // parts)
    assert sum(size not in (0, sizes[0]) for size in sizes) <= 1
