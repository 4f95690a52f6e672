from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from meshwright.data.encode import token_dtype
from meshwright.data.inputs import InputFile
from meshwright.data.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    parse_tokenizer,
    parse_train_request,
    sample_texts,
    train_tokenizer,
)
from meshwright.spec.errors import BadInput
from tests.data.conftest import story

TEXTS = [story(i) for i in range(50)]


def test_training_is_repeatable_and_of_the_size_asked_for() -> None:
    content = train_tokenizer(TEXTS, 280)
    assert content == train_tokenizer(iter(TEXTS), 280)
    record = parse_tokenizer(content, "x").record
    assert (record.vocab_size, record.eos) == (280, 0)


TRAINED = parse_tokenizer(train_tokenizer(TEXTS, 290), "x").tokenizer


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_encoding_and_decoding_returns_the_same_text(text: str) -> None:
    ids = TRAINED.encode(text, add_special_tokens=False).ids
    assert TRAINED.decode(ids, skip_special_tokens=False) == text


def test_a_special_token_spelled_in_a_document_is_text() -> None:
    ids = TRAINED.encode(f"a {END_OF_TEXT} b", add_special_tokens=False).ids
    assert 0 not in ids


def test_text_is_split_by_the_rule_of_gpt2() -> None:
    """transformers' own GPT-2 tokenizer, given our vocabulary and merges, makes the same tokens."""
    from transformers import GPT2Tokenizer

    model = json.loads(train_tokenizer(TEXTS, 290))["model"]
    theirs = GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    text = "It's  the quick\n\n  brown fox,\tjumps 1234 times;   ünïcode — don't!\n"
    assert theirs(text)["input_ids"] == TRAINED.encode(text).ids


@pytest.mark.parametrize("request_text", ["train:256", "train:many", "train:"])
def test_an_invalid_training_request_is_refused(request_text: str) -> None:
    with pytest.raises(BadInput, match=r"at least 257|expected train:SIZE"):
        parse_train_request(request_text)


def test_train_requests() -> None:
    assert parse_train_request("train:32_000") == 32000
    assert parse_train_request("some/tokenizer.json") is None


def test_loading_names_what_is_wrong(tmp_path: Path, tokenizer_file: Path) -> None:
    assert load_tokenizer(tokenizer_file.parent).record == load_tokenizer(tokenizer_file).record
    with pytest.raises(BadInput, match="no such tokenizer"):
        load_tokenizer(tmp_path / "nothing.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(BadInput, match=r"broken.json: not a tokenizer.json"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(BadInput, match=r"has no token '<\|endoftxt\|>' \(nearest: '<\|endoftext\|>'\)"):
        load_tokenizer(tokenizer_file, eos="<|endoftxt|>")


def test_a_foreign_tokenizer_needs_its_end_token_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=100, special_tokens=["<stop>"]))
    tokenizer.enable_truncation(4)
    path = tmp_path / "foreign.json"
    tokenizer.save(str(path))
    with pytest.raises(BadInput, match="name the token that ends a document with --eos"):
        load_tokenizer(path)
    loaded = load_tokenizer(path, eos="<stop>")
    assert loaded.record.eos == 0
    assert len(loaded.tokenizer.encode(TEXTS[0]).ids) > 4, "truncation must be switched off"


def test_a_sample_is_spread_over_all_files(tmp_path: Path) -> None:
    files = []
    for i in range(400):
        path = tmp_path / f"{i:03d}.txt"
        path.write_text(chr(97 + i % 26) * 100)
        files.append(InputFile(path, path.name, path.name, 100))
    sampled = list(sample_texts(files, "text", sample_bytes=6400))
    assert 60 <= len(sampled) <= 64 and all(len(text) == 100 for _, text in sampled)
    numbers = [int(key[:3]) for key, _ in sampled]
    assert max(b - a for a, b in itertools.pairwise(numbers)) <= 8
    assert len(list(sample_texts(files, "text", sample_bytes=10**6))) == 400


def test_a_huge_file_gives_no_more_than_its_share(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    path.write_text("word " * 20000)
    sampled = [text for _, text in sample_texts([InputFile(path, "huge", "huge", 100_000)], "text", sample_bytes=500)]
    assert sum(map(len, sampled)) <= 501


def test_token_dtype() -> None:
    assert (token_dtype(65535), token_dtype(65536)) == ("uint16", "int32")
