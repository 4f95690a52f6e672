"""A small corpus with a tokenizer, prepared once for all tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.data.prepare import prepare
from meshwright.data.tokenizer import train_tokenizer

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "quietly",
    "mix",
    "blue",
    "ink",
    "and",
    "eat",
    "grapes",
]


def story(number: int) -> str:
    """A text that differs from every other number's, in words and in length."""
    words = [WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(30 + number % 40)]
    return f"Story {number}. " + " ".join(words) + ".\n"


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer([story(i) for i in range(100)], 300))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two record files, 120 documents together."""
    folder = tmp_path_factory.mktemp("corpus")
    for part in range(2):
        lines = [json.dumps({"id": f"s{i}", "text": story(i)}) for i in range(part * 60, part * 60 + 60)]
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer_file: Path) -> Path:
    """The corpus in three or more shards, with a tenth held out."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    prepare([str(corpus)], str(tokenizer_file), out, held_out=0.1, shard_tokens=2000)
    return out
