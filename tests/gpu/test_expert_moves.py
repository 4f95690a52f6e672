"""Experts that move between two GPUs over NCCL: all state changes places bit for bit, training continues."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.test_expert_owners import LAYOUTS, MOVES, moved, renumbered
from tests.distributed.test_training import same_bits
from tests.gpu.runs import RUNS_LIMIT, figures, needs, trained
from tests.gpu.test_experts import BOUND, RUN
from tests.training.tiny import make_tiny, prepared, ranks

from meshwright.parallel.world import join
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.spec.run import Assignment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

TWO_GPUS = {
    "expert ranks": [*LAYOUTS["expert ranks"], *ranks(2), "plan.expert=2"],
    "copies": [*LAYOUTS["copies"], *ranks(2), "plan.expert=2"],
    "tensor": [*LAYOUTS["tensor"], *ranks(2), "plan.shard=1"],
}


def run_rank(rank: int, port: int, assignment: Assignment, folder: Path) -> None:
    """Move experts once on a GPU of this host and save their numbers and the state before and after."""
    world = join(RankEnvironment(rank, 2, rank, 2, "127.0.0.1", port), assignment.run.cluster, timeout_seconds=60)
    numbers, before, after = moved(world, assignment)
    states = [{name: tensor.cpu() for name, tensor in state.items()} for state in (before, after)]
    torch.save((torch.from_numpy(numbers), *states), folder / f"{rank}.pt")
    world.leave()


@pytest.mark.parametrize("layout", TWO_GPUS)
def test_a_move_over_nccl_renumbers_all_state_bit_for_bit(layout: str, tmp_path: Path) -> None:
    needs(2)
    settings = [*TWO_GPUS[layout], *MOVES, "cluster.gpu=H200"]
    assignment = prepared(make_tiny(tmp_path / "data"), tmp_path, *settings).assignment
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (port, assignment, tmp_path), nprocs=2)
    for rank in range(2):
        numbers, before, after = torch.load(tmp_path / f"{rank}.pt")
        assert (numbers.numpy() != np.arange(numbers.shape[1])).any()
        assert same_bits(renumbered(after, numbers.numpy()), before)
        assert any(not torch.equal(after[name], before[name]) for name in before if "router" in name)


def test_training_with_moves_equals_training_without(tmp_path: Path) -> None:
    """Moves after every second step, between the update and gathers of the next step on another stream."""
    needs(2)
    words = ["plan.expert=2", "train.balance_loss=0", "train.steps=12"]
    moves = [*MOVES, "plan.expert_placement_every=2"]
    plain = figures(trained(tmp_path, RUN, "plain", 2, words))
    assert figures(trained(tmp_path, RUN, "moved", 2, [*words, *moves])) == pytest.approx(plain, rel=BOUND)
