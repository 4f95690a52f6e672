"""The part of a snapshot that is first copied within device memory, so that the next update waits less.

The update runs in groups of parameters, and each group waits for the copy of its state. A copy within device memory takes a hundredth of
the time of a copy to the host. The groups that are updated first are copied within the device; their state reaches the host last, from
the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SNAPSHOT_GROUPS = 32
"""Most groups of parameters between which an update waits for copies of a snapshot; each group needs one launch."""
NEGLIGIBLE_SECONDS = 1e-6
"""A shorter stall counts as none."""
STATE_BYTES = 12
UPDATE_BYTES = 28
"""Bytes of a parameter's state, a master weight and two moments in fp32, and memory traffic of its update.

The update reads and writes the state and reads the gradient.
"""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a step's forward and backward passes and of its update, and the expected rate of copies to the host."""

    compute_seconds: float
    update_seconds: float
    copy_bytes_per_second: float

    @classmethod
    def of_step(
        cls, step_seconds: float, state_bytes: float, memory_bytes_per_second: float, copy_bytes_per_second: float
    ) -> PassTimes:
        """The times of a rank whose device updates `state_bytes` of state at the rate of its memory."""
        update = min(step_seconds, state_bytes / STATE_BYTES * UPDATE_BYTES / memory_bytes_per_second)
        return cls(step_seconds - update, update, copy_bytes_per_second)


@dataclass(frozen=True)
class DeviceCopies:
    """The first `groups` groups of the update are copied within device memory; `bytes` is the size of their buffers."""

    groups: int
    bytes: int
    stall_seconds: float
    """How long the update still waits for copies to the host."""


def plan_device_copies(
    group_bytes: Sequence[float], times: PassTimes, room: float, copy_seconds: float | None = None
) -> DeviceCopies:
    """The fewest groups for which the update does not wait, or as many as fit into `room` bytes of device memory.

    `group_bytes` has the state of each group in the order of the update. The copy of all of it to the host begins with the forward pass and
    takes `copy_seconds`, or what the expected rate gives. The update is spread evenly over the bytes.
    """
    if copy_seconds is None:
        copy_seconds = sum(group_bytes) / times.copy_bytes_per_second
    size = 0.0
    groups = 0
    stall = _stall(group_bytes, 0, copy_seconds, times)
    for number, count in enumerate(group_bytes):
        if stall < NEGLIGIBLE_SECONDS or size + count > room:
            break
        size = size + count
        groups = number + 1
        stall = _stall(group_bytes, groups, copy_seconds, times)
    return DeviceCopies(groups, int(size), stall)


def _stall(group_bytes: Sequence[float], first: int, copy_seconds: float, times: PassTimes) -> float:
    """Seconds that an update waits for copies to the host if only the groups from `first` on are copied, in its order."""
    total = sum(group_bytes)
    copied = 0.0
    updated = 0.0
    stall = 0.0
    for number, count in enumerate(group_bytes):
        if number >= first and total:
            copied += count
            reached = times.compute_seconds + times.update_seconds * updated / total
            stall = max(stall, copy_seconds * copied / total - reached)
        updated += count
    return stall
