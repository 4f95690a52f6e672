"""Reads files, directories and record files as one ordered stream of documents.

A document is a text file, a line of `.jsonl` (also `.gz`, `.zst`), or a row of `.parquet`. A document that cannot be
read becomes a BadDocument with its position and the reason; the caller decides what to do with it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.spec.errors import BadInput, nearest

STDLIB = "stdlib"
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
RECORD_SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class InputFile:
    """A file to read. `name` is shown to people; `key` is its path in its input and does not change if the input moves.

    `from_search` means that it comes from the search of a directory, so that a binary or empty file is skipped.
    `before` is the size of all files before this one in bytes.
    """

    path: Path
    name: str
    key: str
    size: int
    from_search: bool = False
    before: int = 0


@dataclass(frozen=True)
class Document:
    """A text: its file, its id there, its key in the corpus, and the bytes of all inputs read up to its end.

    `spans` are the ranges [start, stop) of the characters to train on; None means all. `where` is file:line.
    """

    file: str
    id: int | str
    key: str
    text: str
    consumed: int
    spans: tuple[tuple[int, int], ...] | None = None
    where: str = ""


@dataclass(frozen=True)
class BadDocument:
    """An unusable document: `where` is file:line (file:row for parquet), `why` what was expected."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True)
class Record:
    """A line of a record file: `where` is file:line, `shown` its id, and `value` what it has under the key that is read."""

    where: str
    number: int
    shown: int | str
    value: Any
    fields: dict[str, Any]
    consumed: int


@dataclass(frozen=True)
class TextlessFile:
    """A binary or empty file from the search of a directory."""

    file: InputFile


def list_inputs(inputs: Sequence[str], exclude: Path | None = None) -> list[InputFile]:
    """Every file of `inputs` (files, directories, or the word `stdlib`), in an order that depends on names only.

    Hidden files and the files below `exclude` (the output) are left out. Raises BadInput if an input is missing or
    empty.
    """
    files: list[InputFile] = []
    for name in inputs:
        path = Path(name)
        if name == STDLIB and not path.exists():
            matches = list(_stdlib_files())
        elif path.is_dir():
            if exclude is not None and path.resolve() == exclude.resolve():
                raise BadInput(f"{name}: is both input and output; choose another --out")
            matches = list(_directory_files(path, exclude))
        elif path.is_file():
            matches = [InputFile(path, name, path.name, path.stat().st_size)]
        else:
            raise BadInput(_missing(name, path))
        if not matches:
            raise BadInput(f"{name}: no files here to read")
        files += matches
    if not files:
        raise BadInput(f"no input given: expected files, directories, or the word `{STDLIB}`")
    _check_extras(files)
    starts = accumulate((file.size for file in files), initial=0)
    return [replace(file, before=start) for file, start in zip(files, starts, strict=False)]


def read_documents(file: InputFile, text_key: str) -> Iterator[Document | BadDocument | TextlessFile]:
    """The documents of one file in order; `text_key` is the key (or column) of the text in record files."""
    if file.name.endswith(".parquet"):
        yield from _read_parquet(file, text_key)
    elif file.name.endswith(RECORD_SUFFIXES):
        for record in read_records(file, text_key):
            yield record if isinstance(record, BadDocument) else checked_document(file, record, record.value)
    else:
        yield from _read_text(file)


def _read_text(file: InputFile) -> Iterator[Document | BadDocument | TextlessFile]:
    try:
        content = file.path.read_bytes()
    except OSError as error:
        yield BadDocument(file.name, f"cannot be read: {error}")
        return
    if file.from_search and (not content or b"\0" in content[:8192]):
        yield TextlessFile(file)
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield BadDocument(f"{file.name}:{line}", f"not utf-8 (byte {error.start}: {error.reason})")
        return
    if not text.strip():
        yield BadDocument(f"{file.name}:1", "empty")
        return
    yield Document(file.name, 1, f"{file.key}\0{1}", text, file.before + file.size)


def read_records(file: InputFile, key: str) -> Iterator[Record | BadDocument]:
    """The lines of a `.jsonl` file (also `.gz`, `.zst`) that are JSON objects with `key`."""
    number = 0
    try:
        with file.path.open("rb") as raw:
            for number, line in enumerate(_decompressed(raw, file.name), 1):
                if line.strip():
                    yield _parse_line(f"{file.name}:{number}", number, line, key, raw.tell())
    except (EOFError, OSError, zlib.error, *_zstd_errors(file.name)) as error:
        yield BadDocument(f"{file.name}:{number + 1}", f"cannot be read further: {error}")


