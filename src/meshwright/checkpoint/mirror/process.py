"""A process that copies committed checkpoints to the mirror (an object store) while training continues.

It reads the paths of checkpoints from stdin, and writes a JSON line to stdout after each upload. It uploads the newest
path and skips older ones. So if the store is slower than the run's saves, some checkpoints are not copied, and training
never waits.

This module does not import torch.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.checkpoint.mirror.copies import mirror_url, upload_checkpoint
from meshwright.checkpoint.mirror.store import MirrorStore
from meshwright.spec.errors import MeshwrightError

log = logging.getLogger(__name__)
PATIENCE = 3600.0
"""Seconds after which an upload that keeps failing is given up."""


class MirrorUploader:
    """Controls the upload process from the first rank: `offer` each committed checkpoint, and `close` at the end.

    `mirror` is the URL of the store, `keep` the number of checkpoints that stay in it. `say` shows the user a message.
    `offer` never waits for the store; `close` waits for a limited time.
    """

    def __init__(self, mirror: str, run_folder: Path, keep: int, say: Callable[[str], None]) -> None:
        command = [
            sys.executable,
            "-m",
            "meshwright.checkpoint.mirror.process",
            mirror_url(mirror, run_folder),
            str(keep),
        ]
        self._say = say
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._listener = threading.Thread(target=self._listen, name="mirror", daemon=True)
        self._listener.start()

    def offer(self, path: Path) -> None:
        """Ask the process to copy the checkpoint at `path`."""
        assert self._process.stdin is not None
        with suppress(OSError):  # the process has died: `_listen` says so
            self._process.stdin.write(f"{path}\n")
            self._process.stdin.flush()

    def close(self, limit: float) -> None:
        """Wait up to `limit` seconds for the last upload. After that the process finishes it alone."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._listener.join(limit)
        if self._listener.is_alive():
            self._say(
                f"the last upload to the mirror is not done after {limit:.0f} s; process {self._process.pid} finishes it"
            )

    def _listen(self) -> None:
        """Report the answers of the process until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                answer = json.loads(line)
                if "error" in answer:
                    self._say(f"step {answer['step']} is not in the mirror: {answer['error']}")
                else:
                    log.info(
                        "step %d is in the mirror: %d bytes in %.1f s",
                        answer["step"],
                        answer["bytes"],
                        answer["seconds"],
                    )
        code = self._process.wait()
        if code:
            self._say(f"the upload process ended with code {code}; nothing more is copied to the mirror")


def main() -> None:
    """Upload the checkpoints whose paths stdin has, until stdin closes."""
    url = sys.argv[1]
    keep = int(sys.argv[2])
    store: MirrorStore | None = None
    for path in _newest_lines():
        started = time.monotonic()
        step = path.name
        answer: dict[str, Any] = {"step": int(step.rpartition("-")[2])}
        try:
            store = store or MirrorStore(url, patience=PATIENCE)
            answer |= {"bytes": upload_checkpoint(store, path, keep), "seconds": time.monotonic() - started}
        except FileNotFoundError:
            answer["error"] = "it was deleted before it was copied"
        except MeshwrightError as error:
            answer["error"] = str(error)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _newest_lines() -> Iterator[Path]:
    """Yield paths from stdin. If several have arrived since the last one, yield only the newest."""
    newest: list[Path] = []
    arrived = threading.Condition()
    ended = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            with arrived:
                newest[:] = [Path(line.rstrip("\n"))]
                arrived.notify()
        with arrived:
            ended.set()
            arrived.notify()

    threading.Thread(target=read, daemon=True).start()
    while True:
        with arrived:
            arrived.wait_for(lambda: newest or ended.is_set())
            if not newest:
                return
            path = newest.pop()
        yield path


if __name__ == "__main__":
    main()
