"""Preferences in every form that data sets have: recognised, with one prompt for both answers, whole in windows, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.manifest import TRAIN, Manifest
from meshwright.data.preference_forms import FORMS, preference_form_of
from meshwright.data.prepare import PreparedCorpus, prepare
from meshwright.data.request import ChatRequest
from meshwright.data.source import DataSource, open_data
from meshwright.spec.errors import BadInput
from meshwright.spec.job import DataSpec
from meshwright.spec.preference import PreferenceSpec
from tests.data.chats import CHATML, byte_level, marked, plain, turns, write_tokenizer
from tests.preferences.corpus import write_records

ASKED, YES, NO = (
    turns("Why?")[0],
    {"role": "assistant", "content": "Yes."},
    {"role": "assistant", "content": "No, never."},
)
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Why?", "chosen": "Yes.", "rejected": "No, never."},
    "messages": {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
    "repeated prompt": {"prompt": "Why?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    "scored": {"prompt": "Why?", "chosen": "Yes.", "rejected": "No, never.", "score_chosen": 8.5, "score_rejected": 3},
    "implicit": {"chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    "turns in a text": {
        "chosen": "\n\nHuman: Why?\n\nAssistant: Yes.",
        "rejected": "\n\nHuman: Why?\n\nAssistant: No, never.",
    },
    "OpenAI": {"input": {"messages": [ASKED]}, "preferred_output": [YES], "non_preferred_output": [NO]},
    "ranked": {
        "context": [ASKED],
        "completions": [{"rank": 1, "completion": [NO]}, {"rank": 0, "completion": [YES]}],
    },
    "rejected response": {"messages": [ASKED, YES], "rejected_response": "No, never."},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "Why?"}],
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No, never."},
    },
}


def prepared(
    folder: Path, records: list[dict[str, Any]], template: str = marked(CHATML), **more: Any
) -> PreparedCorpus:
    folder.mkdir(exist_ok=True)
    tokenizer = write_tokenizer(folder / "tokenizer", template, byte_level())
    source = write_records(folder / "preferences.jsonl", records)
    request = ChatRequest(preferences=more.pop("preferences", True))
    return prepare([str(source)], str(tokenizer), folder / "out", chat=request, **more)


def opened(folder: Path, seq_len: int = 64, split: Any = "train", **preference: Any) -> DataSource:
    spec = DataSpec(mix={str(folder / "out"): 1.0})
    return open_data(spec, seq_len=seq_len, seed=0, split=split, preference=PreferenceSpec(**preference))


@pytest.mark.parametrize("name", PAIRS)
def test_every_form_is_the_same_pair(tmp_path: Path, name: str) -> None:
    """Token for token, with one prompt: both answers begin at the same token, and nothing of the prompt is trained on in either."""
    manifest = prepared(tmp_path, [PAIRS[name]]).manifests[TRAIN]
    assert manifest.preferences is not None and manifest.preferences.kind == "pairs"
    (source,) = opened(tmp_path).sources.values()
    stream = source.stream
    (chosen, rejected), (long, short) = (each[:2].tolist() for each in stream.document_ranges())
    first, second = stream.read(chosen, chosen + long), stream.read(rejected, rejected + short)
    good, bad = (stream.read_weights(start, start + size) for start, size in ((chosen, long), (rejected, short)))
    begins = [int(np.flatnonzero(weights)[0]) for weights in (good, bad)]
    assert begins[0] == begins[1] and (first[: begins[0]] == second[: begins[0]]).all()
    assert set(good.tolist()) == {0, 1} and set(bad.tolist()) == {0, -1}
    tokenizer = byte_level()
    assert tokenizer.decode(first[good != 0].tolist(), skip_special_tokens=False) == "Yes.<|im_end|>"
    assert tokenizer.decode(second[bad != 0].tolist(), skip_special_tokens=False) == "No, never.<|im_end|>"
    assert preference_form_of(PAIRS[name]) in FORMS


def test_boundaries_are_those_of_tokens(tmp_path: Path) -> None:
    """Where the first token of an answer could join the prompt's last one, the prompt's tokens are those of its own text."""
    record = {"prompt": "Why?", "chosen": "\n\nYes.", "rejected": "No"}
    tokenizer = write_tokenizer(tmp_path / "tokenizer", marked(CHATML), byte_level(merges_newlines=True))
    source = write_records(tmp_path / "one.jsonl", [record])
    prepare([str(source)], str(tokenizer), tmp_path / "out", chat=ChatRequest(preferences=True))
    (stream,) = (each.stream for each in opened(tmp_path).sources.values())
    starts, lengths = stream.document_ranges()
    prompts = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        begin = int(np.flatnonzero(stream.read_weights(start, start + length))[0])
        prompts.append(stream.read(start, start + begin).tolist())
    assert prompts[0] == prompts[1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "other prompts": (
        {"chosen": turns("Why?", "Yes."), "rejected": turns("When?", "No.")},
        "the prompts of chosen and rejected differ from the first message on",
    ),
    "another first answer": (
        {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "e", "d")},
        "the prompts of chosen and rejected differ from message 3 on",
    ),
    "another prompt beside": (
        {"prompt": "When?", "chosen": turns("Why?", "Yes."), "rejected": turns("Why?", "No.")},
        "prompt: the prompts differ: chosen and rejected begin with another one",
    ),
    "the same answers": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
    "a tie": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 2, "score_rejected": 2},
        "score_chosen 2 is not above score_rejected 2",
    ),
    "text without prompt": (
        {"prompt": None, "chosen": "yes", "rejected": "no"},
        "prompt: expected text, got NoneType",
    ),
    "weights": (
        {"prompt": "a", "chosen": [{**YES, "weight": 2}], "rejected": "c"},
        "message 1 of the answer: weight: preferences have none",
    ),
    "no answer": (
        {"prompt": "a", "chosen": [ASKED], "rejected": "c"},
        "the prompts of chosen and rejected differ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs_are_named(tmp_path: Path, name: str) -> None:
    record, why = BAD[name]
    with pytest.raises(BadInput, match=rf"preferences.jsonl:1: {re.escape(why)}"):
        prepared(tmp_path, [record], on_bad="refuse")


def test_labelled_answers(tmp_path: Path) -> None:
    records = [{"prompt": f"Why {n}?", "completion": "Yes.", "label": n % 3 == 0} for n in range(9)]
    counts = prepared(tmp_path, records).manifests[TRAIN].preferences
    assert counts is not None and (counts.kind, counts.good, counts.bad) == ("labels", 3, 6)
    columns = opened(tmp_path, loss="kto").samples([0, 1]).columns
    assert columns["signs"].shape == columns["answers"].shape
    with pytest.raises(
        BadInput, match=r"has labelled answers, and preference.loss dpo compares pairs; set preference.loss to kto"
    ):
        opened(tmp_path)
    with pytest.raises(BadInput, match="label: expected true or false"):
        prepared(tmp_path / "bad", [{**records[0], "label": "good"}])


def test_one_label_alone_is_refused(tmp_path: Path) -> None:
    prepared(tmp_path, [{"prompt": f"Why {n}?", "completion": "Yes.", "label": True} for n in range(9)])
    with pytest.raises(BadInput, match=r"data.mix: all 9 answers are good; kto needs answers of both labels"):
        opened(tmp_path, loss="kto")


def test_pairs_and_labels_are_not_mixed(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", marked(CHATML))
    files = [
        write_records(tmp_path / "a.jsonl", [PAIRS["texts"]]),
        write_records(tmp_path / "b.jsonl", [{"prompt": "Why?", "completion": "Yes.", "label": True}]),
    ]
    with pytest.raises(
        BadInput, match=r"b.jsonl:1: labelled answers, and those before are pairs: prepare pairs and labelled answers"
    ):
        prepare(list(map(str, files)), str(tokenizer), tmp_path / "out", chat=ChatRequest(preferences=True))


def test_unknown_records_name_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput,
        match=r"'prompt', 'choosen', 'rejected' \('choosen' is near 'chosen'\), which is no known form of preferences",
    ):
        prepared(tmp_path, [{"prompt": "a", "choosen": "b", "rejected": "c"}])


@pytest.mark.parametrize("name", ["texts", "implicit", "OpenAI"])
def test_preferences_read_as_chats_or_texts_name_their_option(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"preferences of the form .*: --preferences reads them"):
        prepared(tmp_path, [PAIRS[name]], preferences=False)
    source = str(tmp_path / "preferences.jsonl")
    with pytest.raises(BadInput, match=r"no key 'text'.*; preferences of the form .* need --preferences"):
        prepare([source], str(tmp_path / "tokenizer"), tmp_path / "texts", on_bad="refuse")


def test_labels_are_not_lost_as_chats(tmp_path: Path) -> None:
    """A bad answer read as a chat would be trained on as a good one."""
    with pytest.raises(BadInput, match="label: unknown key; --preferences reads it"):
        prepared(tmp_path, [{"prompt": "a", "completion": "b", "label": False}], preferences=False)


def test_runs_read_what_they_train_on(tmp_path: Path) -> None:
    prepared(tmp_path, [PAIRS["texts"]] * 3)
    spec = DataSpec(mix={str(tmp_path / "out"): 1.0})
    with pytest.raises(BadInput, match=r"has good and bad answers, on which a run with `preference` trains"):
        open_data(spec, seq_len=64, seed=0)
    prepared(tmp_path / "chats", [{"messages": turns("a", "b")}] * 3, preferences=False)
    with pytest.raises(BadInput, match="has no preferences, which a run with `preference` needs"):
        opened(tmp_path / "chats")


def many(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Why {n}?", "chosen": "Yes. " * (1 + n % 5), "rejected": "No. " * (1 + n * 7 % 11), "id": f"q{n}"}
        for n in range(count)
    ]


def test_pairs_stay_together(tmp_path: Path) -> None:
    """In shards that are closed after any document, in splits, and in windows, each pair once an epoch."""
    manifests = prepared(tmp_path, many(24), held_out=0.3, shard_tokens=90).manifests
    assert all(shard.documents % 2 == 0 for manifest in manifests.values() for shard in manifest.shards)
    assert len(manifests[TRAIN].shards) > 3 and sum(manifest.documents for manifest in manifests.values()) == 48
    for split, documents in (("train", manifests[TRAIN].documents), ("validation", manifests["held_out"].documents)):
        data = opened(tmp_path, 150, split)
        columns = data.samples(range(data.windows)).columns
        numbers = columns["answers"][columns["signs"] != 0]
        assert sorted(numbers.tolist()) == list(range(documents))
        assert (columns["signs"][:, ::2] >= 0).all() and (columns["signs"][:, 1::2] <= 0).all()
        present = columns["signs"][:, ::2] > 0
        assert (columns["answers"][:, 1::2] - columns["answers"][:, ::2])[present].tolist() == [1] * (documents // 2)
    described = opened(tmp_path, 150).describe(0)
    assert set(described["weights"]) == {1.0, -1.0}


def test_a_pair_that_is_too_long_is_refused_or_left_out(tmp_path: Path) -> None:
    records = many(10)
    records[4]["chosen"] = "Yes. " * 200
    prepared(tmp_path, records)
    with pytest.raises(
        BadInput,
        match=r"preferences.jsonl \[q4\]: a pair of [\d,]+ tokens, its prompt included, and .* 150; 1 pairs",
    ):
        opened(tmp_path, 150)
    (source,) = opened(tmp_path, 150, too_long="leave_out").sources.values()
    assert source.packing is not None and source.packing.conversations == 18


def test_mismatched_answers_have_other_prompts_and_the_same_room(tmp_path: Path) -> None:
    prepared(tmp_path, [{"prompt": f"Why {n}?", "completion": f"As {n}.", "label": n % 2 == 0} for n in range(12)])
    data = opened(tmp_path, 100, loss="kto")
    data.mismatched = True
    tokenizer, columns = byte_level(), data.samples(range(data.windows)).columns
    for tokens, documents in zip(columns["mismatched_tokens"], columns["mismatched_documents"], strict=True):
        texts = [tokenizer.decode(tokens[documents == n].tolist()) for n in range(documents.max())]
        asked = [text.split("Why ")[1].split("?")[0] for text in texts]
        answered = [text.split("As ")[1].split(".")[0] for text in texts]
        assert answered == [*asked[1:], asked[0]] and len(asked) > 1
    batch = data.samples(range(data.windows))
    assert sorted(batch.tokens.flatten().tolist()) == sorted(columns["mismatched_tokens"].flatten().tolist())


def test_only_a_manifest_of_preferences_has_their_counts(tmp_path: Path) -> None:
    prepared(tmp_path, [PAIRS["texts"]] * 3)
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert content["preferences"] == {"kind": "pairs", "good": 3, "bad": 3}
    prepared(tmp_path / "chats", [{"messages": turns("a", "b")}] * 3, preferences=False)
    assert "preferences" not in json.loads((tmp_path / "chats" / "out" / "manifest.json").read_text())
    assert Manifest.read(tmp_path / "chats" / "out").preferences is None


def test_templates_without_marks(tmp_path: Path) -> None:
    """The range of an answer is found as in chats."""
    manifest = prepared(tmp_path, [PAIRS["texts"]], plain(CHATML)).manifests[TRAIN]
    assert manifest.preferences is not None and manifest.trained_tokens


def test_the_page_has_every_form() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "preferences.md").read_text(encoding="utf-8")
    for form in FORMS:
        assert f"| {form.name} | {', '.join(f'`{key}`' for key in form.keys)} | {form.meaning} |" in page
