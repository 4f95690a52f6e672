"""Life cycle of a rank's process, from its first line to its exit code.

`RankLife.run` runs a rank's work and ends its process. It converts any exception to one exit code and one message (by the table in
`spec.failures`), informs the launcher, runs the cleanups in bounded time, and exits. A cleanup that fails or hangs changes neither the exit
code nor the message.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from meshwright.events.messages import (
    BeginMessage,
    CollectivesRequest,
    EndMessage,
    FailureMessage,
    MessageChannel,
    SelfTest,
    SelfTestResult,
    decode,
)
from meshwright.events.parent import end_with_parent
from meshwright.events.progress import PROGRESS, ProgressPage, ProgressSender
from meshwright.events.stacks import write_stacks_on_signal
from meshwright.events.terminal import fitted, write_line
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_INTERNAL, CommunicationFailure, MeshwrightError
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.training.stop import StopRequest

log = logging.getLogger("meshwright")

FINISH_SECONDS = 8.0
"""Time for all cleanups of a rank that failed; `policies.job_end.GRACE_SECONDS` is longer."""
DONE_SECONDS = 120.0
"""Time for all cleanups after the rank's work is done."""


class RankLife:
    """This process as a rank. Create it before anything else: it handles logging, signals and the launcher's messages."""

    def __init__(self, environment: RankEnvironment, stop: StopRequest | None = None, *, spare: bool = False) -> None:
        """`stop` receives stop signals; None: a new `StopRequest`, which ends training after the current step.

        A `spare` process has no rank yet. Its `environment` is replaced when `BeginMessage` gives it a rank.
        """
        end_with_parent()
        write_stacks_on_signal()
        self.environment = environment
        self.channel = MessageChannel.from_environment()
        self.progress = ProgressSender(ProgressPage.from_environment(), self.channel)
        rank = 1 if spare else environment.rank
        self.stop = StopRequest.for_rank(rank) if stop is None else stop
        self.log_file: Path | None = None
        self.requested = threading.Event()
        """Set once the launcher has sent a request or has closed the pipe."""
        self._cleanups: list[Callable[[], object]] = []
        self._ending = threading.Lock()
        self._requests: queue.SimpleQueue[BeginMessage | SelfTest | None] = queue.SimpleQueue()
        # A MemoryHandler without a target keeps every record, whatever its capacity.
        self._early = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        _log_through(self._early, first=environment.rank == 0 and not spare)
        if self.channel.connected:
            threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def wait_for_assignment(self, self_test: Callable[[SelfTest], SelfTestResult]) -> Path:
        """Wait for `BeginMessage` and return the assignment file that it names. Exits with code 0 if the launcher's pipe closes before.

        Meanwhile each self-test that the launcher requests is answered by `self_test`. The environment variables of `BeginMessage` are set
        first. If RANK is one of them, this process was a spare and becomes that rank.
        """
        begin = self._requests.get() if self.channel.connected else None
        while isinstance(begin, SelfTest):
            self.channel.send(self_test(begin))
            begin = self._requests.get()
        if begin is None:
            os._exit(EXIT_DONE)
        os.environ.update(begin.environment)
        if "RANK" in begin.environment:
            self.environment = RankEnvironment.from_environment()
            _log_through(self._early, first=self.environment.rank == 0)
        if PROGRESS in begin.environment:
            self.progress.page = ProgressPage.from_environment()
        return Path(begin.assignment)

    def log_to(self, folder: Path) -> None:
        """Log to the run's folder from now on. The records so far are written there first."""
        file = folder / "logs" / f"rank-{self.environment.rank:05d}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(file, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _log_through(handler, first=self.environment.rank == 0)
        self._early.setTarget(handler)
        self._early.flush()
        self.log_file = file

    def add_cleanup(self, action: Callable[[], object]) -> None:
        """Run `action` when the rank ends, for whatever reason. The action added last runs first.

        If another rank has failed, the action may run while this rank's main thread still waits in a collective.
        """
        self._cleanups.append(action)

    def run(self, work: Callable[[], object]) -> NoReturn:
        """Run the rank's work and end the process."""
        try:
            work()
        except BaseException as error:
            self.end(error)
        self.end(None)

    def end(self, error: BaseException | None) -> NoReturn:
        """End the process. `error` is None after finished work. If another thread already ends the process, this call only waits."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        code = EXIT_INTERNAL
        try:
            failure = None if error is None else as_meshwright_error(error)
            code = EXIT_DONE if failure is None else failure.exit_code
            if error is not None and failure is not None:
                self._report(error, failure)
            self._clean_up(failure)
            if failure is not None and self._prints(failure):
                write_line(f"meshwright: {failure}")
        except BaseException:  # whatever happens here, the process ends with the code of its failure
            write_line(traceback.format_exc().rstrip())
        end_process(code)

    def _report(self, error: BaseException, failure: MeshwrightError) -> None:
        """Report a failure: first to the launcher, then in the log with its traceback."""
        self.channel.send(FailureMessage(failure.exit_code, str(failure), str(self.log_file or "")))
        trace = "".join(traceback.format_exception(error))
        log.error("rank %d: %s", self.environment.rank, failure)
        log.debug("%s", trace)
        if self.log_file is None and failure.exit_code == EXIT_INTERNAL:
            write_line(trace.rstrip())

    def _prints(self, failure: MeshwrightError) -> bool:
        """Whether this rank prints the message.

        The launcher prints for the ranks that it started. Without a launcher, every rank prints its own failure; but once ranks have
        joined the job, only rank 0 prints that it lost others.
        """
        if self.channel.connected:
            return False
        return self.environment.rank == 0 or failure.exit_code != EXIT_COMMUNICATION or self.log_file is None

    def _clean_up(self, failure: MeshwrightError | None) -> None:
        """Run the cleanups in a thread, so that a cleanup that hangs can be abandoned."""

        def run() -> None:
            while self._cleanups:
                try:
                    self._cleanups.pop()()
                except BaseException as error:
                    log.warning("while cleaning up: %s", as_meshwright_error(error))
                    log.debug("%s", traceback.format_exc())

        thread = threading.Thread(target=run, name="cleanups", daemon=True)
        thread.start()
        limit = FINISH_SECONDS if failure is not None else DONE_SECONDS
        thread.join(limit)
        if thread.is_alive():
            log.warning("cleaning up took more than %.0f s and was given up", limit)

    def _listen(self) -> None:
        """Handle the launcher's messages: start with an assignment, run self-tests, end because another rank failed."""
        incomplete = b""
        try:
            while data := os.read(
                0, 1 << 16
            ):  # not through sys.stdin, whose lock an interpreter that exits would wait for
                *lines, incomplete = (incomplete + data).split(b"\n")
                for message in map(decode, lines):
                    if isinstance(message, BeginMessage | SelfTest):
                        self._requests.put(message)
                        self.requested.set()
                    elif isinstance(message, CollectivesRequest):
                        # In a thread of its own: torch may wait for a lock that a broken communicator keeps.
                        threading.Thread(target=_answer, args=(message,), name="collectives", daemon=True).start()
                    elif isinstance(message, EndMessage):
                        self.end(CommunicationFailure(message.cause))
        finally:
            self._requests.put(None)
            self.requested.set()


