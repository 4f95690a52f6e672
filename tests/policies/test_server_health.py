"""Health of a server after all short sequences of checks."""

from __future__ import annotations

import itertools
from typing import get_args

from meshwright.policies.server_health import HealthAnswer, ServerHealth, health_after

SILENT = 2.0
QUIET = (0.0, 1.999, 2.0, 60.0)


def test_requests_are_given_up_after_two_missed_checks_and_silence_only() -> None:
    checks = list(itertools.product(get_args(HealthAnswer), QUIET))
    for sequence in itertools.product(checks, repeat=4):
        health = ServerHealth()
        assert not health.ready and not health.lost
        for number, (answer, quiet) in enumerate(sequence):
            health = health_after(health, answer, quiet, SILENT)
            twice = number > 0 and {answer, sequence[number - 1][0]} == {"missed"}
            assert health.ready == (answer == "ready")
            assert health.lost == (twice and quiet >= SILENT)
