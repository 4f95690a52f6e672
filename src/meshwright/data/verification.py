"""Verification of shard contents in the background: each shard is read whole when the run first uses it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable

from meshwright.data.manifest import OpenShard
from meshwright.spec.errors import Damaged

log = logging.getLogger("meshwright")


class ShardVerifier:
    """Compares shards with the digests in their manifest, on a thread of its own.

    All ranks name the same shards; rank R of N verifies those whose number is R modulo N. A shard without record (a foreign file) has no
    digest and is passed over.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._waiting: deque[OpenShard] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def add(self, shards: Iterable[tuple[int, OpenShard]]) -> None:
        """Verify these shards, given with their numbers, after those added before."""
        own = [shard for number, shard in shards if shard.record is not None and number % self._ranks == self._rank]
        with self._lock:
            self._waiting += own
            if self._waiting and self._thread is None:
                thread = threading.Thread(target=self._verify_all, name="verify data", daemon=True)
                thread.start()
                self._thread = thread  # started: whoever reads it may join it

    def check(self) -> None:
        """Raise the error that the thread has found so far: Damaged for contents that differ from the manifest."""
        if self._failure is not None:
            raise self._failure

    def _verify_all(self) -> None:
        try:
            while (shard := self._next()) is not None:
                _verify(shard)
        except Exception as error:  # raised again by `check`, in the thread that uses the data
            self._failure = error

    def _next(self) -> OpenShard | None:
        """The shard to verify now; None ends the thread."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._thread = None
            return None


def _verify(shard: OpenShard) -> None:
    """Raise Damaged when a file that training reads is not what its manifest says."""
    assert shard.record is not None, "foreign shards are not added"
    weights = [] if shard.weights is None else [(shard.weights.kind, shard.weights.path, shard.weights.digest())]
    for key, path, actual in [*shard.file.digests(), *weights]:
        expected = shard.record.digest[key]
        if actual != expected:
            raise Damaged(
                f"{path}: expected content with digest {expected} (by the manifest), found {actual}; put the shard back, or delete it and "
                "set `data.damaged: skip` to train without it"
            )
    log.debug("verified %s", shard.file.stem)
