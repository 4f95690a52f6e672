"""The three renderers of a plan answer: what one says, the others say."""

from __future__ import annotations

import html
import re

import pytest

from meshwright.cli.plan_answer import PlanAnswer, PlanQuestion, answer_question
from meshwright.cli.plan_html import page
from meshwright.cli.plan_json import as_plain
from meshwright.cli.plan_sections import (
    AnswerBars,
    AnswerList,
    AnswerTable,
    Block,
    RankedPlans,
    remarks_of,
    sections_of,
)
from meshwright.cli.plan_text import show
from meshwright.config.load import load_run

DENSE = "model=llama3-1b cluster.gpu=H100 train.seq_len=4096 train.global_batch=16"
EXPERTS = (
    "model=qwen3-30b-a3b cluster.gpu=H100 cluster.nodes=2 cluster.gpus_per_node=8 train.seq_len=4096 "
    "train.global_batch=64 plan.expert=8"
)
HEAD = {"name", "plan", "predicted", "search_seconds"}
"""Keys of JSON that are no section: people have them in the first lines."""


def _answer(
    arguments: str, gpus: str | None, objective: str, critical_batch: float | None, **options: object
) -> PlanAnswer:
    question = PlanQuestion.of(None, gpus, objective, critical_batch, 1e9, 2.0, **options)  # type: ignore[arg-type]
    return answer_question(load_run(None, arguments.split()), question)


@pytest.fixture(
    scope="module",
    params=["comparisons", "sizes", "trainings", "stages", "idle", "unknown chip"],
)
def answer(request: pytest.FixtureRequest) -> PlanAnswer:
    match request.param:
        case "comparisons":
            options = {"features": True, "precision": "fp8-row", "chips": "H100,L4", "software": "torchtitan,nanotron"}
            return _answer(EXPERTS, None, "time", None, **options)
        case "sizes":
            return _answer(f"{DENSE} cluster.gpus_per_node=2", "1..2", "cost", None)
        case "trainings":
            return _answer(f"{DENSE} cluster.gpus_per_node=1", None, "training", 2e5)
        case "stages":
            shape = "cluster.nodes=5 cluster.gpus_per_node=2 plan.pipeline=10 plan.stages=none model.layers=20"
            return _answer(f"{DENSE} {shape}", None, "time", None)
        case "idle":
            return _answer(f"{DENSE} cluster.gpus_per_node=7", None, "time", None, include_untrainable=True)
        case _:
            chip = "cluster.memory_gib=64 cluster.gpus_per_node=4"
            return _answer(f"{DENSE.replace('H100', 'X9000')} {chip}", None, "time", None)


def _said(block: Block) -> list[str]:
    """All texts of a block."""
    match block:
        case AnswerTable(rows, heads):
            return [cell for row in (heads, *rows) for cell in row]
        case AnswerList(sentences):
            return list(sentences)
        case RankedPlans(plans):
            return [text for plan in plans for text in (plan.line, plan.mark, plan.about)]
        case AnswerBars(bars):
            return [text for bar in bars for text in (bar.label, bar.value)] + [
                text for pair in block.key for text in pair
            ]


def _arguments(text: str) -> str:
    return " ".join(text.replace("\u00a0", " ").split())


def test_text_and_page_say_all_that_the_answer_has(
    answer: PlanAnswer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    show(answer)
    text = _arguments(capsys.readouterr().out)
    drawn = _arguments(html.unescape(re.sub(r"<[^>]*>", " ", page(answer))))
    for section in sections_of(answer):
        said = [text for block in section.blocks for text in _said(block)]
        for arguments in [*said, *section.note.splitlines(), *([section.title] if any(said) or section.note else [])]:
            assert _arguments(arguments) in text, section.key
            assert _arguments(arguments).lower() in drawn.lower(), section.key
    for remark in remarks_of(answer):
        for arguments in (remark.text, remark.mark, *remark.more):
            assert _arguments(arguments) in text and _arguments(arguments) in drawn


def test_json_has_a_value_for_each_section_and_nothing_that_people_are_not_told(answer: PlanAnswer) -> None:
    plain = as_plain(answer, explain=True)
    sections = {section.key for section in sections_of(answer) if section.plain}
    applicable = {"fixed", "idle", "does_not_fit", "untrainable"}
    assert HEAD | sections <= set(plain) <= HEAD | sections | applicable
    assert set(plain) - set(as_plain(answer, explain=False)) == {"limits", "changes"} & set(plain)


def test_a_bar_of_memory_says_which_ranks_it_leaves_out(answer: PlanAnswer) -> None:
    (bars,) = (block for section in sections_of(answer) if section.key == "memory" for block in section.blocks)
    assert isinstance(bars, AnswerBars)
    left_out = sum(int(found[1]) for bar in bars.bars if (found := re.match(r"… (\d+) more", bar.label)))
    drawn = [bar for bar in bars.bars if bar.parts]
    assert len(drawn) + left_out == answer.plan.axis_size("pipeline")
    predicted = answer.plan.predicted
    assert (
        predicted is not None
        and max(sum(size for _, size in bar.parts) for bar in drawn) == predicted.memory_peak_bytes
    )
