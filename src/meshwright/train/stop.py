"""Being asked to stop: SIGTERM and USR1 mean preempted, the first Ctrl-C means interrupted, the second stops at once.

A signal only sets a flag. The flag travels with the step's token count to every rank, so all ranks stop after the same step.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from meshwright.spec.errors import EXIT_INTERRUPTED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
NOT_ASKED, PREEMPT, INTERRUPT = 0, 1, 1 << 20
"""Values of the flag. They are summed over ranks; up to a million ranks may be preempted without looking interrupted."""


class StopRequest:
    """Whether this rank was asked to stop, and how."""

    def __init__(self) -> None:
        self.flag = NOT_ASKED

    def listen(self) -> None:
        """Take over the process's stop signals, also those that a launcher blocked until now and that came meanwhile."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.flag == INTERRUPT:
            os._exit(EXIT_INTERRUPTED)
        self.flag = max(self.flag, INTERRUPT if number == signal.SIGINT else PREEMPT)
