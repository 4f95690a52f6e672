from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any, TextIO

import pytest

from meshwright.cli.data import _sentences, _summary
from meshwright.data import disk_space, shards
from meshwright.data.indexed import IndexedFile
from meshwright.data.manifest import Manifest, verify
from meshwright.data.prepare import prepare
from meshwright.data.tokenizer import load_tokenizer, train_tokenizer
from meshwright.durable.lock import locked
from meshwright.spec.errors import BadInput, OutOfResources
from tests.data import megatron
from tests.data.conftest import story
from tests.slow import quick_first


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test catches it."""


def test_shards_hold_the_encoded_documents_each_with_its_end(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    result = prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", shard_tokens=2000)
    tokenizer = load_tokenizer(tokenizer_file).tokenizer
    expected = [[*tokenizer.encode(story(i)).ids, 0] for i in range(120)]
    manifest = result.manifests["train"]
    stored_documents = [d for shard in manifest.shards for d in megatron.read(tmp_path / "out" / shard.name)]
    assert stored_documents == [[document] for document in expected]
    assert len(manifest.shards) >= 3
    assert (manifest.documents, manifest.tokens) == (120, sum(map(len, expected)))
    assert manifest.text_bytes == sum(len(story(i).encode()) for i in range(120))
    lines = [line for shard in manifest.shards for line in (tmp_path / "out" / f"{shard.name}.documents.jsonl").open()]
    assert json.loads(lines[70]) == [f"{corpus}/part-1.jsonl", "s70"]
    assert Manifest.read(tmp_path / "out") == manifest
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("kill_at", ["document 1", "document 50", "shard 1", "shard 3", "journal", "manifest"])
@pytest.mark.parametrize("tokenizer", quick_first(1, ["file", "train:280"]))
def test_a_killed_preparation_continues_to_the_same_bytes(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: str, tokenizer: str
) -> None:
    arguments: dict[str, Any] = {"held_out": 0.1, "shard_tokens": 1500}
    request = ([str(corpus)], str(tokenizer_file) if tokenizer == "file" else tokenizer)
    prepare(*request, tmp_path / "whole", **arguments)
    with monkeypatch.context() as patch:
        break_at(patch, kill_at)
        with pytest.raises(Killed):
            prepare(*request, tmp_path / "killed", workers=1, **arguments)
    assert "train/manifest.json" not in contents(tmp_path / "killed")
    if kill_at == "journal":
        journal = tmp_path / "killed" / "journal.jsonl"
        journal.write_bytes(journal.read_bytes()[:-30])
    result = prepare(*request, tmp_path / "killed", workers=3, **arguments)
    assert not result.reused
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_kill_inside_a_journal_line_does_not_spoil_the_lines_after_it(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ([str(corpus)], str(tokenizer_file))
    prepare(*arguments, tmp_path / "whole", shard_tokens=1500)
    journal = tmp_path / "killed" / "journal.jsonl"
    for attempt in (1, 2):
        with monkeypatch.context() as patch:
            break_at(patch, "shard 2")
            with pytest.raises(Killed):
                prepare(*arguments, tmp_path / "killed", shard_tokens=1500)
        journal.write_bytes(journal.read_bytes()[:-30])
        assert len(journal.read_bytes().splitlines()) == attempt + 1, "whole lines, and one that was cut"
    prepare(*arguments, tmp_path / "killed", shard_tokens=1500)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_trained_tokenizer_has_not_seen_the_held_out_text(tmp_path: Path, corpus: Path) -> None:
    result = prepare([str(corpus)], "train:290", tmp_path / "out", held_out=0.3)
    lines = [
        json.loads(line)[1]
        for shard in result.manifests["train"].shards
        for line in (tmp_path / "out" / "train" / f"{shard.name}.documents.jsonl").open()
    ]
    alone = train_tokenizer([story(int(name[1:])) for name in lines], 290)
    assert (tmp_path / "out" / "train" / "tokenizer.json").read_bytes() == alone
    assert alone != train_tokenizer([story(i) for i in range(120)], 290)


def break_at(patch: pytest.MonkeyPatch, event: str) -> None:
    """Make the place raise Killed: after so many documents or shards, or before the last manifest."""
    event_type, _, number = event.partition(" ")
    if event_type == "manifest":
        write = Manifest.write

        def killed_write(self: Manifest, directory: Path) -> None:
            if directory.name == "train":
                raise Killed
            write(self, directory)

        patch.setattr(Manifest, "write", killed_write)
        return
    name = "add" if event_type == "document" else "finish_shard"
    original, calls = getattr(shards.SplitWriter, name), []

    def killed_call(self: shards.SplitWriter, *arguments: Any) -> None:
        original(self, *arguments)
        calls.append(1)
        if len(calls) == int(number or 2):
            raise Killed

    patch.setattr(shards.SplitWriter, name, killed_call)


def test_finished_shards_are_not_encoded_again(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_at(patch, "shard 3")
        with pytest.raises(Killed):
            prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", shard_tokens=1500)
    done = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").open()]
    added = []
    original = shards.SplitWriter.add
    monkeypatch.setattr(shards.SplitWriter, "add", lambda self, e, n: (added.append(n), original(self, e, n))[1])
    prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", shard_tokens=1500)
    assert len(done) == 3 and added == list(range(done[-1]["through"] + 1, 120))


def test_the_same_command_again_finds_the_work_done(prepared: Path, corpus: Path, tokenizer_file: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert prepare([str(corpus)], str(tokenizer_file), prepared, held_out=0.1, shard_tokens=2000).reused
    after = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert {p: t for p, t in after.items() if p.is_file()} == {p: t for p, t in before.items() if p.is_file()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"held_out": 0.2}, "held_out: 0.1 before, 0.2 now"),
        ({"held_out": 0.0}, "held_out: 0.1 before, 0.0 now"),
        ({"shard_tokens": 5}, "shard_tokens: 2000 before, 5 now"),
        ({"text_key": "body"}, "text_key: text before, body now"),
        ({"tokenizer": "train:300"}, "train:300 now"),
    ],
)
def test_a_different_command_into_the_same_place_is_refused(
    prepared: Path, corpus: Path, tokenizer_file: Path, change: dict[str, Any], named: str
) -> None:
    arguments = {"tokenizer": str(tokenizer_file), "held_out": 0.1, "shard_tokens": 2000, **change}
    with pytest.raises(BadInput, match=named):
        prepare([str(corpus)], arguments.pop("tokenizer"), prepared, **arguments)


def test_changed_inputs_are_noticed_on_the_way(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": story(i)}) + "\n" for i in range(40)))
    with monkeypatch.context() as patch:
        break_at(patch, "shard 1")
        with pytest.raises(Killed):
            prepare([str(source)], str(tokenizer_file), tmp_path / "out", shard_tokens=500)
    with source.open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(BadInput, match=r"different command \(input_bytes: .*newest_input_ns"):
        prepare([str(source)], str(tokenizer_file), tmp_path / "out", shard_tokens=500)


def test_an_attempt_without_finished_shards_does_not_block_the_next(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadInput, match="no usable document for train\n120 bad documents:"):
        prepare([str(corpus)], "train:280", out, text_key="body", held_out=0.1)
    result = prepare([str(corpus)], "train:280", out)
    assert result.manifests["train"].documents == 120
    assert {name.split(".")[0] for name in contents(out)} == {"inputs", "manifest", "tokenizer", "shard-00000"}


def test_held_out_documents_are_kept_apart_by_their_key(
    prepared: Path, tmp_path: Path, corpus: Path, tokenizer_file: Path
) -> None:
    def ids(folder: Path) -> set[str]:
        return {json.loads(line)[1] for path in folder.glob("*.documents.jsonl") for line in path.open()}

    train, held_out = ids(prepared / "train"), ids(prepared / "held_out")
    assert not train & held_out and len(train | held_out) == 120 and 3 <= len(held_out) <= 25
    prepare([str(corpus / "part-1.jsonl")], str(tokenizer_file), tmp_path / "out", held_out=0.1)
    assert ids(tmp_path / "out" / "held_out") == {i for i in held_out if int(i[1:]) >= 60}


def test_a_fraction_that_leaves_nothing_is_refused_and_can_be_corrected(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="held-out fraction 1e-09 leaves no document for held_out"):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", held_out=1e-9)
    assert not (tmp_path / "out").exists()
    assert (
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", held_out=0.5).manifests["held_out"].documents > 30
    )


def with_bad_lines(folder: Path) -> Path:
    path = folder / "mixed.jsonl"
    lines = [json.dumps({"text": story(i)}) if i % 3 else "{broken" for i in range(90)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_bad_documents_are_skipped_and_named(tokenizer_file: Path, tmp_path: Path) -> None:
    source = with_bad_lines(tmp_path)
    result = prepare([str(source)], str(tokenizer_file), tmp_path / "out")
    assert result.left_out.bad.count == 30 and len(result.left_out.bad.first) == 20
    assert result.left_out.bad.first[1].startswith(f"{source}:4: not JSON")
    assert str(result.left_out.bad).endswith("... and 10 more")
    assert result.manifests["train"].documents == 60 and result.manifests["train"].skipped == 30


def test_bad_documents_are_refused_before_any_work(tokenizer_file: Path, tmp_path: Path) -> None:
    source = with_bad_lines(tmp_path)
    with pytest.raises(BadInput, match=r"refuse \(.*\n30 bad documents:\n.*mixed.jsonl:1: not JSON"):
        prepare([str(source)], str(tokenizer_file), tmp_path / "out", on_bad="refuse")
    assert not (tmp_path / "out").exists(), "a refused start leaves nothing behind"


def test_files_without_text_are_counted_by_reason(tokenizer_file: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(60):
        (source / f"{number}.txt").write_text(story(number))
    for name, content in {"a.png": b"\x89PNG\0", "b.png": b"\0", "core": b"\x7fELF\0", "empty.py": b""}.items():
        (source / name).write_bytes(content)
    (source / ".hidden").write_text("text")
    (source / "photos.zip").write_bytes(b"PK" * 50)
    result = prepare([str(source)], str(tokenizer_file), tmp_path / "out", held_out=0.1)
    assert result.left_out.bad.count == 0
    expected = {"binary": (3, 11), "empty": (1, 0), "format not read": (1, 100), "hidden": (1, 0)}
    not_read = {reason: {"files": files, "bytes": size} for reason, (files, size) in expected.items()}
    assert result.manifests["train"].not_read == Manifest.read(tmp_path / "out/held_out").not_read == not_read
    assert "not read: binary: 3 files, 11 bytes; empty: 1 files; format not read: 1 files, 100 bytes" in _sentences(
        result
    )
    assert _summary(result)["not_read"]["binary"]["first"] == [
        str(source / name) for name in ("a.png", "b.png", "core")
    ]
    with pytest.raises(
        BadInput, match="not read, format not read: 1 files, 100 bytes\n.*photos.zip: an archive; unpack"
    ):
        prepare([str(source)], str(tokenizer_file), tmp_path / "refused", on_bad="refuse")
    with pytest.raises(BadInput, match="was prepared without 0 bad documents; not read: binary: 3 files"):
        prepare([str(source)], str(tokenizer_file), tmp_path / "out", held_out=0.1, on_bad="refuse")


def test_other_peoples_files_are_not_overwritten(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(BadInput, match=r"is not empty \(it holds thesis.txt\)"):
        prepare([str(corpus)], str(tokenizer_file), tmp_path)
    with pytest.raises(BadInput, match="is a file, expected a directory"):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_small_disk_is_refused_before_the_work(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutOfResources, match=r"bytes are needed, 1,000 are free"):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


FULL_DISK = r"shard.bin: the disk is full .*needs about [\d,]+ bytes in all, [\d,]+ are free; make room and run the same command"


def fill_disk(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "shard.bin")


def test_a_disk_that_fills_up_is_out_of_resources(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shards.SplitWriter, "finish_shard", fill_disk)
        with pytest.raises(OutOfResources, match=FULL_DISK):
            prepare([str(corpus)], str(tokenizer_file), tmp_path / "out")
    assert prepare([str(corpus)], str(tokenizer_file), tmp_path / "out").manifests["train"].documents == 120


def test_two_preparations_into_one_folder_run_one_after_the_other(
    corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    """One works and the other waits for it; without waiting it is refused."""
    results, out = [], tmp_path / "out"

    def work() -> None:
        results.append(prepare([str(corpus)], str(tokenizer_file), out, wait=True).reused)

    with locked(out, wait=False):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        with pytest.raises(
            BadInput, match=f"process {os.getpid()} on .* is writing here; wait for it, or choose another --out"
        ):
            prepare([str(corpus)], str(tokenizer_file), out)
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True, True]
    assert ".lock" not in contents(out) and verify(out) == []


def test_a_lock_whose_name_goes_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder removes the file just before it is locked here: once, and then nobody does."""
    names, flock = [tmp_path / ".lock"], fcntl.flock

    def late(file: TextIO, how: int) -> None:
        flock(file, how)
        if names:
            names.pop().unlink()

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path, wait=True):
        assert not names and (tmp_path / ".lock").exists()


def test_verify_finds_a_flipped_bit_and_a_missing_file(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(corpus)], str(tokenizer_file), out, held_out=0.1, shard_tokens=2000)
    flip(out / "train" / "shard-00001.bin", 100)
    flip(out / "train" / "tokenizer.json", 50)
    (out / "held_out" / "shard-00000.documents.jsonl").unlink()
    faults = verify(out)
    assert len(faults) == 3
    assert "train/tokenizer.json: expected digest" in faults[0]
    assert "shard-00001.bin: expected digest" in faults[1]
    assert faults[2].endswith("found no file")
    assert IndexedFile(out / "train" / "shard-00001").tokens > 0, "a flipped token is invisible to the quick check"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"held_out": 1.0}, "held-out fraction 1.0"), ({"shard_tokens": 0}, "shard size 0")],
)
def test_invalid_arguments_are_refused(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, arguments: Any, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
