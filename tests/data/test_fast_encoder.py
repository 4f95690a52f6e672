"""`tokenizers` is the oracle: the fast encoder gives its ids, or says that it does not."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from meshwright.data import encode, fast_encoder, prepare
from meshwright.data.corpus import CorpusDocument
from meshwright.data.encode import encode_documents
from meshwright.data.fast_encoder import HARD_TEXTS, EncodersDiffer, FastEncoder
from meshwright.data.tokenizer import LoadedTokenizer, load_tokenizer, parse_tokenizer
from meshwright.data.unicode_14 import assigned, treated_alike
from tests.data.conftest import story

NEWER = "\U0001f6d8 \U000323b0"
"""Assigned by Unicode 17, to which `tokenizers` and `gigatoken` give different classes."""
NORMALIZED_OTHERWISE = "\U00010d27\U00010f46 a\u0301\u1abf"
"""Marks of Unicode 11 and 13, which `tokenizers` does not reorder in NFC."""


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> LoadedTokenizer:
    return load_tokenizer(tokenizer_file)


def fast_of(tokenizer: LoadedTokenizer) -> FastEncoder:
    return FastEncoder(tokenizer.content, tokenizer.tokenizer, workers=1)


def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH_CHARACTERS", "FAST_BATCH_CHARACTERS"):
        monkeypatch.setattr(encode, name, 500)


def expected(tokenizer: LoadedTokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [tokenizer.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def lists(rows: Sequence[np.ndarray]) -> list[list[int]]:
    return [row.tolist() for row in rows]


TEXTS = [
    *HARD_TEXTS,
    *(story(i) for i in range(30)),
    "",
    "\n",
    "a <|endoftext|> b",
    NEWER,
    f"old {NEWER} words",
    NORMALIZED_OTHERWISE,
]


def test_ids_are_those_of_tokenizers(tokenizer: LoadedTokenizer) -> None:
    assert lists(fast_of(tokenizer).encode(TEXTS)) == expected(tokenizer, TEXTS)
    assert fast_of(tokenizer).encode([]) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_have_the_same_tokens_with_both(
    tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    small_batches(monkeypatch)
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    long = "".join(story(i) + "\n  indented\n" for i in range(60))
    documents = [
        CorpusDocument("file", i, "key", text, 0) for i, text in enumerate([*TEXTS, long, long.replace("\n", " ")])
    ]
    fast = list(encode_documents(documents, tokenizer, "uint16", workers, fast_of(tokenizer)))
    slow = list(encode_documents(documents, tokenizer, "uint16", workers))
    for one, other in zip(fast, slow, strict=True):
        assert one.document is other.document and one.tokens.dtype == np.uint16
        assert np.array_equal(one.tokens, other.tokens)


def test_only_text_with_newer_characters_goes_to_tokenizers(tokenizer: LoadedTokenizer) -> None:
    fast = fast_of(tokenizer)
    asked: list[str] = []
    right = fast._right
    fast._right = lambda texts: (asked.extend(texts), right(texts))[1]  # type: ignore[method-assign]
    fast.ids(["plain", "ünïcödé €", "שלום", "日本語 🙂", NEWER, "\u0378", NORMALIZED_OTHERWISE])
    assert asked == [NEWER, "\u0378", NORMALIZED_OTHERWISE]


def test_the_table_is_that_of_unicode_14() -> None:
    known = assigned()
    categories = [unicodedata.category(chr(point)) for point in range(0x110000)]
    python = np.array([category not in ("Cn", "Cs") for category in categories])
    if unicodedata.unidata_version == "14.0.0":
        assert np.array_equal(known, python)
    else:  # no character was ever taken away
        assert not (known & ~python).any()
    assert known.sum() == 144_697 + 65 + 137_468, "characters with a name, controls, private use"


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_what_tokenizers_normalizes_otherwise_is_not_treated_alike(form: Literal["NFC", "NFD", "NFKC", "NFKD"]) -> None:
    normalizer = getattr(normalizers, form)()
    for point in np.flatnonzero(treated_alike()).tolist():
        letter = chr(point)
        texts = [letter]
        if unicodedata.combining(letter):  # beside marks of classes above, below and equal to its own
            texts += [mark + letter for mark in "\u0301\u0323\u0334"] + [letter + mark for mark in "\u0301\u0323\u0334"]
        if unicodedata.decomposition(letter) or len(texts) > 1:
            assert [normalizer.normalize_str(text) for text in texts] == [
                unicodedata.normalize(form, text) for text in texts
            ]


def test_encoders_are_loaded_anew_when_their_words_take_too_much_memory(
    tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = fast_of(tokenizer)
    loads = 0
    load = fast._load

    def counted() -> Any:
        nonlocal loads
        loads += 1
        return load()

    monkeypatch.setattr(fast, "_load", counted)
    monkeypatch.setattr(fast_encoder, "LEAST_TEXT", 100)
    texts = [story(i) for i in range(5)]
    for growth, expected_loads in ((0, 0), (1 << 40, 2)):
        monkeypatch.setattr(fast_encoder, "resident", count(growth, growth).__next__)
        for _ in range(3):
            assert lists(fast.ids(texts)) == expected(tokenizer, texts)
        assert loads == expected_loads


def test_memory_does_not_grow_with_the_words_of_the_text(
    tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that keeps all these words takes 170 MB, and one that is loaded anew 25."""
    monkeypatch.setattr(fast_encoder, "LEAST_TEXT", 1 << 20)
    monkeypatch.setattr(fast_encoder, "WORD_MEMORY", 10 << 20)
    fast, draw, most = fast_of(tokenizer), random.Random(0), 0
    before = fast_encoder.resident()
    for _ in range(16):
        fast.ids([" ".join("".join(draw.choices(ascii_lowercase, k=8)) for _ in range(100_000))])
        most = max(most, fast_encoder.resident() - before)
    assert most < 60 << 20


