from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from meshwright.data import encode
from meshwright.data.corpus import Document
from meshwright.data.encode import encode_documents
from meshwright.data.tokenizer import LoadedTokenizer, load_tokenizer, parse_tokenizer, train_tokenizer
from tests.data.conftest import story


def document(text: str) -> Document:
    return Document("file", 1, "key", text, len(text))


def expected(tokenizer: LoadedTokenizer, text: str) -> list[int]:
    return [*tokenizer.tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.record.eos]


LONG = "\n".join(story(i) + "\n" * (i % 4) + "  indented\n" for i in range(60)) + "\n"


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_come_out_in_order_each_with_its_end(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 500)
    tokenizer = load_tokenizer(tokenizer_file)
    texts = [story(i) for i in range(40)] + ["ü"]
    encoded = list(encode_documents(map(document, texts), tokenizer, "uint16", workers))
    assert [e.tokens.tolist() for e in encoded] == [expected(tokenizer, text) for text in texts]
    assert [e.text_bytes for e in encoded] == [len(text.encode()) for text in texts]
    assert all(e.tokens.dtype == np.uint16 for e in encoded)


def test_a_long_document_is_cut_without_changing_a_token(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    pieces = list(encode._pieces_of([document(LONG)], tokenizer))
    assert len(pieces) > 10 and "".join(piece.text for piece in pieces) == LONG
    (encoded,) = encode_documents([document(LONG)], tokenizer, "uint16", workers=2)
    assert encoded.tokens.tolist() == expected(tokenizer, LONG)


def test_long_stretches_of_indented_lines_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a tokenizer that knows code, a line end and the indentation behind it are one token: cuts go before it."""
    code = "def f():\n" + "".join(f"    the_fox = {i}\n\n        jumps(over)\n" for i in range(200))
    tokenizer = parse_tokenizer(train_tokenizer([code], 300), "x")
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    pieces = [len(piece.text) for piece in encode._pieces_of([document(code)], tokenizer)]
    assert max(pieces) < 400
    (encoded,) = encode_documents([document(code)], tokenizer, "uint16", workers=2)
    assert encoded.tokens.tolist() == expected(tokenizer, code)


def test_a_tokenizer_to_which_a_cut_matters_gets_the_document_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece-like: a mark is put before every text, so pieces would each get one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator([LONG], trainers.BpeTrainer(vocab_size=200, special_tokens=["</s>"]))
    loaded = parse_tokenizer(tokenizer.to_str().encode(), "x")
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    (encoded,) = encode_documents([document(LONG)], loaded, "uint16", workers=1)
    assert encoded.tokens.tolist() == expected(loaded, LONG)


def test_the_environment_is_as_before(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    tokenizer = load_tokenizer(tokenizer_file)
    for before in ("true", None):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if before:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        list(encode_documents([document("a")], tokenizer, "uint16", workers=1))
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before
