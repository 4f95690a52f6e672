"""Processes of this host that do the units of a job; one that dies is replaced, and its units are done again."""

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
from meshwright.data.jobs import raised
from meshwright.durable.writes import remove_partials
from meshwright.spec.errors import OutOfResources

AHEAD = 2
"""Units that a worker has at once: it begins the next one while the main process writes shards."""
MOST_DEATHS = 3
"""Processes that may die while they do one unit, before the preparation ends."""


def run_locally(folder: Path, units: Iterable[int], processes: int) -> Iterator[int]:
    """Do `units` of the job in `folder`; the number of each once it is done, in any order.

    Raises what a unit raises, and OutOfResources if the processes that do a unit are killed again and again.
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
            for count in range(AHEAD):
                for process in running:
                    if waiting and len(process.units) == count:
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
        remove_partials(folder)  # of processes that were ended


def _count_death(deaths: Counter[int], process: _Process) -> None:
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
    """A process of `unit_worker`; `units` are those that it has not done, in its order."""

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
        """Send a unit. If the process has ended in the meantime, the unit stays in `units`."""
        assert self._process.stdin is not None
        self.units.append(unit)
        try:
            self._process.stdin.write(b"%d\n" % unit)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # its output has ended too, which `answers` sees

    def answers(self) -> Iterator[int]:
        """The units that are done now. Raises the error of a unit that failed."""
        content = os.read(self.output.fileno(), 1 << 16)
        self.ended = not content
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "error" in answer:
                raise raised(answer)
            self.units.remove(answer["unit"])
            yield answer["unit"]

    def code(self) -> int:
        """The code with which it ended."""
        return self._process.wait()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
