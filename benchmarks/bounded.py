"""Runs a program for a limited time in a process group of its own, so that its own processes end with it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO


def run_for(
    command: Sequence[str], limit: float, stdout: IO[str] | int | None = None, stderr: IO[str] | int | None = None
) -> int | None:
    """The exit code of `command`; None if it did not end in `limit` seconds and was killed with all that it had started."""
    with subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, start_new_session=True) as process:
        try:
            return process.wait(limit)
        except BaseException as stopped:  # also where this program is interrupted
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
    return None
