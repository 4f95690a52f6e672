"""`meshwright data prepare`: converts text to token shards in parallel; continues after a kill with identical bytes.

OUT has one prepared directory or, with held-out documents, two: OUT/train and OUT/held_out. During the work OUT also
has `unfinished.json` (the request) and `journal.jsonl` (finished shards); only a complete directory has a manifest.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.data.answer_ends import AnswerEnds, count_answer_ends
from meshwright.data.chat import CHAT_ENDINGS, ChatCounts, ChatReader, reads_chats
from meshwright.data.chat_template import GENERATION_CONFIG, TEMPLATE, TOOL_TEMPLATE, copy_chat_files, special_tokens
from meshwright.data.corpus import Document, FromFile, read_documents
from meshwright.data.encode import EncodedDocument, encode_documents, token_dtype
from meshwright.data.encode_chat import chat_tokenizer, encode_chats
from meshwright.data.fast_encoder import EncodersDiffer, FastEncoder
from meshwright.data.input_record import changed_inputs, input_record, write_input_record
from meshwright.data.input_stream import Contents
from meshwright.data.inputs import HARMLESS, InputFile, NotRead, check_text_key, list_inputs
from meshwright.data.left_out import LeftOut, not_read_words
from meshwright.data.manifest import TOKENIZER, TRAIN, UNFINISHED, Manifest, Shard
from meshwright.data.preferences import PreferenceReader, count_preferences
from meshwright.data.progress import progress
from meshwright.data.request import (
    ENCODERS_DIFFER,
    SHARD_TOKENS,
    ChatRequest,
    Preparation,
    begin,
    check_same_corpus,
    finished_manifests,
    forget,
    forget_shards,
    newest_input_ns,
)
from meshwright.data.shards import JOURNAL, SplitWriter, recover_journal
from meshwright.data.text_format import read_text_format
from meshwright.data.tokenizer import (
    LoadedTokenizer,
    parse_tokenizer,
    parse_train_request,
    read_tokenizer,
    sample_texts,
    train_tokenizer,
)
from meshwright.durable.lock import locked
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources
from meshwright.spec.host_limits import usable_cores

Read = Callable[[InputFile], Iterable[FromFile]]
"""Reads the documents of a file in order."""


COMPARED_BYTES = 1 << 20
"""Text of the corpus, spread over its files, about whose ids both encoders are asked before the work: some 0.4 s."""
FORM_OF_RECORDS = "messages"
"""The key of chats in a request that names none: then the form of the records decides."""


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`. `left_out` is empty if all output existed already (`reused`)."""

    out: Path
    manifests: dict[str, Manifest]
    left_out: LeftOut
    reused: bool
    answers: AnswerEnds | None = None
    """Of chats, the tokens that end the answers; None for text."""
    chats: ChatCounts | None = None
    """The chats that were read; None for text and if all output existed already."""


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
    unended_answers: Literal["refuse", "accept"] = "refuse",
    workers: int | None = None,
    shown: bool = False,
    wait: bool = False,
) -> Prepared:
    """Turn `inputs` into token shards under `out`.

    `tokenizer` is a `tokenizer.json`, a folder with one, or `train:SIZE`; `held_out` the fraction of documents kept
    apart; `text_key` by default `text`, with `chat` the one of the form that the records have; `unended_answers` is what
    happens to answers of chats without end token; `workers` the encoding threads (all cores when None); `shown` draws
    progress on stderr; `wait` waits for another process that writes here. A second call with the same arguments
    continues after a kill, or finds the work done.

    Raises BadInput for inputs or tokenizers that cannot be used and when `out` holds something else, OutOfResources
    when the disk is too small. A request that is refused before its first shard is finished leaves nothing in `out`.
    """
    key = text_key or ("text" if chat is None else FORM_OF_RECORDS)
    preparation = Preparation(
        tuple(inputs), tokenizer, out, held_out, key, on_bad, eos, shard_tokens, chat, unended_answers
    )
    preparation.check()
    files, not_read = list_inputs(inputs, exclude=out)
    check_text_key(text_key, files)
    if chat is not None:
        _check_records(files)
    request = preparation.describe(files)
    with locked(out, wait):
        done = finished_manifests(preparation)
        if done:
            check_same_corpus(out, preparation.directories()[TRAIN], done[TRAIN], request)
            _check_reusable(preparation, done[TRAIN], files)
            for name in (JOURNAL, ENCODERS_DIFFER):
                (out / name).unlink(missing_ok=True)
            return Prepared(out, done, LeftOut(), reused=True, answers=_answers(preparation, done))
        begin(preparation, files, request)
        try:
            return _run(preparation, files, not_read, request, workers or usable_cores(), shown)
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
    preparation: Preparation,
    files: list[InputFile],
    not_read: list[NotRead],
    request: dict[str, Any],
    workers: int,
    shown: bool,
) -> Prepared:
    if preparation.on_bad == "refuse":
        _refuse_bad(files, not_read, _read_of(preparation, _reader(preparation, files))[0])
    reader = _reader(preparation, files)
    read, chats = _read_of(preparation, reader)
    tokenizer = _tokenizer(preparation, files, shown)
    fast = _fast_encoder(preparation, files, tokenizer, workers, shown)
    dtype = token_dtype(tokenizer.record.vocab_size)
    journal = recover_journal(preparation.out)
    writers = {
        split: SplitWriter(preparation.out, split, directory, dtype, preparation.shard_tokens, journal)
        for split, directory in preparation.directories().items()
    }
    _check_space(preparation.out, files, np.dtype(dtype).itemsize, writers)
    reading = _Reading(files, not_read, read)
    try:
        _write_shards(preparation, reading, tokenizer, fast, writers, workers, shown)
    except EncodersDiffer as difference:
        _tell(difference, shown)
        forget_shards(preparation.out)
        (preparation.out / ENCODERS_DIFFER).touch()
        return _run(preparation, files, not_read, request, workers, shown)
    left_out = reading.left_out
    for split, writer in writers.items():
        if not writer.shards:
            # Nothing here is worth keeping, and without a journal a corrected command may start afresh.
            (preparation.out / JOURNAL).unlink(missing_ok=True)
            raise BadInput(_no_documents(preparation, split, left_out))
    text, answers = tokenizer.text, None
    if preparation.chat is not None:
        shards = {split: writer.shards for split, writer in writers.items()}
        answers = _count_answers(preparation, shards, tokenizer)
        text = text.with_answer_ends(answers.counts)
    preferences = {}
    if isinstance(reader, PreferenceReader) and reader.kind is not None:
        for split, directory in preparation.directories().items():
            preferences[split] = count_preferences(reader.kind, ((directory, shard) for shard in writers[split].shards))
    figures = {
        reason: {"files": each["files"], "bytes": each["bytes"]} for reason, each in sorted(left_out.not_read.items())
    }
    record = input_record(files, reading.digests)
    records = {split: write_input_record(directory, record) for split, directory in preparation.directories().items()}
    manifests = {
        split: Manifest(
            tokenizer.record,
            dtype,
            tuple(writer.shards),
            left_out.bad.count,
            request,
            records[split],
            figures,
            text_format=text,
            unended_answers=0 if answers is None else answers.unended,
            trained_tokens=None if answers is None else answers.trained[preparation.directories()[split]],
            preferences=preferences.get(split),
        )
        for split, writer in writers.items()
    }
    _commit(preparation, manifests)
    return Prepared(preparation.out, manifests, left_out, reused=False, answers=answers, chats=chats)


