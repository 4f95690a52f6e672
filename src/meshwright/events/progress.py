"""Progress of a rank in shared memory: its step and phase, the index of its action in the schedule, and what it waits for.

At every action, the rank stores a few words, without a system call. A thread sends them to the launcher once a second. If the launcher has
created the page itself (a memfd, named by `PROGRESS` in the rank's environment), it can read the page at any time, even while the rank is
stopped or blocked in a driver, and after it has died. Does not import torch.
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
"""Environment variable with the path of a rank's page, `/proc/PARENT/fd/N`. Any process of the same user can open it."""

PHASES: tuple[Phase, ...] = get_args(Phase)
SEND_SECONDS = 1.0
"""Shortest time between two messages about actions, in seconds."""
WAIT_OPS = ("all_reduce", "unshard", "reduce_grad", "norm_barrier", "send", "recv", "other")
"""Communication for which a rank can wait. These are ops of a schedule's actions, except all_reduce, which belongs to no action."""
_STEP_SHIFT = 32
_PHASE_SHIFT = 24
_ACTION_MASK = (1 << 24) - 1
"""Layout of word 0: bits 0 to 23 have the action, bits 24 to 31 the phase, bits 32 to 63 the step."""
_OP_SHIFT = 56
_STAGE_SHIFT = 44
_BATCH_SHIFT = 28
_UNIT_SHIFT = 14
_PROGRESS, _COUNT, _SINCE, _WAIT, _WAIT_SINCE = range(5)


@dataclass(frozen=True)
class PendingWait:
    """The communication in which a rank's host is blocked, and since when: a time of its monotonic clock in ns.

    Stage, micro-batch and unit belong to the action that communicates; -1 if it has none. `peer` is the stage with which a message is
    exchanged.
    """

    op: str
    stage: int
    micro_batch: int
    unit: int
    peer: int
    since_ns: int


class ProgressPage:
    """The page of one rank. Its words are:

    | word | content |
    |---|---|
    | 0 | step, phase and action |
    | 1 | number of stores so far |
    | 2 | monotonic time in ns at which the action began |
    | 3 | what the host waits for; 0 if it does not wait |
    | 4 | time at which this wait began |
    """

    def __init__(self, descriptor: int) -> None:
        """Map the page in the open file `descriptor`. This object closes the descriptor later."""
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("Q")
        self._base = self._words[0] & ~_ACTION_MASK

    @classmethod
    def create(cls) -> ProgressPage:
        """A new page: step 0 in phase `start`."""
        descriptor = os.memfd_create("meshwright-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> ProgressPage:
        """The page that the parent process reads. Without a parent, a page of this process only."""
        path = env.get(PROGRESS)
        return cls.create() if path is None else cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """The path by which another process of the same user can open the page, while this process has it open."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def begin(self, phase: Phase, step: int) -> None:
        """Store that `phase` of `step` begins. The action becomes 0."""
        self._base = (step & 0xFFFFFFFF) << _STEP_SHIFT | PHASES.index(phase) << _PHASE_SHIFT
        self.set_action(0)

    def set_action(self, index: int) -> None:
        """Store that action `index` begins."""
        words = self._words
        words[_PROGRESS] = self._base | index
        words[_SINCE] = time.monotonic_ns()
        words[_COUNT] += 1

    def begin_wait(self, action: ScheduledAction | None) -> None:
        """Store that the host waits for the communication of `action`; None means an all-reduce outside of the schedule."""
        words = self._words
        words[_WAIT_SINCE] = time.monotonic_ns()
        words[_WAIT] = _wait_word(action)

    def end_wait(self) -> None:
        """Store that the host no longer waits."""
        self._words[_WAIT] = 0

    @property
    def pending_wait(self) -> PendingWait | None:
        """The communication in which the rank's host is blocked; None if it is not."""
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
        """Number of stores so far. If it does not change, the rank makes no progress."""
        return self._words[_COUNT]

    def close(self) -> None:
        """Close the descriptor; the mapping stays until the object is freed."""
        os.close(self.descriptor)


class ProgressSender:
    """Reports a rank's progress: stores it in the page at every action, and sends it at each change of phase and once a second."""

    def __init__(self, page: ProgressPage, channel: MessageChannel) -> None:
        self.page = page
        self._channel = channel
        self._phase: Phase | None = None
        self._sent = 0
        if channel.connected:
            threading.Thread(target=self._send_changes, name="progress", daemon=True).start()

    def begin(self, phase: Phase, step: int) -> None:
        """Store and send that `phase` of `step` begins. If only the step has changed, nothing is sent."""
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
    """A wait packed into one word. Indices are stored plus 1, so that -1 becomes 0."""
    if action is None:
        return (WAIT_OPS.index("all_reduce") + 1) << _OP_SHIFT
    op = _OP_CODES.get(action.op, len(WAIT_OPS))
    unit = 0 if action.unit is None else action.unit + 1
    places = (action.stage + 1) << _STAGE_SHIFT | (action.micro_batch + 1) << _BATCH_SHIFT | unit << _UNIT_SHIFT
    return op << _OP_SHIFT | places | action.peer + 1


_OP_CODES = {op: code for code, op in enumerate(WAIT_OPS, start=1)}
