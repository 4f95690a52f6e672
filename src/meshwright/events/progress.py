"""Progress of a rank in shared memory: its step and phase, the index of its action in the schedule, and its pending wait.

The rank stores a few words at every action and makes no system call. A thread sends them to the launcher once a second. A
launcher that creates the page itself (a memfd, named in the rank's environment by `PROGRESS`) reads them at any time,
also while the rank is stopped or waits in a driver, and after its death. Torch-free.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from meshwright.events.messages import MessageChannel, Phase, ProgressMessage
from meshwright.events.span import ScheduledAction

PROGRESS = "MESHWRIGHT_PROGRESS"
"""Environment variable with the path of a rank's page: `/proc/PARENT/fd/N`, which a process of the same user can open."""

PHASES: tuple[Phase, ...] = get_args(Phase)
SEND_SECONDS = 1.0
"""Shortest time between two messages about actions."""
WAIT_OPS = ("all_reduce", "unshard", "reduce_grad", "norm_barrier", "send", "recv", "other")
"""Communication for which a rank can wait: ops of a schedule's actions; all_reduce belongs to no action."""
_STEP_SHIFT = 32
_PHASE_SHIFT = 24
_ACTION_MASK = (1 << 24) - 1
"""Layout of word 0: the step in bits 32 to 63, the phase in bits 24 to 31, the action in bits 0 to 23."""
_OP_SHIFT = 56
_STAGE_SHIFT = 44
_BATCH_SHIFT = 28
_UNIT_SHIFT = 14
_PROGRESS, _COUNT, _SINCE, _WAIT, _WAIT_SINCE = range(5)


@dataclass(frozen=True)
class PendingWait:
    """The communication in which a rank's host is blocked since a time of its monotonic clock in ns.

    Stage, micro-batch and unit are those of the action that communicates, -1 where it has none; `peer` is the stage at the
    other end of a message.
    """

    op: str
    stage: int
    micro_batch: int
    unit: int
    peer: int
    since_ns: int


class ProgressPage:
    """The page of one rank.

    Words: 0 step, phase and action; 1 number of stores; 2 monotonic time in ns at which the action began; 3 pending wait,
    0 without one; 4 time at which the wait began.
    """

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
        words[_PROGRESS] = self._base | index
        words[_SINCE] = time.monotonic_ns()
        words[_COUNT] += 1

    def begin_wait(self, action: ScheduledAction | None) -> None:
        """Store that the host waits for the communication of `action`; None for an all-reduce outside of the schedule."""
        words = self._words
        words[_WAIT_SINCE] = time.monotonic_ns()
        words[_WAIT] = _wait_word(action)

    def end_wait(self) -> None:
        """Store that the host waits for nothing."""
        self._words[_WAIT] = 0

    @property
    def pending_wait(self) -> PendingWait | None:
        """The communication in which the rank's host is blocked."""
        word = self._words[_WAIT]
        since = self._words[_WAIT_SINCE]
        if not word:
            return None
        op = WAIT_OPS[min((word >> _OP_SHIFT) - 1, len(WAIT_OPS) - 1)]
        fields = ((_STAGE_SHIFT, 12), (_BATCH_SHIFT, 16), (_UNIT_SHIFT, 14), (0, 14))
        stage, micro_batch, unit, peer = ((word >> shift & (1 << bits) - 1) - 1 for shift, bits in fields)
        return PendingWait(op, stage, micro_batch, unit, peer, since)

    @property
    def action_since_ns(self) -> int:
        """Time of the monotonic clock, in ns, at which the current action began; 0 before the first."""
        return self._words[_SINCE]

    def read(self) -> ProgressMessage:
        """The last stored values."""
        word = self._words[0]
        phase = PHASES[min(word >> _PHASE_SHIFT & 0xFF, len(PHASES) - 1)]
        return ProgressMessage(phase, word >> _STEP_SHIFT, word & _ACTION_MASK)

    @property
    def count(self) -> int:
        """Number of stores so far: a rank whose count stays the same makes no progress."""
        return self._words[_COUNT]

    def close(self) -> None:
        """Close the descriptor; the mapping stays until the object is freed."""
        os.close(self.descriptor)


class ProgressSender:
    """A rank's progress: stored in its page at every action, sent at each change of phase and once a second while it changes."""

    def __init__(self, page: ProgressPage, channel: MessageChannel) -> None:
        self.page = page
        self._channel = channel
        self._phase: Phase | None = None
        self._sent = 0
        if channel.connected:
            threading.Thread(target=self._send_changes, name="progress", daemon=True).start()

    def begin(self, phase: Phase, step: int) -> None:
        """Store and send that `phase` of `step` begins; a phase that continues in another step is not sent again."""
        self.page.begin(phase, step)
        if phase != self._phase:
            self._phase = phase
            self._channel.send(ProgressMessage(phase, step))

    def _send_changes(self) -> None:
        while True:
            time.sleep(SEND_SECONDS)
            count = self.page.count
            if count != self._sent:
                self._sent = count
                self._channel.send(self.page.read())


def _wait_word(action: ScheduledAction | None) -> int:
    """The packed form of a wait; indices are stored plus 1, so that -1 is 0."""
    if action is None:
        return (WAIT_OPS.index("all_reduce") + 1) << _OP_SHIFT
    op = _OP_CODES.get(action.op, len(WAIT_OPS))
    unit = 0 if action.unit is None else action.unit + 1
    places = (action.stage + 1) << _STAGE_SHIFT | (action.micro_batch + 1) << _BATCH_SHIFT | unit << _UNIT_SHIFT
    return op << _OP_SHIFT | places | action.peer + 1


_OP_CODES = {op: code for code, op in enumerate(WAIT_OPS, start=1)}
