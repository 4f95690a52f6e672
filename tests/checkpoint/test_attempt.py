"""A save that dies or fails anywhere leaves what was there before."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.format.manifest import COMMITTED, MANIFEST, step_name
from meshwright.checkpoint.format.verify import verify
from meshwright.checkpoint.store import CheckpointStore
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError, OutOfResources
from tests.checkpoint.crash import count, die_at, intercept_calls
from tests.checkpoint.made import TEXTS, holds, save, tensors


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def overwrite(folder: Path) -> None:
    """Step 1 again, with the values of step 2."""
    state = {"step": 2, "samples": 16}
    CheckpointStore(folder).save(1, tensors(2), state, TEXTS, overwrite=True)


def test_death_at_any_call_of_a_save_leaves_the_previous_checkpoint_the_newest_good(tmp_path: Path):
    save(tmp_path / "count", 1)
    calls = count(lambda: save(tmp_path / "count", 2))
    published = len(calls) - calls[::-1].index("rename")
    assert {"open", "pwrite", "fsync", "rename", "mkdir"} == set(calls)
    for k in range(len(calls)):
        folder = tmp_path / str(k)
        shutil.copytree(tmp_path / "count", folder, ignore=shutil.ignore_patterns(step_name(2)))
        assert die_at(k, lambda folder=folder: save(folder, 2))
        newest = CheckpointStore(folder).newest_good()
        step = 1 if k < published else 2
        assert newest == folder / step_name(step) and holds(newest, step)


def test_after_a_death_saving_and_retention_go_on_and_clear_up(tmp_path: Path):
    save(tmp_path, 1)
    for k in (3, 9, 14):
        assert die_at(k, lambda: save(tmp_path, 2))
    assert len(hidden(tmp_path)) == 3
    store = CheckpointStore(tmp_path)
    save(tmp_path, 2, store)
    store.retain(1)
    assert [path.name for path in tmp_path.iterdir()] == [step_name(2)]


def test_death_while_replacing_a_step_leaves_the_old_or_the_new_one(tmp_path: Path):
    save(tmp_path / "count", 1)
    calls = count(lambda: overwrite(tmp_path / "count"))
    swap = [index for index, name in enumerate(calls) if name == "rename"]
    assert len(swap) == 2
    for k in range(swap[0] - 3, len(calls)):
        folder = tmp_path / str(k)
        save(folder, 1)
        assert die_at(k, lambda folder=folder: overwrite(folder))
        newest = CheckpointStore(folder).newest_good()
        assert newest is not None
        values = 1 if k <= swap[1] else 2
        assert holds(newest, values)
        CheckpointStore(folder).retain(1)
        assert [path.name for path in folder.iterdir()] == [step_name(1)] and holds(folder / step_name(1), values)


def test_death_at_any_call_of_retention_leaves_the_newest_good(tmp_path: Path):
    for step in (1, 2, 3):
        save(tmp_path / "count", step)
    shutil.copytree(tmp_path / "count", tmp_path / "kept")
    calls = count(lambda: CheckpointStore(tmp_path / "count").retain(1))
    assert calls.count("rename") == 2
    for k in range(0, len(calls), 3):
        folder = tmp_path / str(k)
        shutil.copytree(tmp_path / "kept", folder)
        die_at(k, lambda folder=folder: CheckpointStore(folder).retain(1))
        store = CheckpointStore(folder)
        assert store.newest_good() == folder / step_name(3)
        store.retain(1)
        assert [path.name for path in folder.iterdir()] == [step_name(3)]


@pytest.mark.parametrize(
    ("number", "error_class", "names"),
    [
        (errno.ENOSPC, OutOfResources, ("pwrite", "mkdir", "open")),
        (errno.EIO, Damaged, ("pwrite", "fsync")),
        (errno.EROFS, BadInput, ("mkdir", "rename")),
    ],
)
def test_failure_at_any_call_is_reported_and_leaves_no_partial_files(
    tmp_path: Path, number: int, error_class: type[MeshwrightError], names: tuple[str, ...]
):
    save(tmp_path, 1)
    calls = len(count(lambda: save(tmp_path, 2), names))
    shutil.rmtree(tmp_path / step_name(2))
    open_descriptors = set(os.listdir("/proc/self/fd"))
    for k in range(calls):

        def fail(index: int, name: str, arguments: tuple[Any, ...], k: int = k) -> None:
            if index == k:
                raise OSError(number, os.strerror(number), str(arguments[0]))

        with intercept_calls(fail, names), pytest.raises(MeshwrightError) as caught:
            save(tmp_path, 2)
        assert type(caught.value) is error_class and "saving step 2" in str(caught.value)
        visible = {path.name for path in tmp_path.iterdir()}
        if k == calls - 1 and step_name(2) in visible:  # the last calls come after the rename: all of it is there
            assert verify(tmp_path / step_name(2)) == []
            shutil.rmtree(tmp_path / step_name(2))
            visible.discard(step_name(2))
        assert visible == {step_name(1)}
    assert holds(tmp_path / step_name(1), 1)
    assert set(os.listdir("/proc/self/fd")) <= open_descriptors  # those of earlier tests may be closed meanwhile
    save(tmp_path, 2)


def test_all_files_are_durable_before_the_rename_and_the_manifest_is_written_last(tmp_path: Path):
    events: list[tuple[str, str]] = []

    def note(_: int, name: str, arguments: tuple[Any, ...]) -> None:
        path = os.readlink(f"/proc/self/fd/{arguments[0]}") if name in ("pwrite", "fsync") else str(arguments[0])
        events.append((name, Path(path).name))

    with intercept_calls(note, ("pwrite", "fsync", "rename")):
        save(tmp_path, 2)
    renamed = next(index for index, (name, _) in enumerate(events) if name == "rename")
    partial = events[renamed][1]
    assert partial.endswith(".partial")
    assert events[renamed - 1 :] == [("fsync", partial), events[renamed], ("fsync", tmp_path.name)]
    files = [path.name for path in (tmp_path / step_name(2)).iterdir()]
    writes, syncs = _last(events[:renamed], "pwrite"), _last(events[:renamed], "fsync")
    assert set(writes) == set(files) and all(writes[file] < syncs[file] for file in files)
    order = sorted(files, key=lambda file: syncs[file])
    assert order[-2:] == [MANIFEST, COMMITTED]
    assert writes[COMMITTED] > syncs[MANIFEST]
    first_of_manifest = events.index(("pwrite", MANIFEST))
    assert all(syncs[file] < first_of_manifest for file in files if file not in (MANIFEST, COMMITTED))


def _last(events: list[tuple[str, str]], call: str) -> dict[str, int]:
    return {path: index for index, (name, path) in enumerate(events) if name == call}
