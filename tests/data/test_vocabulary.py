"""Two tokenizers are the same when their tokens and merges are, whatever their files look like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from meshwright.data.tokenizer import load_tokenizer
from meshwright.data.vocabulary import Vocabulary, read_vocabulary
from meshwright.spec.errors import BadInput
from tests.data.chats import write_tokenizer


@pytest.fixture
def tokenizer_json(tokenizer_file: Path) -> dict:
    return json.loads(tokenizer_file.read_bytes())


def vocabulary_of(folder: Path, tokenizer_json: dict, **style: object) -> Vocabulary:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json, **style), encoding="utf-8")  # type: ignore[arg-type]  # options of json.dumps
    vocabulary = read_vocabulary(folder)
    assert vocabulary is not None
    return vocabulary


def test_formatting_order_and_file_layout_do_not_change_the_digest(tmp_path: Path, tokenizer_json: dict) -> None:
    first = vocabulary_of(tmp_path / "a", tokenizer_json)
    model = tokenizer_json["model"]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    vocab = dict(reversed(model["vocab"].items()))
    other = tokenizer_json | {
        "decoder": None,
        "model": model | {"vocab": vocab, "merges": [" ".join(pair) for pair in merges]},
    }
    assert vocabulary_of(tmp_path / "b", other, indent=3).digest == first.digest
    assert vocabulary_of(tmp_path / "c", tokenizer_json | {"model": model | {"merges": merges}}).digest == first.digest
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "vocab.json").write_text(json.dumps(vocab))
    (parts / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in merges))
    vocabulary = read_vocabulary(parts)
    assert vocabulary is not None and vocabulary.difference(first) == "" and vocabulary.digest == first.digest


def test_the_first_token_or_merge_that_differs_is_named(tmp_path: Path, tokenizer_json: dict) -> None:
    first, model = vocabulary_of(tmp_path / "a", tokenizer_json), tokenizer_json["model"]
    tokens = {number: token for token, number in model["vocab"].items()}
    renamed = {"zz" if number == 280 else token: number for token, number in model["vocab"].items()}
    other = vocabulary_of(tmp_path / "b", tokenizer_json | {"model": model | {"vocab": renamed}})
    assert other.digest != first.digest
    assert first.difference(other) == f"token 280 is {tokens[280]!r} in the first and 'zz' in the second"
    added = tokenizer_json["added_tokens"] + [tokenizer_json["added_tokens"][0] | {"id": 300, "content": "<pad>"}]
    more = vocabulary_of(tmp_path / "c", tokenizer_json | {"added_tokens": added})
    assert first.difference(more) == "token 300 is missing in the first and '<pad>' in the second"
    merges = model["merges"]
    swapped = vocabulary_of(
        tmp_path / "d", tokenizer_json | {"model": model | {"merges": [merges[1], merges[0], *merges[2:]]}}
    )
    assert first.difference(swapped).startswith("merge 0 is ")


def test_a_unigram_model_has_scores(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -2.0)]
    tokenizer_json = json.loads(Tokenizer(models.Unigram(pieces, unk_id=0)).to_str())
    first = vocabulary_of(tmp_path / "a", tokenizer_json)
    assert first.tokens == {0: "<unk>", 1: "a", 2: "b"}
    tokenizer_json["model"]["vocab"][2][1] = -3.0
    assert (
        first.difference(vocabulary_of(tmp_path / "b", tokenizer_json))
        == "merge 2 is 'b -2.0' in the first and 'b -3.0' in the second"
    )


def test_a_folder_without_tokenizer_has_no_vocabulary_and_another_file_is_refused(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(BadInput, match="tokenizer.json: not a tokenizer"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize("where", ["vocab", "added"])
def test_ids_of_tokens_have_a_bound(tmp_path: Path, where: str) -> None:
    folder = write_tokenizer(tmp_path / "m", "")
    content = json.loads((folder / "tokenizer.json").read_text())
    if where == "vocab":
        content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = 2**32 - 1
    else:
        content["added_tokens"][0]["id"] = 2**24
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"tokenizer\.json: expected ids of tokens from 0 to 16,777,215, got"):
        read_vocabulary(folder)
    if where == "vocab":  # the library numbers added tokens itself
        with pytest.raises(
            BadInput, match=r"tokenizer\.json: expected ids of tokens from 0 to 16,777,215, got 4294967295"
        ):
            load_tokenizer(folder)
