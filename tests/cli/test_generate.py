"""`meshwright generate` ends a text at every end token that the model's folder names, whoever computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import generate
from meshwright.training.spread import SpreadAnswer
from tests.server.helpers import byte_tokenizer, write_folder

PROMPT, LENGTH = "def read", 24
GREEDY = {"tokens": LENGTH, "temperature": 0.0, "top_k": 0, "seed": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("generate") / "model")


def test_each_end_token_of_the_folder_ends_the_text(folder: Path) -> None:
    (whole,) = generate.sample(folder, [PROMPT], **GREEDY)
    ids = byte_tokenizer().encode(whole["text"]).ids
    stop = next(id for position, id in enumerate(ids) if position > 3 and id not in ids[:position])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, stop]}))
    (cut,) = generate.sample(folder, [PROMPT], **GREEDY)
    assert cut["text"] == byte_tokenizer().decode(ids[: ids.index(stop)]) != ""


def test_ranks_and_plans_have_the_same_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    asked: list[Any] = []

    def by_ranks(module: str, job: Any, *others: Any) -> list[list[int]]:
        asked.append(job["stops"])
        return [[5]]

    def by_plan(*others: Any, continuation: Any) -> SpreadAnswer:
        asked.append(continuation.sampling.stops)
        return SpreadAnswer(tokens=((5,),))

    monkeypatch.setattr(generate, "answer_of_ranks", by_ranks)
    monkeypatch.setattr(generate, "ask_ranks", by_plan)
    monkeypatch.setattr(generate, "cluster_here", lambda *others: None)
    generate.sample(folder, [PROMPT], **GREEDY, tensor=2)
    generate.sample(folder, [PROMPT], **GREEDY, plan=folder / "plan.yaml")
    assert [list(stops) for stops in asked] == [[0, 3, 7]] * 2
