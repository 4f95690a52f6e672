"""How long a start took, phase by phase: from the command to the first step, across the processes that share the work.

All of a host's processes read one monotonic clock, so a rank goes on counting where the process that started it stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

START_TIME_VARIABLE = "MESHWRIGHT_BEGAN"
"""Environment variable with the monotonic clock's seconds at which the command began (local launch only)."""
SHOWN_SECONDS = 0.05
"""Phases shorter than this have no place in the line."""

PHASES: dict[str, str] = {
    "command": "the interpreter, the command's own imports, reading and checking the run file, starting the process",
    "imports": "torch and the rest of what a rank imports; the launcher prepares data and plan meanwhile",
    "plan": "what of preparing the run (data, plan, folder) the rank had to wait for",
    "join": "store, device, process groups of all ranks",
    "mesh": "the groups of the plan's axes",
    "model": "cut, wrapped, sharded, given memory",
    "weights": "initial values",
    "data": "corpora opened",
    "optimizer": "the optimizer and its moments",
    "load": "a checkpoint, or weights that are started from",
    "report": "metrics, terminal, sinks",
    "first batch": "waiting for it",
    "first step": "with compilation, choice of kernels, first use of communicators",
}
"""Parts of a start in order, each on rank 0 from the end of the one before: they add up to the whole."""


class StartClock:
    """Phases of a start, one after another, on the host's monotonic clock."""

    def __init__(self, start_time: float | None = None) -> None:
        self.start_time = process_start_time() if start_time is None else start_time
        self._last = self.start_time
        self.phases: dict[str, float] = {}

    @classmethod
    def for_rank(cls) -> StartClock:
        """Of a locally launched rank: `command` is everything until this process was there."""
        clock = cls(float(os.environ[START_TIME_VARIABLE]) if START_TIME_VARIABLE in os.environ else None)
        clock.end("command", at=max(clock.start_time, process_start_time()))
        return clock

    def end(self, phase: str, *, at: float | None = None) -> None:
        """What has passed since the last phase ended, until `at` (monotonic seconds; now when None), was `phase`."""
        now = time.monotonic() if at is None else at
        self.add(phase, now - self._last)

    def add(self, phase: str, seconds: float) -> None:
        """The next `seconds` were `phase`."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self._last += seconds


def process_start_time() -> float:
    """The monotonic clock's seconds at which this process began, to 10 ms; now where the system does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        # Both clocks at once, for between this and the file the process may have had to wait.
        return time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic()


def start_line(phases: Mapping[str, float], compiler: Mapping[str, float]) -> str:
    """`start: 11.2 s: imports 3.1, join 1.2, …`; `compiler` as observe.compiling counts it."""
    parts = [f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= SHOWN_SECONDS]
    line = f"start: {sum(phases.values()):.1f} s: {', '.join(parts)}"
    made, kept = (compiler.get(key, 0.0) for key in ("compiled", "from_cache"))
    if not made + kept:
        return line
    return (
        f"{line} (compiler {compiler.get('seconds', 0.0):.1f}: {made:.0f} graphs compiled, {kept:.0f} from its cache)"
    )
