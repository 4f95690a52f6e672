"""Progress of a rank in shared memory: its step, its phase, and the index of its action in the schedule.

The rank stores two words at every action and makes no system call. A thread sends them to the launcher once a second. A
launcher that creates the page itself (a memfd, named in the rank's environment by `PROGRESS`) reads them at any time,
also while the rank is stopped or waits in a driver, and after its death. Torch-free.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping
from typing import get_args

from meshwright.events.messages import Channel, Phase, Progress

PROGRESS = "MESHWRIGHT_PROGRESS"
"""Environment variable with the path of a rank's page: `/proc/PARENT/fd/N`, which a process of the same user can open."""

PHASES: tuple[Phase, ...] = get_args(Phase)
SEND_SECONDS = 1.0
"""Shortest time between two messages about actions."""
_STEP_SHIFT, _PHASE_SHIFT, _ACTION_MASK = 32, 24, (1 << 24) - 1
"""Layout of word 0: the step in bits 32 to 63, the phase in bits 24 to 31, the action in bits 0 to 23."""


class ProgressPage:
    """The page of one rank: word 0 holds step, phase and action, word 1 counts the stores."""

    def __init__(self, descriptor: int) -> None:
        """Map the page behind `descriptor`, which this object then owns."""
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("Q")
        self._base = self._words[0] & ~_ACTION_MASK

    @classmethod
    def create(cls) -> ProgressPage:
        """A page that no rank has written to: step 0, phase start."""
        descriptor = os.memfd_create("meshwright-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> ProgressPage:
        """The page that the parent reads; a page of this process's own without one."""
        path = env.get(PROGRESS)
        return cls.create() if path is None else cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """The path by which another process of the same user opens the page while this process has it open."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def begin(self, phase: Phase, step: int) -> None:
        """Store that `phase` of `step` begins, at action 0."""
        self._base = (step & 0xFFFFFFFF) << _STEP_SHIFT | PHASES.index(phase) << _PHASE_SHIFT
        self.set_action(0)

    def set_action(self, index: int) -> None:
        """Store that action `index` begins."""
        words = self._words
        words[0] = self._base | index
        words[1] += 1

    def read(self) -> Progress:
        """The last stored values."""
        word = self._words[0]
        phase = PHASES[min(word >> _PHASE_SHIFT & 0xFF, len(PHASES) - 1)]
        return Progress(phase, word >> _STEP_SHIFT, word & _ACTION_MASK)

    @property
    def count(self) -> int:
        """Number of stores so far: a rank whose count stays the same makes no progress."""
        return self._words[1]

    def close(self) -> None:
        """Close the descriptor; the mapping stays until the object is freed."""
        os.close(self.descriptor)


class ProgressSender:
    """A rank's progress: stored in its page at every action, sent at each change of phase and once a second while it changes."""

    def __init__(self, page: ProgressPage, channel: Channel) -> None:
        self.page, self._channel = page, channel
        self._phase: Phase | None = None
        self._sent = 0
        if channel.connected:
            threading.Thread(target=self._send_changes, name="progress", daemon=True).start()

    def begin(self, phase: Phase, step: int) -> None:
        """Store and send that `phase` of `step` begins; a phase that continues in another step is not sent again."""
        self.page.begin(phase, step)
        if phase != self._phase:
            self._phase = phase
            self._channel.send(Progress(phase, step))

    def _send_changes(self) -> None:
        while True:
            time.sleep(SEND_SECONDS)
            count = self.page.count
            if count != self._sent:
                self._sent = count
                self._channel.send(self.page.read())
