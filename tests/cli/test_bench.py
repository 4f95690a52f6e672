"""Tests of `meshwright bench` with lm-eval, where it is installed (`make test-bench`), and of its refusals."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.chat_prompts import ChatPrompts
from meshwright.server.model_files import read_model_files
from tests.cli.command import meshwright
from tests.server.helpers import write_folder

needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: make test-bench")
CHOICE = """\
task: quiz
dataset_path: acme/quiz
validation_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
doc_to_choice: "choices"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWER = """\
task: answer
dataset_path: acme/quiz
test_split: train
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "x"
generation_kwargs: {until: ["."], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""
TEXT = """\
task: words
dataset_path: acme/quiz
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> tuple[object, ...]:
    """Options for tasks over a local data set."""
    for folder in ("tasks", "sets/acme/quiz"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in (("quiz", CHOICE), ("answer", ANSWER), ("words", TEXT)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text)
    lines = [{"question": f"a fox {number}", "choices": [" jumps", " sleeps long"], "label": 0} for number in range(6)]
    (tmp_path / "sets/acme/quiz/train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "--include", tmp_path / "tasks", "--data-sets", tmp_path / "sets"


@needs_lm_eval
def test_a_model_is_scored_by_choices_answers_and_whole_texts(tmp_path: Path, tasks: tuple[object, ...]) -> None:
    folder = write_folder(tmp_path / "model")
    results = meshwright("bench", folder, "--tasks", "quiz,answer,words", *tasks, "--json").json["results"]
    metrics = {result["task"]: result["metrics"] for result in results}
    assert 0 <= metrics["quiz"]["acc,none"] <= 1 and metrics["answer"]["exact_match,none"] == 0
    assert math.isfinite(metrics["words"]["byte_perplexity,none"])
    assert not (folder / "benchmarks.json").exists()


@needs_lm_eval
def test_questions_as_chats(tmp_path: Path, tasks: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.cli import bench_model

    prompts: list[tuple[list[int], list[int]]] = []
    real = bench_model.score

    def score(decoder: Any, pairs: Any) -> Any:
        prompts.extend(pairs)
        return real(decoder, pairs)

    monkeypatch.setattr(bench_model, "score", score)
    folder = write_folder(tmp_path / "model")
    options = ("--tasks", "quiz,answer", *tasks, "--limit", 2, "--json")
    plain, chats = (meshwright("bench", folder, *options, *chat) for chat in ((), ("--chat",)))
    assert [answer.json["results"][0]["chat"] for answer in (plain, chats)] == [False, True]
    files, contexts = read_model_files(folder), [list(context) for context, _ in prompts]
    chat = list(ChatPrompts(folder, files).ids([{"role": "user", "content": "a fox 0"}]))
    asked, half = files.tokenizer.encode("a fox 0").ids, len(contexts) // 2
    assert contexts[0][-len(asked) :] == asked and chat not in contexts[:half] and chat in contexts[half:]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    refused = meshwright("bench", folder, *options, "--chat")
    assert refused.code == 2 and "has no chat template" in refused.err


@needs_lm_eval
def test_results_of_a_run_are_kept_and_reported(finished: Path, tasks: tuple[object, ...]) -> None:
    answer = meshwright("bench", finished, "--tasks", "quiz", *tasks, "--limit", 2)
    assert answer.code == 0, answer.err
    (result,) = json.loads((finished / "benchmarks.json").read_text())
    assert (result["task"], result["step"], result["limit"]) == ("quiz", 6, 2)
    assert f"{result['metrics']['acc,none']:.4f}" in answer.out
    assert "Benchmarks" in (finished / "report.html").read_text()


@needs_lm_eval
def test_unknown_tasks_and_missing_data_are_named(tmp_path: Path, tasks: tuple[object, ...]) -> None:
    folder = write_folder(tmp_path / "model")
    answer = meshwright("bench", folder, "--tasks", "helaswag")
    assert answer.code == 2 and "nearest: hellaswag" in answer.err
    answer = meshwright("bench", folder, "--tasks", "hellaswag", "--data-sets", tmp_path / "sets")
    assert answer.code == 2 and "hf download --repo-type dataset Rowan/hellaswag" in answer.err


def test_a_missing_package_or_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval", None)
        answer = meshwright("bench", tmp_path, "--tasks", "quiz")
    assert answer.code == 2 and "pip install 'meshwright[bench]'" in answer.err
