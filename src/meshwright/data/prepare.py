"""`meshwright data prepare`: converts text to token shards, in parallel. After a kill it continues, and the result has identical bytes.

OUT becomes one prepared directory or, with held-out documents, contains two: OUT/train and OUT/held_out. During the work, OUT also has
`unfinished.json` (the request) and `journal.jsonl` (the finished shards). Only a complete directory has a manifest.
"""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from meshwright.data.answer_ends import AnswerEnds, count_answer_ends
from meshwright.data.chat import CHAT_ENDINGS, ChatCounts, ChatReader, reads_chats
from meshwright.data.chat_template import GENERATION_CONFIG, TEMPLATE, TOOL_TEMPLATE, copy_chat_files, special_tokens
from meshwright.data.chunk_stream import ChunkStream, Numbered, UnitPlace
from meshwright.data.cleaning import NO_CLEANING, Cleaner, Cleaning
from meshwright.data.corpus import CorpusDocument, read_documents
from meshwright.data.disk_space import check_space, full_disk_named, prepared_bytes
from meshwright.data.encode import EncodedDocument, encode_documents, token_dtype
from meshwright.data.encode_chat import chat_tokenizer, encode_chats
from meshwright.data.fast_encoder import EncodersDiffer, FastEncoder, return_memory
from meshwright.data.input_record import changed_inputs, input_record, write_input_record
from meshwright.data.inputs import HARMLESS, InputFile, NotRead, check_text_key, list_inputs
from meshwright.data.jobs import JOB, EncodeJob
from meshwright.data.left_out import LeftOut, not_read_words
from meshwright.data.local_workers import run_locally
from meshwright.data.manifest import TOKENIZER, TRAIN, UNFINISHED, Manifest, PreferenceCounts, Shard
from meshwright.data.preferences import PreferenceReader, count_preferences
from meshwright.data.progress import progress
from meshwright.data.ray_workers import check_ray, run_on_ray
from meshwright.data.reading import DocumentReading, Read
from meshwright.data.removed import Removed, removed_words
from meshwright.data.request import (
    ENCODERS_DIFFER,
    SHARD_TOKENS,
    UNITS,
    ChatRequest,
    Preparation,
    begin,
    check_same,
    finished_manifests,
    forget,
    forget_shards,
    newest_input_ns,
)
from meshwright.data.shards import JOURNAL, SplitWriter, recover_journal
from meshwright.data.text_format import TextFormat
from meshwright.data.tokenizer import (
    LoadedTokenizer,
    parse_tokenizer,
    parse_train_request,
    read_tokenizer,
    sample_texts,
    train_tokenizer,
)
from meshwright.data.units import UNIT_BYTES, divide, text_bytes
from meshwright.durable.lock import locked
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources
from meshwright.spec.host_limits import usable_cores

Encoder = Literal["auto", "tokenizers"]
NO_PREFERENCES: Mapping[str, PreferenceCounts] = MappingProxyType({})

COMPARED_BYTES = 1 << 20
"""Size of the sample of text, spread over the files, whose ids are compared between both encoders before the work begins.

It takes some 0.4 s.
"""
READ_HERE = 2 * UNIT_BYTES
"""Up to this much text is read and encoded in this process. More text is divided into units for several processes."""
FORM_OF_RECORDS = "messages"
"""The key of chats in a request that names no key. Then the form of the records decides."""


