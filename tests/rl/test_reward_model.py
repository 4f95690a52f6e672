"""Rewards of a trained reward model: its scores beside transformers', the same bits after a stop, its memory, and what is refused."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.models.convert import export_checkpoint
from meshwright.data.source import open_data
from meshwright.data.text_format import TextFormat
from meshwright.rl.reward_model import RewardModel
from meshwright.rl.samples import SampledAnswer
from meshwright.spec.errors import BadConfig, BadInput
from meshwright.workload.rollout_memory import rollout_bytes
from tests.distributed.pool import Pool
from tests.distributed.test_rl import figures
from tests.distributed.test_training import merge_tensors, same_bits, trained
from tests.preferences.corpus import make_preferences
from tests.rl.corpus import make_questions
from tests.training.tiny import ranks, tiny_run

CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.fixture(scope="module")
def rewarding(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has trained a reward model."""
    pairs = make_preferences(tmp_path_factory.getbasetemp() / "preferences")
    runs = tmp_path_factory.mktemp("rewarding")
    trained(pool, pairs, runs, *ranks(1), "preference.loss=reward")
    return runs / "tiny"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_questions(tmp_path_factory.getbasetemp() / "questions")


def judged_by(folder: Path) -> str:
    return f"rl.reward={{file: null, function: reward, processes: 2, model: {folder}}}"


def text_format(questions: Path) -> TextFormat:
    text = open_data(tiny_run(questions).data, seq_len=32, seed=0, conversations=True).text_format
    assert text is not None
    return text


def test_rewards_are_the_scores_that_transformers_gives(rewarding: Path, questions: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    export_checkpoint(rewarding, tmp_path / "folder", dtype="fp32")
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder", dtype=FP32).eval()
    draw = torch.Generator().manual_seed(0)
    answers = [
        SampledAnswer(
            torch.randint(1, 300, (3,), generator=draw).tolist(),
            torch.randint(1, 300, (size,), generator=draw).tolist(),
            [],
            truncated=bool(size % 2),
        )
        for size in (1, 5, 20, 7, 2, 0)
    ]
    for folder in (rewarding, tmp_path / "folder"):
        model = RewardModel(tiny_run(questions, judged_by(folder)), text_format(questions), CPU, FP32)
        signs: list[int] = []
        model.judge(answers, lambda signs=signs: signs.append(1))
        assert len(signs) == 1 and answers[-1].outcome == "no verdict" and answers[-1].reward is None
        for answer in answers[:-1]:
            with torch.no_grad():
                score = theirs(input_ids=torch.tensor([[*answer.prompt, *answer.tokens]])).logits[0, 0].item()
            assert answer.outcome == "reward" and answer.reward == pytest.approx(score, rel=1e-4, abs=1e-5)


def test_a_run_learns_from_a_reward_model_and_goes_on_with_the_same_bits(
    pool: Pool, rewarding: Path, questions: Path, tmp_path: Path
) -> None:
    words = [*ranks(2), judged_by(rewarding), "train.steps=16", "rl.exact=true", "train.learning_rate=1e-2"]
    whole = trained(pool, questions, tmp_path / "whole", *words)
    first = trained(pool, questions, tmp_path / "parts", *words, stop_at=5)
    second = trained(pool, questions, tmp_path / "parts", *words)
    assert same_bits(merge_tensors(second), merge_tensors(whole))
    rewards = figures(whole, "reward")
    assert figures(first, "reward") + figures(second, "reward") == rewards
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + whole[0].steps[0]["reward_deviation"] / 2
    assert (
        all("rewards_error" not in step for step in whole[0].steps) and figures(whole, "unequal_logprobs") == [0.0] * 16
    )


def test_a_score_that_is_not_finite_is_no_reward(rewarding: Path, questions: Path, monkeypatch: Any) -> None:
    model = RewardModel(tiny_run(questions, judged_by(rewarding)), text_format(questions), CPU, FP32)
    monkeypatch.setattr(model._scorer, "score", lambda texts: [math.nan, 1.5][: len(texts)])
    answers = [SampledAnswer([1], [2], [0.0], truncated=False) for _ in range(2)]
    model.judge(answers, lambda: None)
    assert [(answer.outcome, answer.reward) for answer in answers] == [("error", None), ("reward", 1.5)]


def test_the_plan_has_room_for_the_model(rewarding: Path, questions: Path) -> None:
    run = tiny_run(questions, judged_by(rewarding))
    without = replace(run, rl=replace(run.rl, reward=replace(run.rl.reward, file="judge.py", model=None)))
    more = rollout_bytes(run, 2, 4) - rollout_bytes(without, 2, 4)
    weights = 4 * 29_000
    assert more > weights


def test_what_is_no_reward_model_of_this_data_is_refused(
    rewarding: Path, questions: Path, tmp_path: Path, pool: Pool
) -> None:
    text = text_format(questions)
    other = replace(text, tokenizer="another")
    with pytest.raises(BadInput, match="the tokenizer of the data"):
        RewardModel(tiny_run(questions, judged_by(rewarding)), other, CPU, FP32)
    long = tiny_run(questions, judged_by(rewarding), "train.seq_len=64", "model.max_seq_len=96")
    with pytest.raises(BadInput, match="expected a context of 65 tokens"):
        RewardModel(long, text, CPU, FP32)
    trained(pool, questions, tmp_path, *ranks(1), "train.steps=1", "train.warmup_steps=0")
    with pytest.raises(BadInput):  # a language model has no score
        RewardModel(tiny_run(questions, judged_by(tmp_path / "tiny")), text, CPU, FP32)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadInput):
        RewardModel(tiny_run(questions, judged_by(empty)), text, CPU, FP32)
    shutil.rmtree(empty)
    with pytest.raises(BadInput, match="expected the folder of a reward model"):
        tiny_run(questions, judged_by(empty)).rl.reward.check_path()
    for words, message in (
        (f"rl.reward={{model: {rewarding}}}", "none beside rl.reward.file"),
        (
            f"rl.reward={{file: null, function: reward, processes: 2, model: {rewarding}, seconds: 3}}",
            "no such key, as rl.reward.model judges",
        ),
        ("rl.reward={file: null}", "file: FILE.py with a function, or model: DIR"),
    ):
        with pytest.raises(BadConfig, match=message):
            tiny_run(questions, words)
