"""Files of records in every format and compression, and files that are damaged or of a format that is not read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import lz4.frame
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from meshwright.data import records
from meshwright.data.corpus import CorpusDocument, read_documents
from meshwright.data.file_formats import COMPRESSIONS, REFUSED, format_of
from meshwright.data.input_stream import Contents
from meshwright.data.inputs import NotRead, list_inputs
from meshwright.durable.writes import digest_file
from meshwright.spec.errors import BadInput

TEXTS = ["one", "zwei ü", 'three\n"lines", and more\n']
RECORDS = [{"text": text, "other": number} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
TABLE = 'other,text\n0,one\n1,zwei ü\n2,"three\n""lines"", and more\n"\n'
CONTENTS = {
    "a.jsonl": LINES,
    "b.ndjson": LINES,
    "c.JSONLINES": LINES.replace("\n", "\r\n"),
    "d.json": LINES,
    "e.json": json.dumps(RECORDS),
    "f.json": "\n " + json.dumps(RECORDS, indent=1, ensure_ascii=False) + "\n\n",
    "g.csv": TABLE,
    "h.Tsv": TABLE.replace("0,", "0\t").replace("1,", "1\t").replace("2,", "2\t").replace("other,", "other\t"),
}
COMPRESSORS: dict[str, Any] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".lz4": lz4.frame.compress,
}


def read(path: Path) -> list[Any]:
    (file,) = list_inputs([str(path)]).files
    *items, contents = read_documents(file, "text")
    assert isinstance(contents, Contents) and contents.digest == digest_file(path), "every byte was read"
    return items


def texts(items: list[Any]) -> list[str]:
    return [item.text for item in items if isinstance(item, CorpusDocument)]


def problems(items: list[Any]) -> list[str]:
    return [str(item) for item in items if not isinstance(item, CorpusDocument)]


@pytest.mark.parametrize("name", list(CONTENTS))
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_records_are_read_whatever_the_format(tmp_path: Path, name: str, mark: str) -> None:
    path = tmp_path / name
    path.write_bytes((mark + CONTENTS[name]).encode())
    items = read(path)
    assert texts(items) == TEXTS and problems(items) == []


@pytest.mark.parametrize("ending", list(COMPRESSORS))
def test_compressed_files_hold_the_same_in_one_frame_or_two(tmp_path: Path, ending: str) -> None:
    compress, content = COMPRESSORS[ending], LINES.encode()
    path = tmp_path / f"a.JSONL{ending.upper()}"
    for frames in (compress(content), compress(content[:20]) + compress(content[20:])):
        path.write_bytes(frames)
        assert texts(read(path)) == TEXTS
    text = tmp_path / f"notes.txt{ending}"
    text.write_bytes(compress(b"\xef\xbb\xbfone text"))
    assert texts(read(text)) == ["one text"]


@pytest.mark.parametrize("ending", list(COMPRESSORS))
def test_a_truncated_file_and_bytes_behind_the_data_are_found(tmp_path: Path, ending: str) -> None:
    whole = COMPRESSORS[ending]("".join(json.dumps({"text": str(i * i)}) + "\n" for i in range(40_000)).encode())
    path = tmp_path / f"a.jsonl{ending}"
    for content, word in ((whole[:-1], "the file ends inside"), (whole[: len(whole) // 2], "ends"), (whole + b"x", "")):
        path.write_bytes(content)
        (problem,) = problems(read(path))
        assert "damaged: cannot be read further: " in problem and word in problem
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(whole[:-1])
    (file,) = list_inputs([str(path)]).files
    assert next(str(item) for item in read_documents(file, "text")).startswith(f"{path}: damaged: the file ends inside")


def test_windows_of_zstd_beyond_128_mib(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=29, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "long.jsonl.zst"
    path.write_bytes(compressor.compress(LINES.encode()) + compressor.flush())  # of unknown size: the window stays
    assert texts(read(path)) == TEXTS


def test_a_json_array_is_read_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.data.records.READ_BYTES", 1)
    path = tmp_path / "a.json"
    path.write_text("  [ " + " , ".join(json.dumps(record, ensure_ascii=False) for record in RECORDS) + " ]  \n")
    assert texts(read(path)) == TEXTS
    path.write_text("[]")
    assert read(path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"text": "a"}, {"text": ', "a.json:2: damaged: not JSON from this element on"),
        ('[{"text": "a"}', "a.json:2: damaged: not JSON from this element on: the file ends inside the array"),
        ('[{"text": "a"}]]', "text after the end"),
        ('[{"text": "a"} {"text": "b"}]', "expected a comma"),
        ('{"text": "a"}\n{"text"', "a.json:2: not JSON"),
        ('{"text":\n"a"}\n{', "a.json: damaged: not JSON; expected an array of objects, an object in each line"),
        ('{\n "name": "x"\n}', "a.json:1: no key 'text'; keys: 'name'; --text-key names another key"),
        (
            '{"messages": []}',
            "a.json:1: no key 'text'; keys: 'messages'; chats of the form messages (messages) need --chat; ",
        ),
    ],
)
def test_json_that_cannot_be_read_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert any(words in problem for problem in problems(read(tmp_path / "a.json")))


def test_tables_with_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,id\n"fine",x\ncaf\xe9,y\na,b,c\n\nfine too,z\n"never closed,w\n')
    items = read(path)
    assert [(item.id, item.text) for item in items if isinstance(item, CorpusDocument)] == [
        ("x", "fine"),
        ("z", "fine too"),
    ]
    assert [problem[len(f"{path}:") :][:20] for problem in problems(items)] == [
        "3: not utf-8 (charac",
        "4: expected 2 fields",
        "7: not a line of a t",
    ]
    path.write_text("body,id\nx,y\n")
    assert problems(read(path))[0].startswith(f"{path}: no column: no column 'text'; columns: 'body', 'id'")


def test_files_of_formats_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.zip", "b.tar.gz", "c.PDF", "d.arrow", "e.parquet.gz", "f.jsonl.lzma"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(BadInput, match=rf"{name}: is (an|a|parquet)"):
            list_inputs([str(tmp_path / name)])
    files = list_inputs([str(tmp_path)]).files
    assert [str(item).split(": ")[1] for file in files for item in read_documents(file, "text")] == [
        "format not read"
    ] * 6


def test_endings() -> None:
    assert {format_of(f"x{ending}").refused for ending in REFUSED} == set(REFUSED.values())
    assert {format_of(f"x.md{ending}").layout for ending in COMPRESSIONS} == {"text"}
    assert [format_of(name).layout for name in ("json", ".json", "a.json/b", "a.b.JSON", "a.parquet")] == [
        "text",
        "text",
        "text",
        "json",
        "parquet",
    ]


def test_a_byte_order_mark_is_no_text_and_utf16_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello")
    assert texts(read(tmp_path / "a.txt")) == ["Hello"]
    (tmp_path / "b.txt").write_bytes("Hello".encode("utf-16"))
    assert problems(read(tmp_path / "b.txt")) == [f"{tmp_path}/b.txt:1: UTF-16; expected UTF-8"]


def test_parquet_in_upper_case(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.PARQUET")
    assert texts(read(tmp_path / "a.PARQUET")) == TEXTS


def test_a_line_has_a_limit_also_where_it_is_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE", 1000)
    lines = [json.dumps({"text": text}) for text in ("first", "x" * 5000, "y" * 980, "last")]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "b.json").write_text(json.dumps({"text": "x" * 5000}, indent=1))
    found = list(records.read_records(list_inputs([str(tmp_path / "a.jsonl.gz")]).files[0], "text"))
    assert [str(each) for each in found if isinstance(each, records.BadDocument)] == [
        f"{tmp_path}/a.jsonl.gz:2: a line of more than 1,000 bytes"
    ]
    assert [each.number for each in found if isinstance(each, records.DataRecord)] == [1, 3, 4]
    (only, _) = records.read_records(list_inputs([str(tmp_path / "b.json")]).files[0], "text")
    assert isinstance(only, NotRead) and "more than 1,000 bytes" in str(only)
