"""Durable writes: a file or folder has its old or its new content, and is renamed only after it is on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.durable.writes import (
    append_durable,
    new_folder,
    publish,
    publish_folder,
    remove_partials,
    rename,
    sync_folder,
    write_durable,
)
from tests.checkpoint.crash import CALLS, FILE_OPEN, count, die_at, intercept_calls

WRITES = (*CALLS, FILE_OPEN)


def events(work: Callable[[], object]) -> list[tuple[str, str]]:
    """The flushes and renames that `work` makes, each with the name of the file or folder."""
    calls: list[tuple[str, str]] = []

    def note(_: int, name: str, arguments: tuple[Any, ...]) -> None:
        path = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else str(arguments[0])
        calls.append((name, Path(path).name))

    with intercept_calls(note, ("fsync", "rename", "replace")):
        work()
    return calls


def test_a_file_is_flushed_then_renamed_then_its_folder_is_flushed(tmp_path: Path) -> None:
    partial = f"a.{os.getpid()}.partial"
    write = events(lambda: write_durable(tmp_path / "a", "content"))
    assert write == [("fsync", partial), ("replace", partial), ("fsync", tmp_path.name)]
    (tmp_path / "new").mkdir()
    moved = events(lambda: publish_folder(tmp_path / "new", tmp_path / "run", tmp_path / "old"))
    assert moved == [("rename", "new"), ("fsync", tmp_path.name)]


def test_a_folder_gets_its_name_when_it_is_complete_and_a_failed_one_is_removed(tmp_path: Path) -> None:
    """What a killed process left, even one with the same process id, is removed too."""
    abandoned = tmp_path / f".run.{os.getpid()}.partial"
    (abandoned / "old").mkdir(parents=True)
    with pytest.raises(RuntimeError), new_folder(tmp_path / "run") as folder:
        write_durable(folder / "a", "content")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "run") as folder:
        write_durable(folder / "a", "content")
        assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]
    (abandoned / "old").mkdir(parents=True)
    remove_partials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_pipe_gets_the_content_itself(tmp_path: Path) -> None:
    """As `--out /dev/stdout | head`: the link of a pipe names no path."""
    reading, writing = os.pipe()
    link = tmp_path / "stdout"
    link.symlink_to(f"/proc/self/fd/{writing}")
    write_durable(link, ["first\n", "second\n"])
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        assert pipe.read() == "first\nsecond\n"
    assert link.is_symlink()


def test_death_at_any_call_leaves_the_old_or_the_new_content(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def write() -> None:
        write_durable(path, ["new ", "content"])

    path.write_text("old content")
    calls = count(write, WRITES)
    renamed = calls.index("replace")
    for k in range(len(calls)):
        path.write_text("old content")
        assert die_at(k, write, WRITES)
        assert path.read_text() == ("old content" if k <= renamed else "new content")
    remove_partials(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_old_content_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old content")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with intercept_calls(fail, ("fsync",)), pytest.raises(OSError, match="No space left") as caught:
        write_durable(path, b"new content")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old content" and [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_link_is_kept_and_its_target_has_the_new_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old content")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_durable(tmp_path / "link", "new content")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_text() == "new content"


def test_appended_content_and_the_name_of_a_new_file_are_flushed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert events(lambda: append_durable(path, b"first\n")) == [("fsync", "journal"), ("fsync", tmp_path.name)]
    assert events(lambda: append_durable(path, b"second\n")) == [("fsync", "journal")]
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_published_folder_replaces_another_unless_the_rename_fails(tmp_path: Path) -> None:
    run, new, old = tmp_path / "run", tmp_path / "new", tmp_path / "old"
    run.mkdir()
    with pytest.raises(FileNotFoundError):
        publish_folder(new, run, old)
    assert run.is_dir() and not old.exists()
    new.mkdir()
    (new / "file").touch()
    publish_folder(new, run, old)
    assert (run / "file").exists() and old.is_dir() and not new.exists()


def test_rename_and_publish_give_files_their_new_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    rename(tmp_path / "a", tmp_path / "b")
    sync_folder(tmp_path)
    (tmp_path / "c").write_text("replaced")
    publish(tmp_path / "b", tmp_path / "c")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"c": "content"}


def test_a_failed_append_leaves_the_file_as_it_was_and_a_torn_line_is_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    append_durable(path, b"first\n")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError) as caught:
            append_durable(path, b"second\n")
    assert caught.value.filename == str(path) and path.read_bytes() == b"first\n"
    path.write_bytes(b"first\nsec")
    append_durable(path, b"third\n")
    assert path.read_bytes() == b"first\nsec\nthird\n"
