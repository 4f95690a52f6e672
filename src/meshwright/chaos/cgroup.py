"""A control group whose memory another program exhausts, so that the kernel's out-of-memory killer ends a rank."""

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
"""Memory that the limit leaves to the program which then takes more."""
HOG = f"""
import os, sys, time
open("/proc/self/oom_score_adj", "w").write("999")
open(sys.argv[1], "w").write(str(os.getpid()))
data = bytearray({2 * SPARE_BYTES})
for at in range(0, len(data), 4096):
    data[at] = 1
time.sleep(60)
"""
"""A program that enters a group and takes twice as much as its limit leaves, less than a rank has.

Until the memory of a killed process is free the kernel may kill another one: after the victim, with a score of 1000, that is this program.
"""


def memory_group_obstacle() -> str | None:
    """Return why this process cannot limit the memory of a control group; None if it can."""
    parent = _parent()
    if parent is None:
        return "there is no memory controller below /sys/fs/cgroup"
    return None if os.access(parent, os.W_OK) else f"{parent} is not writable (needs root)"


def _parent() -> Path | None:
    """The folder in which groups with a memory controller are created: version 1, else version 2."""
    first = ROOT / "memory"
    if (first / "memory.limit_in_bytes").exists():
        return first
    controllers = ROOT / "cgroup.subtree_control"
    return ROOT if controllers.exists() and "memory" in controllers.read_text().split() else None


class MemoryGroup:
    """A memory control group for a job."""

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
        """Move a process that has just started into the group; its children follow."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def exhaust(self, victim: int) -> None:
        """Limit the group to a little more than it uses, and start a program in it that takes more; the kernel kills `victim`."""
        Path(f"/proc/{victim}/oom_score_adj").write_text("1000", encoding="ascii")
        self._limit.write_text(str(int(self._usage.read_text()) + SPARE_BYTES))
        self._hog = subprocess.Popen([sys.executable, "-c", HOG, str(self._folder / "cgroup.procs")])

    def release(self) -> None:
        """End the other program and lift the limit."""
        if self._hog is not None:
            self._hog.kill()
            self._hog.wait()
        with suppress(OSError):
            self._limit.write_text("max" if self._limit.name == "memory.max" else "-1")

    def close(self) -> None:
        """Remove the group, whose processes have ended."""
        self.release()
        for _ in range(50):
            with suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.1)
