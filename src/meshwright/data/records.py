"""Reads records from files of JSON, CSV, TSV and parquet, with the position of each in its file."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from meshwright.data.chat_forms import form_of
from meshwright.data.file_formats import READ_BYTES, DamagedData
from meshwright.data.input_stream import Contents, InputStream
from meshwright.data.inputs import InputFile, NotRead
from meshwright.data.preference_forms import preference_form_of
from meshwright.durable.writes import digest_file
from meshwright.spec.errors import BadInput, nearest

LONGEST_ELEMENT = 128 << 20
"""Longest element of a JSON array, in characters."""
LONGEST_LINE = 128 << 20
"""Longest line, and largest JSON file that is a single value, in bytes. Reading takes a few times as much memory."""
ROWS_AT_ONCE = 1024
BLANK = " \t\r\n"


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be used. `where` is file:line (file:number for arrays and parquet); `why` says what was expected."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True)
class DataRecord:
    """A record of a file. `where` is file:line, `shown` is its id, and `value` is the value under the key that is read."""

    where: str
    number: int
    shown: int | str
    value: Any
    fields: Mapping[str, Any]
    consumed: int


ReadRecord = DataRecord | BadDocument | NotRead | Contents


def read_records(file: InputFile, key: str, columns: Sequence[str] = ()) -> Iterator[ReadRecord]:
    """The records of a file that have `key`, and then the digest of the file. For a part of a file, only its records.

    From parquet files, only the columns `key`, `id` and `columns` are read.
    """
    if file.format.layout == "parquet":
        yield from _parquet(file, key, columns)
        return
    try:
        stream = InputStream(file)
    except OSError as error:
        yield NotRead(file.name, "cannot be read", error.strerror or str(error), file.size)
        return
    with stream:
        try:
            yield from LAYOUT_READERS[file.format.layout](stream, key)
        except (DamagedData, OSError) as error:
            place = f"{file.name}:{stream.number + 1}"
            yield NotRead(place, "damaged", f"cannot be read further: {error}", file.size - stream.consumed)
        if file.range is None:
            yield stream.contents()


def first_records(file: InputFile, most: int = 100) -> Iterator[Mapping[str, Any]]:
    """The first records of a file that can be read, with all their keys; `most` at most."""
    if file.format.layout == "parquet":
        yield from _first_rows(file)
        return
    try:
        with InputStream(file) as stream:
            for item in islice(LAYOUT_READERS[file.format.layout](stream, None), most):
                if isinstance(item, DataRecord):
                    yield item.fields
    except (DamagedData, OSError):
        return


def all_fields(file: InputFile) -> Iterator[Mapping[str, Any]]:
    """All records of a file with all their keys. Raises BadInput if a record cannot be read."""
    if file.format.layout == "parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            for batch in pyarrow.parquet.ParquetFile(file.path).iter_batches(batch_size=ROWS_AT_ONCE):
                yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInput(f"{file.name}: cannot be read as parquet: {error}") from error
        return
    try:
        with InputStream(file) as stream:
            for item in LAYOUT_READERS[file.format.layout](stream, None):
                if not isinstance(item, DataRecord):
                    raise BadInput(str(item))
                yield item.fields
    except (DamagedData, OSError) as error:
        raise BadInput(f"{file.name}: cannot be read: {error}") from error


def _first_rows(file: InputFile) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(file.path).iter_batches(batch_size=1):
            yield from batch.to_pylist()
            return
    except (pyarrow.ArrowException, OSError):
        return


def _lines(stream: InputStream, key: str | None) -> Iterator[ReadRecord]:
    name = stream.file.name
    number = stream.number
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            while line and not line.endswith(b"\n"):
                line = stream.readline(READ_BYTES)
            yield BadDocument(f"{name}:{number}", f"a line of more than {LONGEST_LINE:,} bytes")
        elif not line.isspace():
            yield parse_line(f"{name}:{number}", number, line, key, stream.consumed)
        stream.number = number


def _json(stream: InputStream, key: str | None) -> Iterator[ReadRecord]:
    """The elements of an array, the objects on separate lines, or the single object of a file."""
    if _first_byte(stream) == b"[":
        yield from _array(stream, key)
        return
    name = stream.file.name
    line = stream.readline(LONGEST_LINE + 1)
    first = parse_line(f"{name}:1", 1, line, key, stream.consumed)
    others = stream.read(LONGEST_LINE + 1) if isinstance(first, BadDocument) and not _is_json(line) else b""
    if len(line) + len(others) > LONGEST_LINE:
        yield NotRead(
            name, "damaged", f"more than {LONGEST_LINE:,} bytes that are no array or lines of JSON", stream.file.size
        )
    elif not others:
        stream.number = 1
        yield first
        yield from _lines(stream, key)
    elif _is_json(line + others):
        yield parse_line(f"{name}:1", 1, line + others, key, stream.consumed)
    else:
        expected = "expected an array of objects, an object in each line, or an object"
        yield NotRead(name, "damaged", f"not JSON; {expected}", stream.file.size)


def _array(stream: InputStream, key: str | None) -> Iterator[ReadRecord]:
    name = stream.file.name
    try:
        for number, element in enumerate(_elements(stream), 1):
            yield _record(f"{name}:{number}", number, element, key, stream.consumed)
            stream.number = number
    except (ValueError, RecursionError) as error:
        yield NotRead(f"{name}:{stream.number + 1}", "damaged", f"not JSON from this element on: {error}")


def _elements(stream: InputStream) -> Iterator[Any]:
    """The elements of a JSON array in a stream. Little more than one element is in memory at a time. Raises ValueError."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    parse = json.JSONDecoder().raw_decode
    text = ""
    at = 0
    complete = False
    count = -1
    while True:
        at = _skip(text, at)
        if count < 0 and text[at : at + 1] == "[":
            at = _skip(text, at + 1)
            count = 0
        closed = text[at : at + 1] == "]"
        separated = count == 0 or text[at : at + 1] == ","
        element = None
        if count >= 0 and at < len(text) and not closed:
            if not separated:
                raise ValueError("expected a comma or the end of the array")
            begin = _skip(text, at + 1 if count else at)
            try:
                element, end = parse(text, begin)
            except json.JSONDecodeError:
                if complete or len(text) - at > LONGEST_ELEMENT:
                    raise
            else:
                if end < len(text) or complete:  # otherwise a number may continue in the next block
                    yield element
                    at = end
                    count = count + 1
                    continue
        if complete:
            if not closed:
                raise ValueError("the file ends inside the array")
            if text[at + 1 :].strip(BLANK):
                raise ValueError("text after the end of the array")
            return
        piece = stream.read(max(READ_BYTES, len(text) - at))
        text = text[at:] + decode(piece, not piece)
        at = 0
        complete = not piece


