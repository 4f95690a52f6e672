"""The same beginning and the same ends of texts at every entrance: prepare, train, eval, generate, serve and the export in transformers.

A small model learns its few texts by heart, so that its greedy answer ends by itself. One case runs in `make test`, all of them in
`make test-families`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

import meshwright
from meshwright.checkpoint.models.convert import export_checkpoint
from meshwright.cli.evaluate import _evaluate
from meshwright.cli.generate import sample
from meshwright.data.indexed import IndexedFile
from meshwright.data.manifest import TRAIN, Manifest
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.data.text_format import read_text_format
from tests.data.chats import CHATML, HEADERS, INSTRUCT, byte_level, plain, sentence_piece, turns, write_chats
from tests.server.helpers import JSON, call, running_server

TEXTS = ["red is the first word of this text", "blue is another word and a longer text than the first one", "green"]
ANSWERS = {"which word is first": "it is red the first", "and which is last": "green is the last one of them"}
STEPS, LENGTH, NEW_TOKENS = 160, 96, 48
RUN_FILE = """\
model: {{family: llama, layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn_hidden: 128, max_seq_len: 192}}
data: {{mix: {{"{data}": 1}}}}
train: {{steps: {steps}, global_batch: 8, seq_len: {length}, learning_rate: 1e-2, warmup_steps: 5, validate_every: 0}}
cluster: {{gpu: cpu, gpus_per_node: 1}}
supervision: {{restarts: 0}}
checkpoint: {{keep: 1}}
"""


@dataclass(frozen=True)
class Case:
    """A tokenizer's folder and what its texts must look like."""

    tokenizer: Tokenizer
    files: Mapping[str, Any]
    """JSON files beside tokenizer.json; a text under `eos_token_id` stands for its id."""
    document_end: str
    answer_end: str
    """End of the answers of `template`."""
    template: str
    begin: str = ""
    eos: str | None = None
    """The flag `--eos`."""
    other_stops: Sequence[str] = field(default=())
    """Further tokens that end a generated text."""


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    processor: Any = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.post_processor = processor
    return tokenizer


def configured(**values: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **values}}


UNUSUAL = plain(CHATML).replace("<|im_end|>", "<|eot|>").replace("<|im_start|>", "<|header|>")
CASES = {
    "byte level, pad is not the end": lambda: Case(
        byte_level(),
        configured(eos_token="</s>", pad_token="<|endoftext|>"),
        "</s>",
        "<|im_end|>",
        plain(CHATML),
    ),
    "Llama 3": lambda: Case(
        with_bos(byte_level()),
        configured(eos_token="<|eot|>", bos_token="<s>")
        | {"generation_config.json": {"eos_token_id": ["</s>", "<|eot|>"]}},
        "</s>",
        "<|eot|>",
        plain(HEADERS),
        begin="<s>",
        other_stops=["<|eot|>"],
    ),
    "two ends": lambda: Case(
        byte_level(),
        configured(eos_token="</s>") | {"generation_config.json": {"eos_token_id": ["</s>", "<|im_end|>"]}},
        "</s>",
        "<|im_end|>",
        plain(CHATML),
        other_stops=["<|im_end|>"],
    ),
    "SentencePiece with a beginning": lambda: Case(
        with_bos(sentence_piece()),
        configured(eos_token="</s>", bos_token="<s>", add_bos_token=True),
        "</s>",
        "</s>",
        plain(INSTRUCT),
        begin="<s>",
    ),
    "base of ChatML": lambda: Case(
        byte_level(), configured(eos_token="<|endoftext|>"), "<|endoftext|>", "<|im_end|>", plain(CHATML)
    ),
    "without an end": lambda: Case(byte_level(), {}, "<|eot|>", "<|eot|>", UNUSUAL, eos="<|eot|>"),
}


def write_folder(folder: Path, case: Case) -> Path:
    """The tokenizer's files of a Hugging Face folder."""
    folder.mkdir()
    case.tokenizer.save(str(folder / "tokenizer.json"))
    for name, values in case.files.items():
        ids = {
            key: [case.tokenizer.token_to_id(text) for text in value]
            for key, value in values.items()
            if key == "eos_token_id"
        }
        (folder / name).write_text(json.dumps({**values, **ids}))
    (folder / "chat_template.jinja").write_text(case.template)
    return folder


def prepared(folder: Path, case: Case, kind: str) -> Path:
    """A corpus of the texts or chats, each many times; the last split is held out."""
    out, source = folder / "corpus", folder / f"{kind}.jsonl"
    if kind == "chat":
        write_chats(source, [turns(question, answer) for question, answer in ANSWERS.items()] * 20)
    else:
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 20))
    prepare(
        [str(source)],
        str(folder / "tokenizer"),
        out,
        held_out=0.2,
        eos=case.eos,
        chat=ChatRequest() if kind == "chat" else None,
    )
    return out


