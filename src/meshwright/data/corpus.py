"""Reads input files as one ordered stream of documents.

A document is a text file, or a record of a file of records. A document that cannot be read becomes a BadDocument with its position and
the reason, a file that is not read a NotRead; the caller decides what to do with them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from meshwright.data.file_formats import DamagedData
from meshwright.data.input_stream import Contents, InputStream
from meshwright.data.inputs import InputFile, NotRead
from meshwright.data.records import BadDocument, DataRecord, read_records

UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SEARCHED_BYTES = 8192
"""First bytes of a file from a directory in which a zero byte means that it is binary."""


@dataclass(frozen=True)
class CorpusDocument:
    """A text: its file, its id there, its key in the corpus, and the bytes of all inputs read up to its end.

    `spans` are the ranges [start, stop) of the characters to train on; None means all. `where` is file:line. `spelled` are those of special
    tokens that a message of a chat spells, which are text; None if none does. `span_weights` are the weights of `spans` in the loss; None:
    all 1. With `goes_on` the next document is of the same record, and in the same shard. `score` is that of an answer in the data.
    """

    file: str
    id: int | str
    key: str
    text: str
    consumed: int
    spans: tuple[tuple[int, int], ...] | None = None
    where: str = ""
    spelled: tuple[tuple[int, int], ...] | None = None
    span_weights: tuple[float, ...] | None = None
    goes_on: bool = False
    score: float | None = None


FromFile = CorpusDocument | BadDocument | NotRead | Contents
"""An item that the reader of a file yields."""


def read_documents(file: InputFile, text_key: str) -> Iterator[FromFile]:
    """The documents of a file in order, then its digest; `text_key` is the key (or column) of the text of a record."""
    form = file.format
    if form.refused:
        yield NotRead(file.name, "format not read", form.refused, file.size)
    elif form.layout == "text":
        yield from _read_text(file)
    else:
        for record in read_records(file, text_key):
            yield checked_document(file, record, record.value) if isinstance(record, DataRecord) else record


def _read_text(file: InputFile) -> Iterator[FromFile]:
    try:
        if file.format.compression is None:
            content = file.path.read_bytes()
            contents = Contents(file, xxhash.xxh3_128_hexdigest(content))
        else:
            with InputStream(file) as stream:
                content = stream.read()
                contents = stream.contents()
    except DamagedData as error:
        yield NotRead(file.name, "damaged", str(error), file.size)
        return
    except OSError as error:
        yield NotRead(file.name, "cannot be read", error.strerror or str(error), file.size)
        return
    yield _text_document(file, content)
    yield contents


def _text_document(file: InputFile, content: bytes) -> CorpusDocument | BadDocument | NotRead:
    if file.from_search and not content:
        return NotRead(file.name, "empty")
    if content.startswith(UTF16):
        return BadDocument(f"{file.name}:1", "UTF-16; expected UTF-8")
    if file.from_search and b"\0" in content[:SEARCHED_BYTES]:
        return NotRead(file.name, "binary", "", file.size)
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return BadDocument(f"{file.name}:{line}", f"not utf-8 (byte {error.start}: {error.reason})")
    if not text.strip():
        return BadDocument(f"{file.name}:1", "empty")
    return CorpusDocument(file.name, 1, f"{file.key}\0{1}", text, file.before + file.size)


def checked_document(
    file: InputFile, record: DataRecord, text: Any, spans: tuple[tuple[int, int], ...] | None = None
) -> CorpusDocument | BadDocument:
    """The document of a record, if its text is one."""
    if not isinstance(text, str):
        return BadDocument(record.where, f"expected text, got {type(text).__name__}")
    if not text.strip():
        return BadDocument(record.where, "empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return BadDocument(record.where, f"not utf-8 (character {error.start} is half of a surrogate pair)")
    key = f"{file.key}\0{record.number}"
    consumed = file.before + record.consumed
    return CorpusDocument(file.name, record.shown, key, text, consumed, spans, record.where)
