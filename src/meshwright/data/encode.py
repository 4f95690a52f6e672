"""Encodes documents to token ids with several threads, in order.

`gigatoken` and `tokenizers` release Python's lock while they work, so threads can use all cores. Each thread encodes one batch at a time.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np

from meshwright.data.corpus import CorpusDocument
from meshwright.data.fast_encoder import FastEncoder
from meshwright.data.tokenizer import LoadedTokenizer

BATCH_CHARACTERS = 1 << 18
"""Characters that a thread encodes in one call of `tokenizers`, which needs some hundred bytes of memory for each character."""
FAST_BATCH_CHARACTERS = 1 << 20
"""Characters that a thread encodes in one call of `gigatoken`. The overhead of a call is as large as encoding some 50 kB of text."""
LONGEST_PIECE = 1 << 18
CONTEXT = 1000
CUT_ATTEMPTS = 100
MARKS = ("\n", ".", "|")
"""One of these characters is put before a part of a text if the text before that part is not known to the encoder."""
LINE_END = re.compile(r"(?<!\n)(?=\n)")
WORD_END = re.compile(r"(?<=\w)(?=\W)|(?= )")


@dataclass(frozen=True)
class EncodedDocument:
    """A document with its token ids: first the ids that begin each text, last the end-of-document token.

    `text_bytes` is the length of its text in UTF-8.

    `weights` are the weights of the tokens in the loss: bool if all are 0 or 1, else float32; None if all are 1.
    """

    document: CorpusDocument
    tokens: np.ndarray
    text_bytes: int
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class EncodePiece:
    """A part of a document that is encoded in one call. `context` is the text before it that can affect its first tokens."""

    document: CorpusDocument
    text: str
    context: str
    last: bool


Item = TypeVar("Item", EncodePiece, CorpusDocument)
"""Type of items that have a `text` to encode."""
Result = TypeVar("Result")


def encode_documents(
    documents: Iterable[CorpusDocument],
    tokenizer: LoadedTokenizer,
    dtype: str,
    workers: int,
    fast: FastEncoder | None = None,
) -> Generator[EncodedDocument, None, None]:
    """Encode `documents` with `workers` threads, with the encoder `fast` if it is given. Results are in the order of the documents.

    Raises EncodersDiffer if `fast` gives other ids than the tokenizer. At most two batches for each worker are in memory. For a long
    document, only its text and its tokens are in memory in addition.
    """
    begin = [np.array(tokenizer.text.begin_ids, dtype=dtype)] if tokenizer.text.begin else []
    ids = list(begin)
    encode = partial(_encode_batch, tokenizer=tokenizer, fast=fast, dtype=dtype)
    characters = BATCH_CHARACTERS if fast is None else FAST_BATCH_CHARACTERS
    for piece, tokens in encode_in_order(_pieces_of(documents, tokenizer, fast), encode, workers, characters):
        ids.append(tokens)
        if piece.last:
            ids.append(np.array([tokenizer.record.eos], dtype=dtype))
            yield EncodedDocument(piece.document, np.concatenate(ids), len(piece.document.text.encode("utf-8")))
            ids = list(begin)


def token_dtype(vocab_size: int) -> str:
    """The smallest type for token ids of a vocabulary that Megatron's readers support."""
    return "uint16" if vocab_size < 65536 else "int32"


def encode_in_order(
    items: Iterable[Item],
    encode: Callable[[list[Item]], list[Result]],
    workers: int,
    characters: int = BATCH_CHARACTERS,
) -> Generator[Result, None, None]:
    """Encode batches of `items` with about `characters` characters each, in `workers` threads. Results are in the order of the items."""
    pending: deque[Future[list[Result]]] = deque()
    with one_thread_for_each_call(), ThreadPoolExecutor(workers, "encode") as pool:
        for batch in _batches(items, characters):
            pending.append(pool.submit(encode, batch))
            if len(pending) >= 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


def _batches(items: Iterable[Item], characters: int) -> Iterator[list[Item]]:
    """Consecutive items with at least `characters` characters in total. The last batch may have less."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.text)
        if size >= characters:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _encode_batch(
    batch: list[EncodePiece], tokenizer: LoadedTokenizer, fast: FastEncoder | None, dtype: str
) -> list[tuple[EncodePiece, np.ndarray]]:
    def ids_of(texts: list[str]) -> list[np.ndarray]:
        if fast is not None:
            return [ids.astype(dtype) for ids in fast.encode(texts)]
        encodings = tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=dtype) for encoding in encodings]

    contexts = list(filter(None, (piece.context for piece in batch)))
    ids = ids_of([*(piece.context + piece.text for piece in batch), *contexts])
    lengths = map(len, ids[len(batch) :])
    starts = [next(lengths) if piece.context else 0 for piece in batch]
    return [(piece, tokens[start:]) for piece, tokens, start in zip(batch, ids[: len(batch)], starts, strict=True)]


def _pieces_of(
    documents: Iterable[CorpusDocument], tokenizer: LoadedTokenizer, fast: FastEncoder | None = None
) -> Iterator[EncodePiece]:
    """Cut each document into parts of limited length. The tokens of the parts, one after another, are the tokens of the whole document.

    The encoder needs some hundred bytes of memory for each character, and uses one thread for each part.
    """
    for document in documents:
        text = document.text
        start = 0
        context = ""
        while len(text) - start > LONGEST_PIECE:
            cut, context_after = _next_cut(text, start + LONGEST_PIECE, tokenizer, fast)
            yield EncodePiece(document, text[start:cut], context, last=False)
            start = cut
            context = context_after
        yield EncodePiece(document, text[start:], context, last=True)


def _next_cut(text: str, near: int, tokenizer: LoadedTokenizer, fast: FastEncoder | None) -> tuple[int, str]:
    """Where to cut a text: (position at or after `near`, context for the part that follows).

    The cut is before a line end or after a word, if the tokenizer confirms that no token crosses it. It is before the line end because
    tokenizers such as GPT-2's join a line end with the indentation after it. If there is no such position, the text is cut at `near`, and
    the context is a character after which tokenizers do not add a space.
    """
    end = near + LONGEST_PIECE // 4
    for pattern in (LINE_END, WORD_END):
        for match in islice(pattern.finditer(text, near, end), CUT_ATTEMPTS):
            cut = match.start()
            before = text[max(cut - CONTEXT, 0) : cut]
            after = text[cut : cut + CONTEXT]
            if _keeps_apart(before, after, tokenizer, fast):
                return cut, before
    after = text[near : near + CONTEXT]
    return near, next((mark for mark in MARKS if _keeps_apart(mark, after, tokenizer, fast)), "")


def _keeps_apart(before: str, after: str, tokenizer: LoadedTokenizer, fast: FastEncoder | None) -> bool:
    """Whether no token crosses the border: the tokens of `before` + `after` begin with the tokens of `before`."""
    if fast is not None:
        both, first = fast.ids([before + after, before])
        return np.array_equal(both[: len(first)], first)
    together, alone = tokenizer.tokenizer.encode_batch_fast([before + after, before], add_special_tokens=False)
    return together.ids[: len(alone.ids)] == alone.ids


@contextmanager
def one_thread_for_each_call() -> Iterator[None]:
    """Within a `with` block, disable the threads of `tokenizers`, by an environment variable that is restored afterwards."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
