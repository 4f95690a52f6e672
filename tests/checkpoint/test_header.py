from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.format.header import (
    HEADER_LIMIT,
    ITEM_BYTES,
    TensorHeader,
    encode_header,
    find_entry,
    read_entries,
)
from meshwright.checkpoint.local_tensors import DTYPES
from meshwright.checkpoint.read.fill import Destination
from meshwright.checkpoint.write import file_writer, live_state
from meshwright.checkpoint.write.live_state import write_tensors
from meshwright.spec.errors import Damaged

GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]},
}


def raw(table: Any, data: int = 29) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entries(tmp_path: Path, content: bytes) -> dict[str, Any]:
    (tmp_path / "a.safetensors").write_bytes(content)
    return read_entries(tmp_path / "a.safetensors")


def test_other_programs_read_what_we_write_in_every_dtype(tmp_path: Path):
    names = sorted(DTYPES, key=lambda name: -ITEM_BYTES[name])
    tensors = {f"{name}.x": torch.arange(6).reshape(2, 3).to(DTYPES[name]) for name in names}
    tensors["empty"], tensors["scalar"] = torch.empty(0, 4, dtype=torch.int8), torch.tensor(3, dtype=torch.int8)
    headers = [TensorHeader(name, _name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_tensors(tmp_path / "a.safetensors", headers, tensors.values())
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert (
            torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))
            if tensor.dim()
            else loaded[name] == tensor
        )


def read_box(path: Path, key: str, offsets: tuple[int, ...], target: torch.Tensor) -> None:
    """Fill `target` with the box of an entry that begins at `offsets`, from blocks of 40 bytes in reverse order."""
    destination, content = Destination(read_entries(path)[key], offsets, target), path.read_bytes()
    for start in reversed(range(0, len(content), 40)):
        destination.fill(torch.frombuffer(bytearray(content[start : start + 40]), dtype=torch.uint8), start)


def test_we_read_what_other_programs_write(tmp_path: Path):
    tensors = {"x": torch.randn(6, 5), "y": torch.randn(3).half(), "z": torch.tensor(2.0)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        target = torch.zeros_like(tensor)
        read_box(tmp_path / "a.safetensors", name, (0,) * tensor.dim(), target)
        assert torch.equal(target, tensor)


def test_a_box_is_read_into_any_stride_and_dtype(tmp_path: Path):
    path, stored = tmp_path / "a.safetensors", torch.arange(6 * 5 * 2, dtype=torch.float32).reshape(6, 5, 2)
    write_tensors(path, [TensorHeader("x", "F32", (6, 5, 2))], [stored.transpose(0, 1).contiguous().transpose(0, 1)])
    target = torch.zeros(3, 2, 4, dtype=torch.float64).permute(2, 0, 1)
    read_box(path, "x", (1, 2, 0), target)
    assert torch.equal(target, stored[1:5, 2:5, 0:2].double())
    entries = read_entries(path)
    assert find_entry(entries, "x", "F32", (6, 5, 2), path) == entries["x"]
    with pytest.raises(Damaged, match="holds F32"):
        find_entry(entries, "x", "F16", (6, 5, 2), path)
    with pytest.raises(Damaged, match="holds nothing"):
        find_entry(entries, "y", "F32", (6, 5, 2), path)


@pytest.mark.parametrize("blocks", [1, 3])
def test_windows_smaller_than_a_tensor_and_larger_than_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
):
    """The two buffers are filled again and again; each block's digest is of what is on the disk."""
    for module in (live_state, file_writer):
        monkeypatch.setattr(module, "BLOCK_BYTES", 33)
    monkeypatch.setattr(live_state, "WINDOW_BLOCKS", blocks)
    tensors, path = [torch.randn(n) for n in (1, 40, 2, 3, 17)], tmp_path / "a.safetensors"
    headers = [TensorHeader(str(index), "F32", tuple(tensor.shape)) for index, tensor in enumerate(tensors)]
    record = write_tensors(path, headers, (tensor.clone() for tensor in tensors))
    loaded = safetensors.torch.load_file(path)
    assert all(torch.equal(loaded[str(index)], tensor) for index, tensor in enumerate(tensors))
    content = path.read_bytes()
    digests = [xxhash.xxh3_64(content[start : start + 33]).hexdigest() for start in range(0, len(content), 33)]
    assert (record.bytes, list(record.blocks)) == (len(content), digests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {**GOOD["a"], "data_offsets": [4, 28]}}, "starts at byte"),
        ({"b": {**GOOD["b"], "data_offsets": [23, 28]}}, "starts at byte"),
        ({"b": {**GOOD["b"], "data_offsets": [24, 1 << 70]}}, "lacks a known dtype"),
        ({"b": {**GOOD["b"], "data_offsets": [29, 24]}}, "has shape"),
        ({"b": {**GOOD["b"], "shape": [6]}}, "has shape"),
        ({"b": {**GOOD["b"], "shape": [-5]}}, "lacks a known dtype"),
        ({"b": {**GOOD["b"], "shape": [1 << 40, 1 << 40]}}, "lacks a known dtype"),
        ({"b": {**GOOD["b"], "shape": [5.0]}}, "lacks a known dtype"),
        ({"b": {**GOOD["b"], "shape": [True] * 5}}, "lacks a known dtype"),
        ({"b": {**GOOD["b"], "dtype": "OBJECT"}}, "lacks a known dtype"),
        ({"b": None}, "lacks a known dtype"),
    ],
)
def test_a_header_that_contradicts_itself_is_damage(tmp_path: Path, change: dict[str, Any], message: str):
    assert set(entries(tmp_path, raw(GOOD))) == {"a", "b"}
    with pytest.raises(Damaged, match=message):
        entries(tmp_path, raw({**GOOD, **change}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        raw(GOOD, 28),
        raw(GOOD, 30),
        raw(b"[" * 100_000),
        raw(b"[1, 2]"),
        raw(b"\xff\xfe"),
        (HEADER_LIMIT + 1).to_bytes(8, "little") + bytes(64),
        (1 << 63).to_bytes(8, "little") + bytes(64),
        raw(b'{"a": ' + b"9" * 5000 + b"}"),
    ],
)
def test_a_file_that_is_no_safetensors_is_damage(tmp_path: Path, content: bytes):
    with pytest.raises(Damaged):
        entries(tmp_path, content)


def test_a_huge_header_is_refused_without_reading_it(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((200 << 20).to_bytes(8, "little"))
        file.truncate(400 << 20)
    with pytest.raises(Damaged, match="does not fit"):
        read_entries(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_files_never_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    content = bytearray(raw(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    open_descriptors = set(os.listdir("/proc/self/fd"))
    try:
        for entry in read_entries(path).values():
            assert 8 <= entry.start <= entry.end <= len(content)
    except Damaged:
        pass
    assert set(os.listdir("/proc/self/fd")) == open_descriptors


def _name(tensor: torch.Tensor) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)


def test_header_keeps_tensors_aligned():
    head = encode_header([TensorHeader("x", "F64", (3,)), TensorHeader("y", "U8", (3,))])
    assert len(head) % 8 == 0
