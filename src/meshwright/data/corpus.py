"""Reads input files as one ordered stream of documents.

A document is a text file, or one record of a file of records. A document that cannot be used becomes a BadDocument with
its position and the reason. A file that is not read becomes a NotRead. The caller decides what to do with these.
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
"""First bytes of a text in UTF-16."""
SEARCHED_BYTES = 8192
"""A file found in a directory counts as binary if there is a zero byte among this many first bytes."""


@dataclass(frozen=True)
class CorpusDocument:
    """A text of the corpus."""

    file: str
    """Name of its file."""
    id: int | str
    """Its id in the file: the record's `id`, or its number."""
    key: str
    """Identifies the document in the corpus: the key of the file, a zero character, and the number in the file."""
    text: str
    """The text itself."""
    consumed: int
    """Bytes of all inputs that are read once this document is read, for progress."""
    spans: tuple[tuple[int, int], ...] | None = None
    """Ranges [start, stop) of characters on which a model is trained; None means all."""
    where: str = ""
    """Where the document is, as `file:line`."""
    spelled: tuple[tuple[int, int], ...] | None = None
    """Ranges [start, stop) of characters in which a message of a chat contains the spelling of a special token.

    These characters are encoded as ordinary text. None if there are none.
    """
    span_weights: tuple[float, ...] | None = None
    """Weight in the loss of each range in `spans`; None means 1 for all."""
    goes_on: bool = False
    """Whether the next document comes from the same record, and so must go into the same shard."""
    score: float | None = None
    """Score of the answer, if the data has scores."""


FromFile = CorpusDocument | BadDocument | NotRead | Contents
"""What reading a file yields: documents, reasons why something was not read, and at last the digest of the file."""


def read_documents(file: InputFile, text_key: str) -> Iterator[FromFile]:
    """Yield the documents of a file in order, then its digest. `text_key` is the key or column of a record that holds the text."""
    form = file.format
    if form.refused:
        yield NotRead(file.name, "format not read", form.refused, file.size)
    elif form.layout == "text":
        yield from _read_text(file)
    else:
        for record in read_records(file, text_key):
            yield checked_document(file, record, record.value) if isinstance(record, DataRecord) else record


def _read_text(file: InputFile) -> Iterator[FromFile]:
    """Yield the document of a text file, then its digest."""
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
    """Return the document of a text file with these bytes. A NotRead if the file was found in a directory and is empty or binary."""
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
    """Make a document from a record. The result is a BadDocument if `text` is not text, or is empty or not valid Unicode."""
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
