"""Finds and signals the processes of a disturbed job, using /proc. It works on Linux only."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

TOKEN = "MESHWRIGHT_CHAOS"
"""Environment variable whose value identifies the processes of one job."""


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process started with; empty if the process has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def processes_with(token: str) -> list[int]:
    """Return the ids of running processes whose environment has the token of a job. Zombies do not count."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if environment(pid).get(TOKEN) == token and state(pid) not in ("Z", "X", "")]


def state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as R for running; empty if the process has ended."""
    fields = _status(pid)
    return fields[0] if fields else ""


def start_ticks(pid: int) -> int:
    """Return the clock ticks between the boot of the machine and the start of a process; 0 if the process has ended."""
    fields = _status(pid)
    # The 20th field after the command's name.
    return int(fields[19]) if fields else 0


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the command's name; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def command(pid: int) -> list[str]:
    """Return the arguments with which a process was started; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """Return the child processes that the main thread of a process has started and not yet waited for."""
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []


def training_ranks(agent: int) -> dict[int, int]:
    """Return the process ids of the running attempt's ranks, by rank. They are children of the process `agent`.

    Spare processes also have a rank in their environment. They are younger than the process of that rank.
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
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_all(token: str) -> list[int]:
    """Kill every process with the token of a job. Return the processes that were running."""
    first_processes = processes = processes_with(token)
    while processes:
        for pid in processes:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)
        processes = processes_with(token)
    return first_processes
