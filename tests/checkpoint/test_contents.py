from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.format.contents import TensorChunk, TensorRecord, check_record
from meshwright.checkpoint.format.files import FileRecord
from meshwright.checkpoint.format.manifest import (
    COMMITTED,
    CONTENTS,
    MANIFEST,
    CheckpointManifest,
    NewerFormat,
    commit_line,
    read_manifest,
)
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write.file_writer import write_file
from meshwright.spec.errors import BadInput, Damaged
from tests.checkpoint.made import blank, save, stored
from tests.slow import examples


def forge(path: Path, contents: Any = None, files: dict[str, Any] | None = None) -> Path:
    """Rewrite a checkpoint's metadata (and manifest entries) with digests that agree: what an attacker would do."""
    manifest = read_manifest(path)
    if contents is not None:
        (path / CONTENTS).unlink()
        data = contents if isinstance(contents, bytes) else json.dumps(contents).encode()
        manifest.files[CONTENTS] = write_file(path / CONTENTS, [[data]])
    entries: dict[str, FileRecord] = {**manifest.files, **(files or {})}
    versions = (manifest.world_size, manifest.attempt, manifest.written, manifest.versions)
    data = CheckpointManifest(manifest.step, *versions, entries).encode()
    (path / MANIFEST).write_bytes(data)
    (path / COMMITTED).write_bytes(commit_line(data))
    return path


def load_all(path: Path) -> None:
    CheckpointStore(path.parent).load(path, blank())


def read_contents(path: Path) -> dict[str, Any]:
    return json.loads((path / CONTENTS).read_text())


NAME = "model.embed.weight"


def first_chunk(contents: dict[str, Any]) -> dict[str, Any]:
    return contents["tensors"][NAME]["chunks"][0]


