"""Documents to token ids, many at a time, in order.

`tokenizers` releases Python's lock while it works, so plain threads use every core; each thread encodes one batch
alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from meshwright.data.corpus import Document
from meshwright.data.tokenizer import LoadedTokenizer

BATCH_CHARACTERS = 1 << 18
LONGEST_PIECE = 1 << 18


@dataclass(frozen=True)
class EncodedDocument:
    """A document with its token ids, the end-of-document token last; `text_bytes` is its length in utf-8."""

    document: Document
    tokens: np.ndarray
    text_bytes: int


@dataclass(frozen=True)
class Piece:
    """Part of a document that is encoded at one time."""

    document: Document
    text: str
    last: bool


def encode_documents(
    documents: Iterable[Document], tokenizer: LoadedTokenizer, dtype: str, workers: int
) -> Generator[EncodedDocument, None, None]:
    """Encode `documents` with `workers` threads; results come in the order of the documents.

    At most two batches for each worker are held, so memory grows with the longest document and not with the corpus.
    """
    ids: list[np.ndarray] = []
    for piece, tokens in _encode_pieces(_pieces_of(documents, tokenizer), tokenizer, dtype, workers):
        ids.append(tokens)
        if piece.last:
            ids.append(np.array([tokenizer.record.eos], dtype=dtype))
            yield EncodedDocument(piece.document, np.concatenate(ids), len(piece.document.text.encode("utf-8")))
            ids = []


def token_dtype(vocab_size: int) -> str:
    """The narrowest dtype that Megatron's readers know for a vocabulary."""
    return "uint16" if vocab_size < 65536 else "int32"


def _encode_pieces(
    pieces: Iterable[Piece], tokenizer: LoadedTokenizer, dtype: str, workers: int
) -> Iterator[tuple[Piece, np.ndarray]]:
    waiting: deque[Future[list[tuple[Piece, np.ndarray]]]] = deque()
    with _one_thread_for_each_call(), ThreadPoolExecutor(workers, "encode") as pool:
        for batch in _batches(pieces):
            waiting.append(pool.submit(_encode_batch, batch, tokenizer, dtype))
            if len(waiting) >= 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _encode_batch(batch: list[Piece], tokenizer: LoadedTokenizer, dtype: str) -> list[tuple[Piece, np.ndarray]]:
    encodings = tokenizer.tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    return [(piece, np.array(encoding.ids, dtype=dtype)) for piece, encoding in zip(batch, encodings, strict=True)]


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces_of(documents: Iterable[Document], tokenizer: LoadedTokenizer) -> Iterator[Piece]:
    """Each document whole, or cut at line ends into pieces of bounded length that encode to the same tokens as the
    whole.

    One huge file would otherwise occupy one thread, and need some hundred bytes of memory for each token. A cut is made
    only where the tokenizer itself shows that it does not matter: the lines around it give the same tokens together and
    apart.
    """
    for document in documents:
        text, start = document.text, 0
        while len(text) - start > LONGEST_PIECE:
            cut = _harmless_cut(text, start + LONGEST_PIECE, tokenizer)
            if cut is None:
                break
            yield Piece(document, text[start:cut], last=False)
            start = cut
        yield Piece(document, text[start:], last=True)


def _harmless_cut(text: str, near: int, tokenizer: LoadedTokenizer) -> int | None:
    """The first harmless place at or after `near` just before a line end; None when the next 1,000 line ends offer none.

    Before, not after: the rules of GPT-2 and its kin join a line end to the indentation that follows it.
    """
    for _ in range(1000):
        cut = text.find("\n", near)
        if cut <= 0:
            return None
        before = text[max(text.rfind("\n", 0, cut), cut - 1000, 0) : cut]
        after = text[cut : min(text.find("\n", cut + 1) + 1 or len(text), cut + 1000)]
        together, left, right = tokenizer.tokenizer.encode_batch_fast(
            [before + after, before, after], add_special_tokens=False
        )
        if together.ids == left.ids + right.ids:
            return cut
        near = cut + 1
    return None


@contextmanager
def _one_thread_for_each_call() -> Iterator[None]:
    """`tokenizers` reads this variable at every call; it is put back afterwards."""
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
