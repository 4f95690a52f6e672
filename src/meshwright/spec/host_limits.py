"""Processor cores and memory that this process may use on its host. Torch-free.

A batch system or a container limits them by a CPU affinity mask and by control groups, of version 1 or 2 (cgroups(7)). Every group above
the process's own counts too. Inside a container the files of the own group lie at the top of /sys/fs/cgroup.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60
"""Groups of version 1 without a limit have one of 2^63 bytes, less a page."""


@dataclass(frozen=True)
class MemoryLimit:
    """Memory of a control group in bytes. Of `used` the kernel can free `reclaimable`, inactive pages of files, and some more."""

    limit: int
    used: int
    reclaimable: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used + self.reclaimable)


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Cores in the affinity mask, or fewer if the processor time of a control group, rounded up, is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _core_quotas(cgroups, membership))]))


def cgroup_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[MemoryLimit]:
    """The limits of this process's control groups; none where it has no limit."""
    found = []
    for folder in _groups("memory", cgroups, membership):
        for limit, used, statistic in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):  # no such file, or the limit is `max`
                most = int(_text(folder / limit))
                now = int(_text(folder / used))
                if most < NO_LIMIT:
                    found.append(MemoryLimit(most, now, _statistic(folder / "memory.stat", statistic)))
    return found


def _statistic(file: Path, name: str) -> int:
    """Bytes after `name` in a file with a name and a number per line; 0 where there is none."""
    with suppress(OSError, ValueError):
        return int(dict(line.split() for line in _text(file).splitlines()).get(name, 0))
    return 0


def _core_quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """Seconds of processor time per second of each control group that has such a limit."""
    for folder in _groups("cpu", cgroups, membership):
        with suppress(OSError, ValueError):
            quota, period = map(int, _text(folder / "cpu.max").split())
            yield quota / period
        with suppress(OSError, ValueError):
            quota, period = (int(_text(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
            if quota > 0:
                yield quota / period


def _groups(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's control groups that may have files of `controller`, each before the one above it."""
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
        inside = parts if ".." not in parts else ()  # `..`: the group lies outside the mounted tree
        for count in range(len(inside), -1, -1):
            yield top.joinpath(*inside[:count])


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii")
