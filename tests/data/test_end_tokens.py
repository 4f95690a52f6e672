"""Tokens that end texts, by the files of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from meshwright.data.end_tokens import end_tokens

NAMES = ["a", "<|endoftext|>", "<|im_end|>", "</s>", "<|eot_id|>", "<pad>"]
TEXT, TURN, CLOSE, EOT, PAD = range(1, 6)
CONFIG, GENERATION, TOKENIZER, SPECIAL = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip


def tokenizer(*names: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="a"))


@pytest.mark.parametrize(
    ("files", "document", "stops"),
    [
        ({}, TEXT, [TEXT]),
        ({TOKENIZER: {"eos_token": "<|im_end|>"}}, TURN, [TURN]),
        ({TOKENIZER: {"eos_token": {"content": "</s>"}}, SPECIAL: {"eos_token": "<|im_end|>"}}, CLOSE, [CLOSE]),
        ({SPECIAL: {"eos_token": {"content": "<|im_end|>"}}}, TURN, [TURN]),
        ({CONFIG: {"eos_token_id": [3, 4]}}, CLOSE, [CLOSE, EOT]),
        ({CONFIG: {"eos_token_id": 3}, TOKENIZER: {"eos_token": "<|eot_id|>"}}, EOT, [CLOSE, EOT]),
        ({GENERATION: {"eos_token_id": [4, 2]}, CONFIG: {"eos_token_id": 3}}, CLOSE, [TURN, CLOSE, EOT]),
        ({GENERATION: {"eos_token_id": 4}}, TEXT, [EOT]),
        # A token for padding is no end, unless a file says that it is one.
        ({TOKENIZER: {"pad_token": "<|endoftext|>"}}, CLOSE, [CLOSE]),
        ({SPECIAL: {"pad_token": {"content": "<|endoftext|>"}}}, CLOSE, [CLOSE]),
        ({CONFIG: {"pad_token_id": 1}}, CLOSE, [CLOSE]),
        ({TOKENIZER: {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}, TURN, [TURN]),
        ({TOKENIZER: {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}}, TEXT, [TEXT]),
        ({GENERATION: {"eos_token_id": [2, 1], "pad_token_id": 1}}, CLOSE, [TEXT, TURN]),
        # What the tokenizer does not have ends nothing.
        ({TOKENIZER: {"eos_token": "<|no_such|>"}, CONFIG: {"eos_token_id": 99}}, TEXT, [TEXT]),
        ({CONFIG: {"eos_token_id": [2**70, -1, True, None, "3", 2]}}, TURN, [TURN]),
        ({TOKENIZER: [], CONFIG: {"eos_token_id": None}}, TEXT, [TEXT]),
    ],
)  # fmt: skip
def test_the_files_name_the_ends(tmp_path: Path, files: dict[str, Any], document: int, stops: list[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path, tokenizer(*NAMES)) == (document, tuple(stops))


def test_a_tokenizer_may_have_no_end(tmp_path: Path) -> None:
    assert end_tokens(tmp_path, tokenizer("a", "b")) == (None, ())
