"""Being asked to stop: SIGTERM, SIGUSR1 and SIGHUP mean preempted, the first Ctrl-C means interrupted, the second stops at once.

A signal only sets a flag. At the end of each step the flags of all ranks are summed with its loss, so all ranks stop after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshwright.checkpoint.verify import where_it_continues
from meshwright.events.terminal import write_line
from meshwright.spec.errors import EXIT_INTERRUPTED
from meshwright.spec.rank_environment import stop_signals

NOT_ASKED, SAVE, BUSY, PREEMPT, INTERRUPT, FAILED = 0, 1, 2, 4, 1 << 22, 1 << 43
"""Values of the flag. They are summed over ranks; up to a million ranks may be preempted without looking interrupted, and so on.
SAVE asks for a checkpoint and BUSY says that one is being written: they ask for no stop, are added to other values, and come from the
first rank alone. FAILED means that a rank cannot write its reports."""


@dataclass(frozen=True)
class StopFlags:
    """What all ranks together said at the end of `step`."""

    step: int = 0
    total: int = NOT_ASKED

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is due by the first rank's clock."""
        return bool(self.total & SAVE)

    @property
    def busy(self) -> bool:
        """Whether the first rank still had a save in flight."""
        return bool(self.total & BUSY)

    @property
    def stop(self) -> int:
        """NOT_ASKED, or at least PREEMPT, INTERRUPT or FAILED."""
        return self.total & ~(SAVE | BUSY)


class StopRequest:
    """Whether this rank was asked to stop, and how. What it hears it tells people by `show`, which may be replaced."""

    def __init__(self, show: Callable[[str], object] = lambda text: None) -> None:
        self.flag = NOT_ASKED
        self.show = show
        self.folder: Path | None = None
        """The run's, once it is known."""

    @classmethod
    def for_rank(cls, rank: int) -> StopRequest:
        """One that listens; the first rank's tells the terminal."""
        stop = cls() if rank else cls(_to_terminal)
        stop.listen()
        return stop

    def listen(self) -> None:
        """Take over the process's stop signals, also those that a launcher blocked until now and that came meanwhile.

        A thread hears them, so that they count and are answered while the main thread waits for a device or a peer.
        """
        heard, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        signals = stop_signals()
        for number in signals:
            signal.signal(number, _heard_elsewhere)
        threading.Thread(target=self._listen_to, args=(heard, signals), name="stop", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _listen_to(self, pipe: int, signals: tuple[signal.Signals, ...]) -> None:
        while number := os.read(pipe, 1):
            if number[0] in signals:
                self._asked(signal.Signals(number[0]))

    def _asked(self, number: signal.Signals) -> None:
        before = self.flag
        self.flag = max(before, INTERRUPT if number == signal.SIGINT else PREEMPT)
        if number == signal.SIGINT and before == INTERRUPT:
            self.show("ended at once" + (f"; {where_it_continues(self.folder)}" if self.folder else ""))
            os._exit(EXIT_INTERRUPTED)
        if number == signal.SIGINT:
            self.show(
                "Ctrl-C: ending after the running step; a second one ends at once, and leaves the last checkpoint"
            )
        elif before == NOT_ASKED:
            self.show(f"{number.name}: ending after the running step")


def _to_terminal(text: str) -> None:
    write_line(f"meshwright: {text}")


def _heard_elsewhere(number: int, frame: FrameType | None) -> None:
    """A handler of Python's must be there for the signal's number to be written to the pipe."""
