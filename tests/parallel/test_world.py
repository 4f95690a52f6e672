"""A rank finds its place from whatever launcher started it, and refuses one where the ranks could not meet."""

from __future__ import annotations

import pytest

from meshwright.parallel.world import Place
from meshwright.spec.errors import BadInput

MEET = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, Place(0, 1, 0, 1, "127.0.0.1", 0)),
        (TORCHRUN | MEET, Place(9, 16, 1, 8, "node1", 29500)),
        (SLURM | TORCHRUN | {"RANK": "3"} | MEET, Place(3, 16, 1, 8, "node1", 29500)),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "8"} | MEET, Place(9, 16, 1, 8, "node1", 29500)),
        (SLURM | {"SLURM_NNODES": "2"} | MEET, Place(9, 16, 1, 8, "node1", 29500)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, Place(0, 1, 0, 1, "127.0.0.1", 0)),
        ({"RANK": "1", "WORLD_SIZE": "2"} | MEET, Place(1, 2, 0, 1, "node1", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0, 1, "127.0.0.1", 0)),
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
def test_place_of_a_rank(env: dict[str, str], place: Place) -> None:
    assert Place.from_environment(env) == place


@pytest.mark.parametrize("missing", MEET)
@pytest.mark.parametrize("launcher", [TORCHRUN, SLURM], ids=["torchrun", "srun"])
def test_ranks_that_do_not_know_where_to_meet_are_told(launcher: dict[str, str], missing: str) -> None:
    env = launcher | {name: value for name, value in MEET.items() if name != missing}
    with pytest.raises(BadInput, match=r"rank 9 of 16: MASTER_ADDR and MASTER_PORT must name rank 0's host"):
        Place.from_environment(env)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize(
    "launcher",
    [TORCHRUN, SLURM | {"SLURM_NTASKS_PER_NODE": "8"}, SLURM | {"SLURM_NNODES": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}],
)
def test_loopback_is_refused_for_several_hosts(launcher: dict[str, str], address: str) -> None:
    with pytest.raises(BadInput, match="which other hosts cannot reach"):
        Place.from_environment(launcher | {"MASTER_ADDR": address, "MASTER_PORT": "29500"})


def test_loopback_is_good_for_one_host() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Place.from_environment(env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).address == "127.0.0.1"