def _parse_line(where: str, number: int, line: bytes, key: str, consumed: int) -> Record | BadDocument:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return BadDocument(where, f"not utf-8 (byte {error.start} of the line: {error.reason})")
    except (ValueError, RecursionError) as error:
        return BadDocument(where, f"not JSON ({error})")
    if not isinstance(record, dict):
        return BadDocument(where, f"expected a JSON object, got {type(record).__name__}")
    if key not in record:
        near = nearest(key, record)
        hint = f" (nearest: {near!r})" if near else ""
        return BadDocument(where, f"no key {key!r}; keys: {', '.join(map(repr, record))}{hint}")
    identity = record.get("id")
    shown = identity if isinstance(identity, (int, str)) and not isinstance(identity, bool) else number
    return Record(where, number, shown, record[key], record, consumed)


def _read_parquet(file: InputFile, text_key: str) -> Iterator[Document | BadDocument]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        columns = table.schema_arrow.names
        if text_key not in columns:
            near = nearest(text_key, columns)
            hint = f" (nearest: {near!r})" if near else ""
            yield BadDocument(file.name, f"no column {text_key!r}; columns: {', '.join(map(repr, columns))}{hint}")
            return
        column_names = [text_key, *(["id"] if "id" in columns and text_key != "id" else [])]
        number, row_count = 0, table.metadata.num_rows or 1
        for batch in table.iter_batches(batch_size=1024, columns=column_names):
            for record in batch.to_pylist():
                number += 1
                identity = record.get("id")
                shown = identity if isinstance(identity, (int, str)) and text_key != "id" else number
                consumed = file.size * number // row_count
                value = record[text_key]
                yield checked_document(
                    file, Record(f"{file.name}:{number}", number, shown, value, record, consumed), value
                )
    except (pyarrow.ArrowException, OSError) as error:
        yield BadDocument(file.name, f"cannot be read as parquet: {error}")


def checked_document(
    file: InputFile, record: Record, text: Any, spans: tuple[tuple[int, int], ...] | None = None
) -> Document | BadDocument:
    """The document of a record, if its text is one."""
    if not isinstance(text, str):
        return BadDocument(record.where, f"expected text, got {type(text).__name__}")
    if not text.strip():
        return BadDocument(record.where, "empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return BadDocument(record.where, f"not utf-8 (character {error.start} is half of a surrogate pair)")
    key, consumed = f"{file.key}\0{record.number}", file.before + record.consumed
    return Document(file.name, record.shown, key, text, consumed, spans, record.where)


def _decompressed(raw: BinaryIO, name: str) -> Iterable[bytes]:
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if name.endswith(".zst"):
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    return raw


def _zstd_errors(name: str) -> tuple[type[Exception], ...]:
    if not name.endswith(".zst"):
        return ()
    import zstandard

    return (zstandard.ZstdError,)


def _stdlib_files() -> Iterator[InputFile]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root, NOT_STDLIB, None):
        if path.suffix == ".py" and path.stat().st_size:
            key = path.relative_to(root).as_posix()
            yield InputFile(path, f"{STDLIB}/{key}", key, path.stat().st_size, from_search=True)


def _directory_files(root: Path, exclude: Path | None) -> Iterator[InputFile]:
    for path in _walk(root, {"__pycache__"}, exclude):
        key = path.relative_to(root).as_posix()
        yield InputFile(path, str(path), key, path.stat().st_size, from_search=True)


def _walk(root: Path, skipped: set[str], exclude: Path | None) -> Iterator[Path]:
    excluded = exclude.resolve() if exclude else None
    for folder, folders, names in os.walk(root):
        parent = Path(folder)
        visible = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        folders[:] = [name for name in visible if (parent / name).resolve() != excluded]
        for name in sorted(names):
            if not name.startswith(".") and (parent / name).is_file():
                yield parent / name


def _check_extras(files: list[InputFile]) -> None:
    """Raise BadInput before any work if a file needs a package that is not installed."""
    for suffix, module in ((".zst", "zstandard"), (".parquet", "pyarrow")):
        needing = next((file for file in files if file.name.endswith(suffix)), None)
        if needing is not None and not _importable(module):
            raise BadInput(f"{needing.name}: reading {suffix} needs {module}: pip install {module}")


def _importable(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def _missing(name: str, path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, [*siblings, STDLIB])
    hint = f" (nearest: {near if near == STDLIB else path.parent / near})" if near else ""
    return f"{name}: no such file or directory{hint}; expected files, directories, or the word `{STDLIB}`"
