"""Requests to stop: SIGTERM, SIGUSR1, SIGHUP and the program that started the run end it with a checkpoint and the code of a preempted
run; the first Ctrl-C interrupts, the second ends at once.

A signal only sets a flag. At the end of each step the flags of all ranks are summed with its loss, so all ranks stop
after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshwright.checkpoint.format.inventory import describe_continuation
from meshwright.events.terminal import fitted, write_line
from meshwright.spec.errors import EXIT_INTERRUPTED
from meshwright.spec.rank_environment import PROGRAM_STOP, stop_signals

NO_REQUEST = 0
SAVE = 1
BUSY = 2
UNREADY = 4
PREEMPT = 1 << 22
INTERRUPT = 1 << 42
FAILED = 1 << 62
"""Values of the flag, far enough apart to be summed over a million ranks.
SAVE requests a checkpoint and BUSY means that a save is in flight: they request no stop, are added to other values, and
come from the first rank only. UNREADY means that a rank cannot begin a save yet. FAILED means that a rank cannot write its reports."""


@dataclass(frozen=True)
class StopFlags:
    """The flags of all ranks at the end of `step`, summed."""

    step: int = 0
    total: int = NO_REQUEST

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is due by the first rank's clock."""
        return bool(self.total & SAVE)

    @property
    def busy(self) -> bool:
        """Whether the first rank has a save in flight."""
        return bool(self.total & BUSY)

    @property
    def unready(self) -> bool:
        """Whether a rank cannot begin a save yet."""
        return self.total % PREEMPT >= UNREADY

    @property
    def stop(self) -> int:
        """NO_REQUEST, or at least PREEMPT, INTERRUPT or FAILED."""
        return self.total // PREEMPT * PREEMPT


class StopRequest:
    """This rank's request to stop. `show` prints messages about it and may be replaced."""

    def __init__(self, show: Callable[[str], object] = lambda text: None) -> None:
        self.flag = NO_REQUEST
        self.show = show
        self.folder: Path | None = None
        """The run's folder, once it is known."""

    @classmethod
    def for_rank(cls, rank: int) -> StopRequest:
        """A request that is set by signals; the first rank's prints on the terminal."""
        stop = cls() if rank else cls(_to_terminal)
        stop.listen()
        return stop

    def listen(self) -> None:
        """Handle the process's stop signals, including those that arrived while the launcher blocked them.

        A thread receives them, so that they are counted and acknowledged while the main thread waits for a device or a
        peer.
        """
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signals = stop_signals()
        for number in signals:
            signal.signal(number, _ignore_in_main_thread)
        threading.Thread(target=self._listen_to, args=(read_end, signals), name="stop", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _listen_to(self, pipe: int, signals: tuple[signal.Signals, ...]) -> None:
        while number := os.read(pipe, 1):
            if number[0] in signals:
                self._receive(signal.Signals(number[0]))

    def _receive(self, number: signal.Signals) -> None:
        before = self.flag
        self.flag = max(before, INTERRUPT if number == signal.SIGINT else PREEMPT)
        if number == signal.SIGINT and before == INTERRUPT:
            self.show("ended at once" + (f"; {describe_continuation(self.folder)}" if self.folder else ""))
            os._exit(EXIT_INTERRUPTED)
        if number == signal.SIGINT:
            self.show(
                "Ctrl-C: ending after the running step; a second one ends at once, and leaves the last checkpoint"
            )
        elif before == NO_REQUEST:
            cause = "" if number == PROGRAM_STOP else f"{number.name}: "
            self.show(f"{cause}ending after the running step")


def _to_terminal(text: str) -> None:
    write_line(fitted(f"meshwright: {text}"))


def _ignore_in_main_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python writes a signal's number to the pipe only if it has a handler."""
