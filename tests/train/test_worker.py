"""How a rank ends: the exit code of what went wrong, what it says where, and never outliving its launcher."""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.spec.errors import BadInput, Damaged, Interrupted, NumericalFailure, OutOfResources, Preempted
from meshwright.train.stop import INTERRUPT, NOT_ASKED, PREEMPT, StopRequest
from meshwright.train.worker import die_with_parent, guarded, log_to


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The log of rank 0, with the process's own logging given back after."""
    logger = logging.getLogger("meshwright")
    kept = logger.handlers[:], logger.level, logger.propagate
    log_to(tmp_path, 0)
    yield tmp_path / "logs" / "rank-00000.log"
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = kept


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BadInput("no such key"), 2, "meshwright: no such key\n"),
        (OutOfResources("disk full"), 3, "meshwright: disk full\n"),
        (Damaged("torn"), 4, "meshwright: torn\n"),
        (NumericalFailure("step 3"), 6, "meshwright: step 3\n"),
        (Preempted("after step 3"), 75, "meshwright: after step 3\n"),
        (Interrupted("after step 3"), 130, "meshwright: after step 3\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 3, "meshwright: out of memory: CUDA out of memory."),
        (MemoryError(), 3, "meshwright: out of memory: host; lower plan.micro_batch"),
        (dist.DistBackendError("NCCL error"), 5, "meshwright: communication failed: NCCL error\n"),
        (
            RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
            5,
            "meshwright: communication failed: ",
        ),
        (RuntimeError("shapes differ"), 1, "meshwright: internal error: RuntimeError: shapes differ\n  traceback in "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_went_wrong_has_a_code_and_a_sentence(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, code: int, said: str
) -> None:
    def work() -> None:
        raise error

    assert guarded(work, tmp_path, 0) == code
    assert capsys.readouterr().err.startswith(said)
    text = log.read_text()
    assert "ERROR rank 0: " in text and "Traceback (most recent call last)" in text and "in work" in text


def test_warnings_reach_the_terminal_from_rank_0(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("meshwright.checkpoint.store")
    logger.info("quiet")
    logger.warning("loud")
    assert capsys.readouterr().err == "meshwright: loud\n"
    assert "quiet" in log.read_text() and "WARNING loud" in log.read_text()
    log_to(log.parents[1], 1)
    logger.warning("elsewhere")
    assert capsys.readouterr().err == "" and "elsewhere" in log.with_name("rank-00001.log").read_text()


def test_signals_set_a_flag_and_are_answered_by_a_thread_of_their_own() -> None:
    """So that they are while the main thread waits in native code."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    shown: queue.Queue[tuple[str, str]] = queue.Queue()
    try:
        stop = StopRequest(lambda text: shown.put((text, threading.current_thread().name)))
        stop.listen()
        assert stop.flag == NOT_ASKED
        for number, flag, said in [(signal.SIGUSR1, PREEMPT, "SIGUSR1"), (signal.SIGINT, INTERRUPT, "Ctrl-C")]:
            os.kill(os.getpid(), number)
            text, thread = shown.get(timeout=20)
            assert text.startswith(f"{said}: ending after the running step") and thread == "stop"
            assert stop.flag == flag
        stop._asked(signal.SIGTERM)
        assert stop.flag == INTERRUPT and shown.empty()
    finally:
        os.close(signal.set_wakeup_fd(-1))
        for number, handler in kept.items():
            signal.signal(number, handler)
    assert 100_000 * PREEMPT < INTERRUPT  # flags are summed over ranks


def test_a_second_ctrl_c_ends_a_rank_at_once_and_names_the_last_checkpoint(tmp_path: Path) -> None:
    """As under a launcher that passes both on; the child's main thread sleeps all the while."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            stop = StopRequest(lambda text: os.writev(theirs, [text.encode(), b"\n"]))
            stop.folder = tmp_path
            stop.listen()
            for _ in range(2):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(20)
        finally:
            os._exit(0)
    os.close(theirs)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    first, second = os.read(ours, 1000).decode().splitlines()
    os.close(ours)
    assert "a second one ends at once" in first
    assert second == f"ended at once; there is no checkpoint in {tmp_path} yet; the same command begins at step 1"


def test_a_rank_does_not_outlive_its_launcher() -> None:
    """A process forks a rank, which asks to die with it, and is killed: the pipe the rank holds closes."""
    ours, theirs = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        try:
            os.environ["MESHWRIGHT_PARENT"] = str(os.getpid())
            if os.fork() == 0:
                die_with_parent()
                os.write(theirs, b"ready")
            signal.pause()
        finally:
            os._exit(0)
    os.close(theirs)
    assert os.read(ours, 5) == b"ready"
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert select.select([ours], [], [], 20)[0] and os.read(ours, 1) == b""
    os.close(ours)


def test_a_rank_whose_launcher_is_gone_already_ends_at_once() -> None:
    child = os.fork()
    if child == 0:
        try:
            os.environ["MESHWRIGHT_PARENT"] = "1"
            die_with_parent()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
