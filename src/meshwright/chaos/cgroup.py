"""A control group whose memory another program uses up, so that the kernel's out-of-memory killer ends a rank."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SPARE_BYTES = 64 << 20
"""Bytes that the limit leaves free for the program that then uses too much."""
HOG = f"""
import os, sys, time
open("/proc/self/oom_score_adj", "w").write("999")
open(sys.argv[1], "w").write(str(os.getpid()))
data = bytearray({2 * SPARE_BYTES})
for at in range(0, len(data), 4096):
    data[at] = 1
time.sleep(60)
"""
"""A program that enters a control group and uses twice the memory that its limit leaves free, but less than a rank
uses.

Until the memory of a killed process is free, the kernel may kill a second process. The victim has the highest score,
1000; this program has the next one, so it would be that second process.
"""


def memory_group_obstacle() -> str | None:
    """Return why this process cannot limit the memory of a control group; None if it can."""
    parent = _parent()
    if parent is None:
        return "there is no memory controller below /sys/fs/cgroup"
    return None if os.access(parent, os.W_OK) else f"{parent} is not writable (needs root)"


def _parent() -> Path | None:
    """Return the folder in which groups with a memory controller can be created, for cgroup version 1 or else 2; None
    without one.
    """
    first = ROOT / "memory"
    if (first / "memory.limit_in_bytes").exists():
        return first
    controllers = ROOT / "cgroup.subtree_control"
    return ROOT if controllers.exists() and "memory" in controllers.read_text().split() else None


class MemoryGroup:
    """A control group that limits the memory of a job."""

    def __init__(self) -> None:
        parent = _parent()
        assert parent is not None, "see memory_group_obstacle"
        self._folder = parent / f"meshwright-{secrets.token_hex(4)}"
        self._folder.mkdir()
        first = (self._folder / "memory.limit_in_bytes").exists()
        self._limit = self._folder / ("memory.limit_in_bytes" if first else "memory.max")
        self._usage = self._folder / ("memory.usage_in_bytes" if first else "memory.current")
        self._hog: subprocess.Popen[bytes] | None = None

    def add(self, pid: int) -> None:
        """Move a process that has just started into the group. Its later children will belong to the group too."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def exhaust(self, victim: int) -> None:
        """Let the kernel kill the process `victim` of the group.

        The limit is set to a little more than the group uses now. Then a program in the group uses more than that.
        """
        Path(f"/proc/{victim}/oom_score_adj").write_text("1000", encoding="ascii")
        self._limit.write_text(str(int(self._usage.read_text()) + SPARE_BYTES))
        self._hog = subprocess.Popen([sys.executable, "-c", HOG, str(self._folder / "cgroup.procs")])

    def release(self) -> None:
        """End the program that uses the memory, and remove the limit."""
        if self._hog is not None:
            self._hog.kill()
            self._hog.wait()
        with suppress(OSError):
            self._limit.write_text("max" if self._limit.name == "memory.max" else "-1")

    def close(self) -> None:
        """Remove the group. Its processes must have ended."""
        self.release()
        for _ in range(50):
            with suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.1)