def _answer(request: CollectivesRequest) -> None:
    """Write the collectives that torch has recorded. If that fails, for example because the launcher is gone, write nothing."""
    from meshwright.observe.flight_recorder import write_collectives  # imports nothing that needs torch

    try:
        write_collectives(Path(request.path))
    except Exception as error:
        log.debug("the recorded collectives are not written: %s", error)


def _log_through(handler: logging.Handler, first: bool) -> None:
    """Send every record of meshwright to `handler`. The first rank also prints its warnings on the terminal."""
    log.handlers[:] = [handler, _Warnings()] if first else [handler]
    log.setLevel(logging.DEBUG)
    log.propagate = False


class _LogFile(logging.FileHandler):
    """A log file that never stops the run: after its first write error it reports the error on the terminal and writes nothing more."""

    def handleError(self, record: logging.LogRecord) -> None:
        log.removeHandler(self)
        write_line(f"meshwright: {self.baseFilename}: {sys.exc_info()[1]}; nothing more is logged there")


class _Warnings(logging.Handler):
    """Prints warnings on the current stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            write_line(fitted(f"meshwright: {record.getMessage()}"))


def end_process(code: int) -> NoReturn:
    """Exit at once. A rank with lost peers must not run the destructors of communicators, which would wait for the peers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, gone, or None
            stream.flush()
    os._exit(code)
