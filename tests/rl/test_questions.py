"""The conversations of a corpus as questions and answers, in an order of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.config.load import load_run
from meshwright.data.single_conversations import _last_answer
from meshwright.data.source import open_data
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.launch.fine_tuning import fine_tuning_lines
from meshwright.launch.prepare import open_run_data
from meshwright.spec.errors import BadInput
from meshwright.spec.job import DataSpec
from tests.rl.corpus import make_questions


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_questions(tmp_path_factory.getbasetemp() / "questions").parent / "data")


def test_each_epoch_has_every_question_once_with_its_answer(corpus: str) -> None:
    data = open_data(DataSpec(mix={corpus: 1.0}), seq_len=32, seed=3, conversations=True)
    assert data.tokenizer_file is not None
    tokenizer, seen = open_tokenizer(data.tokenizer_file), []
    for index in range(2 * data.windows):
        tokens, answer = data.conversation(index)
        question = tokenizer.decode(tokens[:answer].tolist())
        assert question.endswith(" = ")
        digits = question.removesuffix(" = ").split()
        assert tokenizer.decode(tokens[answer:].tolist()) == " ".join(sorted(digits))
        seen.append(question)
    first, second = seen[: data.windows], seen[data.windows :]
    assert sorted(first) == sorted(second) and first != second


def test_a_question_that_leaves_no_room_and_text_without_answers_are_refused(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has a question of \d+ tokens, train.seq_len is 6; raise it"):
        open_data(DataSpec(mix={corpus: 1.0}), seq_len=6, seed=0, conversations=True)
    text = str(Path(corpus).parent / "text" / "data")
    with pytest.raises(BadInput, match="has no chats, whose questions rl needs"):
        open_data(DataSpec(mix={text: 1.0}), seq_len=32, seed=0, conversations=True)


def test_a_start_says_what_a_step_samples(corpus: str) -> None:
    run = load_run(Path(corpus).parent / "tiny.yaml")
    first, rate, validation = fine_tuning_lines(run, open_run_data(run))
    assert first.startswith(
        "RL: a step has 8 questions with 4 answers of at most 8 tokens; grpo; rewards by common of "
    )
    assert rate.startswith("RL: learning rate grows for 1 steps") and validation.startswith("RL: held-out loss")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([0, 0, 1, 1], (2, 4)), ([0, 1, 0, 0.5, 0.5, 0], (3, 5)), ([1, 1], None), ([0, 0], None), ([], None)],
)
def test_the_last_answer_is_the_last_run_of_trained_tokens(weights: list[float], expected: object) -> None:
    assert _last_answer(np.array(weights)) == expected
