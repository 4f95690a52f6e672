"""RankEnvironment reads the variables of every launcher and rejects those with which ranks cannot reach rank 0."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.world import RankEnvironment, World, block_size, limit_device_memory, open_store
from meshwright.spec.errors import BadInput

MEET = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("env", "environment"),
    [
        ({}, RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0)),
        (TORCHRUN | MEET, RankEnvironment(9, 16, 1, 8, "node1", 29500)),
        (SLURM | TORCHRUN | {"RANK": "3"} | MEET, RankEnvironment(3, 16, 1, 8, "node1", 29500)),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "8"} | MEET, RankEnvironment(9, 16, 1, 8, "node1", 29500)),
        (SLURM | {"SLURM_NNODES": "2"} | MEET, RankEnvironment(9, 16, 1, 8, "node1", 29500)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0)),
        ({"RANK": "1", "WORLD_SIZE": "2"} | MEET, RankEnvironment(1, 2, 0, 1, "node1", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0)),
    ],
    ids=[
        "alone",
        "torchrun",
        "torchrun inside Slurm",
        "srun",
        "srun by nodes",
        "sbatch alone",
        "Kubernetes",
        "one rank",
    ],
)
def test_rank_environment_of_each_launcher(env: dict[str, str], environment: RankEnvironment) -> None:
    assert RankEnvironment.from_environment(env) == environment


@pytest.mark.parametrize("missing", MEET)
@pytest.mark.parametrize("launcher", [TORCHRUN, SLURM], ids=["torchrun", "srun"])
def test_ranks_that_do_not_know_where_to_meet_are_told(launcher: dict[str, str], missing: str) -> None:
    env = launcher | {name: value for name, value in MEET.items() if name != missing}
    with pytest.raises(BadInput, match=r"rank 9 of 16: MASTER_ADDR and MASTER_PORT must name rank 0's host"):
        RankEnvironment.from_environment(env)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize(
    "launcher",
    [TORCHRUN, SLURM | {"SLURM_NTASKS_PER_NODE": "8"}, SLURM | {"SLURM_NNODES": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}],
)
def test_loopback_is_refused_for_several_hosts(launcher: dict[str, str], address: str) -> None:
    with pytest.raises(BadInput, match="which other hosts cannot reach"):
        RankEnvironment.from_environment(launcher | {"MASTER_ADDR": address, "MASTER_PORT": "29500"})


def test_loopback_is_good_for_one_host() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert (
        RankEnvironment.from_environment(env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).address == "127.0.0.1"
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set in the environment; expected an integer ≥ 1"),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE is 'x' in the environment; expected an integer ≥ 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '999"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is '' in the environment; expected an integer from 0 to 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK is '2' .* from 0 to 1 \(below WORLD_SIZE\)"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'"),
        (TORCHRUN | MEET | {"LOCAL_RANK": "8"}, r"LOCAL_RANK is '8' .* \(below LOCAL_WORLD_SIZE\)"),
        (TORCHRUN | MEET | {"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one'"),
        (TORCHRUN | MEET | {"LOCAL_WORLD_SIZE": "17"}, r"LOCAL_WORLD_SIZE is '17' .* \(at most WORLD_SIZE\)"),
        (TORCHRUN | MEET | {"MASTER_PORT": "http"}, r"MASTER_PORT is 'http' .* from 0 to 65535 \(a port\)"),
        (TORCHRUN | MEET | {"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        (SLURM | MEET | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS is 'many'"),
        (SLURM | MEET | {"SLURM_PROCID": "16"}, r"SLURM_PROCID is '16' .* \(below SLURM_NTASKS\)"),
        (SLURM | MEET | {"SLURM_LOCALID": ""}, "SLURM_LOCALID is ''"),
        (SLURM | MEET | {"SLURM_NNODES": "0"}, "SLURM_NNODES is '0'"),
        (SLURM | MEET | {"SLURM_NTASKS_PER_NODE": "8(x2)"}, r"SLURM_NTASKS_PER_NODE is '8\(x2\)'"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"} | MEET, "SLURM_LOCALID is not set"),
    ],
)
def test_a_variable_that_is_missing_or_out_of_range_is_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        RankEnvironment.from_environment(env)


def world(rank: int, node_ranks: int | None = None) -> World:
    return World(RankEnvironment(rank, 8, rank, 8, "host", 1), torch.device("cpu"), None, node_ranks)  # type: ignore[arg-type]


def test_nodes_are_those_of_the_launcher_unless_the_host_plays_several() -> None:
    assert [world(0).node(rank) for rank in (0, 7)] == [0, 0]
    assert [world(0, 4).node(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]


def test_memory_is_shared_inside_a_node_only() -> None:
    world(0).refuse_across_nodes(range(8), "symmetric memory")
    world(0, 4).refuse_across_nodes((4, 5, 7), "symmetric memory")
    with pytest.raises(BadInput, match=r"shared host memory between rank 1 \(node 0\) and rank 4 \(node 1\)"):
        world(0, 4).refuse_across_nodes((1, 2, 4), "shared host memory")


@pytest.mark.parametrize(
    ("nodes", "size"),
    [([9], 1), ([5, 5, 5], 3), ([5, 5, 2, 2], 2), ([3, 1, 2], 1), ([1, 1, 2], 1), ([7] * 6 + [8] * 6 + [9] * 4, 2)],
)
def test_ranks_of_a_node(nodes: list[int], size: int) -> None:
    assert block_size(nodes) == size


@pytest.mark.parametrize("nodes", [[1, 2, 1, 2], [1, 1, 2, 2, 1, 1]])
def test_nodes_whose_ranks_are_not_consecutive_are_refused(nodes: list[int]) -> None:
    with pytest.raises(BadInput, match="expected consecutive ranks on each node"):
        block_size(nodes)


@pytest.mark.parametrize(("memory", "expected_fractions"), [(45, [45 / 141]), (141, []), (150, [])])
def test_memory_that_a_device_has_beyond_the_cluster_s_stays_unused(
    monkeypatch: pytest.MonkeyPatch, memory: int, expected_fractions: list[float]
) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=141 << 30))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.append(fraction)
    )
    limit_device_memory(memory << 30, torch.device("cuda", 0))
    assert fractions == pytest.approx(expected_fractions)


def test_ranks_that_an_agent_starts_again_do_not_meet_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps its store over restarts: what the last attempt's ranks wrote there must not be read."""
    agent = dist.HashStore()
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: agent)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(open_store(RankEnvironment(0, 2, 0, 2, "node1", 29500), timedelta(seconds=1)))
    stores[0].set("address", "old")
    assert not stores[1].check(["address"])
