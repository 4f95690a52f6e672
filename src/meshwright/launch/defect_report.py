"""Reports a host that was excluded from a run to the site: runs a command, and labels the host's Kubernetes node."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Callable

from meshwright.events.terminal import write_line
from meshwright.launch.node_label import label_node
from meshwright.spec.node_label import node_label
from meshwright.spec.run import RunSpec
from meshwright.spec.secrets import without_own_keys

COMMAND_SECONDS = 60.0
"""Seconds that the command may take."""

Record = dict[str, object]
"""What is reported: `run`, `host`, `cause`, and `time` in seconds since the epoch."""


class DefectReporter:
    """Reports excluded hosts as `supervision.report_command` and `report_label` ask.

    It works in threads: supervision never waits.
    """

    def __init__(self, run: RunSpec) -> None:
        self._run = run.name
        self._command = run.supervision.report_command
        self._label = run.supervision.report_label
        self._threads: list[threading.Thread] = []

    def __call__(self, host: str, cause: str) -> None:
        """Report a host and the cause of its exclusion.

        `host` is the name of an agent, HOST/PID. The command gets HOST, which in Kubernetes is the name of the node.
        """
        record: Record = {"run": self._run, "host": host.partition("/")[0], "cause": cause, "time": time.time()}
        if self._command is not None:
            self._start("report_command", _run_command, self._command, record)
        if self._label is not None:
            self._start("report_label", _set_label, self._label, record)

    def close(self) -> None:
        """Wait until all reports have been sent, at most `COMMAND_SECONDS` for each."""
        for thread in self._threads:
            thread.join(COMMAND_SECONDS)

    def _start(self, key: str, report: Callable[[str, Record], str], value: str, record: Record) -> None:
        """Call `report` in a thread. If it fails, print one line that names the setting `key`."""

        def run() -> None:
            if failure := report(value, record):
                write_line(f"meshwright: supervision.{key}: {failure}")

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()


def _run_command(command: str, record: Record) -> str:
    """Run the site's command with the record as JSON on its standard input. Return what went wrong; empty on success."""
    try:
        ended = subprocess.run(
            shlex.split(command),
            input=json.dumps(record),
            text=True,
            errors="replace",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMMAND_SECONDS,
            check=False,
            env=without_own_keys(),
        )
    except subprocess.TimeoutExpired:
        return f"took more than {COMMAND_SECONDS:g} s"
    except (OSError, ValueError) as error:
        return str(error)
    lines = ended.stderr.strip().splitlines()[-1:]
    return f"ended with code {ended.returncode}: {''.join(lines)[:300]}" if ended.returncode else ""


def _set_label(label: str, record: Record) -> str:
    """Set the label on the host's node. Return what went wrong; empty on success."""
    node = str(record["host"])
    try:
        label_node(node_label(label), node, {key: value for key, value in record.items() if key != "host"})
    except (OSError, ValueError) as error:
        return str(error)
    return ""
