"""How a rank ends: exit codes, where messages are written, and that a rank ends when its launcher does."""

from __future__ import annotations

import errno
import logging
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from meshwright.events.messages import CHANNEL, FailureMessage, RankMessageReader
from meshwright.spec.errors import (
    BadInput,
    Damaged,
    Interrupted,
    MeshwrightError,
    NumericalFailure,
    OutOfResources,
    Preempted,
)
from meshwright.spec.rank_environment import RankEnvironment, stop_signals
from meshwright.training import lifecycle
from meshwright.training.lifecycle import RankLife, end_with_parent
from meshwright.training.stop import INTERRUPT, NO_REQUEST, PREEMPT, StopRequest


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """meshwright's logger, given back as it was."""
    logger = logging.getLogger("meshwright")
    previous = logger.handlers[:], logger.level, logger.propagate
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = previous


@pytest.fixture
def rank(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RankLife]:
    """Makes the life of a rank whose process does not end: `os._exit` raises SystemExit instead."""

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(lifecycle, "end_process", leave)

    def make(number: int = 0) -> RankLife:
        return RankLife(RankEnvironment(number, 2, number, 2, "127.0.0.1", 0), StopRequest())

    return make


def end_of(life: RankLife, error: BaseException | None) -> int:
    """The exit code of a rank whose work raises `error`."""

    def work() -> None:
        if error is not None:
            raise error

    with pytest.raises(SystemExit) as ended:
        life.run(work)
    return int(ended.value.code or 0)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (BadInput("no such key"), 2, "meshwright: no such key\n"),
        (OutOfResources("disk full"), 3, "meshwright: disk full\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            3,
            "meshwright: /x: No space left on device; free some",
        ),
        (Damaged("torn"), 4, "meshwright: torn\n"),
        (NumericalFailure("step 3"), 6, "meshwright: step 3\n"),
        (Preempted("after step 3"), 75, "meshwright: after step 3\n"),
        (Interrupted("after step 3"), 130, "meshwright: after step 3\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 3, "meshwright: out of memory: CUDA out of memory."),
        (MemoryError(), 3, "meshwright: out of memory: host; lower plan.micro_batch"),
        (dist.DistStoreError("wait timeout\nframe #0"), 5, "meshwright: communication failed: wait timeout\n"),
        (RuntimeError(GLOO), 5, "meshwright: communication failed: Connection closed"),
        (RuntimeError("shapes differ"), 1, "meshwright: internal error: RuntimeError: shapes differ\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_has_one_code_and_one_message(
    rank: Callable[..., RankLife],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    printed: str,
) -> None:
    life = rank()
    life.log_to(tmp_path)
    assert end_of(life, error) == code
    assert capsys.readouterr().err.startswith(printed)
    text = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert "ERROR rank 0: " in text and "Traceback (most recent call last)" in text and "in work" in text


@pytest.mark.parametrize("error", [OutOfResources("disk full"), Preempted("after step 3"), None])
def test_a_cleanup_that_fails_changes_neither_code_nor_message(
    rank: Callable[..., RankLife],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: MeshwrightError | None,
) -> None:
    """As when the report is written to a disk that is full: once its error replaced the run's own."""
    life, closed = rank(), []
    life.log_to(tmp_path)
    life.add_cleanup(lambda: closed.append("first given"))
    life.add_cleanup(lambda: (tmp_path / "absent" / "report.html").write_text(""))
    assert end_of(life, error) == (0 if error is None else error.exit_code)
    printed = capsys.readouterr().err.splitlines()
    assert closed == ["first given"]
    assert any("while cleaning up: " in line and "report.html" in line for line in printed)
    assert error is None or printed[-1] == f"meshwright: {error}"


def test_a_cleanup_that_hangs_is_given_up(
    rank: Callable[..., RankLife], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lifecycle, "FINISH_SECONDS", 0.05)
    life, release = rank(), threading.Event()
    life.add_cleanup(release.wait)
    assert end_of(life, Damaged("torn")) == 4
    release.set()
    assert "was given up" in capsys.readouterr().err


def test_a_rank_ends_even_if_reporting_fails(rank: Callable[..., RankLife], monkeypatch: pytest.MonkeyPatch) -> None:
    life = rank()
    monkeypatch.setattr(life.channel, "send", lambda message: 1 / 0)
    assert end_of(life, Damaged("torn")) == 4


def test_a_failure_before_the_folder_is_known_keeps_its_traceback(
    rank: Callable[..., RankLife], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(rank(), KeyError("x")) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "in work" in printed and "rank-0" not in printed
    life = rank()
    logging.getLogger("meshwright").info("before the folder")
    life.log_to(tmp_path)
    assert "before the folder" in (tmp_path / "logs" / "rank-00000.log").read_text()


def test_the_launcher_hears_of_a_failure_and_writes_its_message(
    rank: Callable[..., RankLife],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    commands, orders = os.pipe()
    monkeypatch.setenv(CHANNEL, str(writing))
    monkeypatch.setattr(
        os, "read", lambda descriptor, size, read=os.read: read(commands if descriptor == 0 else descriptor, size)
    )
    life = rank(1)
    life.log_to(tmp_path)
    assert end_of(life, Damaged("torn")) == 4
    messages = list(RankMessageReader(reading).read())
    assert messages == [FailureMessage(4, "torn", str(tmp_path / "logs" / "rank-00001.log"))]
    assert capsys.readouterr().err == ""
    os.close(orders)


def test_warnings_reach_the_terminal_from_rank_0(
    rank: Callable[..., RankLife], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank(0).log_to(tmp_path)
    logger = logging.getLogger("meshwright.checkpoint.store")
    logger.info("quiet")
    logger.warning("loud")
    assert capsys.readouterr().err == "meshwright: loud\n"
    first = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert "quiet" in first and "WARNING loud" in first
    rank(1).log_to(tmp_path)
    logger.warning("elsewhere")
    assert capsys.readouterr().err == "" and "elsewhere" in (tmp_path / "logs" / "rank-00001.log").read_text()


def test_a_log_that_cannot_be_written_is_reported_once(
    rank: Callable[..., RankLife], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(1).log_to(tmp_path)
    logger = logging.getLogger("meshwright")

    def full(self: logging.StreamHandler, record: logging.LogRecord) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            self.handleError(record)

    monkeypatch.setattr(logging.StreamHandler, "emit", full)
    logger.info("a")
    logger.info("b")
    assert capsys.readouterr().err.count("No space left on device; nothing more is logged there") == 1


def test_a_hangup_asks_to_stop_unless_it_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    previous = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_signals_set_a_flag_and_are_answered_by_a_thread_of_their_own() -> None:
    """So that they are while the main thread waits in native code."""
    previous = {number: signal.getsignal(number) for number in (*stop_signals(), signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may run pytest, ignores it
    shown: queue.Queue[tuple[str, str]] = queue.Queue()
    try:
        stop = StopRequest(lambda text: shown.put((text, threading.current_thread().name)))
        stop.listen()
        assert stop.flag == NO_REQUEST
        for number, flag, output in [(signal.SIGHUP, PREEMPT, "SIGHUP"), (signal.SIGINT, INTERRUPT, "Ctrl-C")]:
            os.kill(os.getpid(), number)
            text, thread = shown.get(timeout=60)
            assert text.startswith(f"{output}: ending after the running step") and thread == "stop"
            assert stop.flag == flag
        stop._receive(signal.SIGTERM)
        assert stop.flag == INTERRUPT and shown.empty()
    finally:
        os.close(signal.set_wakeup_fd(-1))
        for number, handler in previous.items():
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
                end_with_parent()
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
            end_with_parent()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
