"""Groups are made by few operations however many ranks there are, and have the members that the layout says."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.parallel import channels as channels_module
from meshwright.parallel import mesh as mesh_module
from meshwright.parallel import world as world_module
from meshwright.parallel.channels import matchings, open_channels
from meshwright.parallel.mesh import Mesh, pairs_along_pipeline
from meshwright.parallel.world import World
from meshwright.schedules.registry import build
from meshwright.spec.layout import Layout
from meshwright.spec.rank_environment import RankEnvironment
from tests.schedules.sizes import PIPELINES

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
LAYOUTS = {
    "64": Layout((("pipeline", 4), ("replicate", 2), ("shard", 8)), 8),
    "128": Layout((("replicate", 16), ("shard", 8)), 8),
    "256": Layout((("pipeline", 7), ("replicate", 3), ("shard", 4), ("tensor", 3)), 4),
    "512": Layout((("pipeline", 8), ("replicate", 2), ("shard", 8), ("context_ring", 1), ("tensor", 4)), 8),
    "512 in one axis": Layout((("shard", 512),), 8),
}


class Recorded:
    """torch.distributed for one rank of a job that is not there: it answers and keeps what it was asked, in order."""

    class _Group:
        def __init__(self, ranks: list[int], rank: int) -> None:
            self.ranks, self._rank = ranks, rank

        def rank(self) -> int:
            return self.ranks.index(self._rank)

    class _Work:
        def wait(self) -> None: ...

    ProcessGroup = _Group

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self.group = type("group", (), {"WORLD": self._Group(list(range(ranks)), rank)})
        self.calls: list[tuple[str, Any]] = []

    def split_group(
        self, parent: object, groups: list[list[int]], *, timeout: timedelta, pg_options: object, group_desc: str
    ) -> _Group:
        assert parent is None and pg_options is None and group_desc
        assert timeout == timedelta(seconds=7)
        self.calls.append(("split_group", groups))
        return self._Group(next(group for group in groups if self._rank in group), self._rank)

    def isend(self, message: torch.Tensor, *, group: _Group, group_dst: int) -> _Work:
        self.calls.append(("isend", group.ranks[group_dst]))
        return self._Work()

    def irecv(self, message: torch.Tensor, *, group: _Group, group_src: int) -> _Work:
        peer = group.ranks[group_src]
        message.fill_(self.layout.coordinates(peer)["pipeline"])
        self.calls.append(("irecv", peer))
        return self._Work()

    def __getattr__(self, name: str) -> Any:
        if name == "Work":
            return self._Work
        raise AssertionError(f"dist.{name} is not among the operations that making groups may use")


def recorded(monkeypatch: pytest.MonkeyPatch, layout: Layout, rank: int) -> tuple[Mesh, Recorded]:
    fake = Recorded(rank, layout.ranks)
    fake.layout = layout
    for module in (world_module, mesh_module, channels_module):
        monkeypatch.setattr(module, "dist", fake)
    environment = RankEnvironment(rank, layout.ranks, rank % layout.ranks_per_node, layout.ranks_per_node, "host", 1)
    world = World(environment, torch.device("cuda", 0), cast(Any, fake.group.WORLD), limit=timedelta(seconds=7))
    return Mesh(layout, world), fake


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_splits_once_an_axis(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All ranks split the world in one order and by the same divisions.

    They do nothing else: no barrier, no access to the store, no loop over groups.
    """
    layout = LAYOUTS[name]
    axes = set()
    for rank in range(layout.ranks):
        mesh, fake = recorded(monkeypatch, layout, rank)
        assert [call for call, _ in fake.calls] == ["split_group"] * sum(
            1 < size < layout.ranks for _, size in layout.axes
        )
        for axis, size in layout.axes:
            group = cast(Any, mesh.group(axis))
            assert group.ranks == list(layout.group(axis, rank)) if size > 1 else group is None
        axes.add(str(fake.calls))
    assert len(axes) == 1
    assert all(
        sorted(rank for members in member_lists for rank in members) == list(range(layout.ranks))
        for _, member_lists in fake.calls
    )


def test_other_groups_are_made_on_first_use_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["512"]
    mesh, fake = recorded(monkeypatch, layout, 200)
    calls_before = len(fake.calls)
    stage_shards = cast(Any, mesh.group_over(("pipeline", "shard")))
    coordinates = layout.coordinates(200)
    alike = [
        r
        for r in range(512)
        if all(layout.coordinates(r)[axis] == coordinates[axis] for axis in ("replicate", "tensor"))
    ]
    assert stage_shards.ranks == alike
    assert mesh.group_over(("shard", "pipeline")) is stage_shards
    assert mesh.group_over(("context_ring", "shard")) is mesh.group("shard")
    assert mesh.group_over(("context_ring",)) is None
    all_axes = cast(Any, mesh.group_over(("pipeline", "replicate", "shard", "tensor")))
    assert all_axes is fake.group.WORLD
    first_and_last = mesh.pair(0, 7)
    assert (first_and_last is None) == (coordinates["pipeline"] not in (0, 7))
    assert len(fake.calls) == calls_before + 2