@dataclass(frozen=True)
class PreparedCorpus:
    """The result of `prepare`. If all output existed already (`reused`), `left_out` is empty."""

    out: Path
    manifests: dict[str, Manifest]
    left_out: LeftOut
    reused: bool
    answers: AnswerEnds | None = None
    """For chats, the tokens that end the answers; None for text."""
    chats: ChatCounts | None = None
    """The chats that were read; None for text, and if all output existed already."""
    removed: Removed = field(default_factory=Removed)
    """What cleaning removed; empty if all output existed already."""


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
    cleaning: Cleaning = NO_CLEANING,
    workers: int | None = None,
    ray: str | None = None,
    encoder: Encoder = "auto",
    shown: bool = False,
    wait: bool = False,
) -> PreparedCorpus:
    """Convert `inputs` to token shards under `out`.

    A second call with the same arguments continues after a kill; if the work is done, it does nothing.

    - `tokenizer`: a `tokenizer.json`, a folder with one, or `train:SIZE`.
    - `held_out`: fraction of documents that are kept apart for validation.
    - `text_key`: key of the text in records, by default `text`; with `chat`, the key that fits the form of the records.
    - `unended_answers`: what to do if answers of chats have no end token.
    - `cleaning`: filters, evaluations and duplicates to remove.
    - `workers`: number of processes or threads that encode, by default one for each core. With `ray`, tasks on the Ray cluster at this
      address.
    - `encoder`: `tokenizers` to use only this library.
    - `shown`: draw progress on stderr.
    - `wait`: wait if another process is writing to `out`.

    Raises BadInput if inputs or tokenizer cannot be used, or if `out` has other contents; OutOfResources if the disk is too small. If a
    request is refused before its first shard is finished, nothing remains in `out`.
    """
    key = text_key or ("text" if chat is None else FORM_OF_RECORDS)
    preparation = Preparation(
        tuple(inputs), tokenizer, out, held_out, key, on_bad, eos, shard_tokens, chat, unended_answers, cleaning
    )
    if ray is not None:
        check_ray(chat is not None)
    preparation.check()
    files, not_read = list_inputs(inputs, exclude=out)
    check_text_key(text_key, files)
    if chat is not None:
        _check_records(files)
    request = preparation.describe(files)
    with locked(out, wait):
        done = finished_manifests(preparation)
        if done:
            check_same(out, done[TRAIN].request, request)
            _check_reusable(preparation, done[TRAIN], files)
            _forget_work(out)
            return PreparedCorpus(out, done, LeftOut(), reused=True, answers=_answers(preparation, done))
        begin(preparation, files, request)
        try:
            how = _How(workers or usable_cores(), ray, encoder, shown)
            with full_disk_named(out, prepared_bytes(files, preparation.vocab_size)):
                return _run(preparation, files, not_read, request, how)
        except MeshwrightError as error:
            # Keep finished units if the same command could continue with more memory or disk space.
            goes_on = isinstance(error, OutOfResources) and any((out / UNITS).glob("unit-*.json"))
            if not ((out / JOURNAL).exists() or goes_on):
                forget(out)
            raise


@dataclass(frozen=True)
class _How:
    """Settings that do not change the corpus: number of processes or threads, or a Ray cluster; the encoder; whether to draw progress."""

    workers: int
    ray: str | None
    encoder: Encoder
    shown: bool


def _run(
    preparation: Preparation, files: list[InputFile], not_read: list[NotRead], request: dict[str, Any], how: _How
) -> PreparedCorpus:
    cleaner = Cleaner(preparation.cleaning)
    if preparation.on_bad == "refuse":
        refuse_bad(files, not_read, _read_of(preparation, _reader(preparation, files))[0])
    reader = _reader(preparation, files)
    read, chats = _read_of(preparation, reader)
    tokenizer = tokenizer_of(preparation, files, how.shown)
    fast = fast_encoder(preparation, files, tokenizer, how.workers, how.encoder, how.shown)
    writers = split_writers(preparation, tokenizer)
    finished = sum(sum(shard.bytes.values()) for writer in writers.values() for shard in writer.shards)
    check_space(preparation.out, prepared_bytes(files, tokenizer.record.vocab_size) - finished)
    source: DocumentReading | ChunkStream
    if _in_units(preparation, files, how):
        source = _stream_of_units(preparation, files, not_read, tokenizer, fast is not None, how)
        fast = None
        return_memory()
        documents = source.documents(preparation.split_of, writers)
    else:
        source = DocumentReading(files, not_read, read, cleaner)
        documents = _encoded_here(preparation, source, tokenizer, fast, writers, how.workers)
    try:
        write_shards(documents, writers, sum(file.size for file in files), how.shown)
    except EncodersDiffer as difference:
        tell(difference, how.shown)
        forget_shards(preparation.out)
        (preparation.out / ENCODERS_DIFFER).touch()
        return _run(preparation, files, not_read, request, how)
    left_out = source.left_out
    removed = source.removed
    check_splits(preparation, writers, left_out, removed)
    text = tokenizer.text
    answers = None
    if preparation.chat is not None:
        shards = {split: writer.shards for split, writer in writers.items()}
        answers = _count_answers(preparation, shards, tokenizer)
        text = text.with_answer_ends(answers.counts)
    preferences = {}
    if isinstance(reader, PreferenceReader) and reader.kind is not None:
        for split, directory in preparation.directories().items():
            preferences[split] = count_preferences(reader.kind, ((directory, shard) for shard in writers[split].shards))
    manifests = write_corpus(
        preparation,
        writers,
        tokenizer,
        text,
        request,
        input_record(files, source.digests),
        left_out,
        removed,
        answers,
        preferences,
    )
    return PreparedCorpus(preparation.out, manifests, left_out, False, answers, chats, removed)