def _count_answers(
    preparation: Preparation, shards: Mapping[str, Sequence[Shard]], tokenizer: LoadedTokenizer
) -> AnswerEnds:
    """The tokens that end the answers of all chats. Raises BadInput for answers without any, unless the request accepts them."""
    directories = preparation.directories()
    written = [(directories[split], shard) for split, of_split in shards.items() for shard in of_split]
    answers = count_answer_ends(written, tokenizer.tokenizer)
    if answers.unended and preparation.unended_answers == "refuse":
        raise BadInput(
            f"{preparation.out}: {answers.unended:,} of {answers.answers:,} answers do not end with a special token, the first in "
            f"{answers.first}; a model that is trained on them does not stop. Use a chat template that writes an end token behind each "
            "answer, or continue with --unended-answers accept"
        )
    return answers


def _answers(preparation: Preparation, manifests: Mapping[str, Manifest]) -> AnswerEnds | None:
    """The tokens that end the answers of a finished corpus; None for text."""
    if preparation.chat is None or preparation.loaded is None:
        return None
    return _count_answers(
        preparation, {split: manifest.shards for split, manifest in manifests.items()}, preparation.loaded
    )


class _Reading:
    """A pass over the documents of all files; `left_out` and `digests` are complete once it is done."""

    def __init__(self, files: list[InputFile], not_read: list[NotRead], read: Read) -> None:
        self.files, self._read = files, read
        self.left_out = LeftOut()
        self.digests: dict[str, str] = {}
        """Digest of the bytes of each file, by name."""
        for item in not_read:
            self.left_out.add(item)

    def documents(self) -> Iterator[Document]:
        for file in self.files:
            for item in self._read(file):
                if isinstance(item, Document):
                    yield item
                elif isinstance(item, Contents):
                    self.digests[item.file.name] = item.digest
                else:
                    self.left_out.add(item)


