"""Duration of a start by phase, from the command to the first step, across the processes involved.

All processes of a host read one monotonic clock, so a rank continues the count of the process that started it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

START_TIME_VARIABLE = "MESHWRIGHT_BEGAN"
"""Environment variable with the monotonic time in seconds at which the command began (local launch only)."""
SHORTEST_SECONDS = 0.05
"""Phases shorter than this are left out of the line."""

PHASES: dict[str, str] = {
    "command": "interpreter, imports of the command, reading and checking the run file, starting the process",
    "imports": "torch and the other imports of a rank; the launcher prepares data and plan meanwhile",
    "plan": "wait until data, plan and folder of the run are prepared",
    "join": "store, device, process groups of all ranks",
    "mesh": "process groups of the plan's axes",
    "model": "building, splitting, sharding and allocating the model",
    "weights": "initial values",
    "data": "opening the corpora",
    "optimizer": "the optimizer and its moments",
    "load": "loading a checkpoint or initial weights",
    "reference": "with preference: log-probabilities of the answers under the reference that are not stored yet",
    "report": "metrics, terminal, sinks",
    "first batch": "wait for the first batch",
    "first step": "first step, with compilation, kernel selection and communicator set-up",
}
"""Phases of a start in order. On rank 0 each begins at the end of the previous one, so they add up to the whole start."""


class StartClock:
    """Phases of a start, one after another, on the host's monotonic clock."""

    def __init__(self, start_time: float | None = None) -> None:
        self.start_time = process_start_time() if start_time is None else start_time
        self._last = self.start_time
        self.phases: dict[str, float] = {}

    @classmethod
    def for_rank(cls) -> StartClock:
        """The clock of a locally launched rank: `command` ends when this process started."""
        clock = cls(float(os.environ[START_TIME_VARIABLE]) if START_TIME_VARIABLE in os.environ else None)
        clock.end("command", at=max(clock.start_time, process_start_time()))
        return clock

    @classmethod
    def for_spare(cls) -> StartClock:
        """The clock of a spare process that gets a rank now: `command` is the time since the command or failure began."""
        clock = cls(float(os.environ[START_TIME_VARIABLE]) if START_TIME_VARIABLE in os.environ else time.monotonic())
        clock.end("command")
        return clock

    def end(self, phase: str, *, at: float | None = None) -> None:
        """End `phase`: the time from the end of the last phase until `at` (monotonic seconds; None: now)."""
        now = time.monotonic() if at is None else at
        self.add(phase, now - self._last)

    def add(self, phase: str, seconds: float) -> None:
        """Count the next `seconds` as `phase`."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self._last += seconds


def process_start_time() -> float:
    """The monotonic time in seconds at which this process began, to 10 ms; now where the system does not report it."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        # Read both clocks together: the process may have waited after it read the file.
        return time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic()


def start_line(phases: Mapping[str, float], compiler: Mapping[str, float]) -> str:
    """`start took 11.2 s: imports 3.1, join 1.2, …`; `compiler` holds the counts of `observe.compiling`."""
    parts = [f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= SHORTEST_SECONDS]
    line = f"start took {sum(phases.values()):.1f} s: {', '.join(parts)}"
    compiled, cached = (compiler.get(key, 0.0) for key in ("compiled", "from_cache"))
    if not compiled + cached:
        return line
    return f"{line} (compiler {compiler.get('seconds', 0.0):.1f}: {compiled:.0f} graphs compiled, {cached:.0f} from its cache)"
