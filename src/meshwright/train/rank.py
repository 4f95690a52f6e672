"""The process of a locally launched rank: it imports what training needs while its parent still plans, then trains as it is told.

`python -m meshwright.train.rank cpu|cuda [ASSIGNMENT]` reads the path of the run's assignment, where it is not given, from its standard
input. When that ends without one, the parent has nothing to run.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from meshwright.events.start import StartClock


def main() -> None:
    clock = StartClock.of_rank()
    if sys.argv[1] == "cuda":
        _begin_device()
        import torch._inductor.compile_fx  # noqa: F401  # most of a warm first step would be this import
    from meshwright.train import worker

    clock.end("imports")
    worker.main(Path(sys.argv[2]) if sys.argv[2:] else _told(), clock)


def _told() -> Path:
    """The assignment that the parent names when it has planned. A rank but the first then leaves the terminal to the first."""
    told = sys.stdin.readline().strip()
    if not told:
        os._exit(0)
    file = Path(told)
    if rank := int(os.environ["RANK"]):
        _write_to(file.parent / "logs" / f"rank-{rank:05d}.log")
    return file


def _begin_device() -> None:
    """Open the rank's device in a thread: the driver takes seconds for it and holds no lock of Python's meanwhile."""
    import torch

    def begin() -> None:
        place = int(os.environ["LOCAL_RANK"])
        if place < torch.cuda.device_count():  # else joining says what is wrong
            torch.empty(1, device=torch.device("cuda", place))

    threading.Thread(target=begin, name="device", daemon=True).start()


def _write_to(log: Path) -> None:
    """From here on, what this process prints goes to `log`: the terminal is rank 0's."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


if __name__ == "__main__":
    main()
