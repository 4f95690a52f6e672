"""Attempts on fewer and on more hosts train, bit for bit, as starts by hand with the same Plan and checkpoint."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.launch.attempts import write_attempt
from meshwright.policies.supervision import State
from meshwright.spec.run import Assignment
from tests.distributed import cases_numerics as cases
from tests.distributed.pool import Pool
from tests.training.tiny import make_tiny, prepared

WORDS = ("checkpoint.every=3", "train.steps=8")
TWO_HOSTS, ONE_HOST = ("cluster.nodes=2", "cluster.gpus_per_node=1"), ("cluster.gpus_per_node=1",)


def test_attempts_on_fewer_and_then_on_more_hosts_equal_starts_by_hand(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    begun = prepared(tiny, tmp_path / "supervised", *TWO_HOSTS, *WORDS)

    def attempt(number: int, *hosts: str, stop_at: int = 0) -> Any:
        assignment = Assignment.read(write_attempt(begun, State(attempt=number, members=hosts)))
        return pool.run(partial(cases.run_with_nan, stop_at=stop_at), len(hosts), assignment)

    def by_hand(name: str, words: tuple[str, ...], count: int) -> Any:
        """Start from a copy of the run's folder as it is now."""
        shutil.copytree(tmp_path / "supervised", tmp_path / name)
        return pool.run(cases.run_with_nan, count, prepared(tiny, tmp_path / name, *words, *WORDS).assignment)

    attempt(1, "a", "b", stop_at=4)
    shrunk_by_hand = by_hand("shrunk", ONE_HOST, 1)
    shrunk = attempt(2, "a", stop_at=6)
    grown_by_hand = by_hand("grown", TWO_HOSTS, 2)
    grown = attempt(3, "a", "c")
    assert shrunk[0][1] == shrunk_by_hand[0][1][:2] and [step for step, _ in shrunk[0][1]] == [5, 6]
    assert grown[0][1] == grown_by_hand[0][1] and [step for step, _ in grown[0][1]] == [7, 8]
    for state, other in zip(grown, grown_by_hand, strict=True):
        assert state[2].keys() == other[2].keys() and all(
            torch.equal(state[2][name], other[2][name]) for name in state[2]
        )
