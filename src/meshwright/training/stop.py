"""Requests to stop a run.

- SIGTERM, SIGUSR1, SIGHUP, or a request of the program that started the run: the run ends after the current step with a checkpoint and the
  exit code of a preempted run.
- Ctrl-C: the first one interrupts the run after the current step, the second one ends it at once.

A signal only sets a flag. At the end of each step the flags of all ranks are summed together with the loss, so all ranks stop after the
same step.
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
"""Values of the flag. They are so far apart that the flags of a million ranks can be added.

- SAVE: a checkpoint is due; BUSY: a save is in flight. Only the first rank sends these, added to other values. They request no stop.
- UNREADY: the rank cannot begin a save yet.
- PREEMPT, INTERRUPT: the rank received a request to stop.
- FAILED: the rank cannot write its reports.
"""


@dataclass(frozen=True)
class StopFlags:
    """The sum of the flags of all ranks at the end of `step`."""

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
        """NO_REQUEST, or a number that is at least PREEMPT, INTERRUPT or FAILED, for the strongest request."""
        return self.total // PREEMPT * PREEMPT


class StopRequest:
    """This rank's request to stop. `show` prints messages about the request and may be replaced."""

    def __init__(self, show: Callable[[str], object] = lambda text: None) -> None:
        self.flag = NO_REQUEST
        self.show = show
        self.folder: Path | None = None
        """The run's folder, once it is known."""

    @classmethod
    def for_rank(cls, rank: int) -> StopRequest:
        """Return a request that signals set. The first rank's request prints on the terminal."""
        stop = cls() if rank else cls(_to_terminal)
        stop.listen()
        return stop

    def listen(self) -> None:
        """Handle the stop signals of the process, also those that arrived while the launcher blocked them.

        A thread receives the signals. So they are counted and acknowledged even while the main thread waits for a device or a peer.
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
    """Do nothing. Python writes the number of a signal to the pipe only if the signal has a handler."""
