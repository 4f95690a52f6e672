"""Kill -9 of a rank, its writer or its parent at a random time of a save."""

from __future__ import annotations

import ctypes
import os
import random
import select
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tests.checkpoint.toy import ToyRank, newest

VICTIMS = ("rank", "writer", "parent")
SCALE = 4000
"""A rank's state has 30 MB then, so that a save takes long enough to be hit."""
LIMIT_SECONDS = 30.0


def kill_once(run: Path, seed: int) -> str:
    """Save steps 1, 2, …, kill one process at a random time behind the first commit, and check what is left.

    The newest good checkpoint is that of the last step that was reported, or of the next one. Returns the victim's name.
    """
    chance = random.Random(seed)
    victim, delay = VICTIMS[seed % len(VICTIMS)], chance.uniform(0.0, 0.25)
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(reading)
        _parent(run, writing)
    os.close(writing)
    lines = _Lines(reading)
    try:
        rank, writer = (int(number) for number in lines.next().split())
        assert lines.next() == "committed 1"
        time.sleep(delay)
        os.kill({"rank": rank, "writer": writer, "parent": parent}[victim], signal.SIGKILL)
        reported = 1
        if victim == "writer":  # training goes on, and a later save is committed by another writer
            failures = commits = 0
            while commits < 5:  # also where all but one of them were made before the kill
                line = lines.next()
                failures, commits = (failures + 1, 0) if line == "failed" else (failures, commits + 1)
                reported = int(line.split()[1]) if line.startswith("committed") else reported
            assert failures <= 1
            os.kill(rank, signal.SIGKILL)
        for line in lines.remaining():
            reported = int(line.split()[1]) if line.startswith("committed") else reported
    finally:
        os.close(reading)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    _await_no_attempt(run)
    newest_step = newest(run, SCALE)
    assert newest_step in (reported, reported + 1), (victim, newest_step, reported)
    shutil.rmtree(run, ignore_errors=True)  # a writer may still remove an attempt there
    return victim


def _parent(run: Path, writing: int) -> NoReturn:
    """Fork the rank, which the kernel ends with this process, and wait."""
    own_pid = os.getpid()
    rank = os.fork()
    if rank == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != own_pid:
            os._exit(1)
        try:
            _train(run, writing)
        finally:
            os._exit(1)
    os.close(writing)
    os.waitpid(rank, 0)
    os._exit(0)


def _train(run: Path, writing: int) -> None:
    def say(text: str) -> None:
        os.write(writing, f"{text}\n".encode())

    rank = ToyRank(run, scale=SCALE, keep=2)
    rank.saver.agree_on_readiness()
    assert rank.saver.writer is not None
    say(f"{os.getpid()} {rank.saver.writer.pid}")
    for step in range(1, 1000):
        result = rank.save(step)
        say(f"committed {step}" if result.failure is None else "failed")


def _await_no_attempt(run: Path) -> None:
    """Return when the writer, which outlives its rank, has finished: nothing in the folder changes for a while."""
    deadline, previous = time.monotonic() + LIMIT_SECONDS, None
    while time.monotonic() < deadline:
        now = _entries(run)
        if now == previous:
            return
        previous = now
        time.sleep(0.1)
    raise AssertionError(f"{run} still changes")


def _entries(run: Path) -> dict[str, int]:
    """Every file and folder of the checkpoints with its time of change."""
    entries: dict[str, int] = {}
    for folder, names, files in os.walk(run / "checkpoints"):
        for name in (*names, *files):
            with suppress(FileNotFoundError):  # renamed meanwhile
                entries[f"{folder}/{name}"] = Path(folder, name).stat().st_mtime_ns
    return entries


class _Lines:
    """Lines from a pipe, each within `LIMIT_SECONDS`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._buffered = descriptor, b""

    def next(self) -> str:
        while b"\n" not in self._buffered:
            assert self._fill(), "the rank ended"
        line, _, self._buffered = self._buffered.partition(b"\n")
        return line.decode()

    def remaining(self) -> list[str]:
        while self._fill():
            continue
        return self._buffered.decode().splitlines()

    def _fill(self) -> bool:
        assert select.select([self._descriptor], [], [], LIMIT_SECONDS)[0], "the rank hangs"
        data = os.read(self._descriptor, 1 << 16)
        self._buffered += data
        return bool(data)
