"""The most text that one token can stand for: it shows that a text does not fit a context before it is encoded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_LEVEL = "ByteLevel"
_FORMS: Mapping[str, tuple[float, float]] = {"NFC": (4, 9), "NFD": (1, 3), "NFKC": (4, 12), "NFKD": (1, 4)}
"""Characters and bytes that Unicode's forms take for each one they leave, at most.

A form decomposes each character, then composes some. Decomposing leaves no fewer characters, composing at least a quarter: no canonical
decomposition is longer than 4. Of UTF-8, decomposing leaves at least 1/3 (canonical: the Kelvin sign, 3 bytes, is K) or 1/4
(compatibility: mathematical letters of 4 bytes), and composing at least 1/3.
"""
_LOWERCASE = (1, 3)
"""The same of lower case: the Kelvin sign has 3 bytes, k has 1."""
_ASCII_KEPT = {*_FORMS, "Lowercase"}
"""Normalizers that leave as many characters of ASCII as they take."""
_PRE_TOKENIZERS = {_BYTE_LEVEL, "Metaspace", "Digits", "Punctuation", "Split", "FixedLength"}
"""Pre-tokenizers that remove no text, unless their behaviour is to."""


class TokenReach(NamedTuple):
    """Upper limit of the text that one token stands for."""

    in_bytes: bool
    """Whether it is counted in bytes of UTF-8; if not, in characters."""
    ascii: int
    """Limit in a text of ASCII."""
    other: int

    def least_tokens(self, text: str) -> int:
        """Number of tokens that the text has at least."""
        if text.isascii():
            return -(-len(text) // self.ascii)
        return -(-(len(text.encode("utf-8")) if self.in_bytes else len(text)) // self.other)


class _Unlimited(Exception):
    """A token can stand for any length of text."""


def token_reach(tokenizer: Tokenizer) -> TokenReach | None:
    """The reach of a tokenizer's tokens by the structure of its tokenizer.json; None if there is no limit or none is known.

    There is none where text can vanish without a token: removed by a normalizer or pre-tokenizer, swallowed as white space beside an
    added token, or joined to one unknown token.
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
    """The normalizers or pre-tokenizers of a part, those of sequences one by one."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[key]:
        yield from _steps(step, key)


def _shrinks(step: Mapping[str, Any], in_bytes: bool) -> float:
    """Units of text that a normalizer takes for each one it leaves, at most."""
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
    """Units of the longest piece of the model's vocabulary, if every unit of a text has a token."""
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
    # A character of such a piece stands for a byte.
    return max(map(len, pieces), default=1)


def _longest_added(parts: Mapping[str, Any], tokenizer: Tokenizer, in_bytes: bool) -> int:
    """Units of the longest added token, which is found in the text as it is or in its normal form."""
    tokens = parts.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in tokens):
        raise _Unlimited
    normalizer: Any = tokenizer.normalizer
    texts = [token["content"] for token in tokens]
    texts += [normalizer.normalize_str(text) for text in texts] if normalizer is not None else []
    return max((_units(text, in_bytes) for text in texts), default=0)


def _units(text: str, in_bytes: bool) -> int:
    return len(text.encode("utf-8")) if in_bytes else len(text)
