"""Locks on folders that other processes create and remove at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.durable.lock import LOCK, locked


@pytest.mark.parametrize("depth", [1, 3])
def test_a_folder_that_is_removed_after_it_was_found_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    folder = tmp_path.joinpath(*"abc"[:depth])
    folder.mkdir(parents=True)
    make, removed = os.mkdir, list[str]()

    def mkdir(path: str, mode: int = 0o777) -> None:
        try:
            make(path, mode)
        except FileExistsError:
            if not removed:
                os.rmdir(path)
                removed.append(str(path))
            raise

    monkeypatch.setattr(os, "mkdir", mkdir)
    with locked(folder, wait=False) as exclusive:
        assert exclusive and (folder / LOCK).is_file() and removed == [str(folder)]
    assert not folder.exists()


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError), locked(tmp_path / name, wait=False):
            pass
    with pytest.raises(NotADirectoryError), locked(tmp_path / "file" / "below", wait=False):
        pass
