"""Process of a locally launched rank: imports modules while the launcher plans, then trains.

`python -m meshwright.training.rank cpu|cuda [spare]` waits for the message `Begin` on its standard input (`events.messages`), which names
the run's assignment. Until then it runs a self-test on request. If the input ends without `Begin`, the process ends. A spare imports the
same modules, at idle priority because ranks train meanwhile. It has no rank and opens no device until `Begin` gives it the environment
variables of a rank.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from meshwright.events.start import START_TIME_VARIABLE, StartClock
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.training.idle_priority import run_at_idle_priority
from meshwright.training.lifecycle import RankLife

NO_RANK = RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0)
"""Environment of a spare until it gets a rank."""


def main() -> None:
    clock = StartClock.for_rank()
    cuda = sys.argv[1] == "cuda"
    spare = "spare" in sys.argv[2:]
    if spare:
        os.environ.pop(START_TIME_VARIABLE, None)  # its start begins with the message Begin
    life = RankLife(NO_RANK if spare else RankEnvironment.from_environment(), spare=spare)
    if spare:
        run_at_idle_priority(partial(import_all, cuda, open_device=False), life.requested)
    else:
        import_all(cuda)
    from meshwright.training import worker
    from meshwright.training.self_test import answer_self_test

    clock.end("imports")
    file = life.wait_for_assignment(partial(answer_self_test, sys.argv[1]))
    if spare:
        clock = StartClock.for_spare()
        if cuda:
            _begin_device()
    if life.environment.rank:
        _write_to(file.parent / "logs" / f"rank-{life.environment.rank:05d}.log")
    worker.main(life, file, clock)


def import_all(cuda: bool, *, open_device: bool = True) -> None:
    """Import what a rank needs before its first step. With `cuda` this includes the compiler.

    With `open_device` the GPU of a `cuda` rank is opened at the same time.
    """
    with uncollected():
        if cuda:
            if open_device:
                _begin_device()
            import torch._inductor.compile_fx  # noqa: F401  # otherwise this import is most of a warm first step
        import meshwright.training.worker  # noqa: F401


@contextmanager
def uncollected() -> Iterator[None]:
    """Exclude the objects that are created in this block from garbage collection, now and later.

    Imports create hundreds of thousands of permanent objects. Scanning them again and again takes a sixth of the import time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _begin_device() -> None:
    """Open the rank's device in a thread. The driver needs seconds for this and releases Python's lock meanwhile."""
    import torch

    local_rank = RankEnvironment.from_environment().local_rank

    def begin() -> None:
        if local_rank < torch.cuda.device_count():  # else joining the process group reports the error
            torch.empty(1, device=torch.device("cuda", local_rank))

    threading.Thread(target=begin, name="device", daemon=True).start()


def _write_to(log: Path) -> None:
    """Redirect the output of this process to the file `log`, because only rank 0 writes to the terminal."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


if __name__ == "__main__":
    main()