def _write_shards(
    preparation: Preparation,
    reading: _Reading,
    tokenizer: LoadedTokenizer,
    fast: FastEncoder | None,
    writers: dict[str, SplitWriter],
    workers: int,
    shown: bool,
) -> None:
    """Read, encode and write every document that is not in a finished shard."""
    pending: deque[tuple[str, int]] = deque()  # (split, number) of each document in the encoder

    def unfinished_documents() -> Iterator[Document]:
        for number, document in enumerate(reading.documents()):
            split = preparation.split_of(document.key)
            if number > writers[split].done_through:
                pending.append((split, number))
                yield document

    dtype = token_dtype(tokenizer.record.vocab_size)

    def encode(documents: Iterator[Document]) -> Generator[EncodedDocument, None, None]:
        if (chat_files := preparation.chat_files()) is not None:
            named = special_tokens(chat_files.config).values()
            return encode_chats(documents, chat_tokenizer(tokenizer.content), named, dtype, workers)
        return encode_documents(documents, tokenizer, dtype, workers, fast)

    with (
        ExitStack() as unfinished,
        progress("preparing", sum(file.size for file in reading.files), shown) as report,
        closing(encode(unfinished_documents())) as encoded_documents,
    ):
        for writer in writers.values():
            unfinished.callback(writer.abandon)  # after success no shard is open
        for encoded in encoded_documents:
            split, number = pending.popleft()
            writers[split].add(encoded, number)
            documents = sum(writer.documents for writer in writers.values())
            report(encoded.document.consumed, documents, sum(writer.tokens for writer in writers.values()))
        for writer in writers.values():
            writer.finish_shard()


def _fast_encoder(
    preparation: Preparation, files: list[InputFile], tokenizer: LoadedTokenizer, workers: int, shown: bool
) -> FastEncoder | None:
    """The fast encoder of texts, if it gives the ids of the tokenizer for a sample of the files; None for chats."""
    if preparation.chat is not None or (preparation.out / ENCODERS_DIFFER).exists():
        return None
    try:
        fast = FastEncoder(tokenizer.content, tokenizer.tokenizer, workers)
        fast.check(text for _, text in sample_texts(files, preparation.text_key, COMPARED_BYTES))
    except EncodersDiffer as difference:
        _tell(difference, shown)
        return None
    return fast


def _tell(difference: EncodersDiffer, shown: bool) -> None:
    if shown:
        sys.stderr.write(f"{difference}; tokenizers encodes all text, several times slower\n")


def _reader(preparation: Preparation, files: list[InputFile]) -> ChatReader | None:
    """The reader of chats or preferences; None for text."""
    chat_files = preparation.chat_files()
    if chat_files is None or preparation.chat is None or preparation.loaded is None:
        return None
    of_records = PreferenceReader if preparation.chat.preferences else ChatReader
    return of_records(chat_files, preparation.chat.roles, preparation.loaded.tokenizer, newest_input_ns(files))


def _read_of(preparation: Preparation, reader: ChatReader | None) -> tuple[Read, ChatCounts | None]:
    """The function that reads the documents of a file, and the counts of chats that it keeps."""
    key = preparation.text_key
    if reader is None:
        return lambda file: read_documents(file, key), None
    messages = None if key == FORM_OF_RECORDS else key
    return lambda file: reader.read(file, messages), reader.counts


def _check_records(files: list[InputFile]) -> None:
    """Raise BadInput if a file that is an input itself, or every file, has no chats."""
    for file in files:
        if not reads_chats(file) and (not file.from_search or len(files) == 1):
            raise BadInput(f"{file.name}: chats are read from {', '.join(CHAT_ENDINGS)} files")


