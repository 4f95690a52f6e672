"""The stacks of a rank's threads. A signal makes the rank write them into memory that its launcher reads.

The signal handler is `faulthandler`'s: it runs in C and needs no lock of the interpreter, so it also works while the
main thread waits in a collective. Fatal signals write the stacks too. A stopped process writes nothing until it
continues.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping

STACKS = "MESHWRIGHT_STACKS"
"""Environment variable with the path of a file in the launcher's memory: `/proc/PARENT/fd/N`."""
STACK_SIGNAL = signal.SIGUSR2
"""Signal at which a rank writes its stacks."""
LARGEST_BYTES = 256 << 10
"""Most bytes that a reader takes: the last ones."""


def write_stacks_on_signal(env: Mapping[str, str] = os.environ) -> None:
    """Let `STACK_SIGNAL` and fatal signals write the stacks of all threads. Without a launcher, this does nothing."""
    path = env.get(STACKS)
    if path is None:
        return
    # The descriptor stays open until the process ends, because the handlers write to it.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.enable(descriptor)
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)


def evidence_memory() -> int:
    """Create a file in memory for what one rank writes, its stacks or its collectives. Return its descriptor."""
    return os.memfd_create("meshwright-evidence", os.MFD_CLOEXEC)


def read_stacks(descriptor: int) -> bytes:
    """Return the bytes that a rank has written so far, at most the last `LARGEST_BYTES`."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, LARGEST_BYTES, max(0, size - LARGEST_BYTES))
