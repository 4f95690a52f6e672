"""A rank for the launcher's tests; its first argument selects the behaviour."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from meshwright.events.messages import BeginMessage, EndMessage, FailureMessage, MessageChannel, StepMessage, decode


def main() -> None:
    behaviour, folder = sys.argv[1], Path(sys.argv[2])
    rank, channel = int(os.environ["RANK"]), MessageChannel.from_environment()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if behaviour == "succeed":
        print("rank", rank, "of", os.environ["WORLD_SIZE"])
    elif behaviour == "begin":
        message = decode(sys.stdin.buffer.readline())
        assert isinstance(message, BeginMessage)
        sys.stdout.write(f"rank {rank}: {message.assignment}\n")
    elif behaviour == "end":
        # Rank 1 fails; rank 0 ends as soon as the launcher says so, and writes what it was told.
        if rank == 1:
            channel.send(FailureMessage(4, "torn"))
            sys.exit(4)
        message = decode(sys.stdin.buffer.readline())
        assert isinstance(message, EndMessage)
        (folder / "cause").write_text(message.cause)
        sys.exit(5)
    elif behaviour == "steps":
        for step in range(1, 6):
            channel.send(StepMessage(step, {"loss": 1.0 / step} if rank == 0 else {}))
    elif behaviour == "one-fails":
        if rank == 1:
            while not (folder / "pid-0").exists():
                time.sleep(0.01)
            sys.exit(3)
        time.sleep(60)
    elif behaviour == "victim-first":
        # Rank 0 notices that a peer is gone before the peer's own exit code is there.
        if rank == 0:
            sys.exit(5)
        time.sleep(0.3)
        sys.exit(4)
    elif behaviour == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    elif behaviour == "hangs":
        # Rank 0 gives up waiting for rank 1, which had finished four steps.
        if rank == 1:
            channel.send(StepMessage(4))
            (folder / "sent").touch()
            time.sleep(60)
        while not (folder / "sent").exists():
            time.sleep(0.02)
        sys.exit(5)
    elif behaviour == "wait":
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: sys.exit(75))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGHUP])
        (folder / f"ready-{rank}").touch()
        time.sleep(60)


main()
