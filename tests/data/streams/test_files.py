"""Reads of a file of a store: each byte is requested once if the file is read in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from meshwright.data.streams.files import BLOCK_BYTES, TAIL_BYTES, ObjectFile
from meshwright.data.streams.stores import StoredFile


@dataclass
class Store:
    """A store with one file, and the requests for parts of it."""

    content: bytes
    requests: list[tuple[int, int]] = field(default_factory=list)

    def list(self, files: str) -> list[StoredFile]:
        return [StoredFile(files, len(self.content), "tag")]

    def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        self.requests.append((start, stop))
        return self.content[start:stop]

    def check(self, file: StoredFile) -> None:
        pass


@pytest.mark.parametrize("last", [1, 1000, TAIL_BYTES, TAIL_BYTES + 1, BLOCK_BYTES])
def test_each_byte_of_a_file_is_requested_once_in_order(last: int) -> None:
    """The last block may be shorter than what a read near the end of the file fetches."""
    size = 2 * BLOCK_BYTES + last
    content = bytes(range(251)) * (size // 251 + 1)
    store = Store(content[:size])
    with ObjectFile(store, store.list("file")[0]) as file:
        pieces = iter(lambda: file.read(1 << 20), b"")
        assert b"".join(pieces) == store.content
    assert store.requests == [(start, min(start + BLOCK_BYTES, size)) for start in range(0, size, BLOCK_BYTES)]


def test_a_read_near_the_end_fetches_the_end() -> None:
    store = Store(b"x" * (3 * TAIL_BYTES))
    with ObjectFile(store, store.list("file")[0]) as file:
        file.seek(-8, 2)
        assert file.read() == b"x" * 8
    assert store.requests == [(2 * TAIL_BYTES, 3 * TAIL_BYTES)]
