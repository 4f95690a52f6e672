"""The result of a unit of work on the disk: its encoded documents, their signatures, and a record that is written last.

    unit-000003.tokens       the tokens of all documents, one after another
    unit-000003.documents    a line of JSON for each: [file, id, key, bytes read until its end, tokens, bytes of text]
    unit-000003.signatures   where duplicates are removed (data/signatures.py); with near-duplicates also
    unit-000003.sets, .ends  the shingles of each document
    unit-000003.json         counts, what was left out, sizes

Everything is a function of the unit and the request, so that a unit which two processes have done has the same files.
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
    """What a unit of `size` bytes gave: `bytes` are the sizes of its files by their ending."""

    size: int
    documents: int
    tokens: int
    bytes: dict[str, int]
    left_out: LeftOut
    removed: Removed
    digests: dict[str, str]
    segments: tuple[SignatureSegment, ...] = field(default=())


def chunk_path(folder: Path, unit: int, sort: str) -> Path:
    """The path of a file of a unit; its record has the ending `json`."""
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
    """Write the documents of a unit of `size` bytes, which `encoded` makes of `reading`; with `signed` their signatures too."""
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
    """Whether the documents of a unit are there as its record has them."""
    paths = {sort: chunk_path(folder, unit, sort) for sort in (TOKENS, DOCUMENTS)}
    return all(path.is_file() and path.stat().st_size == record.bytes[sort] for sort, path in paths.items())


def read_chunk(folder: Path, unit: int, dtype: str) -> Iterator[EncodedDocument]:
    """The documents of a unit, without their texts."""
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
    """The signatures of a unit that is done."""
    near = SETS in record.bytes
    return SignedUnit(
        chunk_path(folder, unit, SIGNATURES),
        chunk_path(folder, unit, SETS) if near else None,
        chunk_path(folder, unit, ENDS) if near else None,
        record.documents,
        record.segments,
    )


def remove_documents(folder: Path, unit: int) -> None:
    """Remove the documents of a unit, which are in shards; its record stays."""
    for sort in (TOKENS, DOCUMENTS):
        chunk_path(folder, unit, sort).unlink(missing_ok=True)


def remove_signatures(folder: Path, unit: int) -> None:
    """Remove the signatures of a unit, whose duplicates are known."""
    for sort in (SIGNATURES, SETS, ENDS):
        chunk_path(folder, unit, sort).unlink(missing_ok=True)


def _partial(folder: Path, unit: int, sort: str) -> Path:
    """A name of this process alone: a worker that was taken for lost may still write the same unit."""
    return folder / f"unit-{unit:06d}.{sort}.{os.getpid()}{PARTIAL}"


def _publish(file: BinaryIO, path: Path) -> int:
    """Flush a written file and give it its name; its size."""
    file.flush()
    sync_open_file(file.fileno(), path)
    size = file.tell()
    publish(Path(file.name), path)
    return size
