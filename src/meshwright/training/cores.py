"""Chooses the processor cores of a rank: cores near its device, divided among the ranks that have the same near cores.

A host may have several NUMA nodes. If the system moves a process to another node than its GPU's, the process reaches the GPU and its pinned
memory only over the link between the processors, which is slower.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import torch

from meshwright.parallel.world import World

log = logging.getLogger("meshwright")

SYSFS = Path("/sys")


def keep_to_own_cores(world: World) -> None:
    """Bind all threads of this process to its rank's share of the cores that it may use."""
    environment = world.environment
    addresses = [
        _pci_address(number) if world.device.type == "cuda" else None for number in range(environment.local_ranks)
    ]
    cores = own_cores(environment.local_rank, addresses, os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cores)
    log.info("keeps to processor cores %s", ",".join(map(str, sorted(cores))))


def own_cores(local_rank: int, addresses: Sequence[str | None], allowed: set[int], sysfs: Path = SYSFS) -> set[int]:
    """Return the cores for local rank `local_rank`, out of the cores `allowed`.

    `addresses` has the PCI address of every local rank's device (`0000:1b:00.0`), or None for a CPU rank. Ranks with the same near cores
    get equal parts of them, and the threads of one physical core stay together. If there are fewer near cores than such ranks, each of the
    ranks gets all of them.
    """
    near = [_near(address, allowed, sysfs) for address in addresses]
    beside = [rank for rank, cores in enumerate(near) if cores == near[local_rank]]
    first = {core: min(_siblings(core, sysfs), default=core) for core in near[local_rank]}
    ordered = sorted(near[local_rank], key=lambda core: (first[core], core))
    position = beside.index(local_rank)
    count = len(beside)
    if len(ordered) < count:
        return set(ordered)
    return set(ordered[len(ordered) * position // count : len(ordered) * (position + 1) // count])


def _pci_address(number: int) -> str:
    domain, bus, device = attrgetter("pci_domain_id", "pci_bus_id", "pci_device_id")(
        torch.cuda.get_device_properties(number)
    )
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _near(address: str | None, allowed: set[int], sysfs: Path) -> set[int]:
    """Return the `allowed` cores that are near the device; all of `allowed` if the system reports none."""
    return (address and allowed & set(_listed(sysfs / "bus/pci/devices" / address / "local_cpulist"))) or allowed


def _siblings(core: int, sysfs: Path) -> Iterable[int]:
    return _listed(sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")


def _listed(file: Path) -> list[int]:
    """Return the numbers in a list such as `0-15,32-47`; empty if the file does not exist."""
    try:
        parts = file.read_text(encoding="ascii").strip().split(",")
    except OSError:
        return []
    ranges = [[int(number) for number in part.split("-")] for part in parts if part]
    return [number for ends in ranges for number in range(ends[0], ends[-1] + 1)]
