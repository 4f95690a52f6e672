"""The files in which a finished unit of work is stored: its encoded documents, their signatures, and a record that is written last.

    unit-000003.tokens       the tokens of all documents, one after another
    unit-000003.documents    one line of JSON for each document: [file, id, key, bytes read until its end, tokens, bytes of text]
    unit-000003.signatures   only if duplicates are removed (data/signatures.py)
    unit-000003.sets, .ends  only if near-duplicates are removed: the shingles of each document, and the end of each document's shingles
    unit-000003.json         the record: counts, what was left out, sizes

The files depend only on the unit and the request. If two processes do the same unit, they write equal files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshwright.data.corpus import CorpusDocument
from meshwright.data.duplicates import SignedUnit
from meshwright.data.encode import EncodedDocument
from meshwright.data.left_out import LeftOut
from meshwright.data.reading import DocumentReading
from meshwright.data.removed import Removed
from meshwright.data.signatures import SignatureSegment, SignatureWriter
from meshwright.durable.writes import PARTIAL, publish, sync_open_file, write_durable
from meshwright.spec.errors import Damaged
from meshwright.spec.folder_files import parse_json

TOKENS = "tokens"
DOCUMENTS = "documents"
SIGNATURES = "signatures"
SETS = "sets"
ENDS = "ends"


@dataclass(frozen=True)
class ChunkRecord:
    """What a finished unit has read and written."""

    size: int
    """Bytes of input."""
    documents: int
    tokens: int
    bytes: dict[str, int]
    """Size of each file of the unit, by its suffix."""
    left_out: LeftOut
    removed: Removed
    digests: dict[str, str]
    """Digest of each input file that was read, by its name."""
    segments: tuple[SignatureSegment, ...] = field(default=())


def chunk_path(folder: Path, unit: int, sort: str) -> Path:
    """The path of one file of a unit; `sort` is its suffix, "json" for the record."""
    return folder / f"unit-{unit:06d}.{sort}"


def write_chunk(
    folder: Path,
    unit: int,
    size: int,
    encoded: Iterable[EncodedDocument],
    reading: DocumentReading,
    signed: bool,
    near: bool,
) -> None:
    """Encode and write the documents of a unit of `size` bytes, then its record.

    `encoded` yields the documents while it consumes `reading`, which afterwards says what was left out. With `signed`, signatures are
    written; with `near`, also the shingles.
    """
    sorts = [TOKENS, DOCUMENTS, *([SIGNATURES] if signed else []), *([SETS, ENDS] if near else [])]
    count = tokens = 0
    with ExitStack() as opened:
        files = {sort: opened.enter_context(_partial(folder, unit, sort).open("wb")) for sort in sorts}
        writer = SignatureWriter(files[SIGNATURES], files.get(SETS)) if signed else None
        for each in encoded:
            document = each.document
            files[TOKENS].write(each.tokens.tobytes())
            line = [document.file, document.id, document.key, document.consumed, len(each.tokens), each.text_bytes]
            files[DOCUMENTS].write(json.dumps(line).encode() + b"\n")
            if writer is not None:
                writer.add(document.text)
            count += 1
            tokens += len(each.tokens)
        if writer is not None:
            writer.finish()
            if near:
                files[ENDS].write(np.array(writer.ends, dtype="<u8").tobytes())
        sizes = {sort: _publish(file, chunk_path(folder, unit, sort)) for sort, file in files.items()}
    record = {
        "size": size,
        "documents": count,
        "tokens": tokens,
        "bytes": sizes,
        "left_out": asdict(reading.left_out),
        "removed": reading.removed.reasons,
        "digests": reading.digests,
        "segments": [asdict(segment) for segment in ([] if writer is None else writer.segments)],
    }
    write_durable(chunk_path(folder, unit, "json"), json.dumps(record).encode() + b"\n")


def read_record(folder: Path, unit: int) -> ChunkRecord | None:
    """The record of a unit; None if the unit is not done. Raises Damaged if the record cannot be read."""
    path = chunk_path(folder, unit, "json")
    if not path.is_file():
        return None
    plain = parse_json(path.read_bytes(), path, own=True, hint="; remove the file and prepare again")
    try:
        return ChunkRecord(
            plain["size"],
            plain["documents"],
            plain["tokens"],
            plain["bytes"],
            LeftOut.from_plain(plain["left_out"]),
            Removed(plain["removed"]),
            plain["digests"],
            tuple(SignatureSegment(**segment) for segment in plain["segments"]),
        )
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path}: no record of a unit: {error!r}; remove the file and prepare again") from None


def has_documents(folder: Path, unit: int, record: ChunkRecord) -> bool:
    """Whether the files with the documents of a unit exist and have the sizes in its record."""
    paths = {sort: chunk_path(folder, unit, sort) for sort in (TOKENS, DOCUMENTS)}
    return all(path.is_file() and path.stat().st_size == record.bytes[sort] for sort, path in paths.items())


def read_chunk(folder: Path, unit: int, dtype: str) -> Iterator[EncodedDocument]:
    """The documents of a unit with their tokens, but without texts. Raises Damaged if a file is too short."""
    size = np.dtype(dtype).itemsize
    with (
        chunk_path(folder, unit, TOKENS).open("rb", buffering=1 << 20) as tokens,
        chunk_path(folder, unit, DOCUMENTS).open("rb") as lines,
    ):
        for line in lines:
            file, identity, key, consumed, count, text_bytes = json.loads(line)
            content = tokens.read(count * size)
            if len(content) != count * size:
                raise Damaged(f"{tokens.name}: ends early; remove {folder} and prepare again")
            document = CorpusDocument(file, identity, key, "", consumed)
            yield EncodedDocument(document, np.frombuffer(content, dtype=dtype), text_bytes)


def signed_unit(folder: Path, unit: int, record: ChunkRecord) -> SignedUnit:
    """The paths and segments of the signatures of a finished unit."""
    near = SETS in record.bytes
    return SignedUnit(
        chunk_path(folder, unit, SIGNATURES),
        chunk_path(folder, unit, SETS) if near else None,
        chunk_path(folder, unit, ENDS) if near else None,
        record.documents,
        record.segments,
    )


def remove_documents(folder: Path, unit: int) -> None:
    """Delete the documents of a unit after they were written to shards. The record stays."""
    for sort in (TOKENS, DOCUMENTS):
        chunk_path(folder, unit, sort).unlink(missing_ok=True)


def remove_signatures(folder: Path, unit: int) -> None:
    """Delete the signatures of a unit after its duplicates were found."""
    for sort in (SIGNATURES, SETS, ENDS):
        chunk_path(folder, unit, sort).unlink(missing_ok=True)


def _partial(folder: Path, unit: int, sort: str) -> Path:
    """A temporary path that only this process uses. A worker that was declared lost may still be writing the same unit."""
    return folder / f"unit-{unit:06d}.{sort}.{os.getpid()}{PARTIAL}"


def _publish(file: BinaryIO, path: Path) -> int:
    """Flush a temporary file, rename it to `path`, and return its size in bytes."""
    file.flush()
    sync_open_file(file.fileno(), path)
    size = file.tell()
    publish(Path(file.name), path)
    return size
