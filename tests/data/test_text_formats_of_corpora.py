"""What begins and ends the documents of prepared corpora, and corpora that do not go together."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from meshwright.data.manifest import MANIFEST, open_directory
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.data.source import open_data
from meshwright.data.text_format import read_text_format
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import DataSpec
from tests.data.chats import CHATML, CHATS, HEADERS, byte_level, plain, sentence_piece, write_chats, write_tokenizer
from tests.data.conftest import story
from tests.data.test_text_format import with_bos

CHAT = {"chat": ChatRequest()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder whose tokenizer begins each text with <s>."""
    return write_tokenizer(tmp_path_factory.mktemp("model"), None, with_bos(sentence_piece()))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": story(number)}) for number in range(20)) + "\n")
    return file


def documents(corpus: Path) -> list[list[int]]:
    (file,) = [shard.file for shard in open_directory(corpus).shards]
    bounds = file.document_bounds().tolist()
    return [file.read(start, stop).tolist() for start, stop in pairwise(bounds)]


def without(key: str, corpus: Path) -> Path:
    """The corpus whose manifest lacks a key."""
    manifest = json.loads((corpus / MANIFEST).read_bytes())
    del manifest[key]
    (corpus / MANIFEST).write_text(json.dumps(manifest))
    return corpus


def test_every_document_begins_and_ends_as_the_record_says(folder: Path, texts: Path, tmp_path: Path) -> None:
    manifest = prepare([str(texts)], str(folder), tmp_path / "out", eos="<|eot|>").manifests["train"]
    record = read_text_format(tmp_path / "out")
    assert record == manifest.text_format
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for number, ids in enumerate(documents(tmp_path / "out")):
        text = tokenizer.encode(story(number), add_special_tokens=True).ids
        assert ids == [*text, tokenizer.token_to_id("<|eot|>")] and ids[0] == tokenizer.token_to_id("<s>")
    assert [token.text for token in record.begin] == ["<s>"]
    assert [token.text for token in record.stops] == ["<|eot|>", "</s>"]


def test_a_long_document_begins_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.data.encode.LONGEST_PIECE", 200)
    (tmp_path / "long.txt").write_text("\n".join(map(story, range(40))))
    prepare([str(tmp_path / "long.txt")], str(folder), tmp_path / "out")
    (ids,) = documents(tmp_path / "out")
    begin = read_text_format(tmp_path / "out").begin_ids[0]
    assert ids[0] == begin and ids.count(begin) == 1


