"""A checkpoint of a later version of the format is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.checkpoint.format.manifest import COMMITTED, FORMAT, MANIFEST, NewerFormat, commit_line, read_manifest
from tests.checkpoint.made import save


def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    data = json.dumps({**json.loads((path / MANIFEST).read_bytes()), "format": FORMAT + 1}).encode()
    (path / MANIFEST).write_bytes(data)
    (path / COMMITTED).write_bytes(commit_line(data))
    with pytest.raises(NewerFormat, match=rf"newer format: format {FORMAT + 1}, .*this release reads format {FORMAT}"):
        read_manifest(path)
