"""Controls a rank's writer process: starts it, gives it one save at a time, monitors it, and replaces it.

This module does not import torch.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer
from meshwright.checkpoint.write.writer import Command, Discard, Save, WriterSetup, encode
from meshwright.durable.lease import LeaseLost
from meshwright.spec.errors import ERROR_CLASS_BY_EXIT_CODE, MeshwrightError, OutOfResources
from meshwright.spec.secrets import without_secrets

SILENT_SECONDS = 30.0
"""A writer without heartbeats for this many seconds is killed: it was stopped, or its host is overloaded."""
STALLED_SECONDS = 300.0
"""A writer that sends heartbeats but writes nothing for this many seconds is killed: its storage hangs."""

log = logging.getLogger("meshwright")


class WriterProcess:
    """The writer of one rank. One thread at a time may call its methods; any thread may call `kill`."""

    def __init__(
        self,
        buffer: SnapshotBuffer,
        setup: WriterSetup,
        *,
        kept_open: Sequence[int] = (),
        silent_seconds: float = SILENT_SECONDS,
        stalled_seconds: float = STALLED_SECONDS,
    ) -> None:
        """Writers inherit the descriptors `kept_open`. Other processes see by them that a writer still runs."""
        self._buffer = buffer
        self._setup = setup
        self._kept_open = kept_open
        self._silent = silent_seconds
        self._stalled = stalled_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._incomplete = b""
        self.starts = 0
        """Number of writers started so far. More than one means that some have failed."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a writer, unless one is running."""
        if self._process is not None and self._process.poll() is None:
            return
        self._release()
        command = [sys.executable, "-m", "meshwright.checkpoint.write.writer", str(self._buffer.descriptor)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._buffer.descriptor, *self._kept_open],
            start_new_session=True,
            env=without_secrets(),
        )
        self._incomplete = b""
        self.starts += 1
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._send(self._setup)

    def save(self, save: Save, committed: Callable[[dict[str, Any]], None]) -> None:
        """Write a snapshot, and return when the writer is idle again.

        On the first rank, `committed` is called with the writer's reply once the checkpoint is visible. Raises the
        writer's failure. Raises OutOfResources if the writer died or had to be killed; then another writer runs, and has
        been told to discard the attempt.
        """
        try:
            self.start()
            self._send(save)
            for reply in self._replies():
                event = reply["event"]
                if event == "failed" and reply["step"] == save.step:
                    failure = LeaseLost if reply["lease_lost"] else ERROR_CLASS_BY_EXIT_CODE[reply["exit_code"]]
                    raise failure(reply["message"])
                if event == "committed":
                    committed(reply)
                if event in ("done", "deleted") and reply["step"] == save.step:
                    return
        except _WriterLost as lost:
            self.kill()
            self.discard(save)
            raise OutOfResources(f"saving step {save.step}: {lost}; another writer was started") from None

    def discard(self, save: Save) -> None:
        """Tell the writer to discard the attempt of a save that failed on this rank. Does not wait for it."""
        with suppress(_WriterLost, OSError):
            self.start()
            self._send(Discard(save.step, save.attempt))

    def kill(self) -> None:
        """Kill the writer at once."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Let the writer end after the commands that it has. Does not wait for it."""
        self._release()

    def _send(self, command: Command) -> None:
        """Send a command. Waits for space in the pipe for as long as a writer may be silent."""
        assert self._process is not None and self._process.stdin is not None
        line = memoryview(encode(command))
        descriptor = self._process.stdin.fileno()
        while line:
            if not select.select([], [descriptor], [], self._silent)[1]:
                raise _WriterLost(f"the writer took no command for {self._silent:.0f} s")
            try:
                line = line[os.write(descriptor, line) :]
            except BrokenPipeError:
                raise _WriterLost(self._end()) from None

    def _replies(self) -> Iterator[dict[str, Any]]:
        """Yield the writer's replies except heartbeats. Raises _WriterLost if it ends, is silent, or makes no progress."""
        # (time of the last progress, phase, bytes written).
        progress = (time.monotonic(), "", -1)
        while True:
            for reply in self._read():
                if reply["event"] == "warning":
                    log.warning("%s", reply["message"])
                elif reply["event"] == "copied":
                    log.info(
                        "step %d is in the memory of the partner host, after %.2f s", reply["step"], reply["seconds"]
                    )
                elif reply["event"] != "beat":
                    yield reply
                elif (reply["phase"], reply["written"]) != progress[1:] or reply["phase"] == "waiting":
                    progress = (time.monotonic(), reply["phase"], reply["written"])
            if time.monotonic() - progress[0] > self._stalled:
                raise _WriterLost(f"the writer was {progress[1]} and made no progress for {self._stalled:.0f} s")

    def _read(self) -> list[dict[str, Any]]:
        """Return the replies that have arrived. Raises _WriterLost if none arrives in time, or if the writer has ended."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(self._silent * 1000):
            raise _WriterLost(f"the writer sent no heartbeat for {self._silent:.0f} s")
        data = os.read(descriptor, 1 << 16)
        if not data:
            raise _WriterLost(self._end())
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _end(self) -> str:
        """Return a text on how the writer ended."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            return f"the writer was ended by signal {-code}" if code < 0 else f"the writer ended with code {code}"
        return "the writer closed its pipe"

    def _release(self) -> None:
        """Close the pipes to the writer, and forget it."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()
            self._process = None


class _WriterLost(MeshwrightError):
    """The writer is dead, stopped, or makes no progress."""
