"""Chooses which part of a snapshot is first copied within device memory, so that the next optimizer update waits less.

The update handles one group of parameters after another, and each group waits until its old state has been copied. A copy within device
memory takes a hundredth of the time of a copy to the host. So the groups that are updated first are copied into a buffer on the device.
Their state is copied from the buffer to the host last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SNAPSHOT_GROUPS = 32
"""Most groups of parameters between which an update waits for copies of a snapshot. Each group needs one kernel launch."""
NEGLIGIBLE_SECONDS = 1e-6
"""A wait shorter than this counts as none."""
STATE_BYTES = 12
"""Bytes of state per parameter: a master weight and two moments in fp32."""
UPDATE_BYTES = 28
"""Memory traffic per parameter in an update, in bytes: the state is read and written, and the gradient is read."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a step's forward and backward passes and of its optimizer update, and the expected bandwidth of copies to the host."""

    compute_seconds: float
    update_seconds: float
    copy_bytes_per_second: float

    @classmethod
    def of_step(
        cls, step_seconds: float, state_bytes: float, memory_bytes_per_second: float, copy_bytes_per_second: float
    ) -> PassTimes:
        """The times of a rank whose device updates `state_bytes` of state at the bandwidth of its memory."""
        update = min(step_seconds, state_bytes / STATE_BYTES * UPDATE_BYTES / memory_bytes_per_second)
        return cls(step_seconds - update, update, copy_bytes_per_second)


@dataclass(frozen=True)
class DeviceCopies:
    """The first `groups` groups of the update are copied within device memory, into buffers of `bytes` bytes."""

    groups: int
    bytes: int
    stall_seconds: float
    """How long the update still waits for copies to the host."""


def plan_device_copies(
    group_bytes: Sequence[float], times: PassTimes, room: float, copy_seconds: float | None = None
) -> DeviceCopies:
    """Choose the fewest groups with which the update does not wait, or as many as fit into `room` bytes of device memory.

    `group_bytes` has the bytes of state of each group in the order of the update. The copy of all state to the host begins with the forward
    pass. It takes `copy_seconds`; None means the time at the expected bandwidth. The update is assumed to take equal time for each byte.
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
    """Seconds that an update waits for copies to the host, if only the groups from `first` on are copied, in the order of the update."""
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
