"""Observes a running `meshwright train`: its steps, its attempts and its output, with the time at which each was seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.chaos.processes import TOKEN, training_ranks
from meshwright.spec.errors import MeshwrightError

POLL_SECONDS = 0.01
"""Seconds between two looks at the job."""
RECENT_STEPS = 10
"""Number of steps over which the duration of a step is averaged."""
LONGEST_SECONDS = 180.0
"""Seconds that a job on CPUs may take until an awaited point or its end."""
LONGEST_GPU_SECONDS = 600.0
"""The same on GPUs. It is longer, because kernels are compiled."""


class NotReached(MeshwrightError):
    """The job ended, or took too long, before it reached the point that the scenario waits for."""

    exit_code = 1


class Tail:
    """Reads new lines of a file that grows. The file may also be replaced by another file of the same name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._seen: set[str] = set()

    def read(self) -> list[str]:
        """Return the complete lines that no earlier call has returned.

        A line with the same text as an earlier one is skipped.
        """
        try:
            status = self._path.stat()
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode = status.st_ino
                self._offset = 0
            if status.st_size == self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = [line for line in complete.decode(errors="replace").splitlines() if line not in self._seen]
        self._seen.update(lines)
        return lines


class ChaosJob:
    """A running command, on one or several hosts, and what was observed of it. Times are seconds of `time.monotonic`."""

    def __init__(
        self,
        arguments: Sequence[str],
        run: Path,
        output: Path,
        token: str,
        *,
        longest_seconds: float = LONGEST_SECONDS,
        show: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`run` is the folder of the run, and `output` the file for what the command prints.

        `launch` starts the command.

        `arguments` are those of `meshwright`, and `token` is the value of `processes.TOKEN`. Waiting for a point of the
        job ends after `longest_seconds`. `show` receives each line of progress.
        """
        self._longest_seconds = longest_seconds
        self._show = show
        self.run = run
        self.output_file = output
        self.processes: list[subprocess.Popen[bytes]] = []
        """The process of the command on each host."""
        self._arguments = arguments
        self._token = token
        self._forgotten: set[int] = set()
        """Process ids whose end and exit code do not count."""
        self.steps: list[tuple[float, int]] = []
        """(time, number) of each finished step."""
        self.losses: list[tuple[int, float | None]] = []
        """(number, loss) of each finished step. A step that is trained again occurs again."""
        self.states: list[tuple[float, dict[str, Any]]] = []
        """(time, content) of each line of the run's supervision.jsonl."""
        self.lines: list[tuple[float, str]] = []
        """(time, text) of each line that the command has printed."""
        output.parent.mkdir(parents=True, exist_ok=True)
        self._tails = [Tail(run / "metrics.jsonl"), Tail(run / "supervision.jsonl"), Tail(output)]
        for tail in self._tails:
            tail.read()  # skip what an earlier job has written
        self.started = time.monotonic()

    def launch(self, prefix: Sequence[str] = (), env: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the process of the command on one host.

        `prefix` are arguments before the command, and `env` further environment variables.
        """
        with self.output_file.open("ab") as file:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "meshwright", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, TOKEN: self._token, **env},
                start_new_session=True,
            )
        self.processes.append(process)

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Ignore a process that the scenario has killed or cut off: do not wait for it, and do not use its exit code."""
        self._forgotten.add(process.pid)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of the command on the first host."""
        return self.processes[0]

    @property
    def code(self) -> int | None:
        """The exit code of the command: the largest of all hosts. None while the command still runs on one of them."""
        codes = [process.poll() for process in self.processes if process.pid not in self._forgotten]
        exit_codes = [code for code in codes if code is not None]
        return max(exit_codes, key=abs) if len(exit_codes) == len(codes) and exit_codes else None

    @property
    def output(self) -> str:
        """All text that the command has printed so far."""
        self.poll()
        return "\n".join(line for _, line in self.lines)

    @property
    def last_step(self) -> int:
        """The step that was finished last; 0 before the first."""
        return self.steps[-1][1] if self.steps else 0

    @property
    def step_seconds(self) -> float:
        """Mean seconds of the newest steps; 0 before the second step."""
        recent = [moment for moment, _ in self.steps[-RECENT_STEPS:]]
        return (recent[-1] - recent[0]) / (len(recent) - 1) if len(recent) > 1 else 0.0

    @property
    def attempt(self) -> int:
        """Number of the running attempt, or of the last one if none runs."""
        return self.states[-1][1]["attempt"] if self.states else 0

    def ranks(self, host: int = 0) -> dict[int, int]:
        """Return the process ids of the ranks that train on a host, by their rank on that host."""
        return training_ranks(self.processes[host].pid)

    def poll(self) -> None:
        """Read the lines that were written since the last call."""
        metrics, states, output = (tail.read() for tail in self._tails)
        now = time.monotonic()
        for record in _records(metrics):
            if record.get("kind") == "step":
                self._show_step(record["step"])
                self.steps.append((now, record["step"]))
                self.losses.append((record["step"], record.get("loss")))
        self.states += [(now, record) for record in _records(states)]
        self.lines += [(now, line) for line in output]
        for line in output:
            self._show(line)

    def _show_step(self, step: int) -> None:
        """Show a step if it is the first one, or does not follow the step before it, as after a restart."""
        if step != self.last_step + 1 or not self.steps:
            self._show(f"step {step} is finished")

    def until(self, reached: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Wait until `reached()` is true. `what` describes that point in errors.

        Raises NotReached if the job ends before, or after `seconds`.
        """
        seconds = seconds or self._longest_seconds
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if reached():
                return
            if self.code is not None:
                raise NotReached(f"the job ended with code {self.code} before {what}: {self._last_line()}")
            if time.monotonic() > deadline:
                raise NotReached(f"{what} did not occur within {seconds:g} s: {self._last_line()}")
            time.sleep(POLL_SECONDS)

    def until_step(self, step: int) -> None:
        """Wait until a step is finished."""
        self.until(lambda: self.last_step >= step, f"step {step}")

    def until_printed(self, text: str, seconds: float | None = None) -> None:
        """Wait until the command has printed a line that contains `text`."""
        self.until(lambda: any(text in line for _, line in self.lines), f"the line {text!r}", seconds)

    def wait(self, seconds: float | None = None) -> int:
        """Observe the job until it ends, and return its exit code. Raises NotReached after `seconds`."""
        seconds = seconds or self._longest_seconds
        deadline = time.monotonic() + seconds
        while (code := self.code) is None:
            self.poll()
            if time.monotonic() > deadline:
                raise NotReached(f"the job did not end within {seconds:g} s: {self._last_line()}")
            time.sleep(POLL_SECONDS)
        self.poll()
        return code

    def _last_line(self) -> str:
        return self.lines[-1][1] if self.lines else "it printed nothing"


def _records(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON objects among lines; other lines are skipped."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
