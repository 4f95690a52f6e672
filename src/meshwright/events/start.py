"""Measures how long each phase of a start takes, from the command to the first step, across processes.

All processes of a host use the same monotonic clock. So a rank can continue the count of the process that started it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

START_TIME_VARIABLE = "MESHWRIGHT_BEGAN"
"""Environment variable with the monotonic time in seconds at which the command began (local launch only)."""
SHORTEST_SECONDS = 0.05
"""Shorter phases are left out of the line."""

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
"""Phases of a start in order, with their meanings.

On rank 0, each phase begins when the phase before it ends, so all phases together are the whole start.
"""


class StartClock:
    """Durations of the phases of a start, in seconds. The phases follow each other on the host's monotonic clock."""

    def __init__(self, start_time: float | None = None) -> None:
        self.start_time = process_start_time() if start_time is None else start_time
        self._last = self.start_time
        self.phases: dict[str, float] = {}

    @classmethod
    def for_rank(cls) -> StartClock:
        """Return the clock of a rank that was launched on this host. Its phase `command` ends when this process started."""
        clock = cls(float(os.environ[START_TIME_VARIABLE]) if START_TIME_VARIABLE in os.environ else None)
        clock.end("command", at=max(clock.start_time, process_start_time()))
        return clock

    @classmethod
    def for_spare(cls) -> StartClock:
        """Return the clock of a spare process that becomes a rank now.

        Its phase `command` began with the command or the failure.
        """
        clock = cls(float(os.environ[START_TIME_VARIABLE]) if START_TIME_VARIABLE in os.environ else time.monotonic())
        clock.end("command")
        return clock

    def end(self, phase: str, *, at: float | None = None) -> None:
        """End `phase`, which began when the last phase ended. `at` is the end in monotonic seconds; None is now."""
        now = time.monotonic() if at is None else at
        self.add(phase, now - self._last)

    def add(self, phase: str, seconds: float) -> None:
        """Count the next `seconds` as `phase`."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self._last += seconds


def process_start_time() -> float:
    """Return the monotonic time in seconds at which this process began, to 10 ms; the present if the system does not
    report it.
    """
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The 20th field after the command's name: clock ticks from boot to the start of this process.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        # Both clocks are read now, and not before the file: the process may have been delayed while it read the file.
        return time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic()


def start_line(phases: Mapping[str, float], compiler: Mapping[str, float]) -> str:
    """Return the line `start took 11.2 s: imports 3.1, join 1.2, …`. `compiler` has the figures of `observe.compiling`."""
    parts = [f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= SHORTEST_SECONDS]
    line = f"start took {sum(phases.values()):.1f} s: {', '.join(parts)}"
    compiled, cached = (compiler.get(key, 0.0) for key in ("compiled", "from_cache"))
    if not compiled + cached:
        return line
    return f"{line} (compiler {compiler.get('seconds', 0.0):.1f}: {compiled:.0f} graphs compiled, {cached:.0f} from its cache)"
