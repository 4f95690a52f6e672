"""`meshwright data prepare`: text in, token shards out, in parallel, and continued after a kill to the very same bytes.

OUT holds one prepared directory, or with held-out documents two: OUT/train and OUT/held_out. While the work goes on OUT
also holds `unfinished.json` (the request) and `journal.jsonl` (finished shards); a directory has a manifest only when
it is whole.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.data.corpus import BadDocument, Document, InputFile, list_inputs, read_documents
from meshwright.data.encode import encode_documents, token_dtype
from meshwright.data.manifest import TOKENIZER, TRAIN, UNFINISHED, Manifest
from meshwright.data.progress import progress
from meshwright.data.request import SHARD_TOKENS, Preparation, begin, check_same, finished_manifests, forget
from meshwright.data.shards import JOURNAL, SplitWriter, recover_journal
from meshwright.data.tokenizer import (
    LoadedTokenizer,
    parse_tokenizer,
    parse_train_request,
    sample_texts,
    tokenizer_file,
    train_tokenizer,
)
from meshwright.durable.lock import locked
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources

NAMED = 20


@dataclass
class BadDocuments:
    """How many documents could not be used, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, bad: BadDocument) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(str(bad))

    def __str__(self) -> str:
        more = [f"... and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        return "\n".join([*self.first, *more])


@dataclass(frozen=True)
class Prepared:
    """What `prepare` left behind. `bad` and `passed` are empty when everything was already there (`reused`).

    `passed` counts the files of searched directories that hold no text, by extension.
    """

    out: Path
    manifests: dict[str, Manifest]
    bad: BadDocuments
    passed: Counter[str]
    reused: bool


def prepare(
    inputs: Sequence[str],
    tokenizer: str,
    out: Path,
    *,
    held_out: float = 0.0,
    text_key: str = "text",
    on_bad: Literal["skip", "refuse"] = "skip",
    eos: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    shown: bool = False,
    wait: bool = False,
) -> Prepared:
    """Turn `inputs` into token shards under `out`.

    `tokenizer` is a `tokenizer.json`, a folder with one, or `train:SIZE`; `held_out` the fraction of documents kept
    apart; `workers` the encoding threads (all cores when None); `shown` draws progress on stderr; `wait` waits for
    another process that writes here. A second call with the same arguments continues after a kill, or finds the work
    done.

    Raises BadInput for inputs or tokenizers that cannot be used and when `out` holds something else, OutOfResources
    when the disk is too small. A request that is refused before its first shard is finished leaves nothing in `out`.
    """
    asked = Preparation(tuple(inputs), tokenizer, out, held_out, text_key, on_bad, eos, shard_tokens)
    asked.check()
    files = list_inputs(inputs, exclude=out)
    request = asked.describe(files)
    with locked(out, wait):
        done = finished_manifests(asked)
        if done:
            check_same(out, done[TRAIN].request, request)
            (out / JOURNAL).unlink(missing_ok=True)
            return Prepared(out, done, BadDocuments(), Counter(), reused=True)
        begin(asked, files, request)
        try:
            return _run(asked, files, request, workers or os.cpu_count() or 1, shown)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            message = f"{out}: the disk is full; make room and run the same command again to continue"
            raise OutOfResources(message) from error
        except MeshwrightError:
            if not (out / JOURNAL).exists():
                forget(out)
            raise


def _run(asked: Preparation, files: list[InputFile], request: dict[str, Any], workers: int, shown: bool) -> Prepared:
    if asked.on_bad == "refuse":
        _refuse_bad(files, asked.text_key)
    tokenizer = _tokenizer(asked, files, shown)
    dtype = token_dtype(tokenizer.record.vocab_size)
    journal = recover_journal(asked.out)
    writers = {
        split: SplitWriter(asked.out, split, directory, dtype, asked.shard_tokens, journal)
        for split, directory in asked.directories().items()
    }
    _check_space(asked.out, files, np.dtype(dtype).itemsize, writers)
    bad, passed = BadDocuments(), Counter[str]()
    try:
        _write_shards(asked, files, tokenizer, writers, bad, passed, workers, shown)
    finally:
        for writer in writers.values():
            writer.abandon()
    for split, writer in writers.items():
        if not writer.shards:
            # Nothing here is worth keeping, and without a journal a corrected command may start afresh.
            (asked.out / JOURNAL).unlink(missing_ok=True)
            raise BadInput(_no_documents(asked, split, bad))
    manifests = {
        split: Manifest(tokenizer.record, dtype, tuple(writer.shards), bad.count, request)
        for split, writer in writers.items()
    }
    _commit(asked, manifests)
    return Prepared(asked.out, manifests, bad, passed, reused=False)


def _write_shards(
    asked: Preparation,
    files: list[InputFile],
    tokenizer: LoadedTokenizer,
    writers: dict[str, SplitWriter],
    bad: BadDocuments,
    passed: Counter[str],
    workers: int,
    shown: bool,
) -> None:
    """Read, encode and write every document that no finished shard holds yet."""
    places: deque[tuple[str, int]] = deque()  # split and number of each document that is on its way through the encoder

    def wanted() -> Iterator[Document]:
        for number, document in enumerate(_documents(files, asked.text_key, bad, passed)):
            split = asked.split_of(document.key)
            if number > writers[split].done_through:
                places.append((split, number))
                yield document

    dtype = token_dtype(tokenizer.record.vocab_size)
    with (
        progress("preparing", sum(file.size for file in files), shown) as report,
        closing(encode_documents(wanted(), tokenizer, dtype, workers)) as encoded_documents,
    ):
        for encoded in encoded_documents:
            split, number = places.popleft()
            writers[split].add(encoded, number)
            documents = sum(writer.documents for writer in writers.values())
            report(encoded.document.consumed, documents, sum(writer.tokens for writer in writers.values()))
    for writer in writers.values():
        writer.finish_shard()


def _documents(files: list[InputFile], text_key: str, bad: BadDocuments, passed: Counter[str]) -> Iterator[Document]:
    for file in files:
        for document in read_documents(file, text_key):
            if isinstance(document, Document):
                yield document
            elif isinstance(document, BadDocument):
                bad.add(document)
            else:
                passed[document.file.path.suffix or "no extension"] += 1


def _tokenizer(asked: Preparation, files: list[InputFile], shown: bool) -> LoadedTokenizer:
    """The tokenizer of an earlier attempt, or the one asked for; written into every split's directory."""
    directories = list(asked.directories().values())
    earlier = directories[0] / TOKENIZER
    if earlier.is_file():
        content, where = earlier.read_bytes(), str(earlier)
    elif size := parse_train_request(asked.tokenizer):
        if shown:
            sys.stderr.write(f"training a tokenizer of {size} tokens\n")
        texts = sample_texts(files, asked.text_key)
        content, where = train_tokenizer((text for key, text in texts if asked.split_of(key) == TRAIN), size), "train"
    else:
        content, where = tokenizer_file(Path(asked.tokenizer)).read_bytes(), asked.tokenizer
    for directory in reversed(directories):
        directory.mkdir(exist_ok=True)
        write_durable(directory / TOKENIZER, content)
    return parse_tokenizer(content, where, asked.eos)


def _commit(asked: Preparation, manifests: dict[str, Manifest]) -> None:
    for split in reversed(manifests):
        manifests[split].write(asked.directories()[split])
    (asked.out / UNFINISHED).unlink()
    (asked.out / JOURNAL).unlink()


def _check_space(out: Path, files: list[InputFile], itemsize: int, writers: dict[str, SplitWriter]) -> None:
    """Refuse before hours of work: a token stands for at least two bytes of text, compression for a factor of four."""
    packed = (".gz", ".zst", ".parquet")
    text = sum(file.size * (4 if file.name.endswith(packed) else 1) for file in files)
    done = sum(sum(shard.bytes.values()) for writer in writers.values() for shard in writer.shards)
    needed, free = max(text * itemsize // 2 - done, 0), shutil.disk_usage(out).free
    if needed > free:
        raise OutOfResources(f"{out}: about {needed:,} bytes are needed, {free:,} are free on its disk")


def _refuse_bad(files: list[InputFile], text_key: str) -> None:
    bad = BadDocuments()
    for _ in _documents(files, text_key, bad, Counter()):
        pass
    if bad.count:
        raise BadInput(f"{bad.count} bad documents (`--on-bad skip` leaves them out):\n{bad}")


def _no_documents(asked: Preparation, split: str, bad: BadDocuments) -> str:
    if asked.held_out and bad.count == 0:
        return (
            f"{asked.out}: held-out fraction {asked.held_out:g} leaves no document for {split}; choose another fraction"
        )
    return f"{', '.join(asked.inputs)}: no usable document for {split}; the bad ones:\n{bad}"
