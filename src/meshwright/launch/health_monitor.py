"""The agent's side of health monitoring: starts the process that reads this host, and applies `policies.host_health`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from meshwright.events.parent import PARENT
from meshwright.events.terminal import write_line
from meshwright.launch.health_reader import ALL
from meshwright.policies.host_health import HOST, SILENT_SECONDS, HealthFinding, HealthReading, HealthWatch
from meshwright.spec.run import RunSpec
from meshwright.spec.secrets import without_secrets

FIRST_SECONDS = 10.0
"""Seconds for which the start of ranks waits for the first reading."""


@contextmanager
def health_monitor(run: RunSpec) -> Iterator[HealthMonitor | None]:
    """Provide the monitor of this host within a `with` block; None if the run reads no health (`supervision.health`)."""
    computes_on_gpus = not run.cluster.is_cpu
    if not (computes_on_gpus if run.supervision.health is None else run.supervision.health):
        yield None
        return
    with closing(HealthMonitor(run.cluster.gpus_per_node if computes_on_gpus else ALL)) as monitor:
        yield monitor


class HealthMonitor:
    """Starts the process that reads this host's health, and keeps the newest findings."""

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`count` is the number of visible GPUs that are read. `clock` returns seconds."""
        command = [sys.executable, "-m", "meshwright.launch.health_reader", str(count)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**without_secrets(), PARENT: str(os.getpid())},
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._watch = HealthWatch()
        self._clock = clock
        self._started = self._answered = clock()
        self._incomplete = b""
        self._ended = False
        self._read = False
        self._findings: tuple[HealthFinding, ...] = ()

    @property
    def known(self) -> bool:
        """Whether the start of ranks need not wait: the host has been read, or it has not answered for `FIRST_SECONDS`."""
        return self._read or self._ended or self._clock() - self._started > FIRST_SECONDS

    def findings(self) -> tuple[HealthFinding, ...]:
        """Return what is wrong with this host now. A reader that has been silent too long is a finding, too."""
        self._take_lines()
        silent = self._clock() - self._answered
        if self._ended or silent <= SILENT_SECONDS:
            return self._findings
        return (
            *self._findings,
            *HealthWatch().update(0.0, [HealthReading(HOST, {"silent_seconds": round(silent, 1)})]),
        )

    def close(self) -> None:
        """Kill the reading process. A process that hangs in the driver ends later."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _take_lines(self) -> None:
        """Read the lines that the process has written since the last call."""
        while not self._ended:
            try:
                data = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._ended = True
                write_line(
                    "meshwright: the process that reads the health of this host has ended; it is not read any more"
                )
                return
            *lines, self._incomplete = (self._incomplete + data).split(b"\n")
            for line in lines:
                with suppress(ValueError):  # not JSON: a line that a library of the driver has printed
                    self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        """Handle one line of the process: print its notes, and update the findings."""
        for note in line["notes"]:
            write_line(f"meshwright: {note}")
        readings = [HealthReading(each["part"], each["values"], tuple(each["xids"])) for each in line["readings"]]
        self._findings = self._watch.update(line["seconds"], readings)
        self._answered = self._clock()
        self._read = True
