"""Every version of the format is read for good: one small checkpoint of each is kept in `fixtures/format-N`.

The first release of a version writes its fixture with the store of that release; afterwards it never changes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.format.manifest import COMMITTED, FORMAT, MANIFEST, NewerFormat, commit_line, read_manifest
from meshwright.checkpoint.format.verify import verify
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from tests.checkpoint.made import TEXTS, save

FIXTURES = Path(__file__).parent / "fixtures"
VALUES = torch.arange(320.0).reshape(8, 40) * 2


def test_there_is_a_fixture_of_every_version() -> None:
    assert sorted(path.name for path in FIXTURES.iterdir()) == [f"format-{number + 1}" for number in range(FORMAT)]


@pytest.mark.parametrize("version", range(1, FORMAT + 1))
def test_a_checkpoint_of_each_version_is_loaded(version: int) -> None:
    """Two ranks wrote tensor `x` of 8 rows, half each."""
    (path,) = (FIXTURES / f"format-{version}").iterdir()
    assert json.loads((path / MANIFEST).read_bytes())["format"] == version and verify(path) == []
    x = torch.zeros(8, 40)
    loaded = CheckpointStore(path.parent).load_newest({"x": x})
    assert loaded == (path, {"step": 2, "samples": 2}) and torch.equal(x, VALUES)
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read("x"), VALUES) and reader.text("config.yaml") == TEXTS["config.yaml"]


def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    data = json.dumps({**json.loads((path / MANIFEST).read_bytes()), "format": FORMAT + 1}).encode()
    (path / MANIFEST).write_bytes(data)
    (path / COMMITTED).write_bytes(commit_line(data))
    with pytest.raises(NewerFormat, match=rf"newer format: format {FORMAT + 1}, .*this release reads format {FORMAT}"):
        read_manifest(path)
