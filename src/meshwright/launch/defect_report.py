"""Tells the site that a host was excluded from a run (`supervision.report_command`)."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time

from meshwright.events.terminal import write_line
from meshwright.spec.run import RunSpec
from meshwright.spec.secrets import without_own_keys

COMMAND_SECONDS = 60.0
"""Longest time that the command may take."""


class DefectReporter:
    """Starts the command of a run for hosts that are excluded. Supervision never waits for it."""

    def __init__(self, run: RunSpec) -> None:
        self._run, self._command = run.name, run.supervision.report_command
        self._threads: list[threading.Thread] = []

    def __call__(self, host: str, cause: str) -> None:
        """Report a host. Agents are named HOST/PID; the command gets HOST."""
        if self._command is None:
            return
        record = {"run": self._run, "host": host.partition("/")[0], "cause": cause, "time": time.time()}
        thread = threading.Thread(target=self._start, args=(self._command, json.dumps(record)), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Wait for commands that still run."""
        for thread in self._threads:
            thread.join(COMMAND_SECONDS)

    def _start(self, command: str, record: str) -> None:
        try:
            ended = subprocess.run(
                shlex.split(command),
                input=record,
                text=True,
                errors="replace",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=COMMAND_SECONDS,
                check=False,
                env=without_own_keys(),
            )
            lines = ended.stderr.strip().splitlines()[-1:]
            failure = f"ended with code {ended.returncode}: {''.join(lines)[:300]}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"took more than {COMMAND_SECONDS:g} s"
        except (OSError, ValueError) as error:
            failure = str(error)
        if failure:
            write_line(f"meshwright: supervision.report_command: {failure}")