def _in_units(preparation: Preparation, files: Sequence[InputFile], how: _How) -> bool:
    """Whether to divide the work: if there is much text, if several hosts do it, or if duplicates are removed (known only at the end)."""
    if preparation.chat is not None:
        return False
    much = sum(map(text_bytes, files)) > READ_HERE or (preparation.out / UNITS).exists()
    return much or how.ray is not None or preparation.cleaning.duplicates is not None


def _stream_of_units(
    preparation: Preparation,
    files: Sequence[InputFile],
    not_read: list[NotRead],
    tokenizer: LoadedTokenizer,
    fast: bool,
    how: _How,
) -> ChunkStream:
    """The documents of the files, which other processes read and encode."""
    job = job_of(preparation, files, tokenizer, fast)
    stream = ChunkStream(
        [UnitPlace(job.folder, number) for number in range(len(job.units))],
        job.dtype,
        tokenizer.tokenizer,
        job.folder,
        run=lambda units: run_units(job.folder, units, how.workers, how.ray),
        duplicates=preparation.cleaning.duplicates is not None,
        similarity=preparation.cleaning.similarity,
        total_bytes=sum(file.size for file in files),
        shown=how.shown,
    )
    stream.digests.update(job.digests)
    for item in not_read:
        stream.left_out.add(item)
    return stream


def job_of(preparation: Preparation, files: Sequence[InputFile], tokenizer: LoadedTokenizer, fast: bool) -> EncodeJob:
    """The job of an earlier attempt, if it used the same encoder; otherwise a new job."""
    folder = preparation.out / UNITS
    if (folder / JOB).is_file():
        job = EncodeJob.read(folder)
        if job.fast == fast:
            return job
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    units, digests = divide(files, UNIT_BYTES)
    job = EncodeJob(folder, tokenizer, preparation.text_key, preparation.cleaning, fast, tuple(units), digests)
    job.write()
    return job


def run_units(folder: Path, units: Sequence[int], workers: int, ray: str | None) -> Iterator[int]:
    """Do these units of the job in `folder`, in processes of this host or on a Ray cluster. Yields the number of each finished unit."""
    if not units:
        return iter(())
    if ray is not None:
        return run_on_ray(folder, units, ray)
    return run_locally(folder, units, min(workers, len(units)))


def split_writers(preparation: Preparation, tokenizer: LoadedTokenizer) -> dict[str, SplitWriter]:
    """A writer for the shards of each split. It continues after the shards that are finished."""
    dtype = token_dtype(tokenizer.record.vocab_size)
    journal = recover_journal(preparation.out)
    return {
        split: SplitWriter(preparation.out, split, directory, dtype, preparation.shard_tokens, journal)
        for split, directory in preparation.directories().items()
    }


def check_splits(
    preparation: Preparation, writers: Mapping[str, SplitWriter], left_out: LeftOut, removed: Removed
) -> None:
    """Raise BadInput if a split has no document."""
    for split, writer in writers.items():
        if not writer.shards:
            # Nothing is worth keeping here. Without a journal, a corrected command can start from the beginning.
            (preparation.out / JOURNAL).unlink(missing_ok=True)
            raise BadInput(_no_documents(preparation, split, left_out, removed))


