"""Copies a rank's snapshots into the memory of a partner host, while the writer process writes them to storage.

This module does not import torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from meshwright.checkpoint.format.files import FileRecord
from meshwright.checkpoint.memory.file_image import FileImage
from meshwright.checkpoint.memory.record import SnapshotName
from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer
from meshwright.checkpoint.memory.transport import SnapshotClient, TransportFailure
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.job_token import job_token

STALLED_SECONDS = 30.0
"""Seconds after which a copy is given up if the partner receives nothing."""

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class Partner:
    """The snapshot server that receives copies of a rank's snapshots.

    `address` is HOST:PORT. At most `bytes_per_second` are sent to it.
    """

    address: str
    bytes_per_second: float


class PartnerCopier:
    """Copies snapshots of a snapshot buffer to a partner, one at a time, in a thread.

    A partner that is slow or lost delays neither training nor the write to storage.
    """

    def __init__(self, buffer: SnapshotBuffer, partner: Partner, copied: Callable[[int, float], object]) -> None:
        """`copied(step, seconds)` is called after each complete copy; `seconds` is how long it took."""
        self._buffer = buffer
        self._partner = partner
        self._copied = copied
        self._thread: threading.Thread | None = None
        self._failed = False

    def start(
        self,
        name: SnapshotName,
        image: FileImage,
        generation: int,
        describe: Callable[[FileRecord | None], bytes],
        inspect: Callable[[int, memoryview], object],
    ) -> None:
        """Begin to copy the snapshot that the buffer has at `generation`. A running copy of an earlier snapshot ends.

        `describe` and `inspect` are those of `SnapshotClient.store`.
        """

        def send(client: SnapshotClient) -> None:
            client.store(
                name,
                image,
                describe,
                bytes_per_second=self._partner.bytes_per_second,
                unchanged=lambda: self._buffer.generation == generation,
                inspect=inspect,
            )

        # Not a daemon thread, because the copy must continue when the rank has died.
        self._thread = threading.Thread(target=self._copy, args=(name.step, send, self._thread), name="partner")
        self._thread.start()

    def _copy(self, step: int, send: Callable[[SnapshotClient], None], before: threading.Thread | None) -> None:
        """Send the snapshot of `step` with `send` after the thread `before` has ended."""
        if before is not None:
            before.join()
        began = time.monotonic()
        try:
            with closing(SnapshotClient(self._partner.address, job_token(), seconds=STALLED_SECONDS)) as client:
                send(client)
        except (TransportFailure, MeshwrightError) as error:
            if not self._failed:
                log.warning(
                    "no copy of step %d in the partner's memory: %s; later failures are not reported", step, error
                )
            self._failed = True
            return
        self._failed = False
        self._copied(step, time.monotonic() - began)
