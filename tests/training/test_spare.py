"""Spare processes, started without a rank, become ranks when they receive the message Begin."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.events.messages import (
    CHANNEL,
    BeginMessage,
    Message,
    ProgressMessage,
    RankMessageReader,
    StepMessage,
    encode,
)
from meshwright.events.progress import PROGRESS, ProgressPage
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Spare:
    """A process of `training.rank` without a rank, and the launcher's ends of its pipes."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.reader, self.page = RankMessageReader(reading), ProgressPage.create()
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        env |= {CHANNEL: str(writing), "MESHWRIGHT_PARENT": str(os.getpid()), PROGRESS: self.page.path}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.training.rank", "cpu", "spare"],
            env=env,
            pass_fds=[writing],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        os.close(writing)

    def begin(self, message: BeginMessage) -> None:
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), encode(message))

    def messages(self) -> list[Message]:
        """All messages until the process has ended."""
        messages, deadline = [], time.monotonic() + 60
        while self.reader.open and time.monotonic() < deadline:
            messages += self.reader.read()
            time.sleep(0.01)
        return messages


@pytest.mark.parametrize("count", quick_first(1, [1, 2]))
def test_spares_become_the_ranks_of_a_run(tiny: Path, tmp_path: Path, count: int) -> None:
    prepared_run = prepared(tiny, tmp_path, *ranks(count))
    spares, port = [Spare() for _ in range(count)], str(free_port())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MESHWRIGHT_STORE_BIND": "127.0.0.1"}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    for rank, spare in enumerate(reversed(spares)):
        rank_environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes}
        spare.begin(BeginMessage(str(prepared_run.folder / "assignment.json"), address | rank_environment))
    for rank, spare in enumerate(reversed(spares)):
        messages = spare.messages()
        assert spare.process.wait(60) == 0
        assert [message.step for message in messages if isinstance(message, StepMessage)] == [1, 2, 3, 4, 5, 6]
        phases = [
            message.phase for message in messages if isinstance(message, ProgressMessage) and message.action == -1
        ]
        assert phases == ["compile", "train", "validate", "save", "end"]
        assert spare.page.read().phase == "end" and spare.page.count > 20
        assert (prepared_run.folder / "logs" / f"rank-{rank:05d}.log").exists()


@pytest.mark.slow
def test_a_spare_whose_launcher_ends_ends_too() -> None:
    spare = Spare()
    assert spare.process.stdin is not None
    spare.process.stdin.close()
    assert spare.process.wait(60) == 0
