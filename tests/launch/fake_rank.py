"""A rank for the launcher's tests: does what its first argument says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if what == "succeed":
        print("rank", rank, "of", os.environ["WORLD_SIZE"])
    elif what == "told":
        print(f"rank {rank}: {sys.stdin.readline()}", end="", flush=True)
    elif what == "one-fails":
        if rank == 1:
            sys.exit(3)
        time.sleep(60)
    elif what == "victim-first":
        # Rank 0 notices that a peer is gone before the peer's own exit code is there.
        if rank == 0:
            sys.exit(5)
        time.sleep(0.3)
        sys.exit(4)
    elif what == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    elif what == "hangs":
        # Rank 0 gives up waiting for rank 1, which had finished four steps.
        (folder / "logs").mkdir(exist_ok=True)
        if rank == 1:
            with (folder / "logs" / "rank-00001.log").open("a") as log:
                log.write("DEBUG {'kind': 'step', 'step': 4, 'loss': 1.0}\n")
            time.sleep(60)
        while not (folder / "logs" / "rank-00001.log").read_text().endswith("1.0}\n"):
            time.sleep(0.02)
        sys.exit(5)
    elif what == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        (folder / f"ready-{rank}").touch()
        time.sleep(60)


main()