def _check_reusable(preparation: Preparation, manifest: Manifest, files: list[InputFile]) -> None:
    """Raise BadInput if the inputs changed since the preparation, or it left out what is now to be refused."""
    out, choose = preparation.out, "choose another --out, or remove it to prepare again"
    if changed := changed_inputs(preparation.directories()[TRAIN], manifest, files):
        raise BadInput(f"{out}: was prepared by this command, but {changed}; {choose}")
    _check_earlier(preparation, manifest)
    lost = {reason: figures for reason, figures in manifest.not_read.items() if reason not in HARMLESS}
    if preparation.on_bad == "refuse" and (manifest.skipped or lost):
        files_lost = f"; not read: {not_read_words(lost)}" if lost else ""
        bad = f"without {manifest.skipped:,} bad documents{files_lost}"
        raise BadInput(f"{out}: was prepared {bad}, which --on-bad refuse does not accept; {choose}")


def _check_earlier(preparation: Preparation, manifest: Manifest) -> None:
    """Raise BadInput if an earlier release began or ended the documents of the corpus otherwise."""
    if manifest.text_format is not None or preparation.loaded is None or preparation.chat is not None:
        return
    earlier = read_text_format(preparation.directories()[TRAIN])
    name = f"{preparation.out} (prepared by an earlier release)"
    if difference := earlier.difference(preparation.loaded.text, name, "this command"):
        raise BadInput(f"{difference}; choose another --out, or remove it to prepare again")


def _tokenizer(preparation: Preparation, files: list[InputFile], shown: bool) -> LoadedTokenizer:
    """The tokenizer of an earlier attempt or of the request; also written into every split's directory."""
    directories = list(preparation.directories().values())
    earlier = directories[0] / TOKENIZER
    if earlier.is_file():
        content, where = read_tokenizer(directories[0]), str(earlier)
    elif size := parse_train_request(preparation.tokenizer):
        if shown:
            sys.stderr.write(f"training a tokenizer of {size} tokens\n")
        texts = sample_texts(files, preparation.text_key)
        content, where = (
            train_tokenizer((text for key, text in texts if preparation.split_of(key) == TRAIN), size),
            "train",
        )
    else:
        content, where = read_tokenizer(Path(preparation.tokenizer)), preparation.tokenizer
    folder, chat_files = preparation.tokenizer_folder, preparation.chat_files()
    # Sampling values belong to the weights of the folder; the record of the text format has the end tokens.
    left_out = (GENERATION_CONFIG,) if chat_files is None else (GENERATION_CONFIG, TEMPLATE, TOOL_TEMPLATE)
    # The first directory last: a later attempt reads the tokenizer there, so all the others must have it by then.
    for directory in reversed(directories):
        directory.mkdir(exist_ok=True)
        if chat_files is not None:
            chat_files.write(directory)
        if folder is not None:
            copy_chat_files(folder, directory, leave_out=left_out)
        write_durable(directory / TOKENIZER, content)
    template = None if chat_files is None else chat_files.source
    if (loaded := preparation.loaded) is not None and loaded.content == content:
        return loaded
    return parse_tokenizer(content, where, preparation.eos, folder=folder, template=template)


def _commit(preparation: Preparation, manifests: dict[str, Manifest]) -> None:
    # The training split last: once its manifest exists, so do those of the other splits.
    for split in reversed(manifests):
        manifests[split].write(preparation.directories()[split])
    (preparation.out / UNFINISHED).unlink()
    (preparation.out / JOURNAL).unlink()
    (preparation.out / ENCODERS_DIFFER).unlink(missing_ok=True)


def _check_space(out: Path, files: list[InputFile], itemsize: int, writers: dict[str, SplitWriter]) -> None:
    """Raise OutOfResources if the disk is too small.
    Assumes at least two bytes of text per token, and a compression factor of four."""
    text = sum(file.size * (4 if file.format.compression or file.format.layout == "parquet" else 1) for file in files)
    done = sum(sum(shard.bytes.values()) for writer in writers.values() for shard in writer.shards)
    needed, free = max(text * itemsize // 2 - done, 0), shutil.disk_usage(out).free
    if needed > free:
        raise OutOfResources(f"{out}: about {needed:,} bytes are needed, {free:,} are free on its disk")


def _refuse_bad(files: list[InputFile], not_read: list[NotRead], read: Read) -> None:
    reading = _Reading(files, not_read, read)
    for _ in reading.documents():
        pass
    if lines := reading.left_out.lines():
        raise BadInput("\n".join(["--on-bad refuse (`--on-bad skip` leaves these out):", *lines]))


def _no_documents(preparation: Preparation, split: str, left_out: LeftOut) -> str:
    lines = left_out.lines()
    if preparation.held_out and not lines:
        return f"{preparation.out}: held-out fraction {preparation.held_out:g} leaves no document for {split}; choose another fraction"
    return "\n".join([f"{', '.join(preparation.inputs)}: no usable document for {split}", *lines])
