from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.format.manifest import (
    COMMITTED,
    MANIFEST,
    DamagedCheckpoint,
    commit_line,
    read_manifest,
    step_name,
    step_of,
    steps_in,
)
from meshwright.spec.errors import BadInput
from tests.checkpoint.made import save


def rewrite(path: Path, change: dict[str, Any]) -> Path:
    data = json.loads((path / MANIFEST).read_bytes())
    data.update(change)
    text = json.dumps(data).encode()
    (path / MANIFEST).write_bytes(text)
    (path / COMMITTED).write_bytes(commit_line(text))
    return path


def damage_of(path: Path) -> tuple[str, str]:
    with pytest.raises(DamagedCheckpoint) as caught:
        read_manifest(path)
    (damage,) = caught.value.damage
    return damage.file, damage.kind


RECORD = {"bytes": 3, "blocks": ["0" * 16]}


def test_step_folder_names_and_step_numbers_are_inverse():
    assert [step_of(step_name(step)) for step in (0, 100, 99_999_999, 123_456_789)] == [0, 100, 99_999_999, 123_456_789]
    for name in (
        "step-1",
        "step-000000001",
        "step-0000010a",
        ".step-00000100.ab.partial",
        "step-00000100 ",
        "step-٠٠٠٠٠١٠٠",
    ):
        assert step_of(name) is None


def test_steps_are_listed_in_order_and_nothing_else(tmp_path: Path):
    for name in ("step-00000200", "step-00000100", ".step-00000300.ab.partial", ".deleted-step-00000001.ab", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000400").write_text("a file")
    assert [path.name for path in steps_in(tmp_path)] == ["step-00000100", "step-00000200"]
    assert steps_in(tmp_path / "absent") == []


def test_a_manifest_lists_the_saved_files_and_tensors(tmp_path: Path):
    path = save(tmp_path, 7)
    manifest = read_manifest(path)
    assert (manifest.step, manifest.world_size) == (7, 1)
    file_sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.name not in (MANIFEST, COMMITTED)}
    assert {name: record.bytes for name, record in manifest.files.items()} == file_sizes
    assert manifest.total_bytes == sum(file_sizes.values())


def test_a_copy_under_another_name_is_good_but_a_swapped_step_is_not(tmp_path: Path):
    path = save(tmp_path, 7)
    read_manifest(path.rename(tmp_path / "base-model"))
    assert damage_of((tmp_path / "base-model").rename(tmp_path / step_name(8))) == (MANIFEST, "manifest")


@pytest.mark.parametrize("name", [COMMITTED, MANIFEST])
def test_without_either_file_nothing_is_committed(tmp_path: Path, name: str):
    path = save(tmp_path, 7)
    (path / name).unlink()
    assert damage_of(path) == (name, "missing")


def test_a_commit_file_with_a_wrong_or_invalid_digest_is_damage(tmp_path: Path):
    path = save(tmp_path, 7)
    (path / COMMITTED).write_bytes(b"")
    assert damage_of(path) == (COMMITTED, "commit")
    (path / COMMITTED).write_bytes(commit_line(b"another"))
    assert damage_of(path) == (MANIFEST, "manifest")
    (path / COMMITTED).write_bytes(b"x" * 100)
    assert damage_of(path) == (COMMITTED, "commit")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"block_bytes": 5},
        {"step": -1},
        {"step": True},
        {"world_size": "8"},
        {"attempt": None},
        {"run_id": 5},
        {"run_id": "../x"},
        {"epoch": -1},
        {"epoch": "1"},
        {"versions": []},
        {"files": []},
        {"files": {"../x": RECORD}},
        {"files": {"a/b": RECORD}},
        {"files": {".hidden": RECORD}},
        {"files": {"COMMITTED": RECORD}},
        {"files": {"a": None}},
        {"files": {"a": {**RECORD, "bytes": -1}}},
        {"files": {"a": {**RECORD, "bytes": 1 << 70}}},
        {"files": {"a": {**RECORD, "blocks": []}}},
        {"files": {"a": {**RECORD, "blocks": [5]}}},
        {"files": {"a": {**RECORD, "blocks": ["zz"]}}},
    ],
)
def test_hostile_manifests_are_damage(tmp_path: Path, change: dict[str, Any]):
    assert damage_of(rewrite(save(tmp_path, 7), change)) == (MANIFEST, "manifest")


@pytest.mark.parametrize("data", [b"", b"[]", b"{" * 100_000, b"\xff\xfe"])
def test_a_manifest_that_is_no_json_is_damage(tmp_path: Path, data: bytes):
    path = save(tmp_path, 7)
    (path / MANIFEST).write_bytes(data)
    (path / COMMITTED).write_bytes(commit_line(data))
    assert damage_of(path) == (MANIFEST, "manifest")


def test_a_path_that_is_not_a_folder_is_bad_input(tmp_path: Path):
    with pytest.raises(BadInput, match="is not a folder"):
        read_manifest(tmp_path / "absent")
