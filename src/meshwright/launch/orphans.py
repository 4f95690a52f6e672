"""Ends ranks of an earlier start on this host whose agent is dead, because they would still occupy devices.

The kernel ends most such ranks. A rank's environment names its run, and its agent's process id. The rank is an orphan
if its parent process is no longer that agent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from meshwright.events.terminal import write_line
from meshwright.launch.local import RUN_VARIABLE

PROC = Path("/proc")


def end_orphans(folder: Path) -> list[int]:
    """Kill the orphaned ranks of the run in `folder` on this host, and return their process ids."""
    ended = []
    for pid in orphans(folder):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            ended.append(pid)
    if ended:
        write_line(f"meshwright: ended {len(ended)} processes of an earlier start of {folder}, whose agent is dead")
    return ended


def orphans(folder: Path, proc: Path = PROC) -> Iterator[int]:
    """Yield the process ids of orphaned ranks of the run in `folder`. `proc` is the folder of processes, /proc."""
    run = f"{RUN_VARIABLE}={os.path.abspath(folder)}".encode()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):  # the process has ended, or belongs to another user
            variables = (entry / "environ").read_bytes().split(b"\0")
            if run not in variables or b"meshwright.training.rank" not in (entry / "cmdline").read_bytes().split(b"\0"):
                continue
            # 18 is the length of "MESHWRIGHT_PARENT=".
            agents = (int(value[18:]) for value in variables if value.startswith(b"MESHWRIGHT_PARENT="))
            agent = next(agents, None)
            status = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            # The second field after the command's name is the parent's process id.
            if agent is not None and int(status[1]) != agent:
                yield int(entry.name)
