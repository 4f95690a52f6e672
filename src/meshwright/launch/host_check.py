"""The health of this host before a job starts, for programs of the site such as Slurm's HealthCheckProgram or a prolog."""

from __future__ import annotations

import socket
from itertools import islice
from typing import Any

from meshwright.launch.health_reader import readings
from meshwright.policies.host_health import HealthFinding, HealthWatch, action_of, source_of

READINGS = 3
"""Readings of a check: a state has to hold in up to three in a row."""
BETWEEN_SECONDS = 1.0
"""Seconds between two readings."""
HEALTHY = 0
WARNED = 1
BAD = 2
"""Exit codes of a check."""


def check_host(gpus: int) -> tuple[int, dict[str, Any]]:
    """The exit code and the answer of a check of the first `gpus` visible GPUs (`health_reader.ALL` for all) and of the host.

    Findings have the action that they lead to before a job starts; a host to be drained or excluded is bad.
    """
    watch = HealthWatch()
    notes: list[str] = []
    findings: tuple[HealthFinding, ...] = ()
    values: dict[str, dict[str, float]] = {}
    for number, (found, more) in enumerate(islice(readings(0, gpus, BETWEEN_SECONDS), READINGS)):
        findings = watch.update(number * BETWEEN_SECONDS, found)
        for reading in found:  # only the first has all quantities
            values[reading.part] = {**values.get(reading.part, {}), **reading.values}
        notes += more
    listed = []
    for finding in findings:
        action = action_of(finding.rule, "start")
        if action != "none":
            source = source_of(finding.rule)
            listed.append(
                {"rule": finding.rule, "part": finding.part, "text": finding.text, "action": action, "source": source}
            )
    code = max((WARNED if entry["action"] == "warn" else BAD for entry in listed), default=HEALTHY)
    answer = {"ok": code != BAD, "verdict": ("healthy", "warned", "bad")[code], "host": socket.gethostname()}
    return code, {**answer, "findings": listed, "notes": notes, "values": values}
