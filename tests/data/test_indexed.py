from __future__ import annotations

import functools
import operator
import os
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.indexed import IndexedFile, IndexedWriter
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError
from tests.data import megatron

SEQUENCE = st.lists(st.integers(0, 100), max_size=6)
DOCUMENTS = st.lists(st.lists(SEQUENCE, max_size=4), max_size=8)


def write(stem: Path, documents: list[list[int]], dtype: str = "uint16") -> IndexedWriter:
    writer = IndexedWriter(stem, dtype)
    for document in documents:
        writer.add_document(np.array(document, dtype=np.int64))
    writer.finish()
    return writer


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_an_independent_reader_reads_what_we_write(tmp_path: Path, dtype: str) -> None:
    documents = [[1, 2, 3], [60000], [], [7, 8]]
    write(tmp_path / "ours", documents, dtype)
    assert megatron.read(tmp_path / "ours") == [[document] for document in documents]


@given(DOCUMENTS, st.sampled_from(sorted(megatron.CODES)))
@settings(max_examples=60, deadline=None)
def test_foreign_files_are_read_with_their_documents(documents: list[list[list[int]]], code: int) -> None:
    with TemporaryDirectory() as folder:
        stem = Path(folder) / "foreign.text"
        megatron.write(stem, documents, code)
        file = IndexedFile(stem)
        file.check_layout()
        flat = [functools.reduce(operator.iadd, document, []) for document in documents]
        stream = functools.reduce(operator.iadd, flat, [])
        assert (file.documents, file.tokens) == (len(documents), len(stream))
        assert file.read(0, file.tokens).tolist() == stream
        assert np.diff(file.document_bounds()).tolist() == [len(document) for document in flat]
        owner = [number for number, document in enumerate(flat) for _ in document]
        for start in range(len(stream)):
            for stop in range(start + 1, len(stream) + 1, 3):
                spans = file.document_spans(start, stop)
                assert [span.document for span in spans] == sorted(set(owner[start:stop]))
                assert all(stream[s.start : s.stop] == flat[s.document] for s in spans)


def test_names_appear_only_when_finished(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "shard", "uint16")
    writer.add_document(np.arange(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.bin.partial"]
    writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.bin", "shard.idx"]


def patch(stem: Path, suffix: str, offset: int, content: bytes) -> None:
    path = Path(f"{stem}.{suffix}")
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


def cut(stem: Path, suffix: str, size: int) -> None:
    path = Path(f"{stem}.{suffix}")
    path.write_bytes(path.read_bytes()[:size])


FAULTS: dict[str, tuple[Callable[[Path], None], type[MeshwrightError], str]] = {
    "magic": (lambda s: patch(s, "idx", 0, b"X"), Damaged, "offset 0: expected b'MMIDIDX"),
    "version": (lambda s: patch(s, "idx", 9, b"\2"), Damaged, "offset 9: expected version 1, found 2"),
    "dtype": (lambda s: patch(s, "idx", 17, b"\x63"), Damaged, "offset 17: expected a dtype code of .*, found 99"),
    "floats": (lambda s: patch(s, "idx", 17, b"\7"), BadInput, "offset 17: holds float32 values, expected integer"),
    "no entry": (lambda s: patch(s, "idx", 26, b"\0"), Damaged, "offset 26: expected at least 1 document entry"),
    "short header": (lambda s: cut(s, "idx", 20), Damaged, "expected a header of 34 bytes, the file has 20"),
    "short idx": (lambda s: cut(s, "idx", 80), Damaged, "expected 82 bytes for 2 sequences and 3 .*, found 80"),
    "short bin": (lambda s: cut(s, "bin", 9), Damaged, "expected 10 bytes .*, found 9"),
    "first entry": (lambda s: patch(s, "idx", 58, b"\1"), Damaged, "offset 58: expected document entry 0 to be seq"),
    "last entry": (lambda s: patch(s, "idx", 74, b"\1"), Damaged, "offset 74: expected document entry 2 to be seq"),
    "no bin": (lambda s: Path(f"{s}.bin").unlink(), BadInput, "shard.bin: no such file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_pair_is_refused_with_file_offset_and_expectation(tmp_path: Path, fault: str) -> None:
    stem = tmp_path / "shard"
    write(stem, [[1, 2, 3], [4, 5]])
    harm, error, message = FAULTS[fault]
    harm(stem)
    with pytest.raises(error, match=message) as caught:
        IndexedFile(stem)
    assert "shard." in str(caught.value)


def test_a_gap_between_sequences_is_found_by_check_layout(tmp_path: Path) -> None:
    stem = tmp_path / "shard"
    write(stem, [[1, 2], [3, 4], [5]])
    patch(stem, "idx", 34 + 12 + 8, struct.pack("<q", 6))
    with pytest.raises(Damaged, match=r"offset 54: expected sequence 1 to start at byte 4 of the .bin, found 6"):
        IndexedFile(stem).check_layout()


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_truncated_while_it_is_open_is_damage_and_kills_nobody(tmp_path: Path, suffix: str) -> None:
    """Through a memory map the read would end the process by SIGBUS."""
    stem = tmp_path / "shard"
    write(stem, [[number] * 10 for number in range(4000)])
    file = IndexedFile(stem)
    file.check_sizes()
    os.truncate(f"{stem}.{suffix}", 5000)
    assert file.read(100, 110).tolist() == [10] * 10
    with pytest.raises(Damaged, match=rf"shard.{suffix}: expected \d+ bytes as when it was opened, found 5000"):
        file.check_sizes()
    with pytest.raises(
        Damaged, match=rf"shard.{suffix}: offset \d+: expected \d+ more bytes, found the end of the file"
    ):
        file.read(2000, 3000)
        file.document_spans(39_000, 39_100)


def test_multimodal_modes_behind_the_index_are_passed_over(tmp_path: Path) -> None:
    stem = tmp_path / "shard"
    write(stem, [[1, 2], [3]])
    with Path(f"{stem}.idx").open("ab") as file:
        file.write(b"\0\0")
    assert IndexedFile(stem).read(0, 3).tolist() == [1, 2, 3]


def test_every_error_has_a_readable_message(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="must lie side by side"):
        IndexedFile(tmp_path / "nothing")