def test_a_chat_begins_as_its_template_says(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", CHATS)
    for name, template in (("with", HEADERS), ("without", CHATML)):
        model = write_tokenizer(tmp_path / name, plain(template), with_bos(byte_level()))
        prepare([str(file)], str(model), tmp_path / f"{name}-out", **CHAT)
        bos = read_text_format(tmp_path / f"{name}-out").begin_ids
        counts = {ids.count(bos[0]) for ids in documents(tmp_path / f"{name}-out")}
        assert counts == ({1} if name == "with" else {0}), (
            "as apply_chat_template of transformers: the template's text alone"
        )


def test_the_ends_of_answers_are_in_the_record(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", CHATS)
    model = write_tokenizer(tmp_path / "model", plain(CHATML))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    result = prepare([str(file)], str(model), tmp_path / "out", held_out=0.5, shard_tokens=100, **CHAT)
    answers = sum(message["role"] == "assistant" for chat in CHATS for message in chat)
    assert result.answers is not None
    assert {token.text: count for token, count in result.answers.counts.items()} == {"<|im_end|>": answers}
    record = read_text_format(tmp_path / "out" / "train")
    assert record.document_end is not None and record.document_end.text == "<|endoftext|>"
    assert [token.text for token in record.answer_ends] == ["<|im_end|>"]
    assert [token.text for token in record.stops] == ["<|endoftext|>", "<|im_end|>"]
    again = prepare([str(file)], str(model), tmp_path / "out", held_out=0.5, shard_tokens=100, **CHAT)
    assert again.reused and again.answers == result.answers


@pytest.mark.parametrize("at_once", [1, 3, 1 << 22])
def test_white_space_may_follow_the_end_of_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("meshwright.data.answer_ends.TOKENS_AT_ONCE", at_once)
    template = CHATML.replace("BEGIN", "{% generation %}").replace(
        "END{%- else", "{{- '\n \n' }}{% endgeneration %}{%- else"
    )
    file = write_chats(tmp_path / "chats.jsonl", CHATS)
    result = prepare([str(file)], str(write_tokenizer(tmp_path / "model", template)), tmp_path / "out", **CHAT)
    assert result.answers is not None
    assert [token.text for token in result.answers.counts] == ["<|im_end|>"] and not result.answers.unended


def test_answers_without_end_are_refused_unless_accepted(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", CHATS)
    template = "{% for message in messages %}<|header|>{{ message.role + '\n' + message.content }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|header|>{{ 'assistant\n' }}{% endif %}"
    model = write_tokenizer(tmp_path / "model", template + prompt)
    arguments = ([str(file)], str(model), tmp_path / "out")
    with pytest.raises(
        BadInput, match=r"7 of 7 answers do not end with a special token, the first in .*chats.jsonl \[1\]"
    ):
        prepare(*arguments, **CHAT)
    result = prepare(*arguments, unended_answers="accept", **CHAT)
    assert result.answers is not None and result.answers.unended == 7
    assert result.manifests["train"].unended_answers == 7
    with pytest.raises(BadInput, match="--unended-answers accept"):
        prepare(*arguments, **CHAT)


def test_another_layout_of_the_tokenizer_is_the_same_request(folder: Path, texts: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    value = json.loads((folder / "tokenizer.json").read_bytes())
    for name, indent in (("tokenizer.json", None), ("layout.json", 2)):
        (model / name).write_text(json.dumps(value, indent=indent))
    prepare([str(texts)], str(model), tmp_path / "a")
    (model / "layout.json").replace(model / "tokenizer.json")
    assert prepare([str(texts)], str(model), tmp_path / "a").reused
    prepare([str(texts)], str(model), tmp_path / "b", text_key="text", held_out=0.5)
    mix = DataSpec(mix={str(tmp_path / "a"): 1.0, str(tmp_path / "b"): 1.0})
    source = open_data(mix, seq_len=8, seed=0)
    assert len({record["tokenizer"] for record in source.record().values()}) == 2
    assert len({record["tokenizer_identity"] for record in source.record().values()}) == 1


def test_another_end_named_by_the_folder_is_another_request(folder: Path, texts: Path, tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", None)
    prepare([str(texts)], str(model), tmp_path / "out")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot|>"}))
    with pytest.raises(BadInput, match=r"document_end: </s> before, <\|eot\|> now"):
        prepare([str(texts)], str(model), tmp_path / "out")


def test_texts_with_other_ends_or_beginnings_are_not_mixed(folder: Path, texts: Path, tmp_path: Path) -> None:
    def mixed(name: str, **options: Any) -> Callable[[], object]:
        prepare([str(texts)], str(options.pop("model", folder)), tmp_path / name, **options)
        mix = {str(tmp_path / "plain"): 1.0, str(tmp_path / name): 1.0}
        return lambda: open_data(DataSpec(mix=mix), seq_len=8, seed=0)

    mixed("plain")
    with pytest.raises(
        BadInput, match=r"documents of .*eot end with <\|eot\|>, those of .*plain with </s>; prepare both"
    ):
        mixed("eot", eos="<|eot|>")()
    without = write_tokenizer(tmp_path / "without", None, sentence_piece())
    with pytest.raises(BadInput, match=r"have different tokenizers \(digests"):
        mixed("no-bos", model=without)()


@pytest.mark.parametrize("key", ["text_format", "inputs", "request"])
def test_a_manifest_without_a_key_is_refused_in_one_line(folder: Path, texts: Path, tmp_path: Path, key: str) -> None:
    prepare([str(texts)], str(folder), tmp_path / "out")
    with pytest.raises(
        Damaged, match=rf"^.*manifest\.json: not a readable manifest .*{key}: missing\); prepare again$"
    ):
        open_directory(without(key, tmp_path / "out"))
