"""The stacks of a rank's threads, written on a signal into memory that its launcher reads.

The handler is that of `faulthandler`: it runs in C, needs no lock of the interpreter, and also works while the main thread
waits in a collective. A fatal signal writes the stacks too. A process that is stopped writes nothing until it continues.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping

STACKS = "MESHWRIGHT_STACKS"
"""Environment variable with the path of the launcher's memory file: `/proc/PARENT/fd/N`."""
STACK_SIGNAL = signal.SIGUSR2
LARGEST_BYTES = 256 << 10
"""Most bytes that a reader takes, from the end."""


def write_stacks_on_signal(env: Mapping[str, str] = os.environ) -> None:
    """Let `STACK_SIGNAL` and fatal signals write the stacks of all threads; does nothing without a launcher."""
    path = env.get(STACKS)
    if path is None:
        return
    # Kept open until the process ends: the handlers write to the descriptor.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.enable(descriptor)
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)


def evidence_memory() -> int:
    """A new memory file for what one rank writes: its stacks, or its collectives."""
    return os.memfd_create("meshwright-evidence", os.MFD_CLOEXEC)


def read_stacks(descriptor: int) -> bytes:
    """Return the bytes that a rank has written so far, at most the last `LARGEST_BYTES`."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, LARGEST_BYTES, max(0, size - LARGEST_BYTES))
