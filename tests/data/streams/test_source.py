"""Streamed text against prepared text, and everything that can be wrong with files."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data.corpus import CorpusDocument
from meshwright.data.prepare import prepare
from meshwright.data.prepared_source import CorpusSource
from meshwright.data.source import DataSource, has_validation, open_data
from meshwright.data.streams import group_documents as reading
from meshwright.data.streams import index as indexing
from meshwright.data.streams import process
from meshwright.data.streams.group_documents import group_documents
from meshwright.data.streams.stores import LocalFiles
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import DataSpec, StreamSpec
from tests.data.conftest import story
from tests.data.streams.made import SEQ_LEN, json_lines, spec_of, write_parquet

SAMPLES = 500


def one_lane(spec: DataSpec, **keys: Any) -> DataSpec:
    return replace(spec, lanes=1, **keys)


@pytest.mark.parametrize("mask", [False, True])
def test_samples_are_those_of_prepared_text_in_the_same_order(tokenizer_file: Path, tmp_path: Path, mask: bool) -> None:
    write_parquet(tmp_path / "web")
    spec = spec_of({"web": (str(tmp_path / "web"), "content")}, tokenizer_file, tmp_path / "cache")
    spec = one_lane(spec, document_mask=mask)
    texts = [
        text
        for file in (tmp_path / "web").iterdir()
        for text in pyarrow.parquet.read_table(file)["content"].to_pylist()
    ]
    streamed = open_data(spec, seq_len=SEQ_LEN, seed=1).samples(range(SAMPLES))
    whole = streamed.tokens.ravel()
    # The order of documents is read back from the tokens: each ends with the end token 0.
    by_tokens = {}
    prepared_all = prepared_windows(tmp_path / "all", texts, tokenizer_file)
    stream = prepared_all.sources[str(tmp_path / "all" / "data")].stream
    starts, lengths = stream.document_ranges()
    for text, start, length in zip(texts, starts.tolist(), lengths.tolist(), strict=True):
        by_tokens[stream.read(start, start + length).tobytes()] = text
    ends = np.flatnonzero(whole == 0)
    found = [
        by_tokens[whole[first : last + 1].tobytes()] for first, last in zip([0, *(ends[:-1] + 1)], ends, strict=True)
    ]
    assert len(found) > 100
    missing = [text for text in texts if text not in found]
    prepared = prepared_windows(tmp_path / "same", found + missing, tokenizer_file, mask=mask)
    (source,) = prepared.sources.values()
    complete = int(ends[-1]) // SEQ_LEN - 1
    for window in range(complete):
        right = prepared.batch([(source, window)])
        for column in ("tokens", "targets", "positions", "documents"):
            assert np.array_equal(getattr(right, column)[0], getattr(streamed, column)[window]), (window, column)
        assert right.tokens.sum() == streamed.tokens[window].sum()
    assert complete > SAMPLES - 10


def test_the_documents_of_a_sample_are_known(tokenizer_file: Path, tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "web")
    spec = spec_of({"web": (str(folder), "content")}, tokenizer_file, tmp_path / "cache")
    tokenizer = open_tokenizer(tokenizer_file)
    described = [open_data(spec, seq_len=SEQ_LEN, seed=1).describe(sample) for sample in (5, 24 + 5)]
    data = open_data(spec, seq_len=SEQ_LEN, seed=1)
    for sample, description in zip((5, 24 + 5), described, strict=True):
        expected = []
        for place in description["documents"]:
            texts = pyarrow.parquet.read_table(place["file"])["content"].to_pylist()
            ids = [
                [*tokenizer.encode(text, add_special_tokens=False).ids, 0][place["start"] : place["end"]]
                for text in texts[place["id"] - 1 :: 20]  # that row of each row group
            ]
            expected.append(ids)
        tokens = data.samples([sample]).tokens[0].tolist()
        at = 0
        for choices in expected:
            fitting = [ids for ids in choices if tokens[at : at + len(ids)] == ids]
            assert fitting
            at += len(fitting[0])
        assert at == SEQ_LEN


def prepared_windows(folder: Path, texts: list[str], tokenizer: Path, *, mask: bool = False) -> DataSource:
    folder.mkdir()
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    prepare((str(folder / "in.jsonl"),), str(tokenizer), folder / "data", shown=False)
    return open_data(DataSpec(mix={str(folder / "data"): 1.0}, document_mask=mask), seq_len=SEQ_LEN, seed=1)


def refusal(tokenizer: Path | None, tmp_path: Path, files: str, text: str = "text", **keys: Any) -> str:
    with pytest.raises((BadInput, Damaged)) as error:
        data = open_data(
            spec_of({"web": (files, text)}, tokenizer, tmp_path / "cache", **keys), seq_len=SEQ_LEN, seed=1
        )
        data.samples(range(24))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_column_that_is_not_there_is_named_with_the_nearest(tokenizer_file: Path, tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "web")
    assert "no column 'contents' (nearest: 'content')" in refusal(tokenizer_file, tmp_path, str(folder), "contents")
    assert "column 'id' has int64, expected text; columns of text: content" in refusal(
        tokenizer_file, tmp_path, str(folder), "id"
    )
    (tmp_path / "x.jsonl").write_bytes(json_lines(0, 9))
    assert "no key 'txt' (nearest: 'text')" in refusal(tokenizer_file, tmp_path, str(tmp_path / "x.jsonl"), "txt")


def test_files_that_are_missing_or_of_two_kinds_are_refused(tokenizer_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    assert "matches no file" in refusal(tokenizer_file, tmp_path, f"{folder}/*.parquet")
    assert "no files here to read" in refusal(tokenizer_file, tmp_path, str(folder))
    assert f"(nearest: {folder})" in refusal(tokenizer_file, tmp_path, str(tmp_path / "wep"))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(0, 9)))
    (folder / "b.jsonl.bz2").write_bytes(bz2.compress(json_lines(0, 9)))
    assert "has files of two formats, such as" in refusal(tokenizer_file, tmp_path, str(folder))
    (folder / "c.csv").write_text("text\nx\n")
    assert "is neither parquet nor lines of JSON" in refusal(tokenizer_file, tmp_path, f"{folder}/*.csv")


def test_keys_that_need_prepared_data_are_refused(tokenizer_file: Path, tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "web")
    assert "data.packing none needs prepared data" in refusal(tokenizer_file, tmp_path, str(folder), packing="none")
    assert "data.tokenizer: not set" in refusal(None, tmp_path, str(folder), "content")


def test_damaged_files_end_the_run(tokenizer_file: Path, tmp_path: Path) -> None:
    whole = gzip.compress(json_lines(0, 300))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    assert "the file ends inside its gzip data" in refusal(tokenizer_file, tmp_path, str(tmp_path / "cut.jsonl.gz"))
    folder = write_parquet(tmp_path / "web", files=1)
    file = folder / "part-0.parquet"
    content, described = bytearray(file.read_bytes()), pyarrow.parquet.read_metadata(file)
    for group in range(described.num_row_groups):
        content[described.row_group(group).column(0).dictionary_page_offset + 200] ^= 1
    file.write_bytes(content)
    message = refusal(tokenizer_file, tmp_path, str(folder), "content")
    assert "part-0.parquet: row group" in message and "cannot be read as parquet" in message


def test_bad_documents_are_left_out_and_named(
    tokenizer_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = json_lines(0, 30) + b'{"text": null}\n{"text": \n{"other": 1}\n' + json_lines(30, 60)
    (tmp_path / "x.jsonl").write_bytes(lines)
    data = open_data(
        spec_of({"web": (str(tmp_path / "x.jsonl"), "text")}, tokenizer_file, tmp_path / "cache"),
        seq_len=SEQ_LEN,
        seed=1,
    )
    with caplog.at_level(logging.WARNING):
        data.samples(range(24))
    (record,) = [record.getMessage() for record in caplog.records if "bad documents" in record.getMessage()]
    assert "3 bad documents left out" in record and "expected text, got NoneType" in record


def test_groups_of_lines_have_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json_lines(0, 50).rstrip(b"\n")
    (tmp_path / "x.jsonl").write_bytes(content)
    store = LocalFiles()
    (file,) = store.list(str(tmp_path / "x.jsonl"))
    for size in (1, 100, 271, len(content), len(content) + 1):
        monkeypatch.setattr(reading, "CHUNK_BYTES", size)
        found = [
            item for group in range(-(-len(content) // size)) for item in group_documents(store, file, group, "text")
        ]
        assert [item.text for item in found if isinstance(item, CorpusDocument)] == [
            story(number) for number in range(50)
        ]
        places = [int(item.key.rpartition("\0")[2]) for item in found if isinstance(item, CorpusDocument)]
        assert all(content[place : place + 1] == b"{" for place in places)


def test_a_folder_of_a_data_set_gives_its_training_split(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "data"
    write_parquet(folder, files=3)
    for number, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        (folder / f"part-{number}.parquet").rename(folder / f"{name}.parquet")
    (tmp_path / "set" / "README.md").write_text("---\nlicense: mit\n---\n")
    index = indexing.build_index(LocalFiles(), str(tmp_path / "set"), "content")
    assert [Path(file.name).name[:11] for file in index.files] == ["train-00000", "train-00001"]


def test_an_index_is_kept_and_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_parquet(tmp_path / "web")
    index = indexing.build_index(LocalFiles(), str(folder), "content")
    index.write(tmp_path / "index.npz")
    kept = indexing.SourceIndex.read(tmp_path / "index.npz")
    assert kept is not None and kept.digest == index.digest and kept.files == index.files
    read = []
    whole = indexing._row_groups
    monkeypatch.setattr(indexing, "_row_groups", lambda *arguments: read.append(1) or whole(*arguments))
    assert indexing.build_index(LocalFiles(), str(folder), "content", kept) is kept and not read
    pyarrow.parquet.write_table(pyarrow.table({"content": ["new"]}), folder / "part-3.parquet")
    more = indexing.build_index(LocalFiles(), str(folder), "content", kept)
    assert read == [1] and more.groups == index.groups + 1 and more.digest != index.digest


def test_a_loader_process_that_is_killed_is_replaced(tokenizer_file: Path, tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "web")
    spec = spec_of({"web": (str(folder), "content")}, tokenizer_file, tmp_path / "cache")
    right = open_data(spec, seq_len=SEQ_LEN, seed=1).samples(range(24)).tokens
    data = open_data(replace(spec, cache=str(tmp_path / "other")), seq_len=SEQ_LEN, seed=1)
    before = children()
    data.samples([0])
    (loader,) = children() - before
    os.kill(loader, signal.SIGKILL)
    for file in (tmp_path / "other").glob("*/*.tokens"):
        file.unlink()
    assert np.array_equal(data.samples(range(24)).tokens, right)


def children() -> set[int]:
    """Processes that a thread of this process has started."""
    numbers: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            numbers.update(map(int, (task / "children").read_text().split()))
    return numbers


def test_a_damaged_file_of_the_cache_is_made_again(tokenizer_file: Path, tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "web")
    spec = spec_of({"web": (str(folder), "content")}, tokenizer_file, tmp_path / "cache")
    right = open_data(spec, seq_len=SEQ_LEN, seed=1).samples(range(24)).tokens
    for file in (tmp_path / "cache").glob("*/*.tokens"):
        content = bytearray(file.read_bytes())
        content[7] ^= 4
        file.write_bytes(content)
    assert np.array_equal(open_data(spec, seq_len=SEQ_LEN, seed=1).samples(range(24)).tokens, right)


def test_a_group_that_another_process_deletes_at_once_is_no_failure(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that makes room in the cache does not wait for the process that has just written a file."""
    file = LocalFiles().list(str(write_parquet(tmp_path / "web")))[0]
    written = []
    sizes = []
    write = process.write_group

    def write_and_lose(path: Path, *arguments: Any) -> Any:
        result = write(path, *arguments)
        written.append(path.stat().st_size)
        path.unlink()
        return result

    monkeypatch.setattr(process, "write_group", write_and_lose)
    monkeypatch.setattr(process.Cache, "make_room", lambda cache, size: sizes.append(size))
    worker = process.Worker(process.Settings(str(tokenizer_file), None, str(tmp_path / "cache"), 1 << 20, 1.0))
    assert worker.group(file, 0, "content").documents > 0
    assert sizes == written != []


