"""A process next to an agent that reads the health of its host.

It is separate because a hanging driver must not stop the agent.

`python -m meshwright.launch.health_reader COUNT` writes one JSON object per line: {seconds, notes, readings: [{part,
values, xids}]}. `seconds` is monotonic time. Memory of the agent, its parent process, and of the agent's descendants
does not count as memory of other processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator

from meshwright.events.parent import end_with_parent
from meshwright.events.terminal import write_line
from meshwright.launch.gpu_readings import GpuReader, NoGpus
from meshwright.launch.host_readings import HostReader
from meshwright.policies.host_health import READING_SECONDS, HealthReading

ALL = -1
"""Value of COUNT that means all visible GPUs."""


def readings(
    own_pid: int, count: int, seconds: float = READING_SECONDS
) -> Iterator[tuple[list[HealthReading], list[str]]]:
    """Yield readings of the host and its GPUs every `seconds`, the first at once.

    Each item has the readings, and notes about what cannot be read. The first `count` visible GPUs are read, or `ALL`.
    Memory of `own_pid` and its descendants does not count as memory of other processes.
    """
    host = HostReader()
    gpus = None
    notes = []
    try:
        gpus = GpuReader(None if count == ALL else count)
    except NoGpus as obstacle:
        notes.append(f"the health of GPUs is not read: {obstacle}")
    if gpus is not None and gpus.events_hidden:
        notes.append(f"XID events of GPUs are not read: {gpus.events_hidden}; counters and states are")
    xids: dict[int, list[int]] = {}
    while True:
        yield [*host.read(), *(gpus.read(xids, own_pid) if gpus is not None else ())], notes
        notes = []
        if gpus is None:
            time.sleep(seconds)
        else:
            xids = gpus.wait(seconds)


def main() -> None:
    end_with_parent()
    for found, notes in readings(os.getppid(), int(sys.argv[1])):
        line = {"seconds": time.monotonic(), "notes": notes, "readings": [vars(reading) for reading in found]}
        write_line(json.dumps(line), sys.stdout)


if __name__ == "__main__":
    main()
