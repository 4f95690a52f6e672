"""The process of one rank: join, train, leave, with an exit code that says how it went.

A locally launched rank comes here from `train.rank`; under torchrun and its kin `meshwright train` calls `run_rank` itself.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from meshwright.events.start import StartClock
from meshwright.files.durable import write_durable
from meshwright.parallel.world import Place, World, join
from meshwright.spec.errors import (
    EXIT_COMMUNICATION,
    EXIT_DONE,
    EXIT_INTERNAL,
    EXIT_NO_RESOURCES,
    Interrupted,
    MeshwrightError,
)
from meshwright.spec.fields import to_plain
from meshwright.spec.run import Assignment
from meshwright.train.cores import keep_to_own_cores
from meshwright.train.loop import Trained, train
from meshwright.train.reporting import Reporter
from meshwright.train.session import Session, open_session
from meshwright.train.stop import STOP_SIGNALS, StopRequest

log = logging.getLogger("meshwright")


def main(file: Path, clock: StartClock | None = None, stop: StopRequest | None = None) -> NoReturn:
    """Be the locally launched rank of the assignment in `file`; `clock` has counted its start so far, and `stop` listens already."""
    die_with_parent()
    if clock is None:
        clock = StartClock.of_rank()
        clock.end("imports")
    assignment = Assignment.read(file)
    folder, rank = Path(assignment.folder), Place.from_environment().rank
    stop = stop or StopRequest.of_rank(rank)
    log_to(folder, rank)
    clock.end("plan")
    end_process(guarded(lambda: _joined(assignment, stop, clock), folder, rank))


def answer_as_rank(answer: Callable[[str, Place], str]) -> NoReturn:
    """Be one locally launched rank that is asked one thing: `argv` names the file of the question and that of the answer, which rank 0
    writes. A stop signal interrupts it."""
    die_with_parent()
    question, destination = map(Path, sys.argv[1:])
    place = Place.from_environment()
    log_to(question.parent, place.rank)
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def work() -> None:
        text = answer(question.read_text(encoding="utf-8"), place)
        if place.rank == 0:
            write_durable(destination, text)

    end_process(guarded(work, question.parent, place.rank))


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise Interrupted("interrupted")


def end_process(code: int) -> NoReturn:
    """Leave at once: a rank whose peers are gone must not wait for them in the communicators' destructors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _joined(assignment: Assignment, stop: StopRequest, clock: StartClock) -> None:
    run = assignment.run
    world = join(Place.from_environment(), run.cluster, timeout_seconds=run.train.timeout_seconds)
    clock.end("join")
    run_rank(assignment, world, stop, clock)
    world.leave()


def run_rank(assignment: Assignment, world: World, stop: StopRequest, clock: StartClock) -> None:
    """Train on this rank of a joined job, whose start `clock` has counted so far; rank 0 writes metrics, summary and report."""
    folder = stop.folder = Path(assignment.folder)
    started = time.perf_counter()
    if assignment.run.train.keep_cores:
        keep_to_own_cores(world)
    session = open_session(assignment, world, clock)
    with Reporter.open(session) as reporter:
        stop.show = reporter.say
        if session.step >= session.run.train.steps:
            reporter.event(session.step, f"{folder} is finished: {session.step} of {session.run.train.steps} steps")
            return
        if session.step:
            reporter.event(session.step, f"resumed after step {session.step}")
        try:
            trained = train(session, reporter, stop)
            if world.leads:
                _write_summary(session, trained, time.perf_counter() - started)
        finally:
            reporter.close()
            if world.leads:
                from meshwright.observe.report import write_report  # not before the first step

                write_report(folder)


def _write_summary(session: Session, trained: Trained, wall_seconds: float) -> None:
    last = trained.validation
    summary: dict[str, Any] = {"steps": session.step, "tokens": session.tokens, "wall_seconds": wall_seconds}
    if last is not None and session.held_out is not None:
        summary |= {
            "held_out_loss": last.loss,
            "held_out_tokens": last.tokens,
            "perplexity": last.perplexity,
            "bits_per_byte": last.bits_per_byte,
            "unigram_entropy_nats": session.held_out.source.unigram_entropy(session.held_out.samples),
        }
    if trained.account is not None:
        summary["account"] = to_plain(trained.account)
    write_durable(session.folder / "summary.json", json.dumps(summary, indent=1))


def guarded(work: Callable[[], None], folder: Path, rank: int) -> int:
    """Run `work` and turn what it raises into an exit code and a message on stderr; tracebacks go to the rank's log."""
    try:
        work()
    except MeshwrightError as error:
        return _fail(str(error), error.exit_code, rank, folder)
    except (MemoryError, torch.OutOfMemoryError) as error:
        hint = "lower plan.micro_batch, set plan.recompute=selective or full, or add ranks"
        return _fail(
            f"out of memory: {str(error).splitlines()[0] if str(error) else 'host'}; {hint}",
            EXIT_NO_RESOURCES,
            rank,
            folder,
        )
    except Exception as error:
        if _is_communication(error):
            return _fail(f"communication failed: {str(error).splitlines()[0]}", EXIT_COMMUNICATION, rank, folder)
        return _fail(f"internal error: {type(error).__name__}: {error}", EXIT_INTERNAL, rank, folder)
    return EXIT_DONE


def _fail(message: str, code: int, rank: int, folder: Path) -> int:
    place = folder / "logs" / f"rank-{rank:05d}.log"
    log.error("rank %d: %s", rank, message)
    log.debug("%s", traceback.format_exc())
    if rank == 0 or code != EXIT_COMMUNICATION:
        sys.stderr.write(f"meshwright: {message}\n" + (f"  traceback in {place}\n" if code == EXIT_INTERNAL else ""))
    return code


def _is_communication(error: Exception) -> bool:
    """Whether a collective failed: torch's own classes, or Gloo's plain RuntimeError about a peer."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "gloo", "Broken pipe")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def log_to(folder: Path, rank: int) -> None:
    """Everything meshwright logs on this rank goes to the run's log folder; rank 0's warnings also to the terminal."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "logs" / f"rank-{rank:05d}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers[:] = [handler] if rank else [handler, _Warnings()]
    log.setLevel(logging.DEBUG)
    log.propagate = False


class _Warnings(logging.Handler):
    """Warnings as lines on stderr, wherever that leads at the moment; how a rank ended is said there by `_fail`."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            sys.stderr.write(f"meshwright: {record.getMessage()}\n")


def die_with_parent() -> None:
    """Ask the kernel to end this process when its launcher dies, so that no rank keeps a device for nobody."""
    parent = os.environ.get("MESHWRIGHT_PARENT")
    if parent is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(EXIT_INTERNAL)
