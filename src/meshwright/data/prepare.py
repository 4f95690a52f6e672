"""`meshwright data prepare`: converts text to token shards in parallel; continues after a kill with identical bytes.

OUT has one prepared directory or, with held-out documents, two: OUT/train and OUT/held_out. During the work OUT also
has `unfinished.json` (the request) and `journal.jsonl` (finished shards); only a complete directory has a manifest.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.data.chat import ChatReader
from meshwright.data.corpus import (
    JSONL_SUFFIXES,
    BadDocument,
    Document,
    InputFile,
    TextlessFile,
    list_inputs,
    read_documents,
)
from meshwright.data.encode import EncodedDocument, encode_documents, token_dtype
from meshwright.data.encode_chat import chat_tokenizer, encode_chats
from meshwright.data.manifest import TOKENIZER, TRAIN, UNFINISHED, Manifest
from meshwright.data.progress import progress
from meshwright.data.request import (
    SHARD_TOKENS,
    ChatRequest,
    Preparation,
    begin,
    check_same,
    finished_manifests,
    forget,
    newest_input_ns,
)
from meshwright.data.shards import JOURNAL, SplitWriter, recover_journal
from meshwright.data.tokenizer import (
    LoadedTokenizer,
    load_tokenizer,
    parse_tokenizer,
    parse_train_request,
    sample_texts,
    tokenizer_file,
    train_tokenizer,
)
from meshwright.durable.lock import locked
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources
from meshwright.spec.host_limits import usable_cores

NAMED = 20
Read = Callable[[InputFile], Iterable[Document | BadDocument | TextlessFile]]
"""Reads the documents of a file in order."""


@dataclass
class BadDocuments:
    """The number of unusable documents, and the first of them."""

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
    """The result of `prepare`. `bad` and `passed` are empty if all output existed already (`reused`).

    `passed` counts the files without text in searched directories, by extension.
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
    text_key: str | None = None,
    on_bad: Literal["skip", "refuse"] = "skip",
    eos: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    chat: ChatRequest | None = None,
    workers: int | None = None,
    shown: bool = False,
    wait: bool = False,
) -> Prepared:
    """Turn `inputs` into token shards under `out`.

    `tokenizer` is a `tokenizer.json`, a folder with one, or `train:SIZE`; `held_out` the fraction of documents kept
    apart; `text_key` by default `text`, with `chat` `messages`;
    `workers` the encoding threads (all cores when None); `shown` draws progress on stderr; `wait` waits for
    another process that writes here. A second call with the same arguments continues after a kill, or finds the work
    done.

    Raises BadInput for inputs or tokenizers that cannot be used and when `out` holds something else, OutOfResources
    when the disk is too small. A request that is refused before its first shard is finished leaves nothing in `out`.
    """
    key = text_key or ("text" if chat is None else "messages")
    preparation = Preparation(tuple(inputs), tokenizer, out, held_out, key, on_bad, eos, shard_tokens, chat)
    preparation.check()
    files = list_inputs(inputs, exclude=out)
    if chat is not None:
        _check_records(files)
    request = preparation.describe(files)
    with locked(out, wait):
        done = finished_manifests(preparation)
        if done:
            check_same(out, done[TRAIN].request, request)
            (out / JOURNAL).unlink(missing_ok=True)
            return Prepared(out, done, BadDocuments(), Counter(), reused=True)
        begin(preparation, files, request)
        try:
            return _run(preparation, files, request, workers or usable_cores(), shown)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            message = f"{out}: the disk is full; make room and run the same command again to continue"
            raise OutOfResources(message) from error
        except MeshwrightError:
            if not (out / JOURNAL).exists():
                forget(out)
            raise


def _run(
    preparation: Preparation, files: list[InputFile], request: dict[str, Any], workers: int, shown: bool
) -> Prepared:
    read = _reader(preparation, files)
    if preparation.on_bad == "refuse":
        _refuse_bad(files, read)
    tokenizer = _tokenizer(preparation, files, shown)
    dtype = token_dtype(tokenizer.record.vocab_size)
    journal = recover_journal(preparation.out)
    writers = {
        split: SplitWriter(preparation.out, split, directory, dtype, preparation.shard_tokens, journal)
        for split, directory in preparation.directories().items()
    }
    _check_space(preparation.out, files, np.dtype(dtype).itemsize, writers)
    bad, passed = BadDocuments(), Counter[str]()
    try:
        _write_shards(preparation, files, read, tokenizer, writers, bad, passed, workers, shown)
    finally:
        # After an error this closes the unfinished shards; after success no shard is open.
        for writer in writers.values():
            writer.abandon()
    for split, writer in writers.items():
        if not writer.shards:
            # Nothing here is worth keeping, and without a journal a corrected command may start afresh.
            (preparation.out / JOURNAL).unlink(missing_ok=True)
            raise BadInput(_no_documents(preparation, split, bad))
    manifests = {
        split: Manifest(tokenizer.record, dtype, tuple(writer.shards), bad.count, request)
        for split, writer in writers.items()
    }
    _commit(preparation, manifests)
    return Prepared(preparation.out, manifests, bad, passed, reused=False)


