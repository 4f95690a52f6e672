"""Ends a process when its parent ends, so that no child process keeps a device in use. This module imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from meshwright.spec.errors import EXIT_INTERNAL

PARENT = "MESHWRIGHT_PARENT"
"""Environment variable with the process id of the parent."""
COMMAND_LINE = (
    "from meshwright.events.parent import end_with_parent; end_with_parent(); "
    "from meshwright.cli.main import main; main()"
)
"""Python code that runs the command line in a process that the kernel kills when its parent ends."""


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies. Without `PARENT` in the environment, this does nothing."""
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent has died before the kernel was asked
        os._exit(EXIT_INTERNAL)