def test_an_error_of_the_disk_in_a_loader_process_has_the_exit_code_of_its_cause(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    """The folder of the cache cannot be created below a file."""
    (tmp_path / "file").write_text("")
    spec = spec_of(
        {"web": (str(write_parquet(tmp_path / "web")), "content")}, tokenizer_file, tmp_path / "file" / "cache"
    )
    with pytest.raises(BadInput, match="the path contains a file where a folder is needed"):
        open_data(spec, seq_len=SEQ_LEN, seed=1).samples([0])


def documents_of(source: CorpusSource) -> list[list[int]]:
    starts, lengths = source.stream.document_ranges()
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    return sorted(source.stream.read(start, start + length).tolist() for start, length in pairs)


def test_validation_text_of_files_is_prepared_once(tokenizer_file: Path, tmp_path: Path) -> None:
    write_parquet(tmp_path / "web")
    (tmp_path / "val.jsonl").write_bytes(json_lines(900, 960))
    spec = spec_of({"web": (str(tmp_path / "web"), "content")}, tokenizer_file, tmp_path / "cache")
    held_out = StreamSpec(files=str(tmp_path / "val.jsonl"))
    spec = replace(spec, validation="validation", streams={**spec.streams, "validation": held_out})
    data = open_data(spec, seq_len=SEQ_LEN, seed=1, split="validation")
    (source,) = data.sources.values()
    right = prepared_windows(tmp_path / "right", [story(number) for number in range(900, 960)], tokenizer_file)
    (expected,) = right.sources.values()
    assert documents_of(source) == documents_of(expected)  # validation has an order of its own
    made = [path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("validation-*/data/*.bin")]
    assert has_validation(spec, SEQ_LEN)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("validation-*/data/*.bin")] == made != []
    with pytest.raises(BadInput, match="data.validation: web is trained on"):
        open_data(replace(spec, validation="web"), seq_len=SEQ_LEN, seed=1, split="validation")