def test_one_copy_leaves_out_replicas_and_neighbours_are_blocks_of_an_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout((("replicate", 2), ("shard", 2), ("tensor", 4)), 8)
    for rank in range(layout.ranks):
        mesh, fake = recorded(monkeypatch, layout, rank)
        assert cast(Any, mesh.model_copy_group).ranks == list(range(rank // 8 * 8, rank // 8 * 8 + 8))
        assert cast(Any, mesh.consecutive_group("tensor", 2)).ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
        calls_before = len(fake.calls)
        assert mesh.consecutive_group("tensor", 4) is mesh.group("tensor") and len(fake.calls) == calls_before
    copies, _ = recorded(monkeypatch, Layout((("replicate", 4), ("shard", 1)), 4), 0)
    assert copies.model_copy_group is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("schedule", PIPELINES)
def test_channels_take_six_splits_at_most_and_one_group_each(
    monkeypatch: pytest.MonkeyPatch, schedule: str, ranks: int
) -> None:
    built_schedule = build(schedule, ranks, 2 * ranks)
    layout = Layout((("pipeline", ranks), ("shard", 4)), 2)
    orders = set()
    for rank in range(layout.ranks):
        mesh, fake = recorded(monkeypatch, layout, rank)
        with monkeypatch.context() as patch:
            patch.setattr(channels_module, "torch", _OnCpu())
            channels = open_channels(mesh, built_schedule.channels)
        splits = [member_lists for call, member_lists in fake.calls if call == "split_group"][2:]
        assert len(splits) <= 6
        own_stage = mesh.coordinate("pipeline")
        assert sorted(channels._outgoing) == sorted(b for a, b in built_schedule.channels if a == own_stage)
        assert sorted(channels._incoming) == sorted(a for a, b in built_schedule.channels if b == own_stage)
        groups = [*channels._outgoing.values(), *channels._incoming.values()]
        assert len({id(group) for group in groups}) == len(groups)
        assert all(len(cast(Any, group).ranks) == 2 for group in groups)
        orders.add(str(splits))
    assert len(orders) == 1


class _OnCpu:
    """torch, whatever device is asked for."""

    int64, Tensor, dtype = torch.int64, torch.Tensor, torch.dtype

    @staticmethod
    def tensor(values: list[int], device: object) -> torch.Tensor:
        return torch.tensor(values)

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: object) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


@given(st.integers(2, 12), st.data())
def test_matchings_hold_every_pair_once_and_no_rank_twice(ranks: int, data: st.DataObject) -> None:
    everyone = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    pairs = data.draw(st.lists(st.sampled_from(everyone), unique=True))
    lists = matchings(pairs, ranks)
    assert sorted(pair for matching in lists for pair in matching) == sorted(pairs)
    for matching in lists:
        matched_ranks = [rank for pair in matching for rank in pair]
        assert len(set(matched_ranks)) == len(matched_ranks)


@given(st.sampled_from(list(LAYOUTS.values())), st.sets(st.sampled_from(["pipeline", "replicate", "shard", "tensor"])))
def test_parts_hold_every_rank_once_in_order(layout: Layout, axes: set[str]) -> None:
    groups = layout.groups(*sorted(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
    for group in groups:
        assert list(group) == sorted(group)
        assert len({tuple(p for axis, p in layout.coordinates(r).items() if axis not in axes) for r in group}) == 1


def test_pairs_along_the_pipeline_leave_the_others_alone() -> None:
    layout = Layout((("pipeline", 3), ("shard", 2)), 2)
    assert set(pairs_along_pipeline(layout, ((2, 0),))) == {(0, 4), (1, 5), (2,), (3,)}


PATHS_BESIDE_NCCL = ("_symmetric_memory", "shared_memory", "share_memory_", "_share_cuda_", "_share_filename_cpu_")
"""How torch and Python name symmetric memory, CUDA IPC and memory that processes of one host share."""


def test_no_code_reaches_another_ranks_memory_without_asking_for_its_node() -> None:
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not any(name in text for name in PATHS_BESIDE_NCCL) or "refuse_across_nodes(" in text, file