def word_level() -> bytes:
    tokenizer: Any = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str().encode()


def compatible_form() -> bytes:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.ByteLevel()
    trainer: Any = trainers.BpeTrainer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [story(1)], trainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("content", [word_level(), compatible_form()], ids=["words", "NFKC"])
def test_a_tokenizer_that_it_does_not_read_is_prepared_by_tokenizers(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = parse_tokenizer(content, "x", "<|endoftext|>")
    with pytest.raises(EncodersDiffer, match="gigatoken does not encode this"):
        fast_of(loaded)
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "a.txt").write_text("a b a")
    out = tmp_path / "out"
    arguments: Any = {"eos": "<|endoftext|>", "shown": True}
    prepare.prepare([str(tmp_path / "a.txt")], str(tmp_path / "tokenizer.json"), out, **arguments)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "gigatoken" in line]
    assert line.startswith("gigatoken does not encode this (") and line.endswith("several times slower")


def test_without_gigatoken_tokenizers_is_used(tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(EncodersDiffer, match="gigatoken cannot be imported"):
        fast_of(tokenizer)


def wrong_from(first_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `gigatoken` give other ids to text with `fox`, from its so many-th call on."""
    calls, rows = 0, fast_encoder._rows

    def wrong(encoded: Any) -> list[np.ndarray]:
        nonlocal calls
        calls += 1
        return [ids + 1 if calls >= first_call and len(ids) > 40 else ids for ids in rows(encoded)]

    monkeypatch.setattr(fast_encoder, "_rows", wrong)


def files_of(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("first_call", [2, 40], ids=["in the sample", "after shards"])
def test_a_corpus_on_which_the_encoders_differ_is_that_of_tokenizers(
    first_call: int,
    tokenizer_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small_batches(monkeypatch)
    source = tmp_path / "stories.jsonl"
    source.write_text("".join(json.dumps({"text": story(i)}) + "\n" for i in range(200)))
    arguments: Any = {"held_out": 0.1, "shard_tokens": 400, "workers": 1}

    def corpus(name: str, shown: bool = False) -> dict[str, bytes]:
        prepare.prepare([str(source)], str(tokenizer_file), tmp_path / name, shown=shown, **arguments)
        return files_of(tmp_path / name)

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "gigatoken", None)
        right = corpus("right")
    assert corpus("fast") == right
    wrong_from(first_call, monkeypatch)
    forgotten: list[Path] = []
    forget = prepare.forget_shards
    monkeypatch.setattr(prepare, "forget_shards", lambda out: (forgotten.extend(out.rglob("shard-*")), forget(out)))
    capsys.readouterr()
    assert corpus("differ", shown=True) == right
    lines = [line for line in capsys.readouterr().err.splitlines() if "gigatoken" in line]
    assert len(lines) == 1 and lines[0].startswith("the ids of gigatoken are not those of tokenizers at '")
    assert bool(forgotten) == (first_call == 40), "shards of the wrong ids were there, and were made again"


def test_a_continued_preparation_remembers_that_the_encoders_differ(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_batches(monkeypatch)
    source = tmp_path / "stories.jsonl"
    source.write_text("".join(json.dumps({"text": story(i)}) + "\n" for i in range(200)))
    arguments: Any = {"shard_tokens": 400, "workers": 1}
    out = tmp_path / "out"

    class Killed(Exception):
        pass

    written = 0

    def kill(*given: Any, **named: Any) -> Any:
        nonlocal written
        for item in encode_documents(*given, **named):
            written += 1
            if given[4] is None and written > 150:
                raise Killed
            yield item

    with monkeypatch.context() as first:
        wrong_from(40, first)
        first.setattr(prepare, "encode_documents", kill)
        with pytest.raises(Killed):
            prepare.prepare([str(source)], str(tokenizer_file), out, **arguments)
    assert list(out.glob("shard-*.bin"))
    monkeypatch.setattr(prepare, "FastEncoder", lambda *given: pytest.fail("the encoders differ"))
    prepare.prepare([str(source)], str(tokenizer_file), out, **arguments)
    monkeypatch.undo()
    other = tmp_path / "other"
    prepare.prepare([str(source)], str(tokenizer_file), other, **arguments)
    assert files_of(out) == files_of(other)
