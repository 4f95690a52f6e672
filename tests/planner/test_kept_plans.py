"""Stored plans of published trainings still fit, and the search still finds them or plans within 3%."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshwright.config.load import load_plan, load_run
from meshwright.planner.candidate import fits, memory_budget
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search
from meshwright.spec.plan import Plan

FOLDER = Path(__file__).parents[2] / "benchmarks" / "plans"
QUESTIONS = yaml.safe_load((FOLDER / "questions.yaml").read_text())


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None and plan.predicted.step_seconds is not None
    return plan.predicted.step_seconds


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_kept_plan_still_fits(name: str) -> None:
    run = load_run(None, QUESTIONS[name]["ask"].split())
    kept = load_plan(FOLDER / f"{name}.yaml")
    assert kept.ranks == run.cluster.ranks and kept.why
    assert fits(run, kept, memory_budget(run, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_kept_plan_is_still_the_answer(name: str) -> None:
    run = load_run(None, QUESTIONS[name]["ask"].split())
    kept = load_plan(FOLDER / f"{name}.yaml")
    assert seconds(reprice(run, kept)) == pytest.approx(seconds(search(run).best.plan), rel=0.03)