def _write_shards(
    preparation: Preparation,
    files: list[InputFile],
    read: Read,
    tokenizer: LoadedTokenizer,
    writers: dict[str, SplitWriter],
    bad: BadDocuments,
    passed: Counter[str],
    workers: int,
    shown: bool,
) -> None:
    """Read, encode and write every document that is not in a finished shard."""
    pending: deque[tuple[str, int]] = deque()  # (split, number) of each document in the encoder

    def unfinished_documents() -> Iterator[Document]:
        for number, document in enumerate(_documents(files, read, bad, passed)):
            split = preparation.split_of(document.key)
            if number > writers[split].done_through:
                pending.append((split, number))
                yield document

    dtype = token_dtype(tokenizer.record.vocab_size)

    def encode(documents: Iterator[Document]) -> Generator[EncodedDocument, None, None]:
        if preparation.chat is not None:
            return encode_chats(documents, chat_tokenizer(tokenizer.content), dtype, workers)
        return encode_documents(documents, tokenizer, dtype, workers)

    with (
        progress("preparing", sum(file.size for file in files), shown) as report,
        closing(encode(unfinished_documents())) as encoded_documents,
    ):
        for encoded in encoded_documents:
            split, number = pending.popleft()
            writers[split].add(encoded, number)
            documents = sum(writer.documents for writer in writers.values())
            report(encoded.document.consumed, documents, sum(writer.tokens for writer in writers.values()))
    for writer in writers.values():
        writer.finish_shard()


def _reader(preparation: Preparation, files: list[InputFile]) -> Read:
    """The function that reads the documents of a file."""
    key, chat_files = preparation.text_key, preparation.chat_files()
    if chat_files is None or preparation.chat is None:
        return lambda file: read_documents(file, key)
    tokenizer = load_tokenizer(Path(preparation.tokenizer), preparation.eos).tokenizer
    reader = ChatReader(chat_files, preparation.chat.roles, tokenizer, newest_input_ns(files))
    return lambda file: reader.read(file, key)


def _check_records(files: list[InputFile]) -> None:
    """Raise BadInput if a file is no `.jsonl` file."""
    for file in files:
        if not file.name.endswith(JSONL_SUFFIXES):
            raise BadInput(f"{file.name}: chats are read from {', '.join(JSONL_SUFFIXES)} files")


def _documents(files: list[InputFile], read: Read, bad: BadDocuments, passed: Counter[str]) -> Iterator[Document]:
    for file in files:
        for document in read(file):
            if isinstance(document, Document):
                yield document
            elif isinstance(document, BadDocument):
                bad.add(document)
            else:
                passed[document.file.path.suffix or "no extension"] += 1


def _tokenizer(preparation: Preparation, files: list[InputFile], shown: bool) -> LoadedTokenizer:
    """The tokenizer of an earlier attempt or of the request; also written into every split's directory."""
    directories = list(preparation.directories().values())
    earlier = directories[0] / TOKENIZER
    if earlier.is_file():
        content, where = earlier.read_bytes(), str(earlier)
    elif size := parse_train_request(preparation.tokenizer):
        if shown:
            sys.stderr.write(f"training a tokenizer of {size} tokens\n")
        texts = sample_texts(files, preparation.text_key)
        content, where = (
            train_tokenizer((text for key, text in texts if preparation.split_of(key) == TRAIN), size),
            "train",
        )
    else:
        content, where = tokenizer_file(Path(preparation.tokenizer)).read_bytes(), preparation.tokenizer
    # The first directory last: a later attempt reads the tokenizer there, so all the others must have it by then.
    chat_files = preparation.chat_files()
    for directory in reversed(directories):
        directory.mkdir(exist_ok=True)
        if chat_files is not None:
            chat_files.write(directory)
        write_durable(directory / TOKENIZER, content)
    return parse_tokenizer(content, where, preparation.eos)


def _commit(preparation: Preparation, manifests: dict[str, Manifest]) -> None:
    # The training split last: once its manifest exists, so do those of the other splits.
    for split in reversed(manifests):
        manifests[split].write(preparation.directories()[split])
    (preparation.out / UNFINISHED).unlink()
    (preparation.out / JOURNAL).unlink()


def _check_space(out: Path, files: list[InputFile], itemsize: int, writers: dict[str, SplitWriter]) -> None:
    """Raise OutOfResources if the disk is too small.
    Assumes at least two bytes of text per token, and a compression factor of four."""
    packed = (".gz", ".zst", ".parquet")
    text = sum(file.size * (4 if file.name.endswith(packed) else 1) for file in files)
    done = sum(sum(shard.bytes.values()) for writer in writers.values() for shard in writer.shards)
    needed, free = max(text * itemsize // 2 - done, 0), shutil.disk_usage(out).free
    if needed > free:
        raise OutOfResources(f"{out}: about {needed:,} bytes are needed, {free:,} are free on its disk")


def _refuse_bad(files: list[InputFile], read: Read) -> None:
    bad = BadDocuments()
    for _ in _documents(files, read, bad, Counter()):
        pass
    if bad.count:
        raise BadInput(f"{bad.count} bad documents (`--on-bad skip` leaves them out):\n{bad}")


def _no_documents(preparation: Preparation, split: str, bad: BadDocuments) -> str:
    if preparation.held_out and bad.count == 0:
        return f"{preparation.out}: held-out fraction {preparation.held_out:g} leaves no document for {split}; choose another fraction"
    return f"{', '.join(preparation.inputs)}: no usable document for {split}; the bad ones:\n{bad}"
