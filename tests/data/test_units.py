"""A preparation whose units other processes do: the corpus is the one that this process alone makes, whatever dies on the way."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data import local_workers
from meshwright.data import prepare as prepare_module
from meshwright.data.chunks import chunk_path, read_record
from meshwright.data.inputs import list_inputs
from meshwright.data.jobs import EncodeJob
from meshwright.data.manifest import verify
from meshwright.data.prepare import prepare
from meshwright.data.units import divide
from meshwright.spec.errors import BadInput, OutOfResources
from tests.data.conftest import story
from tests.data.test_prepare import Killed, break_at, contents


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of every kind that is divided, and of some that are not, with lines that cannot be used."""
    folder = tmp_path_factory.mktemp("mixed")
    lines = [json.dumps({"text": story(i)}) for i in range(200)]
    lines[17] = "no JSON"
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.txt").write_text(story(1000))
    (folder / "c.txt").write_text(story(1001))
    table = pyarrow.table({"text": [story(i) for i in range(300, 500)], "id": [f"row {i}" for i in range(200)]})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=30)
    with gzip.open(folder / "e.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": story(i), "id": i}) + "\n" for i in range(500, 600)))
    (folder / "f.bin").write_bytes(b"\0" * 100)
    return folder


@pytest.fixture
def in_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prepare_module, "READ_HERE", 0)
    monkeypatch.setattr(prepare_module, "UNIT_BYTES", 4000)
    return


OPTIONS: dict[str, Any] = {"held_out": 0.1, "shard_tokens": 3000}
PrepareMixed = Callable[..., dict[str, bytes]]


@pytest.fixture
def prepare_mixed(mixed: Path, tokenizer_file: Path, tmp_path: Path, in_units: None) -> PrepareMixed:
    """Prepares `mixed` in units, into `tmp_path / "out"`; the files that are there then."""

    def prepare_there(**options: Any) -> dict[str, bytes]:
        prepare([str(mixed)], str(tokenizer_file), tmp_path / "out", **OPTIONS, **options)
        return contents(tmp_path / "out")

    return prepare_there


@pytest.fixture(scope="module")
def whole(mixed: Path, tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The corpus as this process alone makes it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare([str(mixed)], str(tokenizer_file), out, **OPTIONS)
    return contents(out)


def change_workers(monkeypatch: pytest.MonkeyPatch, folder: Path, change: str) -> list[int]:
    """Let each worker process run the lines `change` first; the numbers of the processes, as they start."""
    worker = folder / "worker.py"
    worker.write_text(
        "import sys\nfrom pathlib import Path\nfrom meshwright.data import fast_encoder, unit_worker\n"
        f"{change}\nunit_worker.main(Path(sys.argv[1]))\n"
    )
    started: list[int] = []
    popen = subprocess.Popen

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = popen([arguments[0], str(worker), arguments[-1]], **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(local_workers.subprocess, "Popen", start)
    return started


@pytest.mark.parametrize("workers", [1, 3])
def test_units_give_the_same_corpus(
    mixed: Path, tokenizer_file: Path, tmp_path: Path, in_units: None, whole: dict[str, bytes], workers: int
) -> None:
    result = prepare([str(mixed)], str(tokenizer_file), tmp_path / "out", workers=workers, **OPTIONS)
    assert contents(tmp_path / "out") == whole
    assert verify(tmp_path / "out") == []
    assert result.left_out.bad.first[0].startswith(f"{mixed}/a.jsonl:18: not JSON")
    assert set(result.left_out.not_read) == {"binary"}


def test_files_are_divided_at_lines_and_row_groups(mixed: Path) -> None:
    files = list_inputs([str(mixed)]).files
    units, digests = divide(files, 4000)
    parts: dict[str, list[Any]] = {}
    for unit in units:
        for file in unit.files:
            parts.setdefault(Path(file.name).name, []).append(file.range)
    assert parts["b.txt"] == parts["e.jsonl.gz"] == [None]
    assert len(parts["a.jsonl"]) > 3 and len(parts["d.parquet"]) > 3
    content = (mixed / "a.jsonl").read_bytes()
    assert b"".join(content[part.start : part.stop] for part in parts["a.jsonl"]) == content
    assert all(content[: part.start].count(b"\n") == part.before for part in parts["a.jsonl"])
    assert all(content[part.stop - 1 : part.stop] == b"\n" for part in parts["a.jsonl"])
    assert [part.before for part in parts["d.parquet"]] == [30 * part.start for part in parts["d.parquet"]]
    assert {Path(name).name for name in digests} == {"a.jsonl", "d.parquet"}


@pytest.mark.parametrize("kill_at", ["document 200", "shard 1", "shard 4", "journal", "manifest"])
def test_a_killed_preparation_of_units_continues_to_the_same_bytes(
    prepare_mixed: PrepareMixed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, bytes],
    kill_at: str,
) -> None:
    with monkeypatch.context() as patch:
        break_at(patch, kill_at)
        with pytest.raises(Killed):
            prepare_mixed(workers=1)
    if kill_at == "journal":
        journal = tmp_path / "out" / "journal.jsonl"
        journal.write_bytes(journal.read_bytes()[:-30])
    assert prepare_mixed(workers=2) == whole


def test_a_worker_that_is_killed_is_replaced(
    prepare_mixed: PrepareMixed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, bytes],
) -> None:
    killed: list[int] = []
    give = local_workers._Process.give

    def give_and_kill(self: local_workers._Process, unit: int) -> None:
        give(self, unit)
        if len(killed) < 2 and unit >= 4 and self._process.pid not in killed:  # a process may get two units at once
            killed.append(self._process.pid)
            os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(local_workers._Process, "give", give_and_kill)
    assert prepare_mixed(workers=2) == whole and len(killed) == 2


