"""Runs that learn from their own answers: the same bits after a stop, the same answers on any ranks, equal probabilities where exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_training import Seen
from tests.distributed.pool import Pool
from tests.distributed.test_training import merge_tensors, same_bits, trained
from tests.rl.corpus import make_questions
from tests.slow import quick_first
from tests.training.tiny import ranks, staged


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_questions(tmp_path_factory.getbasetemp() / "questions")


def figures(results: list[Seen], name: str) -> list[float]:
    """A figure of each step, which all ranks know alike."""
    seen = [[record[name] for record in result.steps] for result in results]
    assert all(each == seen[0] for each in seen)
    return seen[0]


def answers_of(metrics: Path) -> list[dict[str, Any]]:
    """The answers that a run has recorded for people."""
    return [record for record in map(json.loads, metrics.read_text().splitlines()) if record["kind"] == "answers"]


PLANS = {
    "exact, ranks": [*ranks(2), "rl.exact=true"],
    "inexact": [*ranks(2), "rl.temperature=0.7"],
    "tensor": ["cluster.gpus_per_node=2", "plan.tensor=2"],
    "pipeline": staged(2, "1f1b"),
    "adapters": [*ranks(2), "model.adapter.rank=4", "train.learning_rate=3e-2"],
    "adapters of a pipeline": [*staged(2, "1f1b"), "model.adapter={rank: 4, kind: dora}", "train.learning_rate=3e-2"],
}


@pytest.mark.parametrize("name", quick_first(1, PLANS))
def test_a_stopped_run_goes_on_with_the_same_bits(pool: Pool, questions: Path, tmp_path: Path, name: str) -> None:
    whole = trained(pool, questions, tmp_path / "whole", *PLANS[name])
    first = trained(pool, questions, tmp_path / "parts", *PLANS[name], stop_at=2)
    second = trained(pool, questions, tmp_path / "parts", *PLANS[name])
    assert [result.began for result in second] == [2, 2]
    assert same_bits(merge_tensors(second), merge_tensors(whole))
    for figure in ("reward", "answer_tokens", "entropy", "unequal_logprobs"):
        assert figures(first, figure) + figures(second, figure) == figures(whole, figure)
    rewards = figures(whole, "reward")
    assert len(set(rewards)) > 1 and min(figures(whole, "reward_deviation")) > 0
    unequal = figures(whole, "unequal_logprobs")
    assert unequal == [0.0] * 4 if "exact" in name.split(",") else max(unequal) > 0
    assert max(figures(whole, "largest_logprob_difference")) < 1e-4
    read, parts = (
        answers_of(next(folder.rglob("metrics.jsonl"))) for folder in (tmp_path / "whole", tmp_path / "parts")
    )
    assert [record["step"] for record in read] == [1, 2, 3, 4] and read == parts
    assert all(1 <= len(record["answers"]) <= 2 and record["question"] for record in read)


@pytest.mark.slow
def test_layouts_sample_the_same_answers(pool: Pool, questions: Path, tmp_path: Path) -> None:
    """Before the first update all have the same weights. Later answers differ where rounding decides a draw."""
    seen: dict[str, Any] = {}
    for name, plan in {"one": ranks(1), "four": ranks(4), "tensor": PLANS["tensor"]}.items():
        results = trained(pool, questions, tmp_path / name, *plan, "train.steps=1", "train.warmup_steps=0")
        seen[name] = [figures(results, figure)[0] for figure in ("reward", "answer_tokens", "truncated")]
        seen[name].append(pytest.approx(figures(results, "loss")[0], rel=1e-4, abs=1e-6))
    assert seen["one"] == seen["four"] == seen["tensor"]
