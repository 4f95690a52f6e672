"""Processes of a disturbed job, read from /proc. Linux only."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

TOKEN = "MESHWRIGHT_CHAOS"
"""Environment variable with a text that only the processes of one job have."""


def environment(pid: int) -> dict[str, str]:
    """The environment that a process started with; empty if the process has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def processes_with(token: str) -> list[int]:
    """Running processes whose environment has the token of a job, zombies excluded."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if environment(pid).get(TOKEN) == token and state(pid) not in ("Z", "X", "")]


def state(pid: int) -> str:
    """The kernel's letter for the state of a process; empty if the process has ended."""
    fields = _status(pid)
    return fields[0] if fields else ""


def start_ticks(pid: int) -> int:
    """Clock ticks from the boot of the machine to the start of a process; 0 if the process has ended."""
    fields = _status(pid)
    return int(fields[19]) if fields else 0


def _status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command's name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def command(pid: int) -> list[str]:
    """The arguments that a process was started with; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """Processes that the main thread of a process started and that it has not yet waited for."""
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []


def training_ranks(agent: int) -> dict[int, int]:
    """Process id by rank of the attempt that runs under the process `agent`.

    Spares have ranks in their environment too; they are younger than the process whose rank they would take.
    """
    oldest: dict[int, int] = {}
    for pid in children(agent):
        rank = environment(pid).get("RANK")
        if rank is None or state(pid) in ("Z", "X", ""):
            continue
        if int(rank) not in oldest or start_ticks(pid) < start_ticks(oldest[int(rank)]):
            oldest[int(rank)] = pid
    return oldest


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_all(token: str) -> list[int]:
    """Kill every process with the token of a job; returns those that ran."""
    first_processes = processes = processes_with(token)
    while processes:
        for pid in processes:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)
        processes = processes_with(token)
    return first_processes