def _skip(text: str, at: int) -> int:
    """The position of the first character at or after `at` that is not white space."""
    while at < len(text) and text[at] in BLANK:
        at += 1
    return at


def _first_byte(stream: InputStream) -> bytes:
    """The first byte of a stream, after white space and a byte-order mark. It is not consumed."""
    while head := stream.peek(1):
        text = head.removeprefix(codecs.BOM_UTF8).lstrip()
        if text:
            return text[:1]
        stream.read(len(head))
    return b""


def _csv(stream: InputStream, key: str | None) -> Iterator[ReadRecord]:
    yield from _table(stream, key, ",")


def _tsv(stream: InputStream, key: str | None) -> Iterator[ReadRecord]:
    yield from _table(stream, key, "\t")


def _table(stream: InputStream, key: str | None, delimiter: str) -> Iterator[ReadRecord]:
    """The lines of a table. Its first line has the names of the columns."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    if stream.peek(3).startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    # Bytes that are not UTF-8 become surrogates. No document may have surrogates, so only the document with these bytes is refused.
    text = (line.decode("utf-8", "surrogateescape") for line in stream)
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    columns = None
    name = stream.file.name
    while True:
        first_line = lines.line_num + 1
        where = f"{name}:{first_line}"
        try:
            values = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            yield BadDocument(where, f"not a line of a table: {error}")
            continue
        stream.number = lines.line_num
        if not values:
            continue
        if columns is None:
            columns = values
            if key is not None and key not in columns:
                yield NotRead(name, "no column", _no_key("column", key, columns), stream.file.size)
                return
        elif len(values) != len(columns):
            yield BadDocument(where, f"expected {len(columns)} fields as in the first line, got {len(values)}")
        else:
            yield _record(where, first_line, dict(zip(columns, values, strict=True)), key, stream.consumed)


LAYOUT_READERS: dict[str, Callable[[InputStream, str | None], Iterator[ReadRecord]]] = {
    "lines": _lines,
    "json": _json,
    "csv": _csv,
    "tsv": _tsv,
}


def parse_line(where: str, number: int, line: bytes, key: str | None, consumed: int) -> DataRecord | BadDocument:
    """The record in line `number`, at position `where`. A BadDocument if it is not a JSON object or does not have `key`."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return BadDocument(where, f"not utf-8 (byte {error.start} of the line: {error.reason})")
    except (ValueError, RecursionError) as error:
        return BadDocument(where, f"not JSON ({error})")
    return _record(where, number, record, key, consumed)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _record(where: str, number: int, record: Any, key: str | None, consumed: int) -> DataRecord | BadDocument:
    if not isinstance(record, dict):
        return BadDocument(where, f"expected a JSON object, got {type(record).__name__}")
    if key is not None and key not in record:
        return BadDocument(where, _no_key("key", key, record))
    identity = record.get("id")
    shown = identity if isinstance(identity, (int, str)) and not isinstance(identity, bool) and key != "id" else number
    return DataRecord(where, number, shown, None if key is None else record[key], record, consumed)