def test_a_unit_that_kills_every_worker_is_named(
    prepare_mixed: PrepareMixed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, bytes],
) -> None:
    give = local_workers._Process.give

    def give_and_kill(self: local_workers._Process, unit: int) -> None:
        give(self, unit)
        if unit == 6:
            os.kill(self._process.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(local_workers._Process, "give", give_and_kill)
        with pytest.raises(OutOfResources, match="3 processes were ended by SIGKILL while they did unit"):
            prepare_mixed(workers=1)
    done = {path.name for path in (tmp_path / "out" / "units").glob("unit-*.json")}
    assert done, "units that were done are kept"
    assert prepare_mixed(workers=1) == whole


def test_two_processes_that_do_one_unit_write_the_same(
    prepare_mixed: PrepareMixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_at(patch, "document 1")
        with pytest.raises(Killed):
            prepare_mixed(workers=1)
    folder = tmp_path / "out" / "units"
    EncodeJob.read(folder).run(2)
    before = contents(folder)
    EncodeJob.read(folder).run(2)
    assert contents(folder) == before
    record = read_record(folder, 2)
    assert record is not None and record.documents and chunk_path(folder, 2, "tokens").stat().st_size


def test_a_file_that_changes_after_the_listing_is_named(
    mixed: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_units: None
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes((mixed / "a.jsonl").read_bytes())

    def shrink(*arguments: Any) -> Any:
        divided = divide(*arguments)
        source.write_bytes(source.read_bytes()[:5000])
        return divided

    monkeypatch.setattr(prepare_module, "divide", shrink)
    with pytest.raises(BadInput, match=r"a\.jsonl: has 5,000 bytes, and had [\d,]+ when the inputs were listed"):
        prepare([str(source)], str(tokenizer_file), tmp_path / "out", workers=1)


def test_encoders_that_differ_in_a_unit_give_the_corpus_of_tokenizers(
    prepare_mixed: PrepareMixed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    change_workers(
        monkeypatch,
        tmp_path,
        "rows = fast_encoder._rows\n"
        "fast_encoder._rows = lambda encoded: [ids + 1 if len(ids) > 100 else ids for ids in rows(encoded)]",
    )
    assert prepare_mixed(workers=2, shown=True) == whole
    assert "tokenizers encodes all text" in capsys.readouterr().err


RUN = """
import sys
from pathlib import Path
from meshwright.data import prepare as module
module.READ_HERE, module.UNIT_BYTES = 0, 4000
module.prepare([sys.argv[1]], sys.argv[2], Path(sys.argv[3]), workers=2, held_out=0.1, shard_tokens=3000)
"""


def test_workers_end_with_a_killed_preparation(
    mixed: Path, tokenizer_file: Path, tmp_path: Path, in_units: None, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", RUN, str(mixed), str(tokenizer_file), str(out)])
    deadline = time.monotonic() + 60
    while not list(out.glob("units/unit-*.json")) and process.poll() is None and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    process.kill()
    process.wait()
    (out / "train" / "shard-00000.bin.1.partial").touch()  # as where it was killed while it wrote one
    prepare([str(mixed)], str(tokenizer_file), out, workers=1, **OPTIONS)
    assert contents(out) == whole
