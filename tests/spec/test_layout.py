"""Ranks and coordinates are inverse, groups partition the ranks, shards partition the rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec.layout import (
    STAGES_PER_RANK,
    V_SCHEDULES,
    AxisPart,
    Layout,
    balanced_stages,
    context_split_error,
    local_tokens,
    shard_rows,
    stage_table,
    with_node_crossings,
)
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan, SchedulePlan

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
    coordinates = {tuple(layout.coordinates(rank).items()) for rank in range(layout.ranks)}
    assert len(coordinates) == layout.ranks


@given(LAYOUTS)
def test_the_last_axis_is_innermost(layout: Layout) -> None:
    sizes = [range(size) for _, size in layout.axes]
    names = [name for name, _ in layout.axes]
    expected = [dict(zip(names, indices, strict=True)) for indices in itertools.product(*sizes)]
    assert [layout.coordinates(rank) for rank in range(layout.ranks)] == expected


@given(LAYOUTS, st.sampled_from(["replicate", "shard"]))
def test_groups_partition_the_ranks(layout: Layout, axis: str) -> None:
    groups = {layout.group(axis, rank) for rank in range(layout.ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
    assert {len(group) for group in groups} == {dict(layout.axes)[axis]}
    for rank in range(layout.ranks):
        group = layout.group(axis, rank)
        assert group[layout.coordinates(rank)[axis]] == rank


@given(LAYOUTS, st.sampled_from(["replicate", "shard"]))
def test_an_axis_leaves_nodes_where_one_of_its_groups_does(layout: Layout, axis: str) -> None:
    groups = (layout.group(axis, rank) for rank in range(layout.ranks))
    assert layout.axis_crosses_nodes(axis) == any(map(layout.crosses_nodes, groups))


@pytest.mark.parametrize(("per_node", "crossed"), [(8, "ddd"), (4, "ndd"), (2, "nnd"), (1, "nnn"), (3, "nnn")])
def test_what_axes_cross_follows_from_the_nodes_and_not_from_the_plan(per_node: int, crossed: str) -> None:
    mesh = tuple(MeshAxis(axis=axis, size=2, crosses="node") for axis in ("pipeline", "replicate", "shard"))
    mesh += (MeshAxis(axis="tensor", size=1, crosses="node"),)
    plan = with_node_crossings(Plan(mesh=mesh, batch=BatchPlan(global_batch=4, micro_batch=1, accumulate=1)), per_node)
    assert "".join(axis.crosses[0] for axis in plan.mesh) == crossed + "d"


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
def test_shards_partition_the_rows_as_torch_chunks_them(row_count: int, parts: int) -> None:
    shards = [shard_rows(row_count, parts, index) for index in range(parts)]
    assert [index for shard in shards for index in shard] == list(range(row_count))
    sizes = [len(shard) for shard in shards]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == -(-row_count // parts)
    assert sum(size not in (0, sizes[0]) for size in sizes) <= 1


AXES = ("pipeline", "replicate", "shard", "context_ring", "tensor")
ORDERED = st.builds(
    lambda order, sizes: Layout(tuple(zip(order, sizes, strict=True)), 4),
    st.permutations(AXES),
    st.tuples(*[st.integers(1, 3)] * len(AXES)),
)


@given(ORDERED, st.sampled_from(AXES))
def test_members_of_an_axis_are_a_stride_apart(layout: Layout, axis: str) -> None:
    for group in layout.groups(axis):
        assert {b - a for a, b in itertools.pairwise(group)} <= {layout.stride(axis)}
    assert layout.size(axis) > 1 or layout.stride(axis) == 1


@given(ORDERED, st.sets(st.sampled_from(AXES), min_size=1))
def test_members_of_several_axes_are_a_stride_apart_on_average(layout: Layout, axes: set[str]) -> None:
    """Distance between consecutive groups of the outermost axis; uniform if no other axis lies between."""
    coordinates = layout.coordinates(0)
    members = [
        layout.rank(coordinates | dict(zip(axes, at, strict=True)))
        for at in itertools.product(*(range(layout.size(axis)) for axis in axes))
    ]
    long = [layout.stride(axis) * layout.size(axis) for axis in axes if layout.size(axis) > 1]
    assert layout.stride(*axes) == pytest.approx(max(long, default=1) / len(members))
    steps = {b - a for a, b in itertools.pairwise(sorted(members))}
    assert len(steps) != 1 or layout.stride(*axes) == pytest.approx(min(steps))


def sizes_of(table: tuple[tuple[range, ...], ...]) -> list[int]:
    """Layers by stage, in the order of a micro-batch."""
    return [
        len(layers)
        for layers in sorted((layers for stages in table for layers in stages), key=lambda layers: layers.start)
    ]


def owners_of(name: str, pipeline: int, per_rank: int) -> list[int]:
    down = list(range(pipeline))
    return [r for turn in range(per_rank) for r in (down[::-1] if name in V_SCHEDULES and turn % 2 else down)]


def worst(sizes: tuple[int, ...], owners: list[int], head: float, speeds: tuple[float, ...]) -> tuple[float, float]:
    """Time of the slowest rank, and of the slowest stage."""
    work = [size + head * (at == len(sizes) - 1) for at, size in enumerate(sizes)]
    ranks = [sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(len(speeds))]
    slowest = max(total / speed for total, speed in zip(ranks, speeds, strict=True))
    return slowest, max(w / speeds[owner] for w, owner in zip(work, owners, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(("1f1b", "interleaved", "zbv", "breadth_first")),
    st.integers(1, 4),
    st.integers(1, 11),
    st.sampled_from((0.0, 0.5, 1.0, 2.4, 4.0)),
    st.tuples(*[st.sampled_from((1.0, 1.5, 2.0, 2.7))] * 4),
)
def test_no_cut_is_faster(name: str, pipeline: int, layers: int, head: float, four: tuple[float, ...]) -> None:
    """Against every way to cut the layers: first the slowest rank, then the slowest stage."""
    speeds, per_rank = four[:pipeline], STAGES_PER_RANK.get(name, 1)
    owners = owners_of(name, pipeline, per_rank)
    if layers < len(owners):
        with pytest.raises(ValueError, match="cannot fill"):
            balanced_stages(name, pipeline, layers, head, None, speeds)
        return
    table = balanced_stages(name, pipeline, layers, head, None, speeds)
    texts = tuple(tuple(f"{held.start}-{held.stop - 1}" for held in stages) for stages in table)
    assert stage_table(SchedulePlan(name=name, stages=texts), pipeline, layers) == table
    cuts = itertools.combinations(range(1, layers), len(owners) - 1)
    best = min(
        worst(tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))), owners, head, speeds) for cut in cuts
    )
    assert worst(tuple(sizes_of(table)), owners, head, speeds) == pytest.approx(best)


@given(st.integers(1, 12), st.integers(1, 130), st.sampled_from((0.0, 0.5, 1.0, 2.4, 4.0)))
def test_equal_ranks_get_equal_layers_but_the_last(pipeline: int, layers: int, head: float) -> None:
    """Closed form for one stage per rank: the largest last stage that is not the slowest, the others even."""
    if layers < pipeline:
        return
    last = min(
        range(1, layers - pipeline + 2),
        key=lambda size: (max(size + head, -(-(layers - size) // max(1, pipeline - 1))), -size),
    )
    earlier_ranks = pipeline - 1
    expected = [
        (layers - last) // earlier_ranks + (at < (layers - last) % earlier_ranks) for at in range(earlier_ranks)
    ] + [last]
    assert sizes_of(balanced_stages("1f1b", pipeline, layers, head)) == (expected if earlier_ranks else [layers])
    assert balanced_stages("1f1b", pipeline, layers, head, None, (3.0,) * pipeline) == balanced_stages(
        "1f1b", pipeline, layers, head
    )


def test_experts_are_folded_from_the_ranks_of_one_copy() -> None:
    """By hand, 16 ranks: two copies of eight ranks, each with four consecutive expert ranks and two shards."""
    layout = Layout((("replicate", 2), ("shard", 8)), 8, expert=4)
    assert layout.expert_groups() == tuple(tuple(range(first, first + 4)) for first in (0, 4, 8, 12))
    assert layout.expert_shard_groups() == tuple((r, r + 4) for r in (0, 1, 2, 3, 8, 9, 10, 11))
    with_tensor = Layout((("shard", 4), ("tensor", 2)), 8, expert=2)
    assert with_tensor.expert_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert with_tensor.expert_shard_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    with_context = Layout((("shard", 2), ("context_ring", 2), ("tensor", 2)), 8, expert=2)
    assert with_context.expert_groups() == with_tensor.expert_groups()
    assert with_context.expert_shard_groups() == with_tensor.expert_shard_groups()
    outside = Layout((("shard", 4), ("pipeline", 2)), 8, expert=2)
    assert outside.expert_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_context_ranks_hold_every_token_once_in_rising_order(ring: int, ulysses: int, times: int) -> None:
    seq = 2 * ring * ulysses * times
    tokens_by_rank = {
        (r, u): [token for part in local_tokens(seq, AxisPart(r, ring), AxisPart(u, ulysses)) for token in part]
        for r in range(ring)
        for u in range(ulysses)
    }
    assert sorted(token for tokens in tokens_by_rank.values() for token in tokens) == list(range(seq))
    assert all(
        tokens == sorted(tokens) and len(tokens) == seq // (ring * ulysses) for tokens in tokens_by_rank.values()
    )
    for r in range(ring):
        together = [token for u in range(ulysses) for token in tokens_by_rank[r, u]]
        assert together == [token for part in local_tokens(seq, AxisPart(r, ring)) for token in part]
        if ring > 1:  # as many scores under the causal mask as any other
            assert sum(token + 1 for token in together) * ring == seq * (seq + 1) / 2


def test_what_context_ranks_cannot_divide_is_named() -> None:
    assert context_split_error(1, 1, 3, 8, 2, 7) is None
    assert context_split_error(4, 2, 2, 8, 2, 64) is None
    assert context_split_error(4, 1, 1, 8, 2, 24) is None
    for wrong, axis, expected in (
        ((1, 3, 1, 8, 2, 24), "context_ulysses", "model.heads = 8"),
        ((1, 4, 2, 12, 12, 24), "context_ulysses", "model.heads = 12 ÷ tensor 2"),
        ((1, 4, 1, 12, 6, 24), "context_ulysses", "a divisor or a multiple of model.kv_heads = 6"),
        ((4, 1, 1, 8, 2, 28), "context_ring", "a multiple of 8"),
        ((1, 2, 2, 8, 2, 6), "context_ulysses", "a multiple of 4"),
    ):
        message = context_split_error(*wrong)
        assert message is not None and message[0] == axis and expected in message[1]