def cut(text: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """A text in two parts, the first of at least ten characters with the tokens that begin those of the whole text."""
    whole = tokenizer.encode(text).ids
    parts = ((text[:end], text[end:]) for end in range(10, len(text)))
    return next(each for each in parts if (ids := tokenizer.encode(each[0]).ids) == whole[: len(ids)])


def documents(directory: Path) -> list[list[int]]:
    """The token ids of each document."""
    found = []
    for shard in Manifest.read(directory).shards:
        file = IndexedFile(directory / shard.name)
        found += [file.read(start, stop).tolist() for start, stop in pairwise(file.document_bounds().tolist())]
    return found


def trained(folder: Path, data: Path) -> Path:
    """The folder of a run that has learned the corpus by heart."""
    file = folder / "run.yaml"
    file.write_text(RUN_FILE.format(data=data, steps=STEPS, length=LENGTH))
    meshwright.train(file, runs=folder / "runs")
    return folder / "runs" / "run"


def served(folder: Path, prompt: str, kind: str) -> dict[str, Any]:
    """The answer of a server, with `prompt_tokens`, the ids that it read."""
    text = {"messages": turns(prompt)} if kind == "chat" else {"prompt": prompt}
    with running_server(folder) as server:

        def asked(path: str, **options: Any) -> Any:
            answer = server.run(call(server.app, "POST", path, json.dumps({**text, **options}).encode(), JSON))
            assert answer.status == 200, answer.body
            return json.loads(answer.body)

        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        answer = asked(path, max_tokens=NEW_TOKENS, temperature=0)
        ids = asked("/tokenize")["tokens"]
    choice = answer["choices"][0]
    return {
        "text": choice["message"]["content"] if kind == "chat" else choice["text"],
        "tokens": answer["usage"]["completion_tokens"],
        "prompt_tokens": ids,
        "reason": choice["finish_reason"],
    }


def in_transformers(folder: Path, prompt: str, kind: str) -> tuple[list[int], list[int], str]:
    """(prompt, new tokens, text) of the greedy answer with the folder's own settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loader: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    tokenizer, model = tokenizers.from_pretrained(folder), loader.from_pretrained(folder, dtype=torch.float32)
    if kind == "chat":
        ids = tokenizer.apply_chat_template(turns(prompt), add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)[0].tolist()
    new = output[len(ids) :]
    return ids, new, tokenizer.decode(new, skip_special_tokens=True)


ENTRANCES = [(name, kind) for name, kind in zip(CASES, ("text", "chat"), strict=False)]
ENTRANCES += [(name, kind) for name in CASES for kind in ("text", "chat") if (name, kind) not in ENTRANCES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), ENTRANCES)
def test_a_text_begins_and_ends_alike_everywhere(tmp_path: Path, name: str, kind: str) -> None:
    case = CASES[name]()
    prompt, expected = next(iter(ANSWERS.items())) if kind == "chat" else cut(TEXTS[0], case.tokenizer)
    write_folder(tmp_path / "tokenizer", case)
    id_of = case.tokenizer.token_to_id
    begin = [id_of(case.begin)] if case.begin else []
    end = id_of(case.answer_end if kind == "chat" else case.document_end)
    stops = {id_of(token) for token in (case.document_end, *case.other_stops)} | ({end} if kind == "chat" else set())

    corpus = prepared(tmp_path, case, kind)
    for document in documents(corpus / TRAIN):
        assert [id for id in document if id in begin] == begin == document[: len(begin)]
        assert end in document if kind == "chat" else document[-1] == end and document.count(end) == 1
    run = trained(tmp_path, corpus)
    export_checkpoint(run, exported := tmp_path / "exported", dtype="fp32")

    records = [read_text_format(folder) for folder in (corpus / TRAIN, run, meshwright_checkpoint(run), exported)]
    assert {record.stop_ids for record in records} == {tuple(sorted(stops))}
    assert {record.begin_ids for record in records} == {tuple(begin)}
    assert {record.tokenizer for record in records} == {records[0].tokenizer}

    losses = [_evaluate(folder, folder, str(corpus), LENGTH, 8, 4, None, None).loss for folder in (run, exported)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and losses[0] < 1

    ids, new, text = in_transformers(exported, prompt, kind)
    assert text.lstrip() == expected.lstrip() and new[-1] == end, "transformers"
    assert ids[: len(begin)] == begin
    for folder in (run, exported):
        ours = served(folder, prompt, kind)
        # transformers' decoder of this form takes a space from the beginning of what it is given.
        assert (ours["text"].lstrip() if "SentencePiece" in name else ours["text"], ours["reason"]) == (
            expected,
            "stop",
        )
        assert ours["prompt_tokens"] == ids and ours["tokens"] == len(new) - 1  # the end is not counted
    if kind == "text":
        for folder in (run, exported):
            answers = sample(folder, [prompt], tokens=NEW_TOKENS, temperature=0.0, top_k=0, seed=0)
            assert [answer["text"].lstrip() for answer in answers] == [expected.lstrip()]


def meshwright_checkpoint(run: Path) -> Path:
    return next((run / "checkpoints").glob("step-*"))
