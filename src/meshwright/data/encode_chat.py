"""Encodes chats to token ids, with the weight of each token in the loss."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from meshwright.data.corpus import CorpusDocument
from meshwright.data.encode import EncodedDocument, encode_in_order
from meshwright.data.spelled_tokens import ChatText, Span, SpelledTokens
from meshwright.spec.errors import BadInput


def chat_tokenizer(content: bytes) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` for texts that a template has written: special tokens in them become tokens."""
    tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_chats(
    documents: Iterable[CorpusDocument], tokenizer: Tokenizer, named: Iterable[str], dtype: str, workers: int
) -> Generator[EncodedDocument, None, None]:
    """Encode chats (documents with spans) with `workers` threads. Results are in the order of the documents.

    Special tokens that a message spells are encoded as text; `named` is passed to `SpelledTokens`. No end-of-text token is added, because
    the template writes the end tokens. Raises BadInput if a span does not consist of whole tokens.
    """
    spelled = SpelledTokens(tokenizer, named)
    encode = partial(_encode_batch, tokenizer=tokenizer, spelled=spelled, dtype=dtype)
    return encode_in_order(documents, encode, workers)


def _encode_batch(
    batch: list[CorpusDocument], tokenizer: Tokenizer, spelled: SpelledTokens, dtype: str
) -> list[EncodedDocument]:
    return [_encode(document, tokenizer, spelled, dtype) for document in batch]


def _encode(document: CorpusDocument, tokenizer: Tokenizer, spelled: SpelledTokens, dtype: str) -> EncodedDocument:
    assert document.spans is not None
    text = document.text
    bounds = [0, *(bound for span in document.spans for bound in span), len(text)]

    def encoded(ranges: Sequence[Span]) -> list[list[int]]:
        if document.spelled is not None:
            return [spelled.encode(ChatText(text, document.spelled), start, stop) for start, stop in ranges]
        texts = [text[start:stop] for start, stop in ranges]
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    decode = partial(tokenizer.decode, skip_special_tokens=False)
    ids, ends = _tokens_and_ends(bounds, encoded, decode, document.where)
    of_spans = document.span_weights
    weights = np.zeros(len(ids), dtype=bool if of_spans is None else np.float32)
    for number, (start, stop) in enumerate(zip(ends[1:-1:2], ends[2:-1:2], strict=True)):
        weights[start:stop] = 1 if of_spans is None else of_spans[number]
    return EncodedDocument(document, np.array(ids, dtype=dtype), len(text.encode("utf-8")), weights)


def _tokens_and_ends(
    bounds: Sequence[int],
    encoded: Callable[[Sequence[Span]], list[list[int]]],
    decode: Callable[[list[int]], str],
    where: str,
) -> tuple[list[int], list[int]]:
    """The tokens of a text, and the number of tokens before each of `bounds`, which are positions in the text, ascending.

    `encoded` returns the tokens of ranges of the text. `decode` returns the text of tokens.

    The text is encoded as a whole if every prefix up to a bound has the same tokens as when it is encoded alone. This is how a server
    encodes the prompt of an answer. Otherwise each part between two bounds is encoded separately. Raises BadInput if the separate parts do
    not decode to the text.
    """
    whole, *by_part = encoded([(0, bounds[-1]), *pairwise(bounds)])
    joined = [id for part in by_part for id in part]
    ends = [0, *np.cumsum([len(part) for part in by_part]).tolist()]
    if joined == whole:
        return whole, ends
    beginnings = encoded([(0, bound) for bound in bounds])
    if all(whole[: len(beginning)] == beginning for beginning in beginnings):
        return whole, [len(beginning) for beginning in beginnings]
    if decode(joined) != decode(whole):
        raise BadInput(f"{where}: a token of this tokenizer lies across the beginning or end of the text to train on")
    return joined, ends
