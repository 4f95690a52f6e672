"""Inputs: links, directories that cannot be read, files that are no files, and one file under two names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.inputs import NotRead, list_inputs
from meshwright.data.prepare import prepare
from meshwright.spec.errors import BadInput, nearest
from tests.data.conftest import story


def listed(*inputs: Path) -> tuple[list[str], list[tuple[str, str]]]:
    files, not_read = list_inputs([str(path) for path in inputs])
    return [file.key for file in files], sorted((Path(item.where).name, item.reason) for item in not_read)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text(story(1))
    (folder / "sub" / "b.txt").write_text(story(2))
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "deep" / "c.txt").write_text(story(3))
    return folder


def test_linked_directories_and_files_are_read_once(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "again").symlink_to(tmp_path / "outside" / "deep")
    (folder / "latest").symlink_to(folder / "sub")
    (folder / "copy.txt").symlink_to("a.txt")
    (tmp_path / "outside" / "e.txt").write_text(story(5))
    keys, not_read = listed(folder)
    assert keys == ["a.txt", "again/c.txt", "link/e.txt", "sub/b.txt"]
    assert not_read == [(name, "the same as another") for name in ("c.txt", "copy.txt", "latest")]


def test_a_link_into_a_hidden_directory_is_followed(folder: Path) -> None:
    (folder / ".store").mkdir()
    (folder / ".store" / "d.txt").write_text(story(4))
    (folder / "shown").symlink_to(folder / ".store")
    assert listed(folder) == (["a.txt", "shown/d.txt", "sub/b.txt"], [(".store", "hidden")])


def test_loops_broken_links_and_pipes_are_named(folder: Path) -> None:
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "parent").symlink_to(folder.parent)
    (folder / "broken").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    keys, not_read = listed(folder)
    assert keys == ["a.txt", "sub/b.txt"]
    assert not_read == [
        ("broken", "broken link"),
        ("circle", "broken link"),
        ("parent", "link loop"),
        ("pipe", "no regular file"),
        ("up", "the same as another"),
    ]


def test_a_directory_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def scandir(path: str) -> Any:
        if path.endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    files, not_read = list_inputs([str(folder)])
    assert [file.key for file in files] == ["a.txt"]
    assert not_read == [NotRead(str(folder / "sub"), "cannot be read", "Permission denied")]
    with pytest.raises(BadInput, match="sub: cannot be read: Permission denied"):
        list_inputs([str(folder / "sub")])


def test_lost_inputs_are_refused_on_demand_and_else_recorded(
    folder: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    (folder / "broken").symlink_to("nowhere")
    arguments = ([str(folder)], str(tokenizer_file))
    with pytest.raises(BadInput, match="not read, broken link: 1 files\n.*broken: nowhere"):
        prepare(*arguments, tmp_path / "refused", on_bad="refuse")
    result = prepare(*arguments, tmp_path / "out")
    assert result.manifests["train"].not_read == {"broken link": {"files": 1, "bytes": 0}}


def test_one_file_in_two_inputs_is_refused(folder: Path) -> None:
    for second in (folder / "a.txt", folder / "sub" / ".." / "a.txt", folder):
        with pytest.raises(BadInput, match=r"a.txt: is the same file as .*a.txt, which is an input too"):
            list_inputs([str(folder), str(second)])


def test_streams_and_broken_links_are_no_inputs(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for name in ("-", str(folder / "pipe"), "/dev/null"):
        with pytest.raises(BadInput, match="is a stream, and a preparation reads its inputs more than once"):
            list_inputs([name])
    (folder / "broken").symlink_to("nowhere")
    with pytest.raises(BadInput, match="broken: is a link to nowhere, which does not exist"):
        list_inputs([str(folder / "broken")])


def test_a_text_key_needs_records(folder: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--text-key body: no input has records"):
        prepare([str(folder)], str(tokenizer_file), tmp_path / "out", text_key="body")


def test_the_nearest_word_is_another_one() -> None:
    assert nearest("corpus", ["corpus", "corpora"]) == "corpora"
