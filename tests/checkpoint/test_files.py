from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import xxhash

from meshwright.checkpoint.format import files
from meshwright.checkpoint.format.files import (
    BLOCK_BYTES,
    open_regular,
    read_range,
    read_small,
)
from meshwright.checkpoint.write.file_writer import write_file
from meshwright.spec.errors import Damaged


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5])
@pytest.mark.parametrize(("window", "threads"), [(BLOCK_BYTES, 1), (2 * BLOCK_BYTES, 3), (1 << 40, 2)])
def test_record_has_the_xxhash_digests_of_the_blocks(tmp_path: Path, size: int, window: int, threads: int):
    """A file in windows of one or two blocks, or in a single one, each of two parts; the parts meet within a block."""
    data = os.urandom(size)
    windows = [data[start : start + window] for start in range(0, size, window)]
    parts = [[view[:7], memoryview(view)[7:]] for view in windows]
    record = write_file(tmp_path / "a", parts, threads)
    assert (tmp_path / "a").read_bytes() == data
    assert record.bytes == size
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, size, BLOCK_BYTES)]
    assert record.blocks == tuple(xxhash.xxh3_64(block).hexdigest() for block in blocks)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.pwrite

    def short(descriptor: int, data: memoryview, offset: int) -> int:
        return write(descriptor, data[: max(1, len(data) // 3)], offset)

    monkeypatch.setattr(os, "pwrite", short)
    write_file(tmp_path / "a", [[b"all of this arrives"]])
    assert (tmp_path / "a").read_bytes() == b"all of this arrives"


def test_an_existing_file_is_never_overwritten(tmp_path: Path):
    write_file(tmp_path / "a", [[b"first"]])
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", [[b"second"]])


def test_only_regular_files_are_opened(tmp_path: Path):
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(Damaged):
            open_regular(tmp_path / name)


def test_reading_past_the_end_and_beyond_the_limit_is_damage(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_small(path, 5) == b"12345"
    with pytest.raises(Damaged, match="at most 4"):
        read_small(path, 4)
    descriptor = open_regular(path)
    with pytest.raises(Damaged, match="ends at byte 5"):
        read_range(descriptor, bytearray(6), 0, path)
    os.close(descriptor)


def test_disk_space_check_includes_a_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    required = files.add_reserve(1000)
    assert required == 1000 + 10 + 10**6
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10 * required, 9 * required, required))  # type: ignore[attr-defined]
    assert files.disk_space_error(tmp_path, 1000) is None
    refusal = files.disk_space_error(tmp_path, 1001)
    assert refusal is not None and f"{required:,}" in refusal and f"{required + 1:,}" in refusal
