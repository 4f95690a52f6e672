"""Inputs that change after a preparation: they are refused, whatever their size and times say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data.manifest import Manifest, verify
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.spec.errors import BadInput
from tests.data.chats import CHATML, CHATS, marked, write_chats, write_tokenizer
from tests.data.conftest import story

HOUR_NS = 3600 * 10**9


def age(*paths: Path) -> None:
    """Make files an hour older, and the work of a preparation too, so that no time is recent."""
    for path in paths:
        for file in [path, *path.rglob("*")]:
            status = file.stat()
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns - HOUR_NS))


def write_text(path: Path, word: str) -> None:
    path.write_text(story(1) + word)


def write_lines(path: Path, word: str) -> None:
    path.write_text(json.dumps({"text": story(1) + word}) + "\n")


def write_parquet(path: Path, word: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": [story(1) + word]}), path, compression="none")


@pytest.mark.parametrize(
    ("name", "write"), [("a.txt", write_text), ("a.jsonl", write_lines), ("a.parquet", write_parquet)]
)
@pytest.mark.parametrize("times", ["new", "kept"])
def test_other_bytes_of_the_same_size_are_refused(
    tmp_path: Path, tokenizer_file: Path, name: str, write: object, times: str
) -> None:
    assert callable(write)
    path = tmp_path / name
    write(path, "black")
    before = path.stat()
    arguments = ([str(path)], str(tokenizer_file), tmp_path / "out")
    prepare(*arguments)
    write(path, "white")
    assert path.stat().st_size == before.st_size
    if times == "kept":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BadInput, match=f"was prepared by this command, but the contents of {path} changed; choose"):
        prepare(*arguments)
    write(path, "black")
    assert prepare(*arguments).reused, "other times, the same bytes"


def test_chats_that_changed_are_refused(tmp_path: Path) -> None:
    folder, file = write_tokenizer(tmp_path / "model", marked(CHATML)), write_chats(tmp_path / "chats.jsonl", CHATS)
    arguments = ([str(file)], str(folder), tmp_path / "out")
    prepare(*arguments, chat=ChatRequest())
    file.write_text(file.read_text().replace("Hello", "Howdy"))
    with pytest.raises(BadInput, match=r"the contents of .*chats.jsonl changed"):
        prepare(*arguments, chat=ChatRequest())


def test_old_files_are_not_read_again(tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "black")
    arguments = ([str(path)], str(tokenizer_file), tmp_path / "out")
    prepare(*arguments)
    started = (tmp_path / "out" / "tokenizer.json").stat()
    os.utime(tmp_path / "out" / "tokenizer.json", ns=(started.st_atime_ns, started.st_mtime_ns + HOUR_NS))
    monkeypatch.setattr("meshwright.data.input_record.digest_file", lambda path: pytest.fail(f"{path} is read again"))
    assert prepare(*arguments).reused


def test_a_change_between_two_attempts_is_found(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "a.txt", tmp_path / "b.txt"
    write_text(old, "black")
    age(old)
    write_text(new, "black")
    arguments = ([str(old), str(new)], str(tokenizer_file), tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", lambda self, directory: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(*arguments, shard_tokens=10)
    write_text(old, "white")
    age(old)
    with pytest.raises(BadInput, match="different command \\(input_times"):
        prepare(*arguments, shard_tokens=10)


def test_verify_misses_the_record(tmp_path: Path, tokenizer_file: Path) -> None:
    write_text(tmp_path / "a.txt", "black")
    prepare([str(tmp_path / "a.txt")], str(tokenizer_file), tmp_path / "out")
    (tmp_path / "out" / "inputs.jsonl").unlink()
    (fault,) = verify(tmp_path / "out")
    assert "inputs.jsonl: expected digest" in fault and fault.endswith("found no file")
