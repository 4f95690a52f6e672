from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.format.contents import TensorChunk, TensorRecord
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.checkpoint.format.plain_files import encode_plain
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write.attempt import Provenance, SaveAttempt, new_attempt
from meshwright.checkpoint.write.live_state import write_tensors
from meshwright.spec.errors import BadInput, Damaged
from tests.checkpoint.made import save, tensors
from tests.slow import examples

WHOLE = torch.arange(7 * 6 * 2, dtype=torch.int32).reshape(7, 6, 2)


def save_grid(folder: Path, row_cuts: list[int], column_cuts: list[int]) -> Path:
    """A checkpoint of WHOLE cut into boxes, one file each: what a two-dimensional layout would write."""
    attempt = SaveAttempt(folder, 1, new_attempt())
    attempt.create()
    files, chunks = {}, []
    cuts = itertools.product(itertools.pairwise(row_cuts), itertools.pairwise(column_cuts))
    for index, ((top, bottom), (left, right)) in enumerate(cuts):
        box, name, key = WHOLE[top:bottom, left:right], f"tensors-{index:05d}.safetensors", f"x[{top},{left}]"
        files[name] = write_tensors(attempt.folder / name, [TensorHeader(key, "I32", tuple(box.shape))], [box])
        chunks.append(TensorChunk((top, left, 0), tuple(box.shape), name, key))
    contents = {"x": TensorRecord(tuple(WHOLE.shape), "I32", tuple(chunks))}
    attempt.commit(files, contents, encode_plain({}, {}), Provenance(len(files), "any"))
    return attempt.target


def test_every_tensor_is_read_whole(tmp_path: Path):
    with CheckpointReader(save(tmp_path, 6)) as reader:
        assert list(reader.names()) == sorted(tensors(6))
        assert list(reader.names("optimizer.c")) == ["optimizer.count"]
        for name, tensor in tensors(6).items():
            loaded = reader.read(name)
            assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)
        assert reader.state() == {"step": 6, "samples": 48}
        assert reader.text("plan.yaml") == "mesh: []\n"


def test_boxes_in_a_grid_are_put_together(tmp_path: Path):
    path = save_grid(tmp_path, [0, 3, 4, 7], [0, 1, 6])
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read("x"), WHOLE)
        for start, stop in itertools.combinations_with_replacement(range(8), 2):
            assert torch.equal(reader.read_rows("x", start, stop), WHOLE[start:stop])
    loaded = torch.zeros_like(WHOLE)
    CheckpointStore(tmp_path).load(path, {"x": loaded})
    assert torch.equal(loaded, WHOLE)


@settings(max_examples=examples(8, 25), deadline=None)
@given(
    row_cuts=st.sets(st.integers(1, 6)),
    column_cuts=st.sets(st.integers(1, 5)),
    a=st.integers(0, 7),
    b=st.integers(0, 7),
)
def test_any_grid_gives_any_rows(
    tmp_path_factory: pytest.TempPathFactory, row_cuts: set[int], column_cuts: set[int], a: int, b: int
):
    path = save_grid(tmp_path_factory.mktemp("grid"), sorted({0, 7} | row_cuts), sorted({0, 6} | column_cuts))
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read_rows("x", min(a, b), max(a, b)), WHOLE[min(a, b) : max(a, b)])


def test_only_what_is_asked_for_is_opened(tmp_path: Path):
    path = save_grid(tmp_path, [0, 3, 7], [0, 6])
    (path / "tensors-00001.safetensors").write_bytes(bytes((path / "tensors-00001.safetensors").stat().st_size))
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read_rows("x", 0, 3), WHOLE[:3])
        with pytest.raises(Damaged, match="tensors-00001"):
            reader.read_rows("x", 2, 4)


def test_mistakes_name_the_nearest(tmp_path: Path):
    with CheckpointReader(save(tmp_path, 6)) as reader:
        with pytest.raises(BadInput, match=r"nearest: model\.norm\.weight"):
            reader.read("model.norm.weigth")
        with pytest.raises(BadInput, match="rows 3 to 9"):
            reader.read_rows("model.embed.weight", 3, 9)
        with pytest.raises(BadInput, match="it has config"):
            reader.text("../../etc/passwd")
