"""Processes that die at a random time of a save: what is loaded is the newest committed step or the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.kills import VICTIMS, kill_once

SHORT, BLOCKS, BLOCK = 3, 6, 35


def test_a_process_killed_at_a_random_time(tmp_path: Path) -> None:
    assert {kill_once(tmp_path / str(seed), seed) for seed in range(SHORT)} == set(VICTIMS)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("block", range(BLOCKS))
def test_two_hundred_processes_killed_at_random_times(tmp_path: Path, block: int) -> None:
    for seed in range(SHORT + block * BLOCK, SHORT + (block + 1) * BLOCK):
        kill_once(tmp_path / str(seed), seed)
