"""The snapshot buffer: one memory for two processes, with a generation that tells whether it holds a complete snapshot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.checkpoint.memory import snapshot_buffer as buffers
from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer, available_host_memory


def test_an_inherited_descriptor_shows_the_same_snapshot() -> None:
    buffer = SnapshotBuffer.create(10_000)
    inherited = SnapshotBuffer.inherited(os.dup(buffer.descriptor))
    assert (inherited.size, inherited.generation) == (10_000, 0)
    expected = buffer.begin_snapshot()
    assert inherited.generation % 2 == 1, "a snapshot is copied in"
    buffer.data[:5] = b"state"
    buffer.complete_snapshot()
    assert inherited.generation == expected == 2 and bytes(inherited.data[:5]) == b"state"
    buffer.begin_snapshot()
    assert buffer.begin_snapshot() == 4, "one that was not completed is begun again"


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "expected"), [("1000", 700, 200, 500), ("max", 700, 200, None), (None, 0, 0, None)]
)
def test_a_containers_limit_bounds_the_host_memory_that_is_left(
    tmp_path: Path, limit: str | None, used: int, inactive: int, expected: int | None
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    available = available_host_memory(tmp_path, tmp_path / "no list of groups")
    assert available == expected if expected is not None else available > 1 << 20
    assert buffers.DATA_OFFSET % 4096 == 0
