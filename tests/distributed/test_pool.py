"""The workers of the multi-process tests: a failure is reported with its reason, and all workers end together."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.world import World
from tests.distributed.pool import CaseFailed, Pool

MOMENT = 0.5
"""Seconds in which a rank that need not wait for another has long gone."""


def reaches_a_rank_that_is_done(world: World) -> None:
    if world.rank == 1:
        time.sleep(MOMENT)
        dist.isend(torch.zeros(1), 0)  # raises where the other end of the connection was closed


def test_a_rank_that_is_done_stays_until_all_are(pool: Pool) -> None:
    pool.run(reaches_a_rank_that_is_done, 2)


def does_nothing(world: World) -> int:
    return world.rank


def joins_nobody(world: World) -> None:
    dist.destroy_process_group()
    dist.init_process_group("none of torch's")


def test_a_rank_that_cannot_join_says_why_and_does_not_die(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="none of torch's"):
        pool.run(joins_nobody, 2)
    assert pool.run(does_nothing, 2) == [0, 1]
