"""Whether gigatoken gives the ids of `tokenizers`: both encode all of a mixed text, with several tokenizers.

    python benchmarks/same_ids.py --tokenizer DIR [DIR …] --files '/usr/lib/python3*/**/*.py' [--megabytes 1000] [--workers 16]

A document of some 3 kB has paragraphs of four kinds: lines of the files; random tokens of the tokenizer's vocabulary, which are words in
all its languages; random letters of one script; any characters. The text follows from --seed. `tokenizers` needs half a second of a
processor for each megabyte; run some tokenizers at a time. Prints one JSON object per tokenizer: the documents whose ids differ, and the
first text. A document with a character that the two treat differently (newer than Unicode 14, or normalized otherwise) is one that `data
prepare` gives to `tokenizers`; such are counted and not compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np
from prepare import sentences

from meshwright.data.fast_encoder import EncodersDiffer, FastEncoder, is_known
from meshwright.data.tokenizer import LoadedTokenizer, load_tokenizer
from meshwright.data.unicode_14 import assigned
from meshwright.spec.host_limits import usable_cores

PART_BYTES = 4 << 20
"""Text that a process makes and compares at a time."""
PARTS_OF_A_PROCESS = 16
"""Gigatoken keeps all words, so a process ends after so many parts."""
DOCUMENT, PARAGRAPH = 3000, 300
"""Least characters of each."""
SCRIPTS = (
    "0-9",
    "A-z",
    "À-ÿ",
    "Ͱ-Ͽ",
    "Ѐ-ӿ",
    "א-ת",
    "ء-ي",
    "ऀ-ॿ",
    "ก-๛",
    "ა-ჰ",
    "ぁ-ん",
    "ァ-ヶ",
    "一-鿿",
    "가-힣",
    "😀-🙏",
)
MARKS = np.array([*map(ord, "     ,.-'\n\t、。\u00a0\r")])
BETWEEN_WORDS = 0.2
"""Share of the characters of such a paragraph that are one of these marks."""
LARGEST = 0x10FFFF
NEWER_LETTER, NEWER = "\U0001f6d8", 0.02
"""Share of the paragraphs of any code points that have a letter which Unicode 14 lacks."""


@dataclass
class Counts:
    """What was compared."""

    bytes: int = 0
    documents: int = 0
    newer: int = 0
    """Documents with a character newer than Unicode 14."""
    differing: int = 0
    first: str = ""
    """The first text with other ids."""
    seconds: dict[str, float] = field(default_factory=lambda: {"gigatoken": 0.0, "tokenizers": 0.0})

    def add(self, other: Counts) -> None:
        self.bytes += other.bytes
        self.documents += other.documents
        self.newer += other.newer
        self.differing += other.differing
        self.first = self.first or other.first
        self.seconds = {name: seconds + other.seconds[name] for name, seconds in self.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, nargs="+", required=True)
    parser.add_argument("--files", nargs="+", required=True, help="patterns of text files")
    parser.add_argument("--megabytes", type=float, default=1000.0)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parts = max(round(options.megabytes * 1e6 / PART_BYTES), 1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    lines = sentences(options.files)
    for folder in options.tokenizer:
        start, counts, refused = time.monotonic(), Counts(), ""
        with multiprocessing.Pool(options.workers, _begin, (folder, lines), PARTS_OF_A_PROCESS) as pool:
            try:
                for part in pool.imap_unordered(partial(compare, options.seed), range(parts)):
                    counts.add(part)
            except EncodersDiffer as difference:
                refused = str(difference)
        figures = {
            "tokenizer": folder.name,
            "MB": round(counts.bytes / 1e6, 1),
            "documents": counts.documents,
            "newer": counts.newer,
            "differing": counts.differing,
            "first": counts.first,
            "not_used": refused,
            "cpu_seconds": {name: round(seconds, 1) for name, seconds in counts.seconds.items()},
            "wall_seconds": round(time.monotonic() - start, 1),
        }
        print(json.dumps(figures), flush=True)


FOLDER: list[Path] = []
LINES: list[str] = []
"""What a process of the pool works with."""


def _begin(folder: Path, lines: list[str]) -> None:
    FOLDER[:] = [folder]
    LINES[:] = lines


@cache
def encoders() -> tuple[LoadedTokenizer, FastEncoder, list[str]]:
    """The tokenizer of this process, its fast encoder, and the texts of its tokens. Raises EncodersDiffer."""
    tokenizer = load_tokenizer(FOLDER[0])
    fast = FastEncoder(tokenizer.content, tokenizer.tokenizer, 1)
    ids = [[number] for number in range(tokenizer.tokenizer.get_vocab_size())]
    return tokenizer, fast, tokenizer.tokenizer.decode_batch(ids, skip_special_tokens=False)


def compare(seed: int, part: int) -> Counts:
    """Encode a part of the text by both, and compare all ids."""
    tokenizer, fast, tokens = encoders()
    draw, counts, texts = np.random.default_rng([seed, part]), Counts(), list[str]()
    while counts.bytes < PART_BYTES:
        text = document(draw, tokens)
        counts.bytes += len(text.encode())
        texts.append(text)
    counts.documents = len(texts)
    texts = [text for text in texts if is_known(text)]
    counts.newer = counts.documents - len(texts)
    start = time.process_time()
    found = fast.ids(texts)
    between = time.process_time()
    right = [encoding.ids for encoding in tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    counts.seconds = {"gigatoken": between - start, "tokenizers": time.process_time() - between}
    for text, ids, theirs in zip(texts, found, right, strict=True):
        if ids.tolist() != theirs:
            counts.differing += 1
            counts.first = counts.first or text
    return counts


def document(draw: np.random.Generator, tokens: Sequence[str]) -> str:
    """A document with paragraphs of random kinds."""
    paragraphs, size = list[str](), 0
    while size < DOCUMENT:
        kind = draw.random()
        if kind < 0.5:
            start = int(draw.integers(len(LINES)))
            text = "\n".join(LINES[start : start + 4])
        elif kind < 0.75:
            text = "".join(tokens[number] for number in draw.integers(len(tokens), size=PARAGRAPH // 4).tolist())
        elif kind < 0.97:
            text = words(draw, *SCRIPTS[int(draw.integers(len(SCRIPTS)))].split("-"))
        else:
            text = characters(draw.choice(letters("\0", chr(LARGEST)), PARAGRAPH // 4))
            if draw.random() < NEWER:
                text += NEWER_LETTER
        paragraphs.append(text)
        size += len(text)
    return "\n".join(paragraphs)


def words(draw: np.random.Generator, first: str, last: str) -> str:
    """Words of random letters of a script, which has letters from `first` to `last`."""
    between = draw.random(PARAGRAPH) < BETWEEN_WORDS
    codes = np.where(between, draw.choice(MARKS, PARAGRAPH), draw.choice(letters(first, last), PARAGRAPH))
    return characters(codes)


def characters(codes: np.ndarray) -> str:
    return codes.astype("<u4").tobytes().decode("utf-32-le")


@cache
def letters(first: str, last: str) -> np.ndarray:
    """The code points from one letter to another that Unicode 14 assigns."""
    codes = np.arange(ord(first), ord(last) + 1)
    return codes[assigned()[codes]]


if __name__ == "__main__":
    main()
