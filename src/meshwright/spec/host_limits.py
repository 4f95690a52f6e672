"""Processor cores and memory that this process may use on its host. Without torch.

A batch system or a container limits them with a CPU affinity mask and with control groups of version 1 or 2
(cgroups(7)). The limits of all groups above the process's own group apply too. Inside a container, the files of the
process's own group are directly in /sys/fs/cgroup.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
"""Folder of the control groups."""
MEMBERSHIP = Path("/proc/self/cgroup")
"""File that lists the control groups of this process."""
NO_LIMIT = 1 << 60
"""From this number of bytes on, a limit counts as none.

A group of version 1 without a limit states 2^63 bytes minus a page.
"""


@dataclass(frozen=True)
class MemoryLimit:
    """Memory of a control group in bytes."""

    limit: int
    """Maximum memory of the group."""
    used: int
    """Memory that it uses now."""
    reclaimable: int
    """The part of `used` that the kernel can surely free: inactive pages of files."""

    @property
    def left(self) -> int:
        """Return the bytes that the group can still use."""
        return max(0, self.limit - self.used + self.reclaimable)


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the number of cores in the affinity mask, or the processor time of the tightest control group in cores,
    rounded up, if that is less.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _core_quotas(cgroups, membership))]))


def cgroup_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[MemoryLimit]:
    """Return the memory limits of this process's control groups; an empty list if it has none."""
    found = []
    for folder in _groups("memory", cgroups, membership):
        for limit, used, statistic in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):  # there is no such file, or the limit is `max`
                most = int(_text(folder / limit))
                now = int(_text(folder / used))
                if most < NO_LIMIT:
                    found.append(MemoryLimit(most, now, _statistic(folder / "memory.stat", statistic)))
    return found


def _statistic(file: Path, name: str) -> int:
    """Return the number after `name` in a file with a name and a number on each line; 0 if it is not there."""
    with suppress(OSError, ValueError):
        return int(dict(line.split() for line in _text(file).splitlines()).get(name, 0))
    return 0


def _core_quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """Yield the processor time per second of each control group that limits it, in seconds: 2.0 is two cores."""
    for folder in _groups("cpu", cgroups, membership):
        with suppress(OSError, ValueError):
            quota, period = map(int, _text(folder / "cpu.max").split())
            yield quota / period
        with suppress(OSError, ValueError):
            quota, period = (int(_text(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
            if quota > 0:
                yield quota / period


def _groups(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may have files of `controller`, each before the group
    above it.
    """
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/"]:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = cgroups / controller if controllers else cgroups
        parts = PurePosixPath(path).parts[1:]
        inside = parts if ".." not in parts else ()  # with `..`, the group is outside the mounted tree
        for count in range(len(inside), -1, -1):
            yield top.joinpath(*inside[:count])


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii")
