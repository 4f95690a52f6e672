"""Reads the documents of one group of a stored file, in order.

A document that cannot be used becomes a BadDocument. Damage to the file itself is an error.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from meshwright.data.corpus import CorpusDocument, checked_document
from meshwright.data.file_formats import DamagedData, DecompressedFile, format_of
from meshwright.data.inputs import InputFile
from meshwright.data.records import LONGEST_LINE, ROWS_AT_ONCE, BadDocument, DataRecord, parse_line
from meshwright.data.streams.files import ObjectFile
from meshwright.data.streams.index import CHUNK_BYTES, no_text
from meshwright.data.streams.stores import Store, StoredFile
from meshwright.spec.errors import Damaged

KEPT_FOOTERS = 16
"""Parquet footers that a process keeps in memory."""
MOST_READ = 1 << 20
"""Maximum number of bytes of one read: of decompressed lines, and of the rest of a line that goes on after the end of its group."""


def group_documents(store: Store, file: StoredFile, number: int, text: str) -> Iterator[CorpusDocument | BadDocument]:
    """Yield the documents of group `number` of a file. `text` is the column or key that holds the text.

    After the last document it checks that the file is still the one in the index. Raises BadInput if the file has
    changed, Damaged if it cannot be decoded, and CommunicationFailure if the store does not answer.
    """
    shown = InputFile(Path(file.name), file.name, file.name, file.size)
    form = format_of(file.name)
    if form.layout == "parquet":
        yield from _rows(store, file, shown, number, text)
    elif form.compression is not None:
        with ObjectFile(store, file) as stored:
            raw = DecompressedFile(cast(BinaryIO, stored), form.compression)
            try:
                yield from _lines(io.BufferedReader(raw, MOST_READ), shown, 0, text)
            except DamagedData as error:
                raise Damaged(f"{file.name}: {error}") from error
    else:
        start, lines = _chunk(store, file, number)
        yield from _lines(io.BytesIO(lines), shown, start, text)
    store.check(file)


def _rows(
    store: Store, file: StoredFile, shown: InputFile, group: int, text: str
) -> Iterator[CorpusDocument | BadDocument]:
    """Yield the documents of row group number `group` of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with ObjectFile(store, file) as content:
            metadata = _metadata(store, file)
            table = pyarrow.parquet.ParquetFile(content, metadata=metadata, page_checksum_verification=True)
            batches = table.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group], columns=[text])
            for batch in batches:
                for value in batch.column(0).to_pylist():
                    number += 1
                    where = f"{file.name}: row {number} of row group {group}"
                    yield checked_document(shown, DataRecord(where, number, number, value, {}, 0), value)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise Damaged(f"{file.name}: row group {group}: cannot be read as parquet: {reason}") from error


@lru_cache(maxsize=KEPT_FOOTERS)
def _metadata(store: Store, file: StoredFile) -> Any:
    """Return the footer of a parquet file, which describes its row groups and columns."""
    import pyarrow.parquet

    with ObjectFile(store, file) as content:
        return pyarrow.parquet.read_metadata(content)


def _lines(
    stream: io.BufferedIOBase, shown: InputFile, start: int, text: str
) -> Iterator[CorpusDocument | BadDocument]:
    """Yield the documents of a stream of JSON lines.

    `start` is the offset in bytes at which the first line begins in the decompressed file. The offset of a line is its
    number in messages.
    """
    while line := stream.readline(LONGEST_LINE + 1):
        where = f"{shown.name}: line at byte {start}"
        if len(line) > LONGEST_LINE:
            raise Damaged(f"{where}: a line of more than {LONGEST_LINE:,} bytes")
        if not line.isspace():
            record = parse_line(where, start, line, None, 0)
            if isinstance(record, BadDocument):
                yield record
            elif text not in record.fields:
                yield BadDocument(where, no_text("key", text, list(record.fields)))
            else:
                yield checked_document(shown, record, record.fields[text])
        start += len(line)


def _chunk(store: Store, file: StoredFile, number: int) -> tuple[int, bytes]:
    """Return the lines that begin in a group of an uncompressed file of lines, and the offset in bytes of the first of them.

    The last of these lines may end after the end of the group, so this reads on until the line ends.
    """
    start = number * CHUNK_BYTES
    stop = min((number + 1) * CHUNK_BYTES, file.size)
    first = start
    content = store.read(file, max(start - 1, 0), stop)
    if start:  # The group before this one has the line that begins before `start`.
        line_end = content.find(b"\n")
        if line_end < 0:
            return stop, b""
        first = start + line_end
        content = content[line_end + 1 :]
    pieces = [content]
    end = stop
    while content and end < file.size and not pieces[-1].endswith(b"\n"):
        if end - stop > LONGEST_LINE:
            raise Damaged(f"{file.name}: a line of more than {LONGEST_LINE:,} bytes, which begins before byte {stop:,}")
        more = store.read(file, end, min(end + MOST_READ, file.size))
        line_end = more.find(b"\n") + 1
        pieces.append(more[:line_end] if line_end else more)
        end += len(more)
    return first, b"".join(pieces)