HOSTILE = {
    "parent folder": lambda c: first_chunk(c).update(file="../secret.safetensors"),
    "absolute": lambda c: first_chunk(c).update(file="/etc/passwd"),
    "subfolder": lambda c: first_chunk(c).update(file="a/b.safetensors"),
    "file outside the checkpoint": lambda c: first_chunk(c).update(file="other.safetensors"),
    "no file": lambda c: first_chunk(c).update(file=None),
    "file is not tensors": lambda c: first_chunk(c).update(file="state.json"),
    "unknown key": lambda c: first_chunk(c).update(key="model.other"),
    "key of another dtype": lambda c: first_chunk(c).update(key="model.norm.weight"),
    "key is not a string": lambda c: first_chunk(c).update(key=3),
    "negative size": lambda c: first_chunk(c).update(sizes=[-7, 4]),
    "negative offset": lambda c: first_chunk(c).update(offsets=[-1, 0]),
    "chunk beyond the tensor": lambda c: first_chunk(c).update(offsets=[1, 0]),
    "chunks leave a gap": lambda c: first_chunk(c).update(sizes=[6, 4]),
    "too many dimensions": lambda c: first_chunk(c).update(sizes=[7, 4, 1], offsets=[0, 0, 0]),
    "overflowing": lambda c: first_chunk(c).update(sizes=[1 << 62, 1 << 62]),
    "float": lambda c: first_chunk(c).update(sizes=[7.0, 4.0]),
    "duplicate chunk": lambda c: c["tensors"][NAME]["chunks"].append(first_chunk(c)),
    "overlapping": lambda c: c["tensors"][NAME].update(
        chunks=[{**first_chunk(c), "sizes": [4, 4]}, {**first_chunk(c), "sizes": [3, 4], "offsets": [3, 0]}]
    ),
    "no chunks": lambda c: c["tensors"][NAME].update(chunks=[]),
    "shape larger than its chunks": lambda c: c["tensors"][NAME].update(shape=[1 << 40, 1 << 40]),
    "unknown dtype": lambda c: c["tensors"][NAME].update(dtype="OBJECT"),
    "control characters": lambda c: c["tensors"].update({"a\x1b[2J": c["tensors"][NAME]}),
    "number for a tensor entry": lambda c: c["tensors"].update({NAME: 3}),
    "no tensors": lambda c: c.update(tensors=[1]),
    "another format": lambda c: c.update(format=0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_damage_to_every_reader(tmp_path: Path, name: str):
    path = save(tmp_path / "checkpoints", 3)
    (tmp_path / "checkpoints" / "secret.safetensors").write_bytes((path / "tensors-00000.safetensors").read_bytes())
    contents = read_contents(path)
    HOSTILE[name](contents)
    forge(path, contents)
    with pytest.raises(Damaged):
        load_all(path)
    with pytest.raises(Damaged), CheckpointReader(path) as reader:
        reader.read(NAME)


@pytest.mark.parametrize("data", [b"", b"null", b"{", b"[" * 100_000, b"\xff", b'{"format": 1, "tensors": NaN}'])
def test_metadata_that_is_not_a_json_object_is_damage(tmp_path: Path, data: bytes):
    path = forge(save(tmp_path, 3), data)
    with pytest.raises(Damaged):
        load_all(path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path):
    path = save(tmp_path / "checkpoints", 3)
    shard = path / "tensors-00000.safetensors"
    shard.rename(tmp_path / "outside")
    shard.symlink_to(tmp_path / "outside")
    with pytest.raises(Damaged, match="not a regular file"):
        load_all(path)


def test_forging_without_change_still_loads(tmp_path: Path):
    load_all(forge(save(tmp_path, 3), read_contents(save(tmp_path, 3))))


def test_a_dtype_that_the_shard_contradicts_is_damage(tmp_path: Path):
    path = save(tmp_path, 3)
    contents = read_contents(path)
    contents["tensors"][NAME]["dtype"] = "I32"
    forge(path, contents)
    tensors = blank()
    tensors[NAME] = tensors[NAME].int()
    with pytest.raises(Damaged, match="holds F32"):
        CheckpointStore(tmp_path).load(path, tensors)
    with pytest.raises(BadInput, match="stored as I32"):
        load_all(path)


@settings(max_examples=examples(40, 150), deadline=None)
@given(st.data())
def test_metadata_with_a_random_value_loads_or_is_damage(pristine: Path, data: st.DataObject):
    contents = json.loads((pristine.parent / "pristine.json").read_text())
    node: Any = contents
    while isinstance(node, (dict, list)) and node:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if data.draw(st.integers(0, 3)) == 0 or not isinstance(node[key], (dict, list)):
            node[key] = data.draw(RANDOM_VALUES)
            break
        node = node[key]
    forge(pristine, contents)
    with contextlib.suppress(Damaged, NewerFormat):
        stored(pristine)
    with contextlib.suppress(Damaged, BadInput):
        load_all(pristine)


RANDOM_VALUES = (
    st.none() | st.integers(-(2**65), 2**65) | st.text(max_size=9) | st.lists(st.integers(-1, 9), max_size=3)
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(tmp_path_factory.mktemp("mutated"), 3)
    (path.parent / "pristine.json").write_bytes((path / CONTENTS).read_bytes())
    return path


def grid(cuts: list[list[int]]) -> tuple[TensorChunk, ...]:
    spans = [list(itertools.pairwise(dimension_cuts)) for dimension_cuts in cuts]
    return tuple(
        TensorChunk(tuple(a for a, _ in box), tuple(b - a for a, b in box), "f", str(box))
        for box in itertools.product(*spans)
    )


@settings(max_examples=examples(50, 200), deadline=None)
@given(st.data())
def test_exact_cover_agrees_with_counting_elements(data: st.DataObject):
    dims = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(1, 5)) for _ in range(dims))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    chunks = list(grid(cuts))
    if data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(chunks) - 1))
        shifted_offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
        chunks[index] = TensorChunk(shifted_offsets, chunks[index].sizes, "f", "moved")
    count = torch.zeros(shape, dtype=torch.int64)
    inside = all(
        a + n <= size for chunk in chunks for a, n, size in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    for chunk in chunks:
        count[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    exact = inside and bool((count == 1).all())
    try:
        check_record("x", TensorRecord(shape, "F32", tuple(chunks)), Path("here"))
        assert exact
    except Damaged:
        assert not exact
