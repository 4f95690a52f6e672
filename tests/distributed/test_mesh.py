"""Process groups have the right members; channels send in both directions and around the ring, and nothing between nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.channels import Channels, open_channels
from meshwright.parallel.mesh import Mesh, build_mesh
from meshwright.parallel.world import World, _ranks_per_node
from meshwright.schedules.registry import build
from meshwright.schedules.schedule import looped, rank_of, vee
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Layout
from meshwright.spec.plan import DATA_AXES, BatchPlan, MeshAxis, Plan
from tests.distributed.pool import Pool

AXES = {
    "pipeline outermost": (("pipeline", 2), ("shard", 2)),
    "shard outermost": (("shard", 2), ("pipeline", 2)),
    "replicas": (("replicate", 2), ("shard", 2)),
    "replicas inside": (("shard", 2), ("replicate", 2)),
    "replicas only": (("replicate", 4),),
    "one axis": (("shard", 4),),
    "pipeline only": (("pipeline", 4), ("shard", 1)),
}


def plan(axes: tuple[tuple[str, int], ...]) -> Plan:
    mesh = tuple(MeshAxis(axis=axis, size=size) for axis, size in axes)  # type: ignore[arg-type]
    return Plan(mesh=mesh, batch=BatchPlan(global_batch=4, micro_batch=1, accumulate=1))


def members(group: dist.ProcessGroup | None, rank: int) -> tuple[list[int], int]:
    """The ranks of a group and their numbers summed over it."""
    if group is None:
        return [rank], rank
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    return dist.get_process_group_ranks(group), int(total)


def groups_of(world: World, axes: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    mesh = build_mesh(plan(axes), world)
    members_by_axis: dict[str, Any] = {axis: members(mesh.group(axis), world.rank) for axis, _ in axes}
    members_by_axis["all"] = members(mesh.group_over([axis for axis, _ in axes]), world.rank)
    pipeline, shard = mesh.axis_size("pipeline"), mesh.axis_size("shard")
    pair = mesh.pair(0, pipeline - 1) if pipeline > 1 else None
    members_by_axis["pair"] = members(pair, world.rank) if pair is not None else None
    shards = mesh.shards
    members_by_axis["shards"] = (members(shards.get_group(), world.rank), shards.size(), shards.get_local_rank())
    members_by_axis["names"] = shards.mesh_dim_names
    members_by_axis["devices"] = shards.mesh.tolist()
    members_by_axis["place"] = (mesh.coordinate("pipeline"), mesh.coordinate("shard"), pipeline, shard)
    members_by_axis["data"] = members(mesh.group_over(DATA_AXES), world.rank)[0]
    members_by_axis["sum"] = float(mesh.sum_over_all(torch.tensor([2.0**mesh.rank])))
    return members_by_axis


@pytest.mark.parametrize("name", AXES)
def test_groups_have_the_members_the_layout_says(pool: Pool, name: str) -> None:
    layout = Layout(AXES[name], 4)
    for rank, members_by_axis in enumerate(pool.run(groups_of, 4, AXES[name])):
        coordinates = layout.coordinates(rank)
        for axis, _ in layout.axes:
            group = list(layout.group(axis, rank))
            assert members_by_axis[axis] == (group, sum(group))
        assert members_by_axis["all"] == ([0, 1, 2, 3], 6)
        shard = list(layout.group("shard", rank))
        assert members_by_axis["shards"] == ((shard, sum(shard)), layout.size("shard"), coordinates.get("shard", 0))
        assert members_by_axis["names"] == ("shard",)
        assert members_by_axis["devices"] == shard
        assert members_by_axis["place"][:2] == (coordinates.get("pipeline", 0), coordinates.get("shard", 0))
        data = [r for r in range(4) if layout.coordinates(r).get("pipeline", 0) == coordinates.get("pipeline", 0)]
        assert members_by_axis["data"] == data
        assert members_by_axis["sum"] == 15
        last = layout.size("pipeline") - 1
        if last and coordinates["pipeline"] in (0, last):
            end_ranks = sorted(
                {layout.rank({**coordinates, "pipeline": 0}), layout.rank({**coordinates, "pipeline": last})}
            )
            assert members_by_axis["pair"] == (end_ranks, sum(end_ranks))
        else:
            assert members_by_axis["pair"] is None


def stages_in_turn(world: World, shape: str, ranks: int, stages_per_rank: int) -> tuple[list[float], int]:
    """A number through all stages and back, twice, each stage adding its own; then how many messages this rank sent."""
    mesh = build_mesh(plan((("pipeline", ranks), ("shard", world.ranks // ranks))), replace(world, node_ranks=2))
    placement = vee(ranks) if shape == "vee" else looped(ranks, stages_per_rank)
    stage_ranks, coordinate = rank_of(placement), mesh.coordinate("pipeline")
    path = [*range(len(stage_ranks)), *reversed(range(len(stage_ranks)))]
    hops = [(stage_ranks[a], stage_ranks[b]) for a, b in pairwise(path)]
    channels = open_channels(mesh, [hop for hop in hops if hop[0] != hop[1]])
    values: list[float] = []
    sent = 2 * sum(a == coordinate != b for a, b in hops)
    start = torch.tensor([[0.5 + mesh.coordinate("shard")]])
    for _ in range(2):
        x = _round(channels, path, hops, stage_ranks, coordinate, start)
        values.append(float(x))
    return values, sent


def _round(
    channels: Channels,
    path: list[int],
    hops: list[tuple[int, int]],
    stage_ranks: tuple[int, ...],
    coordinate: int,
    x: torch.Tensor,
) -> torch.Tensor:
    arriving = {n: channels.recv(a, (1, 1), torch.float32) for n, (a, b) in enumerate(hops) if b == coordinate != a}
    leaving = []
    for number, stage in enumerate(path):
        if stage_ranks[stage] != coordinate:
            continue
        if number - 1 in arriving:
            x = arriving[number - 1].wait()
        x = x + stage
        if number < len(hops) and hops[number][1] != coordinate:
            leaving.append(channels.send(hops[number][1], x))
    for transfer in leaving:
        transfer.wait()
    return x


PLACEMENTS = [("looped", 4, 1), ("looped", 4, 3), ("looped", 2, 2), ("vee", 4, 2), ("vee", 2, 2)]


@pytest.mark.parametrize(("shape", "ranks", "stages_per_rank"), PLACEMENTS)
def test_messages_go_both_ways_and_round_the_ring(pool: Pool, shape: str, ranks: int, stages_per_rank: int) -> None:
    """All receives are posted before the first send, so messages of one channel must match in order; shards do not mix."""
    stages = ranks * stages_per_rank
    answers = pool.run(stages_in_turn, 4, shape, ranks, stages_per_rank)
    shards = 4 // ranks
    for rank in range(shards):
        assert answers[rank][0] == [0.5 + rank + 2 * sum(range(stages))] * 2
    hops = 2 * (stages - 1) - 2 * (shape == "vee")  # the two middle stages of a V are on one rank
    assert sum(sent for _, sent in answers) == 2 * hops * shards


def schedules_in_turn(world: World) -> int:
    """The channels of one schedule after another on one mesh, some of whose ranks are in none."""
    mesh = build_mesh(plan((("pipeline", 4), ("shard", 1))), world)
    opened = [open_channels(mesh, build(name, 4, 8).channels) for name in ("1f1b", "interleaved", "zbv")]
    opened.append(open_channels(mesh, [(3, 1)]))
    return len(opened)


def test_channels_can_be_opened_again(pool: Pool) -> None:
    assert pool.run(schedules_in_turn, 4) == [4] * 4


def attempts(world: World, name: str) -> dict[str, str]:
    """Each path beside NCCL, tried first with all ranks and then inside the node, on two nodes of two ranks."""
    world = replace(world, node_ranks=2)
    mesh = build_mesh(plan((("replicate", 2), ("shard", 2))), world)
    everyone, node = list(range(4)), dist.get_process_group_ranks(mesh.group("shard"))  # type: ignore[arg-type]
    errors = {}
    for path in (symmetric_memory, cuda_ipc, shared_host_memory):
        for group_name, group in (("all", everyone), ("node", node)):
            try:
                errors[f"{path.__name__} {group_name}"] = path(mesh, group, f"{name}-{group[0]}")
            except BadInput as error:
                errors[f"{path.__name__} {group_name}"] = str(error)
    return errors


def symmetric_memory(mesh: Mesh, ranks: list[int], name: str) -> str:
    mesh.world.refuse_across_nodes(ranks, "symmetric memory")
    import torch.distributed._symmetric_memory as symmetric

    try:
        symmetric.empty(4, dtype=torch.float32, device=mesh.device)
    except RuntimeError:
        return "torch has none here"
    return "made"


def cuda_ipc(mesh: Mesh, ranks: list[int], name: str) -> str:
    mesh.world.refuse_across_nodes(ranks, "CUDA IPC")
    try:
        torch.zeros(1, device="cuda").untyped_storage()._share_cuda_()
    except (RuntimeError, AssertionError):
        return "torch has none here"
    return "made"


def shared_host_memory(mesh: Mesh, ranks: list[int], name: str) -> str:
    """The first rank writes and the others read what it wrote."""
    mesh.world.refuse_across_nodes(ranks, "shared host memory")
    group = mesh.group("shard")
    first = mesh.rank == ranks[0]
    if first:
        memory = SharedMemory(name, create=True, size=8)
        memory.buf[0] = 7 + ranks[0]
    dist.barrier(group=group)
    if not first:
        memory = SharedMemory(name, track=False) if hasattr(SharedMemory, "_track") else SharedMemory(name)
    value = memory.buf[0]
    dist.barrier(group=group)
    memory.close()
    if first:
        memory.unlink()
    return f"read {value}"


def test_nothing_but_nccl_and_sockets_joins_emulated_nodes(pool: Pool, tmp_path: Any) -> None:
    answers = pool.run(attempts, 4, f"meshwright-{tmp_path.name}-{id(tmp_path)}")
    for rank, rank_errors in enumerate(answers):
        for path in ("symmetric memory", "CUDA IPC", "shared host memory"):
            expected = f"{path} between rank 0 (node 0) and rank 2 (node 1): nodes share no memory; keep it to the 2 ranks of one node"
            assert rank_errors[f"{path.replace(' ', '_').lower()} all"] == expected
        assert rank_errors["shared_host_memory node"] == f"read {7 + rank // 2 * 2}"
        assert "node 1" not in rank_errors["symmetric_memory node"] + rank_errors["cuda_ipc node"]


def node_ranks(world: World, names: list[str], local_ranks: int) -> int | str:
    with pytest.MonkeyPatch.context() as patch:
        if names:
            patch.setenv("NCCL_HOSTID", names[world.rank])
        try:
            environment = replace(world.environment, local_rank=world.rank % local_ranks, local_ranks=local_ranks)
            return _ranks_per_node(environment, world.control)
        except BadInput as error:
            return str(error)


def test_nodes_are_the_launchers_hosts_divided_as_nccl_was_told(pool: Pool) -> None:
    assert pool.run(node_ranks, 4, [], 4) == [4] * 4
    assert pool.run(node_ranks, 4, [], 2) == [2] * 4
    assert pool.run(node_ranks, 4, ["node0", "node0", "node1", "node1"], 4) == [2] * 4
    assert pool.run(node_ranks, 4, ["node0", "node1", "node0", "node1"], 2) == [1] * 4
    mixed = pool.run(node_ranks, 4, ["node0", "node1", "node0", "node1"], 4)
    assert len(set(mixed)) == 1
    assert str(mixed[0]).startswith("the ranks are on nodes 0, 1, 0, 1; expected consecutive ranks")
