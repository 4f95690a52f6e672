"""Verifies the contents of shards in the background. A shard is read completely when the run first uses it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable

from meshwright.data.manifest import OpenShard
from meshwright.spec.errors import Damaged

log = logging.getLogger("meshwright")


class ShardVerifier:
    """Compares shards with the digests in their manifest, in its own thread.

    All ranks add the same shards. Rank R of N ranks verifies the shards whose number modulo N is R. Shards that another
    program wrote have no digest and are not verified.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._waiting: deque[OpenShard] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def add(self, shards: Iterable[tuple[int, OpenShard]]) -> None:
        """Add shards to verify, as pairs (number, shard). They are verified after those that were added before."""
        own = [shard for number, shard in shards if shard.record is not None and number % self._ranks == self._rank]
        with self._lock:
            self._waiting += own
            if self._waiting and self._thread is None:
                thread = threading.Thread(target=self._verify_all, name="verify data", daemon=True)
                thread.start()
                self._thread = thread  # It is set after the start, so that whoever reads it may join the thread.

    def check(self) -> None:
        """Raise the error that the thread has met. It is Damaged if a shard's contents differ from its manifest."""
        if self._failure is not None:
            raise self._failure

    def _verify_all(self) -> None:
        try:
            while (shard := self._next()) is not None:
                _verify(shard)
        except Exception as error:  # `check` raises it again in the thread that uses the data.
            self._failure = error

    def _next(self) -> OpenShard | None:
        """Take the next shard to verify. None ends the thread."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._thread = None
            return None


def _verify(shard: OpenShard) -> None:
    """Raise Damaged if a file of the shard does not have the digest that the manifest gives."""
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
