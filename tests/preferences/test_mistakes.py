"""What `check` says of run files with `preference` and `rl` as people bring them: one clear answer at the key, and no others beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command import meshwright
from tests.preferences.corpus import make_preferences
from tests.rl.corpus import make_questions


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preferences(tmp_path_factory.getbasetemp() / "preferences")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_questions(tmp_path_factory.getbasetemp() / "questions")


MISTAKES = {
    "no section": (["preference=dpo"], "preference: expected a section .*got the text 'dpo'"),
    "a loss of another program": (
        ["preference.loss_type=ipo"],
        r"preference.loss_type: expected a key of preference, got 'loss_type' \(nearest: loss\)",
    ),
    "unknown loss": (["preference.loss=dppo"], r"preference.loss: expected dpo .*got the text 'dppo' \(nearest: dpo\)"),
    "no reference": (
        ["model.init=checkpoint:{other}", "preference.reference=hf:nowhere"],
        "preference.reference: hf:nowhere: nowhere/config.json: no such file",
    ),
    "chats": (["data.mix={chats}"], "data.mix: .*has no preferences, .*--preferences"),
    "no preferences": (["preference=none"], "data.mix: .*has good and bad answers, on which a run with `preference`"),
    "short sequences": (["train.seq_len=8"], "train.seq_len: .*a pair of .*preference.too_long: leave_out"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_preferences_is_answered_once_at_its_key(
    pairs: Path, questions: Path, tmp_path: Path, name: str
) -> None:
    words, expected = MISTAKES[name]
    places = {"chats": questions.parent / "data", "other": first_run(pairs, tmp_path)}
    answer = meshwright("check", pairs, *(word.format(**places) for word in words), "--runs", tmp_path)
    assert answer.code == 2 and answer.err.rstrip().endswith("1 mistake"), answer.err
    assert re.search(f"(?m)^.*: {expected}", answer.err), answer.err


def first_run(pairs: Path, folder: Path) -> Path:
    """A checkpoint of the run's model."""
    from meshwright.models.decoder import Decoder
    from tests.serve.helpers import save_run
    from tests.training.tiny import tiny_run

    return save_run(folder / "first", Decoder(tiny_run(pairs).model))


RL_MISTAKES = {
    "no file": (["rl.reward.file=nowhere.py"], "rl.reward.file: expected a Python file, got nowhere.py"),
    "a file for the section": (["rl.reward=judge.py"], "rl.reward: expected a section .*got the text 'judge.py'"),
    "samples by another name": (["rl.num_generations=4"], r"rl.num_generations: .*\(nearest: samples\)"),
    "beta of another program": (["rl.beta=0.1"], "rl.beta: no such key; .* is rl.kl.weight"),
    "top-p": (["rl.top_p=0.9"], "rl.top_p: no such key; answers are drawn from all tokens"),
    "a language model as judge": (
        ["rl.reward={{file: null, processes: 2, function: reward, model: {other}}}"],
        "rl.reward.model: .*first: is a language model; expected a reward model",
    ),
    "texts": (["data.mix={text}"], "data.mix: .*has no chats, whose questions rl needs"),
    "long answers": (["rl.new_tokens=99"], "rl.new_tokens: expected at most train.seq_len = 32"),
}


@pytest.mark.parametrize("name", RL_MISTAKES)
def test_a_mistake_of_reinforcement_learning_is_answered_once_at_its_key(
    questions: Path, tmp_path: Path, name: str
) -> None:
    words, expected = RL_MISTAKES[name]
    places = {"text": questions.parent / "text" / "data", "other": first_run(questions, tmp_path)}
    answer = meshwright("check", questions, *(word.format(**places) for word in words), "--runs", tmp_path)
    assert answer.code == 2 and answer.err.rstrip().endswith("1 mistake"), answer.err
    assert re.search(f"(?m)^.*: {expected}", answer.err), answer.err


def test_a_beta_that_is_probably_a_slip_is_asked_about(pairs: Path, tmp_path: Path) -> None:
    answer = meshwright("check", pairs, "preference.beta=100", "--runs", tmp_path)
    assert answer.code == 0 and "preference.beta is 100, more than 10 times the usual 0.1: is it a slip?" in answer.err
    for words in (["preference.beta=1"], ["preference={loss: simpo, beta: 10}"]):
        assert "slip" not in meshwright("check", pairs, *words, "--runs", tmp_path).err
