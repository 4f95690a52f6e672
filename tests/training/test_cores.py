"""Each rank binds its threads to processor cores of its own, near its device."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.world import World
from meshwright.training.cores import keep_to_own_cores, own_cores

GPUS = ["0000:1b:00.0", "0000:43:00.0", "0000:9a:00.0", "0001:c3:00.0"]
LOCAL = ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]
"""Two processors of four cores with two threads each, and two GPUs beside either."""


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for address, cores in zip(GPUS, LOCAL, strict=True):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cores}\n")
    for core in range(16):
        topology = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    return tmp_path


def test_ranks_share_the_cores_near_their_device_by_whole_cores(sysfs: Path) -> None:
    cores_by_rank = [own_cores(rank, GPUS, set(range(16)), sysfs) for rank in range(4)]
    assert cores_by_rank == [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]


def test_a_rank_uses_only_the_cores_it_is_allowed_to_use(sysfs: Path) -> None:
    """A container that has cores 2 to 5: two a processor, and none for a device whose cores are all elsewhere."""
    assert [own_cores(rank, GPUS, {2, 3, 4, 5}, sysfs) for rank in range(4)] == [{2}, {3}, {4}, {5}]
    assert own_cores(2, GPUS[:3], {0, 1}, sysfs) == {0, 1}


def test_without_topology_information_all_cores_count_as_near(tmp_path: Path) -> None:
    assert [own_cores(rank, ["0000:00:06.0", None], {0, 1, 2, 3, 4}, tmp_path) for rank in range(2)] == [
        {0, 1},
        {2, 3, 4},
    ]
    assert own_cores(1, [None] * 2, {7, 9}, tmp_path) == {9}
    assert own_cores(0, [None] * 3, {7, 9}, tmp_path) == {7, 9}, "a share of nothing is no share"


def kept(world: World) -> tuple[set[int], set[int], set[int]]:
    """Keep to this rank's own cores, and undo it.

    Returns the cores allowed before, and those of this thread and of an earlier thread afterwards.
    """
    allowed, done = os.sched_getaffinity(0), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    try:
        keep_to_own_cores(world)
        return allowed, os.sched_getaffinity(0), os.sched_getaffinity(thread.native_id or 0)
    finally:
        for task in tasks:
            os.sched_setaffinity(task, allowed)
        done.set()


def test_every_thread_of_a_rank_is_bound(pool: Any) -> None:
    (allowed, first, thread), (_, second, _) = pool.run(kept, 2)
    if len(allowed) < 2:
        pytest.skip("needs 2 processor cores")
    assert first == thread and first | second == allowed and not first & second
