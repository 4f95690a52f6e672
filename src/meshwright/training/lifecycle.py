"""One rank from its first line to its exit code.

`RankLife.run` runs a rank's work and ends its process: it turns whatever the work raises into one exit code and one message (by the table
in `spec.failures`), tells the launcher, runs the cleanups in bounded time, and exits. A cleanup that fails or hangs changes neither the
code nor the message.
"""

from __future__ import annotations

import ctypes
import logging
import logging.handlers
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from meshwright.events.messages import Begin, Channel, End, Failure, decode
from meshwright.events.terminal import write_line
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_INTERNAL, CommunicationFailure, MeshwrightError
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.training.stop import StopRequest

log = logging.getLogger("meshwright")

FINISH_SECONDS = 8.0
"""How long the cleanups of a rank that failed may take together; policies.job_end.GRACE_SECONDS is longer."""
DONE_SECONDS = 120.0
"""The same after the rank's work is done."""


class RankLife:
    """The life of this process as one rank. Make it first: logging, signals and the launcher's messages are handled from then on."""

    def __init__(self, environment: RankEnvironment, stop: StopRequest | None = None) -> None:
        """`stop` is set by stop signals; by default it ends training after the running step."""
        end_with_parent()
        self.environment = environment
        self.channel = Channel.from_environment()
        self.stop = StopRequest.for_rank(environment.rank) if stop is None else stop
        self.log_file: Path | None = None
        self._cleanups: list[Callable[[], object]] = []
        self._ending = threading.Lock()
        self._begin: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        # Without a target it keeps every record, whatever its capacity.
        self._early = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        _log_through(self._early, first=environment.rank == 0)
        if self.channel.connected:
            threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def wait_for_assignment(self) -> Path:
        """Return the assignment file that the launcher names. Ends the process with code 0 when the pipe closes without one."""
        file = self._begin.get() if self.channel.connected else None
        if file is None:
            os._exit(EXIT_DONE)
        return file

    def log_to(self, folder: Path) -> None:
        """From here on, log to the run's folder; what was logged before is written there first."""
        file = folder / "logs" / f"rank-{self.environment.rank:05d}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(file, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _log_through(handler, first=self.environment.rank == 0)
        self._early.setTarget(handler)
        self._early.flush()
        self.log_file = file

    def add_cleanup(self, action: Callable[[], object]) -> None:
        """Run `action` when the rank ends, however it ends; the last one given runs first.

        When another rank failed, it may run while this rank's main thread still waits in a collective.
        """
        self._cleanups.append(action)

    def run(self, work: Callable[[], object]) -> NoReturn:
        """Do the rank's work and end the process."""
        try:
            work()
        except BaseException as error:
            self.end(error)
        self.end(None)

    def end(self, error: BaseException | None) -> NoReturn:
        """End the process; `error` is None when its work is done. If another thread is ending it already, wait for that."""
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
        """Tell the launcher before anything else can go wrong, then log the failure with its traceback."""
        self.channel.send(Failure(failure.exit_code, str(failure), str(self.log_file or "")))
        trace = "".join(traceback.format_exception(error))
        log.error("rank %d: %s", self.environment.rank, failure)
        log.debug("%s", trace)
        if self.log_file is None and failure.exit_code == EXIT_INTERNAL:
            write_line(trace.rstrip())

    def _prints(self, failure: MeshwrightError) -> bool:
        """Whether this rank prints the message: not where our launcher does; and of lost peers, once the job is joined, only rank 0."""
        if self.channel.connected:
            return False
        return self.environment.rank == 0 or failure.exit_code != EXIT_COMMUNICATION or self.log_file is None

    def _clean_up(self, failure: MeshwrightError | None) -> None:
        """Run the cleanups in a thread, so that one that hangs is left behind."""

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
        """Obey the launcher: begin with an assignment, end when another rank failed."""
        rest = b""
        try:
            while data := os.read(
                0, 1 << 16
            ):  # not through sys.stdin, whose lock an interpreter that exits would wait for
                *lines, rest = (rest + data).split(b"\n")
                for message in map(decode, lines):
                    if isinstance(message, Begin):
                        self._begin.put(Path(message.assignment))
                    elif isinstance(message, End):
                        self.end(CommunicationFailure(message.cause))
        finally:
            self._begin.put(None)


def end_with_parent() -> None:
    """Ask the kernel to end this process when its launcher dies, so that no rank keeps a device for nobody."""
    parent = os.environ.get("MESHWRIGHT_PARENT")
    if parent is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the kernel was asked
        os._exit(EXIT_INTERNAL)


def _log_through(handler: logging.Handler, first: bool) -> None:
    """Send every record of meshwright to `handler`, and the first rank's warnings to the terminal too."""
    log.handlers[:] = [handler, _Warnings()] if first else [handler]
    log.setLevel(logging.DEBUG)
    log.propagate = False


class _LogFile(logging.FileHandler):
    """A log file that reports its first write error on the terminal, writes nothing more, and does not stop the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        log.removeHandler(self)
        write_line(f"meshwright: {self.baseFilename}: {sys.exc_info()[1]}; nothing more is logged there")


class _Warnings(logging.Handler):
    """Prints warnings on the stderr of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            write_line(f"meshwright: {record.getMessage()}")


def end_process(code: int) -> NoReturn:
    """Leave at once: a rank whose peers are gone must not wait for them in the communicators' destructors."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, gone, or None
            stream.flush()
    os._exit(code)
