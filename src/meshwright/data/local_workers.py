"""Starts processes on this host that do the units of a job. If one dies, another takes its place and does its units again."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import meshwright
from meshwright.data.jobs import error_of
from meshwright.durable.writes import remove_partials
from meshwright.spec.errors import OutOfResources

AHEAD = 2
"""Units that a worker has at a time. With two, it begins the next unit while the main process writes shards."""
MOST_DEATHS = 3
"""Processes that may die while they do the same unit. After that many, the job ends with an error."""


def run_locally(folder: Path, units: Iterable[int], processes: int) -> Iterator[int]:
    """Do `units` of the job in `folder`, and yield the number of each once it is done, in any order.

    Raises the error that a unit raises, and OutOfResources if the processes that do a unit are killed MOST_DEATHS
    times.
    """
    waiting = deque(units)
    deaths = Counter[int]()
    selector = selectors.DefaultSelector()
    running: list[_Process] = []
    try:
        while waiting or any(process.units for process in running):
            while waiting and len(running) < processes:
                running.append(_Process(folder))
                selector.register(running[-1].output, selectors.EVENT_READ, running[-1])
            # Give out units in rounds, so that every process has one unit before any process has two.
            for units_before in range(AHEAD):
                for process in running:
                    if waiting and len(process.units) == units_before:
                        process.give(waiting.popleft())
            for key, _ in selector.select():
                process = key.data
                yield from process.answers()
                if process.ended:
                    selector.unregister(process.output)
                    running.remove(process)
                    waiting.extendleft(reversed(process.units))
                    if process.units:
                        _count_death(deaths, process)
                    process.end()
    finally:
        for process in running:
            process.end()
        selector.close()
        remove_partials(folder)  # Processes that were killed leave partial files.


def _count_death(deaths: Counter[int], process: _Process) -> None:
    """Count the death of a process at the first of its units. After MOST_DEATHS, raises an error that says how it died."""
    unit = process.units[0]
    deaths[unit] += 1
    if deaths[unit] == MOST_DEATHS:
        code = process.code()
        if code >= 0:
            raise RuntimeError(f"{MOST_DEATHS} processes failed with code {code} at unit {unit}; each has said why")
        name = signal.Signals(-code).name
        raise OutOfResources(
            f"{MOST_DEATHS} processes were ended by {name} while they did unit {unit}, most often for want of memory; use fewer "
            "--workers"
        )


class _Process:
    """A process that runs `unit_worker`. `units` are the units that were given to it and are not done, in their order."""

    def __init__(self, folder: Path) -> None:
        packages = str(Path(meshwright.__file__).parents[1])
        path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "meshwright.data.unit_worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.units: deque[int] = deque()
        self.ended = False
        self._line = b""

    @property
    def output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def give(self, unit: int) -> None:
        """Send a unit to the process. If the process has ended in the meantime, the unit stays in `units`."""
        assert self._process.stdin is not None
        self.units.append(unit)
        try:
            self._process.stdin.write(b"%d\n" % unit)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # Its output has ended too, and `answers` will find that.

    def answers(self) -> Iterator[int]:
        """Yield the units that were done since the last call. Raises the error of a unit that failed.

        Waits for output if there is none. If the output has ended, `ended` becomes true.
        """
        content = os.read(self.output.fileno(), 1 << 16)
        self.ended = not content
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "error" in answer:
                raise error_of(answer)
            self.units.remove(answer["unit"])
            yield answer["unit"]

    def code(self) -> int:
        """Return the exit code of the process, once it has ended. Negative: minus the number of the signal."""
        return self._process.wait()

    def end(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