def write_corpus(
    preparation: Preparation,
    writers: Mapping[str, SplitWriter],
    tokenizer: LoadedTokenizer,
    text: TextFormat,
    request: dict[str, Any],
    record: bytes,
    left_out: LeftOut,
    removed: Removed,
    answers: AnswerEnds | None = None,
    preferences: Mapping[str, PreferenceCounts] = NO_PREFERENCES,
) -> dict[str, Manifest]:
    """Write the other files next to the finished shards, and the manifests last."""
    figures = {
        reason: {"files": each["files"], "bytes": each["bytes"]} for reason, each in sorted(left_out.not_read.items())
    }
    records = {split: write_input_record(directory, record) for split, directory in preparation.directories().items()}
    if preparation.cleaning.wanted:
        removed.write(preparation.out)
    manifests = {
        split: Manifest(
            tokenizer.record,
            token_dtype(tokenizer.record.vocab_size),
            tuple(writer.shards),
            left_out.bad.count,
            request,
            records[split],
            figures,
            text_format=text,
            unended_answers=0 if answers is None else answers.unended,
            trained_tokens=None if answers is None else answers.trained[preparation.directories()[split]],
            preferences=preferences.get(split),
            removed=removed.counts(),
        )
        for split, writer in writers.items()
    }
    _commit(preparation, manifests)
    return manifests


def _count_answers(
    preparation: Preparation, shards: Mapping[str, Sequence[Shard]], tokenizer: LoadedTokenizer
) -> AnswerEnds:
    """Count the tokens that end the answers of all chats. Raises BadInput if answers have no end, unless the request accepts this."""
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


def _encoded_here(
    preparation: Preparation,
    reading: DocumentReading,
    tokenizer: LoadedTokenizer,
    fast: FastEncoder | None,
    writers: Mapping[str, SplitWriter],
    workers: int,
) -> Generator[Numbered, None, None]:
    """Read and encode every document that is not in a finished shard yet, in threads of this process."""
    pending: deque[tuple[str, int]] = deque()  # (split, number) of each document in the encoder

    def unfinished_documents() -> Iterator[CorpusDocument]:
        for number, document in enumerate(reading.documents()):
            split = preparation.split_of(document.key)
            if number > writers[split].done_through:
                pending.append((split, number))
                yield document

    dtype = token_dtype(tokenizer.record.vocab_size)

    def encode(documents: Iterator[CorpusDocument]) -> Generator[EncodedDocument, None, None]:
        if (chat_files := preparation.chat_files()) is not None:
            named = special_tokens(chat_files.config).values()
            return encode_chats(documents, chat_tokenizer(tokenizer.content), named, dtype, workers)
        return encode_documents(documents, tokenizer, dtype, workers, fast)

    with closing(encode(unfinished_documents())) as encoded_documents:
        for encoded in encoded_documents:
            yield *pending.popleft(), encoded


def write_shards(
    documents: Iterator[Numbered], writers: Mapping[str, SplitWriter], total_bytes: int, shown: bool
) -> None:
    """Write every document into the shards of its split, and finish them."""
    with (
        ExitStack() as unfinished,
        progress("preparing", total_bytes, shown) as report,
    ):
        for writer in writers.values():
            unfinished.callback(writer.abandon)  # has no effect after success, when no shard is open
        for split, number, encoded in documents:
            writers[split].add(encoded, number)
            written = sum(writer.documents for writer in writers.values())
            report(encoded.document.consumed, written, sum(writer.tokens for writer in writers.values()))
        for writer in writers.values():
            writer.finish_shard()


def fast_encoder(
    preparation: Preparation,
    files: list[InputFile],
    tokenizer: LoadedTokenizer,
    workers: int,
    encoder: Encoder,
    shown: bool,
) -> FastEncoder | None:
    """The fast encoder for texts, if it gives the ids of the tokenizer for a sample of the files; else None. None for chats."""
    differs = (preparation.out / ENCODERS_DIFFER).exists()
    if preparation.chat is not None or encoder == "tokenizers" or differs:
        return None
    try:
        fast = FastEncoder(tokenizer.content, tokenizer.tokenizer, workers)
        fast.check(text for _, text in sample_texts(files, preparation.text_key, COMPARED_BYTES))
    except EncodersDiffer as difference:
        tell(difference, shown)
        return None
    return fast


