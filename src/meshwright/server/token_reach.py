"""Upper limits of the text that one token can stand for.

They show, without encoding it, that a text has too many tokens for a context.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_LEVEL = "ByteLevel"
_FORMS: Mapping[str, tuple[float, float]] = {"NFC": (4, 9), "NFD": (1, 3), "NFKC": (4, 12), "NFKD": (1, 4)}
"""For each Unicode normal form, how much a text can shrink: (in characters, in bytes of UTF-8).

Example: (4, 9) for NFC means that at most 4 characters become one character, and at most 9 bytes become one byte.

Normalizing first decomposes each character, then composes some again (NFC and NFKC). Decomposing never reduces the
number of characters. It can reduce bytes by a factor of 3 in the canonical forms (the Kelvin sign, 3 bytes, becomes K)
and of 4 in the compatibility forms (mathematical letters of 4 bytes). Composing joins at most 4 characters, because no
canonical decomposition is longer, and reduces bytes by a factor of at most 3.
"""
_LOWERCASE = (1, 3)
"""The same for lower case: no fewer characters, but the Kelvin sign of 3 bytes becomes k."""
_ASCII_KEPT = {*_FORMS, "Lowercase"}
"""Normalizers that do not change the length of ASCII text."""
_PRE_TOKENIZERS = {_BYTE_LEVEL, "Metaspace", "Digits", "Punctuation", "Split", "FixedLength"}
"""Pre-tokenizers that never remove text, except with the behaviour "Removed"."""


class TokenReach(NamedTuple):
    """Upper limits of the text that one token stands for, in characters, or in bytes of UTF-8 if `in_bytes` is true."""

    in_bytes: bool
    """Whether `other` counts bytes of UTF-8."""
    ascii: int
    """Limit for a text that is all ASCII."""
    other: int
    """Limit for other texts."""

    def least_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens of a text.

        Example: if a token stands for at most 16 ASCII characters, a text of 100 ASCII characters has at least 7
        tokens.
        """
        if text.isascii():
            return -(-len(text) // self.ascii)
        return -(-(len(text.encode("utf-8")) if self.in_bytes else len(text)) // self.other)


class _Unlimited(Exception):
    """A token can stand for any length of text."""


def token_reach(tokenizer: Tokenizer) -> TokenReach | None:
    """Return the limits for a tokenizer, derived from its tokenizer.json. None if there is no limit or it is unknown.

    There is no limit if text can disappear without becoming a token. That happens if a normalizer or pre-tokenizer
    removes it, if an added token swallows the white space next to it, or if any number of unknown characters become one
    token.
    """
    parts = json.loads(tokenizer.to_str())
    try:
        normalizers = list(_steps(parts.get("normalizer"), "normalizers"))
        pre_tokenizers = list(_steps(parts.get("pre_tokenizer"), "pretokenizers"))
        in_bytes = _BYTE_LEVEL in {step["type"] for step in (*normalizers, *pre_tokenizers)}
        for step in pre_tokenizers:
            if step["type"] not in _PRE_TOKENIZERS or step.get("behavior") == "Removed":
                raise _Unlimited
        longest = max(_longest_piece(parts["model"], in_bytes), _longest_added(parts, tokenizer, in_bytes))
        ascii = other = 1.0
        for step in normalizers:
            shrinks = _shrinks(step, in_bytes)
            other *= shrinks
            ascii *= 1 if step["type"] in _ASCII_KEPT else shrinks
    except _Unlimited:
        return None
    return TokenReach(in_bytes, math.ceil(longest * ascii), math.ceil(longest * other))


def _steps(part: Mapping[str, Any] | None, key: str) -> Iterable[Mapping[str, Any]]:
    """Yield the normalizers or pre-tokenizers of a part of tokenizer.json. Those in a sequence are yielded one by one."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[key]:
        yield from _steps(step, key)


def _shrinks(step: Mapping[str, Any], in_bytes: bool) -> float:
    """Return how much a normalizer can shrink a text: the largest number of characters that become one.

    With `in_bytes`, bytes are counted instead of characters.

    Raises _Unlimited if no limit is known.
    """
    name = step["type"]
    if name in (_BYTE_LEVEL, "Prepend"):
        return 1
    if name in _FORMS:
        return _FORMS[name][in_bytes]
    if name == "Lowercase":
        return _LOWERCASE[in_bytes]
    if name == "Replace" and "String" in step["pattern"] and step["content"]:
        return max(1, _units(step["pattern"]["String"], in_bytes) / _units(step["content"], in_bytes))
    raise _Unlimited


def _longest_piece(model: Mapping[str, Any], in_bytes: bool) -> int:
    """Return the length of the longest token in the vocabulary, in characters, or with `in_bytes` in bytes.

    Raises _Unlimited unless every character (or byte) of a text is part of some token.
    """
    name = model["type"]
    vocab = model["vocab"]
    pieces = {entry[0] for entry in vocab} if name == "Unigram" else vocab
    if name not in ("BPE", "Unigram") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _Unlimited
    if in_bytes:
        from tokenizers import pre_tokenizers

        complete = name == "BPE" and all(char in pieces for char in pre_tokenizers.ByteLevel.alphabet())
    else:
        complete = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in pieces for byte in range(256))
    separate = name == "BPE" and model.get("unk_token") in pieces and not model.get("fuse_unk")
    if not (complete or separate):
        raise _Unlimited
    # In a byte-level vocabulary each character stands for one byte.
    return max(map(len, pieces), default=1)


def _longest_added(parts: Mapping[str, Any], tokenizer: Tokenizer, in_bytes: bool) -> int:
    """Return the length of the longest added token, in characters or bytes.

    An added token is recognised in the text as it is, or in the normalized text.
    """
    tokens = parts.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in tokens):
        raise _Unlimited
    normalizer: Any = tokenizer.normalizer
    texts = [token["content"] for token in tokens]
    texts += [normalizer.normalize_str(text) for text in texts] if normalizer is not None else []
    return max((_units(text, in_bytes) for text in texts), default=0)


def _units(text: str, in_bytes: bool) -> int:
    return len(text.encode("utf-8")) if in_bytes else len(text)
