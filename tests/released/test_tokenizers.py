"""Released tokenizers encode as the library they were made for and as transformers, at the entrances of meshwright."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from meshwright.data.fast_encoder import EncodersDiffer, FastEncoder
from meshwright.data.prepare import prepare
from meshwright.data.tokenizer import load_tokenizer
from meshwright.server.model_files import read_model_files
from meshwright.server.request_reader import RequestReader
from meshwright.spec.serve import ServeSpec
from tests.released.chats import CONVERSATIONS, compared
from tests.released.test_models import stored_tokens
from tests.released.tokenizers import Oracle, Released, released_tokenizers, texts

TOKENIZERS = [entry for entry in released_tokenizers() if entry.found]
OF_THE_TEST_EXTRA = ("glassllm-en", "glassllm-pt")
INSTALLED = pytest.mark.skipif(not TOKENIZERS, reason="make test-models installs them")
each = pytest.mark.parametrize("entry", TOKENIZERS, ids=[entry.name for entry in TOKENIZERS])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Released], tuple[Path, Oracle | None]]:
    """Writes the folder of a tokenizer once."""
    home = tmp_path_factory.mktemp("tokenizers")

    @cache
    def write(entry: Released) -> tuple[Path, Oracle | None]:
        return home / entry.name, entry.write(home / entry.name)

    return write


def loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    return loader.from_pretrained(folder)


@pytest.mark.skipif(len(TOKENIZERS) <= len(OF_THE_TEST_EXTRA), reason="make test-models installs the others")
def test_there_are_at_least_twenty() -> None:
    assert len(TOKENIZERS) >= 20


@each
def test_texts_have_the_ids_of_the_libraries(entry: Released, written: Any, tmp_path: Path) -> None:
    folder, oracle = written(entry)
    theirs, plain = loaded(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = read_model_files(folder)
    reader = RequestReader(ServeSpec(), "model", files, None, 4096, files.tokenizer.get_vocab_size())
    for text in texts():
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert plain.encode(text, add_special_tokens=False).ids == expected, text
        if oracle is not None and "<" not in text:
            assert oracle(text) == expected, text
        served = json.loads(reader.tokenize(json.dumps({"prompt": text, "add_special_tokens": False}).encode()))[
            "tokens"
        ]
        assert served == expected or not text, text
        assert theirs(text)["input_ids"][: len(files.text.begin)] == [token.id for token in files.text.begin], text
    kept = [
        text for text in texts() if text.strip() and "<" not in text
    ]  # what spells a special token is text in a corpus
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    prepare([str(tmp_path / "t.jsonl")], str(folder), tmp_path / "corpus", held_out=0.0)
    stored = stored_tokens(tmp_path / "corpus")
    for text in kept:
        assert contains(stored, theirs(text, add_special_tokens=False)["input_ids"]), text


UNREAD = {
    "gpt2",
    "r50k_base",
    "p50k_base",
    "p50k_edit",
    "glassllm-en",
    "glassllm-pt",
    "lenml-claude",
    "smollm2",
}
"""The pattern of GPT-2 as a `Split`, vocabularies without all bytes, the normalizer NFKC."""


@each
def test_the_fast_encoder_gives_the_same_ids_or_is_not_used(entry: Released, written: Any) -> None:
    tokenizer = load_tokenizer(written(entry)[0])
    if entry.name in UNREAD:
        with pytest.raises(EncodersDiffer, match="gigatoken does not encode this"):
            FastEncoder(tokenizer.content, tokenizer.tokenizer, workers=1)
        return
    fast = FastEncoder(tokenizer.content, tokenizer.tokenizer, workers=1)
    source = [Path(module.__file__).read_text() for module in (json, pytest, argparse, ast) if module.__file__]
    asked = [*texts(), *source]
    for text, ids in zip(asked, fast.encode(asked), strict=True):
        assert ids.tolist() == tokenizer.tokenizer.encode(text, add_special_tokens=False).ids, text[:100]


def contains(stored: Sequence[int], ids: Sequence[int]) -> bool:
    joined, part = (",".join(map(str, tokens)) for tokens in (stored, ids))
    return f",{part}," in f",{joined},"


@each
def test_ten_conversations_have_the_text_of_transformers(entry: Released, written: Any) -> None:
    folder, _ = written(entry)
    files = read_model_files(folder)
    if files.chat_template is None:
        pytest.skip("the package has no chat template")
    outcomes = compared(files.chat_template, files.special_tokens, loaded(folder), files.tool_template)
    assert len(outcomes) == len(CONVERSATIONS) >= 10
    assert not [outcome for outcome in outcomes if outcome is not None and outcome.startswith("DIFFERENT")]