def tell(difference: EncodersDiffer, shown: bool) -> None:
    """Tell the user why `tokenizers` encodes all text."""
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
    """The function that reads the documents of a file, and the counts of chats that it updates."""
    key = preparation.text_key
    if reader is None:
        return lambda file: read_documents(file, key), None
    messages = None if key == FORM_OF_RECORDS else key
    return lambda file: reader.read(file, messages), reader.counts


def _check_records(files: list[InputFile]) -> None:
    """Raise BadInput if a file that was given as an input has no chats, or if no file has any."""
    for file in files:
        if not reads_chats(file) and (not file.from_search or len(files) == 1):
            raise BadInput(f"{file.name}: chats are read from {', '.join(CHAT_ENDINGS)} files")


def _check_reusable(preparation: Preparation, manifest: Manifest, files: list[InputFile]) -> None:
    """Raise BadInput if inputs have changed since the preparation, or if it left out something that must now be refused."""
    out = preparation.out
    choose = "choose another --out, or remove it to prepare again"
    if changed := changed_inputs(preparation.directories()[TRAIN], manifest, files):
        raise BadInput(f"{out}: was prepared by this command, but {changed}; {choose}")
    lost = {reason: figures for reason, figures in manifest.not_read.items() if reason not in HARMLESS}
    if preparation.on_bad == "refuse" and (manifest.skipped or lost):
        files_lost = f"; not read: {not_read_words(lost)}" if lost else ""
        bad = f"without {manifest.skipped:,} bad documents{files_lost}"
        raise BadInput(f"{out}: was prepared {bad}, which --on-bad refuse does not accept; {choose}")


def tokenizer_of(preparation: Preparation, files: list[InputFile], shown: bool) -> LoadedTokenizer:
    """The tokenizer of an earlier attempt, or else of the request. It is also written into the directory of every split."""
    directories = list(preparation.directories().values())
    earlier = directories[0] / TOKENIZER
    if earlier.is_file():
        content = read_tokenizer(directories[0])
        where = str(earlier)
    elif size := parse_train_request(preparation.tokenizer):
        if shown:
            sys.stderr.write(f"training a tokenizer of {size} tokens\n")
        texts = sample_texts(files, preparation.text_key)
        content = train_tokenizer((text for key, text in texts if preparation.split_of(key) == TRAIN), size)
        where = "train"
    else:
        content = read_tokenizer(Path(preparation.tokenizer))
        where = preparation.tokenizer
    folder = preparation.tokenizer_folder
    chat_files = preparation.chat_files()
    # Values for sampling belong to the folder's weights, so they are left out. The record of the text format has the end tokens.
    left_out = (GENERATION_CONFIG,) if chat_files is None else (GENERATION_CONFIG, TEMPLATE, TOOL_TEMPLATE)
    # Write the first directory last. A later attempt reads the tokenizer there, so by then all other directories must have it.
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
    # Write the manifest of the training split last: once it exists, those of the other splits exist too.
    for split in reversed(manifests):
        manifests[split].write(preparation.directories()[split])
    (preparation.out / UNFINISHED).unlink()
    _forget_work(preparation.out)


def _forget_work(out: Path) -> None:
    """Remove the files that only an unfinished preparation needs."""
    for name in (JOURNAL, ENCODERS_DIFFER):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / UNITS, ignore_errors=True)


def refuse_bad(files: Sequence[InputFile], not_read: list[NotRead], read: Read) -> None:
    """Raise BadInput if any document cannot be used."""
    reading = DocumentReading(files, not_read, read)
    for _ in reading.documents():
        pass
    if lines := reading.left_out.lines():
        raise BadInput("\n".join(["--on-bad refuse (`--on-bad skip` leaves these out):", *lines]))


def _no_documents(preparation: Preparation, split: str, left_out: LeftOut, removed: Removed) -> str:
    lines = left_out.lines() + ([f"removed: {removed_words(removed.counts())}"] if removed.reasons else [])
    if preparation.held_out and not lines:
        return f"{preparation.out}: held-out fraction {preparation.held_out:g} leaves no document for {split}; choose another fraction"
    return "\n".join([f"{', '.join(preparation.inputs)}: no usable document for {split}", *lines])
