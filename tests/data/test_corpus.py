from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from meshwright.data.corpus import CorpusDocument, read_documents
from meshwright.data.input_stream import Contents
from meshwright.data.inputs import NotRead, list_inputs
from meshwright.data.records import BadDocument
from meshwright.spec.errors import BadInput


def documents(*inputs: Path | str, text_key: str = "text", exclude: Path | None = None) -> list[Any]:
    files, not_read = list_inputs([str(name) for name in inputs], exclude)
    stream = [document for file in files for document in read_documents(file, text_key)]
    return [*not_read, *(item for item in stream if not isinstance(item, Contents))]


def good(stream: list[Any]) -> list[tuple[int | str, str]]:
    return [(document.id, document.text) for document in stream if isinstance(document, CorpusDocument)]


def not_read(stream: list[Any]) -> list[str]:
    return [str(item) for item in stream if isinstance(item, NotRead)]


def bad(stream: list[Any]) -> list[str]:
    return [str(document) for document in stream if isinstance(document, BadDocument)]


RECORDS = [{"text": "one"}, {"text": "zwei ü", "id": "x"}, {"text": "three\nlines\n"}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
EXPECTED = [(1, "one"), ("x", "zwei ü"), (3, "three\nlines\n")]


def test_jsonl_plain_gzip_and_zstandard_hold_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    frames = zstandard.compress(LINES[:20]) + zstandard.compress(LINES[20:])
    (tmp_path / "c.jsonl.zst").write_bytes(frames)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        assert good(documents(tmp_path / name)) == EXPECTED


def test_parquet_rows(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", None, "", "four"], "id": ["a", "b", "c", "d"], "other": [1, 2, 3, 4]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    stream = documents(path)
    assert good(stream) == [("a", "one"), ("d", "four")]
    assert bad(stream) == [f"{path}:2: expected text, got NoneType", f"{path}:3: empty"]
    columns = "columns: 'text', 'id', 'other' (nearest: 'text'); --text-key names another column"
    assert not_read(documents(path, text_key="txt")) == [f"{path}: no column: no column 'txt'; {columns}"]
    path.write_bytes(path.read_bytes()[:50])
    assert "cannot be read as parquet" in not_read(documents(path))[0]


def test_bad_lines_are_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [b'{"text": "fine"}', b"{broken", b"", b'{"txt": "a"}', b"[1]", b'{"text": 5}', b'{"text": "  "}']
    lines += [b'{"text": "\xff"}', b'{"text": "\\ud800"}', b'{"text": "fine too"}']
    path.write_bytes(b"\n".join(lines))
    stream = documents(path)
    assert good(stream) == [(1, "fine"), (10, "fine too")]
    messages = [line.removeprefix(f"{path}:") for line in bad(stream)]
    assert [message.split(":")[0] for message in messages] == ["2", "4", "5", "6", "7", "8", "9"]
    expected = [
        "not JSON",
        "no key 'text'; keys: 'txt' (nearest: 'txt'); --text-key names another key",
        "expected a JSON object, got list",
    ]
    expected += ["expected text, got int", "empty", "not utf-8", "surrogate"]
    for message, fragment in zip(messages, expected, strict=True):
        assert fragment in message


def test_a_truncated_gzip_gives_what_it_has_and_says_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    many = b"".join(json.dumps({"text": f"document {i * i}"}).encode() + b"\n" for i in range(5000))
    path.write_bytes(gzip.compress(many)[:-2000])
    stream = documents(path)
    assert len(good(stream)) > 100
    assert not bad(stream) and len(not_read(stream)) == 1 and "cannot be read further" in not_read(stream)[0]
    path.write_bytes(b"no gzip at all")
    assert not_read(documents(path))[0].startswith(f"{path}:1: damaged: cannot be read further: no gzip data")


def test_a_directory_gives_its_text_files_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {"z.py": b"print(1)\r\n", "a.txt": b"text", "b/c.md": b"# c", "empty.py": b"", "b/r.jsonl": LINES}
    files |= {"image.png": b"\x89PNG\0\0", ".hidden": b"x", ".git/config": b"x", "latin.txt": b"first\ncaf\xe9"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    stream = documents(tmp_path)
    assert [text for _, text in good(stream)] == ["text", "print(1)\r\n", "# c", *[text for _, text in EXPECTED]]
    assert bad(stream) == [f"{tmp_path}/latin.txt:2: not utf-8 (byte 9: unexpected end of data)"]


def test_the_output_inside_an_input_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    assert len(documents(tmp_path, exclude=tmp_path / "out")) == 1
    with pytest.raises(BadInput, match="is both input and output"):
        documents(tmp_path, exclude=tmp_path)


def test_a_file_named_by_the_user_may_not_be_empty_or_binary(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"\0\xff")
    assert bad(documents(tmp_path / "empty.txt", tmp_path / "binary.txt")) == [
        f"{tmp_path}/empty.txt:1: empty",
        f"{tmp_path}/binary.txt:1: not utf-8 (byte 1: invalid start byte)",
    ]


def test_keys_do_not_change_when_the_input_moves(tmp_path: Path) -> None:
    keys = []
    for folder in ("here", "there/deep"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "sub" / "r.jsonl").write_bytes(LINES)
        keys.append([d.key for d in documents(tmp_path / folder) if isinstance(d, CorpusDocument)])
    assert keys[0] == keys[1] and len(set(keys[0])) == 3


def test_progress_reaches_the_size_of_all_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("12345")
    (tmp_path / "b.jsonl").write_bytes(LINES)
    last = documents(tmp_path)[-1]
    assert isinstance(last, CorpusDocument) and last.consumed == 5 + len(LINES)


def test_a_missing_input_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    with pytest.raises(BadInput, match=f"no such file or directory .nearest: {tmp_path}/corpus"):
        list_inputs([str(tmp_path / "corpsu")])
    with pytest.raises(BadInput, match=r"nearest: stdlib"):
        list_inputs(["stdlb"])
    with pytest.raises(BadInput, match="no files here"):
        list_inputs([str(tmp_path / "corpus")])


@pytest.mark.parametrize(("name", "module"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=f"needs {module}: pip install {module}"):
        list_inputs([str(tmp_path)])


def test_stdlib_is_source_without_tests_and_packages() -> None:
    files = list_inputs(["stdlib"])
    names = [file.name for file in files.files]
    assert "stdlib/abc.py" in names and "stdlib/json/decoder.py" in names
    assert not [n for n in names if "site-packages" in n or "/test/" in n or "/tests/" in n or "idle_test" in n]
    assert all(name.endswith(".py") for name in names)
    assert names == [file.name for file in list_inputs(["stdlib"]).files]
