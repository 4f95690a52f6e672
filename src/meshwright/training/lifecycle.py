"""One rank from its first line to its exit code.

`RankLife.run` is the only way out of a rank: it turns whatever the rank's work raises into one exit code and one message (by the table in
`spec.failures`), tells the launcher, runs the closing actions in bounded time, and ends the process. A closing action that fails or hangs
changes neither the code nor the message.
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
from meshwright.spec.failures import failure_of
from meshwright.spec.place import Place
from meshwright.training.stop import StopRequest

log = logging.getLogger("meshwright")

FINISH_SECONDS = 8.0
"""How long the closing actions of a rank that failed may take together; launch.local.GRACE_SECONDS is longer."""
DONE_SECONDS = 120.0
"""The same after its work is done, when nobody waits for the devices."""
EARLY_RECORDS = 1000
"""Log records kept in memory until the run's folder is known."""


class RankLife:
    """The life of this process as one rank. Make it first: logging, signals and the launcher's messages are handled from then on."""

    def __init__(self, place: Place, stop: StopRequest | None = None) -> None:
        """`stop` replaces the request that stop signals make of a training run: to end after the running step."""
        end_with_parent()
        self.place = place
        self.channel = Channel.of_environment()
        self.stop = stop or StopRequest.of_rank(place.rank)
        self.log_file: Path | None = None
        self._closing: list[Callable[[], object]] = []
        self._ending = threading.Lock()
        self._begin: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._early = logging.handlers.MemoryHandler(EARLY_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        _log_through(self._early, first=place.rank == 0)
        if self.channel.connected:
            threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def assignment(self) -> Path:
        """The assignment file that the launcher names; ends the process with code 0 when there is no launcher, or it closes the pipe."""
        file = self._begin.get() if self.channel.connected else None
        if file is None:
            os._exit(EXIT_DONE)
        return file

    def log_to(self, folder: Path) -> None:
        """From here on, log to the run's folder; what was logged before is written there first."""
        file = folder / "logs" / f"rank-{self.place.rank:05d}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(file, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._early.setTarget(handler)
        self._early.flush()
        _log_through(handler, first=self.place.rank == 0)
        self.log_file = file

    def at_end(self, action: Callable[[], object]) -> None:
        """Run `action` when the rank ends, however it ends; the last one given runs first."""
        self._closing.append(action)

    def run(self, work: Callable[[], object]) -> NoReturn:
        """Do the rank's work and end the process."""
        try:
            work()
        except BaseException as error:
            self.end(error)
        self.end(None)

    def end(self, error: BaseException | None) -> NoReturn:
        """End the process for the reason `error`, or because its work is done. A second thread that comes here waits for the first."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        failure = None if error is None else failure_of(error)
        if error is not None and failure is not None:
            self._record(error, failure)
        self._close(failure)
        if failure is not None and self._speaks_for(failure):
            write_line(f"meshwright: {failure}")
        end_process(EXIT_DONE if failure is None else failure.exit_code)

    def _record(self, error: BaseException, failure: MeshwrightError) -> None:
        """Log the failure with its traceback, and tell the launcher before anything else can go wrong."""
        trace = "".join(traceback.format_exception(error))
        log.error("rank %d: %s", self.place.rank, failure)
        log.debug("%s", trace)
        if self.log_file is None and failure.exit_code == EXIT_INTERNAL:
            write_line(trace.rstrip())
        self.channel.send(Failure(failure.exit_code, str(failure), str(self.log_file or "")))

    def _speaks_for(self, failure: MeshwrightError) -> bool:
        """Whether this rank writes the message itself: our launcher does it for all, and once joined only rank 0 reports lost peers."""
        if self.channel.connected:
            return False
        return self.place.rank == 0 or failure.exit_code != EXIT_COMMUNICATION or self.log_file is None

    def _close(self, failure: MeshwrightError | None) -> None:
        """Run the closing actions, in a thread so that one that hangs is left behind."""

        def close() -> None:
            while self._closing:
                try:
                    self._closing.pop()()
                except BaseException as error:
                    log.warning("while closing: %s", failure_of(error))
                    log.debug("%s", traceback.format_exc())

        thread = threading.Thread(target=close, name="closing", daemon=True)
        thread.start()
        limit = FINISH_SECONDS if failure is not None else DONE_SECONDS
        thread.join(limit)
        if thread.is_alive():
            log.warning("closing took more than %.0f s and was given up", limit)

    def _listen(self) -> None:
        """Obey the launcher: begin with an assignment, end when another rank failed."""
        for line in sys.stdin.buffer:
            message = decode(line)
            if isinstance(message, Begin):
                self._begin.put(Path(message.assignment))
            elif isinstance(message, End):
                self.end(CommunicationFailure(message.cause))
        self._begin.put(None)


def end_with_parent() -> None:
    """Ask the kernel to end this process when its launcher dies, so that no rank keeps a device for nobody."""
    parent = os.environ.get("MESHWRIGHT_PARENT")
    if parent is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(EXIT_INTERNAL)


def _log_through(handler: logging.Handler, first: bool) -> None:
    """Send every record of meshwright to `handler`, and the first rank's warnings to the terminal too."""
    log.handlers[:] = [handler, _Warnings()] if first else [handler]
    log.setLevel(logging.DEBUG)
    log.propagate = False


class _LogFile(logging.FileHandler):
    """A log file whose disk may fill or vanish: says so once on the terminal; the run decides by what it must write itself."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not getattr(self, "_failed", False):
            self._failed = True
            write_line(f"meshwright: {self.baseFilename}: {error}; nothing more is logged there")


class _Warnings(logging.Handler):
    """Warnings as lines on stderr, wherever that leads at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            write_line(f"meshwright: {record.getMessage()}")


def end_process(code: int) -> NoReturn:
    """Leave at once: a rank whose peers are gone must not wait for them in the communicators' destructors."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
