"""Hashes of words, and of shingles (several consecutive words), computed for many texts at once.

A word is a maximal sequence of letters and digits in lower case. In a script without spaces, each character is a word. The hashes depend
only on the text itself: they are the same on every machine, and in every batch of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

PIECE = 1 << 20
"""Characters that are hashed in one pass. A longer text is cut at multiples of this number."""
NO_WORDS = (
    (0x00, 0x2F),
    (0x3A, 0x40),
    (0x5B, 0x60),
    (0x7B, 0xA9),
    (0xAB, 0xB4),
    (0xB6, 0xB9),
    (0xBB, 0xBF),
    (0xD7, 0xD7),
    (0xF7, 0xF7),
    (0x2000, 0x206F),
    (0x20A0, 0x20CF),
    (0x2190, 0x2BFF),
    (0x2E00, 0x2E7F),
    (0x3000, 0x3004),
    (0x3008, 0x3020),
    (0x3030, 0x3030),
    (0xFE10, 0xFE6F),
    (0xFEFF, 0xFF0F),
    (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF40),
    (0xFF5B, 0xFF65),
    (0xFFE0, 0xFFFF),
    (0x1F000, 0x1FAFF),
)
"""Ranges of white space, punctuation and symbols."""
WITHOUT_SPACES = (
    (0x0E01, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2E80, 0x2FFF),
    (0x3005, 0x3007),
    (0x3021, 0x302F),
    (0x3031, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
    (0x20000, 0x323AF),
)
"""Ranges of scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, Chinese and Japanese."""
SEPARATOR = 0
"""Class of a character between words."""
LETTER = 1
"""Class of a character inside a word."""
WORD = 2
"""Class of a character that is a word by itself."""
BASE = 0x9E3779B97F4A7C15
"""Base of the polynomial hash of a word. It is odd, so it has an inverse modulo 2^64."""
JOIN = np.uint64(0xD1342543DE82EF95)
"""Base of the polynomial hash of a shingle over the hashes of its words."""


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each word, `(words,)` uint64, and the index of each text's first word, `(texts + 1,)` int64.

    The hash of a word with the characters c_0, c_1, … is the sum of c_j · BASE^j modulo 2^64, then mixed. Example: for the texts "a b" and
    "c", the second array is [0, 2, 3].
    """
    hashes: list[np.ndarray] = []
    counts: list[int] = []
    lowered = [text.lower() for text in texts]
    at = 0
    while at < len(lowered):
        end = at + 1
        size = len(lowered[at])
        while end < len(lowered) and size + len(lowered[end]) <= PIECE:
            size += len(lowered[end])
            end += 1
        if size > PIECE:
            text = lowered[at]
            of_pieces = [_hashed([text[start : start + PIECE]])[0] for start in range(0, len(text), PIECE)]
            hashes += of_pieces
            counts.append(sum(map(len, of_pieces)))
        else:
            of_texts, starts = _hashed(lowered[at:end])
            hashes.append(of_texts)
            counts += np.diff(starts).tolist()
        at = end
    joined = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
    return joined, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def shingles(hashes: np.ndarray, starts: np.ndarray, words: int) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each shingle of `words` consecutive words, uint64, and the index of each text's first shingle, `(texts + 1,)` int64.

    `hashes` and `starts` are the results of `word_hashes`. A text with fewer than `words` words has no shingle.
    """
    count = max(len(hashes) - words + 1, 0)
    joined = hashes[:count].copy()
    for offset in range(1, words):
        joined *= JOIN
        joined += hashes[offset : offset + count]
    of_text = np.maximum(np.diff(starts) - words + 1, 0)
    inside = np.zeros(len(hashes) + 1, dtype=np.int64)
    with_any = of_text > 0
    np.add.at(inside, starts[:-1][with_any], 1)
    np.add.at(inside, (starts[:-1] + of_text)[with_any], -1)
    # A shingle must not reach into the next text, so only the first `of_text` starts of each text count.
    kept = np.cumsum(inside)[:count] > 0
    return _mixed(joined[kept]), np.concatenate([[0], np.cumsum(of_text)]).astype(np.int64)


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values in ascending order. `numpy.unique` of numpy 2.3 and later takes five times as long for such values."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def joined_words(hashes: np.ndarray) -> int:
    """The hash of all words of a text as one shingle, however many they are."""
    value = 0
    for hashed in hashes.tolist():
        value = (value * int(JOIN) + hashed) % 2**64
    return int(_mixed(np.array([value], dtype=np.uint64))[0])


def _hashed(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Like `word_hashes`, but the texts are in lower case already, and have at most PIECE characters in total."""
    joined = "\0".join(texts)
    characters = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    classes = _classes()[characters]
    letters = classes == LETTER
    alone = classes == WORD
    before = np.concatenate([[False], letters[:-1]])
    after = np.append(letters[1:], False)
    begins = np.flatnonzero((letters & ~before) | alone)
    ends = np.flatnonzero((letters & ~after) | alone) + 1
    powers, inverses = _powers()
    sums = np.zeros(len(characters) + 1, dtype=np.uint64)
    # With prefix sums of c_k · BASE^k, a word at position b has the sum (sums[end] - sums[b]) · BASE^-b.
    np.cumsum(characters * powers[: len(characters)], out=sums[1:])
    hashes = _mixed((sums[ends] - sums[begins]) * inverses[begins])
    text_starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    return hashes, np.searchsorted(begins, text_starts)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


@lru_cache(maxsize=1)
def _classes() -> np.ndarray:
    """The class of each Unicode code point, `(0x110000,)` uint8."""
    classes = np.full(0x110000, LETTER, dtype=np.uint8)
    for value, ranges in ((SEPARATOR, NO_WORDS), (WORD, WITHOUT_SPACES)):
        for first, last in ranges:
            classes[first : last + 1] = value
    return classes


@lru_cache(maxsize=1)
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """BASE^j and BASE^-j modulo 2^64, for each position j of a batch: at most PIECE characters and one separator after each text."""
    size = 2 * PIECE + 1
    found = []
    for base in (BASE, pow(BASE, -1, 2**64)):
        powers = np.full(size, base, dtype=np.uint64)
        powers[0] = 1
        found.append(np.multiply.accumulate(powers))
    return found[0], found[1]
