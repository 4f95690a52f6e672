"""Checkpoints of another run, or under another step's name, are refused, except as weights that `model.init` names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.format.inventory import newest_checkpoint, newest_step
from meshwright.checkpoint.format.manifest import DamagedCheckpoint, read_manifest, read_own_manifest
from meshwright.checkpoint.format.verify import list_checkpoints, verify
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.launch.folder import take_over
from tests.checkpoint.made import save, tensors


def run_with_steps(run: Path, *steps: int) -> CheckpointStore:
    """A run's folder with a lease and a checkpoint of each step."""
    (run / "checkpoints").mkdir(parents=True)
    store = CheckpointStore(run / "checkpoints", lease=take_over(run))
    for step in steps:
        save(run / "checkpoints", step, store)
    return store


def test_a_step_folder_of_another_run_is_passed_over_with_one_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = run_with_steps(tmp_path / "ours", 1), run_with_steps(tmp_path / "theirs", 2)
    ours, theirs = tmp_path / "ours" / "checkpoints", tmp_path / "theirs" / "checkpoints"
    shutil.copytree(theirs / "step-00000002", ours / "step-00000002")
    assert store.newest_good() == ours / "step-00000001"
    assert store.newest_good() == ours / "step-00000001"
    (message,) = [record.message for record in caplog.records if record.name.startswith("meshwright")]
    ids = [read_manifest(folder).run_id for folder in (theirs / "step-00000002", ours / "step-00000001")]
    assert f"written by run {ids[0]}, this folder is that of run {ids[1]}" in message and "does not belong" in message
    assert [checkpoint["ok"] for checkpoint in list_checkpoints(tmp_path / "ours")] == [True, False]
    assert list_checkpoints(tmp_path / "ours")[1]["damaged"] == [
        {"file": "manifest.json", "offset": 0, "kind": "foreign"}
    ]
    assert newest_checkpoint(tmp_path / "ours").name == "step-00000001" and newest_step(ours.parent) == 1


def test_a_step_of_another_run_is_never_the_newest_good_that_retention_keeps(tmp_path: Path) -> None:
    run_with_steps(tmp_path / "ours", 1)
    run_with_steps(tmp_path / "theirs", 2)
    ours = tmp_path / "ours" / "checkpoints"
    shutil.copytree(tmp_path / "theirs" / "checkpoints" / "step-00000002", ours / "step-00000002")
    CheckpointStore(ours, lease=take_over(tmp_path / "ours")).retain(1)
    assert (ours / "step-00000001").is_dir()


def test_a_renamed_step_of_another_run_is_foreign(tmp_path: Path) -> None:
    run_with_steps(tmp_path / "ours", 1)
    run_with_steps(tmp_path / "theirs", 2)
    renamed = tmp_path / "ours" / "checkpoints" / ".replaced-step-00000002.ab"
    shutil.copytree(tmp_path / "theirs" / "checkpoints" / "step-00000002", renamed)
    for folder in (tmp_path / "ours", renamed):
        assert [entry["kind"] for entry in list_checkpoints(folder)[-1]["damaged"]] == ["foreign"]


@pytest.mark.parametrize("name", ["step-00000007", ".replaced-step-00000007.ab"])
def test_a_step_folder_under_another_steps_name_is_refused(tmp_path: Path, name: str) -> None:
    store = run_with_steps(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-00000002").rename(tmp_path / "checkpoints" / name)
    assert [damage.note for damage in verify(tmp_path / "checkpoints" / name)] == ["is that of step 2"]
    assert store.newest_good() == tmp_path / "checkpoints" / "step-00000001"


def test_checkpoints_copied_without_the_lease_keep_their_run(tmp_path: Path) -> None:
    run_with_steps(tmp_path / "here", 1)
    shutil.copytree(tmp_path / "here" / "checkpoints", tmp_path / "there" / "checkpoints")
    store = CheckpointStore(tmp_path / "there" / "checkpoints", lease=take_over(tmp_path / "there"))
    assert store.newest_good() == tmp_path / "there" / "checkpoints" / "step-00000001"


def test_weights_of_another_run_may_be_named_explicitly(tmp_path: Path) -> None:
    run_with_steps(tmp_path / "theirs", 2)
    path = newest_checkpoint(tmp_path / "theirs" / "checkpoints" / "step-00000002")
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read("model.embed.weight"), tensors(2)["model.embed.weight"])
    assert read_own_manifest(path, None).step == 2
    with pytest.raises(DamagedCheckpoint, match="does not belong here"):
        read_own_manifest(path, "another")
