"""Writes the shards of a split, and a journal of finished shards. After a kill, a preparation continues from the journal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from meshwright.data.encode import EncodedDocument
from meshwright.data.indexed import IndexedWriter
from meshwright.data.manifest import Count, Shard, documents_path, shard_files
from meshwright.data.token_weights import encode_weights, weight_path
from meshwright.durable.writes import append_durable, digest, write_durable
from meshwright.spec.errors import Damaged
from meshwright.spec.fields import from_checked_plain
from meshwright.spec.folder_files import parse_json

JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class JournalLine:
    """A finished shard: its split, its record, and the corpus number of its last document."""

    split: str
    through: Count
    shard: Shard


def recover_journal(out: Path) -> list[JournalLine]:
    """The shards that an earlier attempt has finished. If the last line is truncated, it is removed, and its shard is written again.

    Raises Damaged if any other line cannot be read.
    """
    path = out / JOURNAL
    if not path.is_file():
        return []
    content = path.read_bytes()
    complete_lines = content[: content.rfind(b"\n") + 1]
    if complete_lines != content:
        write_durable(path, complete_lines)
    return [_journal_line(line, f"{path}:{number}") for number, line in enumerate(complete_lines.splitlines(), 1)]


def _journal_line(line: bytes, where: str) -> JournalLine:
    try:
        return from_checked_plain(JournalLine, parse_json(line, where))
    except ValueError as error:
        raise Damaged(f"{where}: no record of a shard: {error}; remove the folder and prepare again") from None


class SplitWriter:
    """Writes the shards of one split (`train` or `held_out`). Each shard is closed when it has `shard_tokens` tokens.

    Continues after the shards in `journal`, whose file is in `out`. Documents up to number `done_through` are in finished shards.
    """

    def __init__(
        self, out: Path, split: str, directory: Path, dtype: str, shard_tokens: int, journal: list[JournalLine]
    ) -> None:
        self.out = out
        self.split = split
        self.directory = directory
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        finished = [line for line in journal if line.split == split]
        self.shards = [line.shard for line in finished]
        self.done_through = finished[-1].through if finished else -1
        self._finished_tokens = sum(shard.tokens for shard in self.shards)
        self._finished_documents = sum(shard.documents for shard in self.shards)
        self._through = self.done_through
        self._writer: IndexedWriter | None = None
        self._lines: list[str] = []
        self._weights: list[np.ndarray] = []
        self._text_bytes = 0

    @property
    def tokens(self) -> int:
        """Tokens so far, including the open shard."""
        return self._finished_tokens + (self._writer.tokens if self._writer else 0)

    @property
    def documents(self) -> int:
        """Documents so far, including the open shard."""
        return self._finished_documents + len(self._lines)

    def add(self, encoded: EncodedDocument, number: int) -> None:
        """Append document `number` of the corpus."""
        if self._writer is None:
            self._writer = IndexedWriter(self.directory / f"shard-{len(self.shards):05d}", self.dtype)
        self._writer.add_document(encoded.tokens)
        document = encoded.document
        score = [] if document.score is None else [document.score]
        self._lines.append(json.dumps([document.file, document.id, *score]))
        if encoded.weights is not None:
            self._weights.append(encoded.weights)
        self._text_bytes += encoded.text_bytes
        self._through = number
        if self._writer.tokens >= self.shard_tokens and not document.goes_on:
            self.finish_shard()

    def finish_shard(self) -> None:
        """Make the open shard durable, then add its line to the journal. Does nothing if no shard is open."""
        if self._writer is None:
            return
        writer = self._writer
        stem = self._writer.stem
        names = "".join(line + "\n" for line in self._lines).encode()
        write_durable(documents_path(stem), names)
        digests = {"documents": digest(names)}
        if self._weights:
            kind, weights = encode_weights(self._weights)
            write_durable(weight_path(stem, kind), weights)
            digests[kind] = digest(weights)
        writer.finish()
        digests = {**writer.digests, **digests}
        sizes = {key: path.stat().st_size for key, path in shard_files(stem).items() if key in digests}
        shard = Shard(stem.name, len(self._lines), writer.tokens, self._text_bytes, sizes, digests)
        line = JournalLine(self.split, self._through, shard)
        append_durable(self.out / JOURNAL, json.dumps(asdict(line)).encode() + b"\n")
        self.shards.append(shard)
        self._finished_tokens += shard.tokens
        self._finished_documents += shard.documents
        self.done_through = self._through
        self._writer = None
        self._lines = []
        self._weights = []
        self._text_bytes = 0

    def abandon(self) -> None:
        """Close the open file without giving it its name."""
        if self._writer is not None:
            self._writer.abandon()
