"""No token stands for more text than its tokenizer's reach; without a limit there is none."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from meshwright.server.token_reach import _FORMS, _LOWERCASE, TokenReach, token_reach

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MARK = "\u2581"
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
Change = Callable[[Any], None]


def byte_level(*changes: Change, **model: Any) -> Any:
    """The form of GPT-2: pieces of bytes, some of them spaces, letters and parts of characters."""
    pieces = [*ALPHABET, "aa", "aaaa", "aaaaaaaa", "\u0120" * 2, "\u0120" * 4, "\u0120a", "\u00c3\u00a9"]
    merges = [
        ("a", "a"),
        ("aa", "aa"),
        ("aaaa", "aaaa"),
        ("\u0120", "\u0120"),
        ("\u0120\u0120", "\u0120\u0120"),
        ("\u0120", "a"),
    ]
    merges.append(("\u00c3", "\u00a9"))
    tokenizer: Any = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges, **model))
    tokenizer.pre_tokenizer, tokenizer.decoder = BYTE_LEVEL, decoders.ByteLevel()
    return _changed(tokenizer, changes)


def sentence_piece(*changes: Change, bytes: Iterable[str] = BYTES, **model: Any) -> Any:
    """The form of Llama 2: pieces of characters, and bytes for others."""
    pieces = ["<unk>", *bytes, MARK, "a", "b", MARK + "a", "aa", "aaaa", MARK * 2, MARK * 4]
    merges = [(MARK, "a"), ("a", "a"), ("aa", "aa"), (MARK, MARK), (MARK * 2, MARK * 2)]
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, **model}
    tokenizer: Any = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges, **options))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    return _changed(tokenizer, changes)


def unigram(*changes: Change, bytes: Iterable[str] = BYTES, byte_fallback: bool = True) -> Any:
    pieces = [
        ("<unk>", 0.0),
        *((piece, -9.0) for piece in bytes),
        (MARK, -2.0),
        ("a", -2.0),
        ("aaa", -3.0),
        (MARK + "a", -2.5),
    ]
    tokenizer: Any = Tokenizer(models.Unigram(pieces, 0, byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return _changed(tokenizer, changes)


def words(model: Any) -> Any:
    tokenizer: Any = Tokenizer(model({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def _changed(tokenizer: Any, changes: Iterable[Change]) -> Any:
    for change in changes:
        change(tokenizer)
    return tokenizer


def normalized(*steps: Any) -> Change:
    """The tokenizer has these normalizers, before its own."""

    def change(tokenizer: Any) -> None:
        own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([*steps, *own])

    return change


def split(*steps: Any) -> Change:
    """The tokenizer has these pre-tokenizers, before its own."""

    def change(tokenizer: Any) -> None:
        own = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, *own])

    return change


def added(*tokens: Any) -> Change:
    return lambda tokenizer: tokenizer.add_tokens(list(tokens))


GROUPS = Regex(r"\w{1,7}|\W+")
LIMITED = {
    "byte level": (byte_level(), TokenReach(True, 8, 8)),
    "byte level, split by digits": (
        byte_level(split(pre_tokenizers.Split(GROUPS, "isolated"), pre_tokenizers.Digits(True))),
        TokenReach(True, 8, 8),
    ),
    "byte level, split by punctuation": (byte_level(split(pre_tokenizers.Punctuation())), TokenReach(True, 8, 8)),
    "byte level, NFC": (byte_level(normalized(normalizers.NFC())), TokenReach(True, 8, 72)),
    "byte level, NFKC, lower case": (
        byte_level(normalized(normalizers.NFKC(), normalizers.Lowercase())),
        TokenReach(True, 8, 8 * 36),
    ),
    "byte level, NFD": (byte_level(normalized(normalizers.NFD())), TokenReach(True, 8, 24)),
    "byte level, replaced": (byte_level(normalized(normalizers.Replace("ab", "a"))), TokenReach(True, 16, 16)),
    "byte level, unknown bytes": (byte_level(unk_token="a"), TokenReach(True, 8, 8)),
    "byte level, added": (byte_level(added("<|a long token|>", "\u00e9")), TokenReach(True, 16, 16)),
    "bytes by the normalizer": (
        byte_level(normalized(normalizers.ByteLevel()), lambda made: setattr(made, "pre_tokenizer", None)),
        TokenReach(True, 8, 8),
    ),
    "sentence piece": (sentence_piece(), TokenReach(False, 6, 6)),
    "sentence piece, NFKC": (sentence_piece(normalized(normalizers.NFKC())), TokenReach(False, 6, 24)),
    "sentence piece, metaspace": (
        sentence_piece(lambda made: setattr(made, "normalizer", None), split(pre_tokenizers.Metaspace())),
        TokenReach(False, 6, 6),
    ),
    "sentence piece, added and normalized": (
        sentence_piece(normalized(normalizers.NFKC()), added(AddedToken("\ufdfa", normalized=True))),
        TokenReach(False, 19, 76),
    ),
    "sentence piece, unknown characters one by one": (
        sentence_piece(bytes=BYTES[:9], fuse_unk=False),
        TokenReach(False, 6, 6),
    ),
    "unigram": (unigram(), TokenReach(False, 6, 6)),
}
UNLIMITED = {
    "text is removed before": byte_level(split(pre_tokenizers.Split(" ", "removed"))),
    "white space is removed before": byte_level(split(pre_tokenizers.WhitespaceSplit())),
    "punctuation is removed before": byte_level(split(pre_tokenizers.Punctuation("removed"))),
    "white space is stripped": byte_level(normalized(normalizers.Strip())),
    "accents are stripped": byte_level(normalized(normalizers.StripAccents())),
    "text is replaced by nothing": byte_level(normalized(normalizers.Replace("a", ""))),
    "a pattern is replaced": byte_level(normalized(normalizers.Replace(Regex(" +"), " "))),
    "control characters are removed": byte_level(normalized(normalizers.Nmt())),
    "Bert cleans text": byte_level(normalized(normalizers.BertNormalizer())),
    "a token swallows white space": byte_level(added(AddedToken("<x>", rstrip=True))),
    "another swallows white space": sentence_piece(added(AddedToken("<x>", lstrip=True))),
    "unknown characters are joined": sentence_piece(bytes=BYTES[:9]),
    "unknown characters vanish": sentence_piece(bytes=BYTES[:9], unk_token=None),
    "unknown bytes are joined": unigram(bytes=BYTES[:9]),
    "unknown pieces are joined": unigram(byte_fallback=False),
    "words have endings": byte_level(end_of_word_suffix="</w>"),
    "word pieces": words(models.WordPiece),
    "words": words(models.WordLevel),
}
TEXTS = st.one_of(
    st.lists(st.integers(0, 0x10FFFF).filter(lambda code: not 0xD800 <= code < 0xE000).map(chr), max_size=40).map(
        "".join
    ),
    st.text("a b\u00e9\u212b\u0301\U0001d400<>x|", max_size=120),
    st.builds(
        lambda part, count: part * count,
        st.sampled_from(
            ["a", " ", "ab", "<x>  ", "\u00e9", "\u1f82", "\u212a", "\ufdfa", "<|a long token|>", "\u4e2d"]
        ),
        st.integers(0, 90),
    ),
)


@pytest.mark.parametrize("name", LIMITED)
def test_a_text_has_at_least_the_tokens_that_the_reach_says(name: str) -> None:
    tokenizer, expected = LIMITED[name]
    reach = token_reach(tokenizer)
    assert reach == expected

    @settings(max_examples=60, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) >= reach.least_tokens(text)

    check()


@pytest.mark.parametrize("name", UNLIMITED)
def test_there_is_no_reach_where_text_vanishes_or_is_joined(name: str) -> None:
    assert token_reach(UNLIMITED[name]) is None


def test_unicode_shrinks_by_the_factors_at_most() -> None:
    """Of every character: the bytes that decomposing and composing leave, and the characters of a composed one."""
    everything = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    characters = [char for char in everything if unicodedata.decomposition(char) or "\uac00" <= char <= "\ud7a3"]
    plain = [unicodedata.normalize("NFD", character) for character in characters]
    composed = max(len(long.encode()) / len(short.encode()) for long, short in zip(plain, characters, strict=True))
    assert max(map(len, plain)) <= _FORMS["NFC"][0]
    for form in ("D", "KD"):
        shortest = [unicodedata.normalize(f"NF{form}", character) for character in characters]
        decomposed = max(
            len(long.encode()) / len(short.encode()) for long, short in zip(characters, shortest, strict=True)
        )
        assert decomposed <= _FORMS[f"NF{form}"][1]
        assert decomposed * composed <= _FORMS[f"NF{form.replace('D', 'C')}"][1]
    changed = (character for character in everything if character.lower() != character)
    assert max(len(character.encode()) / len(character.lower().encode()) for character in changed) <= _LOWERCASE[1]