def _no_key(word: str, key: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    near = nearest(key, names)
    hint = f" (nearest: {near!r})" if near else ""
    form = form_of(list(names))
    preferences = preference_form_of(list(names))
    chats = f"chats of the form {form} need --chat; " if form is not None and key not in form.keys else ""
    if preferences is not None:
        chats = f"preferences of the form {preferences.name} need --preferences; "
    return f"no {word} {key!r}; {word}s: {', '.join(map(repr, names))}{hint}; {chats}--text-key names another {word}"


def _parquet(file: InputFile, key: str, columns: Sequence[str]) -> Iterator[ReadRecord]:
    import pyarrow
    import pyarrow.parquet

    part = file.range
    number = 0 if part is None else part.before
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        names = table.schema_arrow.names
        if key not in names:
            yield NotRead(file.name, "no column", _no_key("column", key, names), file.size)
        else:
            wanted = [name for name in dict.fromkeys([key, "id", *columns]) if name in names]
            count = table.metadata.num_rows or 1
            groups = None if part is None else range(part.start, part.stop)
            for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=groups, columns=wanted):
                for fields in batch.to_pylist():
                    number += 1
                    where = f"{file.name}:{number}"
                    yield _record(where, number, _without_nulls(fields), key, file.size * number // count)
    except (pyarrow.ArrowException, OSError) as error:
        yield NotRead(f"{file.name}:{number + 1}", "damaged", f"cannot be read as parquet: {error}")
    if part is not None:
        return
    try:
        yield Contents(file, digest_file(file.path))
    except OSError:
        return


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row. In lists of objects, null values are removed, because parquet gives every object the keys of all others."""

    def pruned(value: Any) -> Any:
        if isinstance(value, list):
            return [pruned(item) for item in value]
        if isinstance(value, dict):
            return {name: pruned(item) for name, item in value.items() if item is not None}
        return value

    return {name: pruned(value) if isinstance(value, list) else value for name, value in fields.items()}
