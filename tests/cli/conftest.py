"""A tiny run, trained once by the command itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import train_here
from tests.training.tiny import make_tiny

ONE_RANK = "cluster.gpus_per_node=1"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, with checkpoints of steps 3 and 6."""
    runs = tmp_path_factory.mktemp("finished")
    answer = train_here(tiny, ONE_RANK, "checkpoint.every=3", "--runs", runs)
    assert answer.code == 0, answer.err
    assert answer.err == "", "nothing went wrong"
    return runs / "tiny"
