"""Choice of the groups of a snapshot that are first copied within device memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.snapshot_copies import NEGLIGIBLE_SECONDS, PassTimes, plan_device_copies

SECONDS = st.floats(0.0, 10.0)


def simulated_stall(group_bytes: list[float], first: int, times: PassTimes, copy_seconds: float) -> float:
    """Stall of an update that walks through its groups and waits for the copy of each from `first` on, by two clocks."""
    rate, per_byte = copy_seconds / sum(group_bytes), times.update_seconds / sum(group_bytes)
    link, update, stall = 0.0, times.compute_seconds, 0.0
    for number, count in enumerate(group_bytes):
        if number >= first:
            link += count * rate
            stall += max(0.0, link - update)
            update = max(update, link)
        update += count * per_byte
    return stall


@given(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=32), SECONDS, SECONDS, SECONDS, st.floats(0.0, 1.2))
def test_the_fewest_groups_without_a_stall_or_as_many_as_fit(
    group_bytes: list[float], copy: float, compute: float, update: float, share: float
) -> None:
    times, room = PassTimes(compute, update, 1.0), share * sum(group_bytes)
    plan = plan_device_copies(group_bytes, times, room, copy)
    stalls = [simulated_stall(group_bytes, first, times, copy) for first in range(len(group_bytes) + 1)]
    assert plan.stall_seconds == pytest.approx(stalls[plan.groups], abs=1e-9)
    assert plan.bytes == int(sum(group_bytes[: plan.groups])) <= room
    assert all(stall > 0 for stall in stalls[: plan.groups])
    if plan.stall_seconds > NEGLIGIBLE_SECONDS:
        assert plan.groups < len(group_bytes) and sum(group_bytes[: plan.groups + 1]) > room


def test_a_copy_of_a_second_beside_half_a_second_of_compute_needs_half_of_the_state_in_device_memory() -> None:
    times = PassTimes(compute_seconds=0.5, update_seconds=0.0, copy_bytes_per_second=32.0)
    assert plan_device_copies([1.0] * 32, times, room=100).groups == 16
    assert plan_device_copies([1.0] * 32, times, room=8).stall_seconds == pytest.approx(0.25)
    assert plan_device_copies([1.0] * 32, times, room=100, copy_seconds=0.4).groups == 0


def test_groups_in_host_memory_take_no_room() -> None:
    """Of a rank whose optimizer state is partly in host memory, the first groups have no bytes on the device."""
    times = PassTimes(compute_seconds=0.5, update_seconds=0.0, copy_bytes_per_second=1.0)
    plan = plan_device_copies([0.0, 0.0, 1.0, 1.0], times, room=2)
    assert (plan.groups, plan.bytes, plan.stall_seconds) == (4, 2, 0.0)


def test_times_of_a_step() -> None:
    times = PassTimes.of_step(1.0, 12e9, 280e9, 5e9)
    assert (times.compute_seconds, times.update_seconds) == (pytest.approx(0.9), pytest.approx(0.1))
