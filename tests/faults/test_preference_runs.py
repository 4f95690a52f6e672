"""Runs on preferences under faults: killed ranks, in training and while the reference's log-probabilities are computed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from meshwright.chaos.suite import Suite, scenario_named
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.events.progress import PROGRESS, ProgressPage
from meshwright.preferences.reference import read_reference
from tests.faults.test_restart import losses, only_incident
from tests.faults.test_scenarios import PATIENCE
from tests.preferences.corpus import make_preferences, question, write_records
from tests.training.test_processes import Job, last_step, until
from tests.training.tiny import tiny_run

LORA = "model.adapter={rank: 2, alpha: 4}"
RUNS = {
    "dpo": [],
    "dpo, adapters": [LORA],
    "kto": ["preference.loss=kto"],
    "reward, adapters": ["preference.loss=reward", LORA],
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preferences(tmp_path_factory.getbasetemp() / "preferences")


@pytest.mark.slow
@pytest.mark.xdist_group("scenarios")
@pytest.mark.parametrize("name", RUNS)
def test_promises_are_kept(pairs: Path, tmp_path: Path, name: str) -> None:
    """A rank is killed; the newest checkpoint is corrupt: the run ends with the bits of an undisturbed one."""
    arguments = [str(pairs), *RUNS[name], "plan.compile=false"]
    suite = Suite(tiny_run(pairs, *arguments[1:]), arguments, tmp_path, steps=36, patience=PATIENCE)
    for scenario in ("kill-rank0", "corrupt-newest")[: 2 if name == "dpo" else 1]:
        verdict = suite.run(scenario_named(scenario))
        assert verdict.ok, (scenario, verdict.observed)


def page_of(rank: int) -> ProgressPage:
    """The page to which a rank's process writes its progress."""
    environment = dict(entry.partition("=")[::2] for entry in Path(f"/proc/{rank}/environ").read_text().split("\0"))
    return ProgressPage(os.open(environment[PROGRESS], os.O_RDWR))


def test_a_rank_killed_while_the_reference_is_computed(pairs: Path, tmp_path: Path) -> None:
    """The pass begins again, and the run has the bits of an undisturbed one; nothing half written is read."""
    source = write_records(tmp_path / "many.jsonl", [question(number) for number in range(1200)])
    prepare([str(source)], str(pairs.parent / "base"), tmp_path / "many", chat=ChatRequest(preferences=True))
    steps = 12
    arguments = [
        "train",
        pairs,
        f'data.mix={{"{tmp_path / "many"}": 1}}',
        *(f"train.steps={steps}", "train.global_batch=64", "train.validate_every=0"),
        *("plan.compile=false", "plan.micro_batch=1", "checkpoint.every=6", "supervision.restarts=1"),
    ]
    arguments += ["--runs", tmp_path]
    whole = Job([*arguments, "name=whole"], tmp_path / "whole")
    assert whole.process.wait(180) == 0, whole.output()
    (stored,) = tmp_path.glob("many/**/reference-*")
    expected = read_reference(stored, 2400)
    stored.unlink()
    run = tmp_path / "killed"
    job = Job([*arguments, "name=killed"], run)
    until(lambda: len(job.ranks()) == 2, job)
    rank = job.ranks()[1]
    page = page_of(rank)
    until(lambda: page.count > 100, job)
    os.kill(rank, signal.SIGKILL)
    assert not stored.exists() and last_step(run) == 0
    assert job.process.wait(180) == 0, job.output()
    assert (only_incident(run)["cause"], only_incident(run)["rank"]) == ("killed", 1)
    assert losses(run) == losses(tmp_path / "whole") and len(losses(run)) == steps
    found = read_reference(stored, 2400)
    assert expected is not None and found is not None
    np.testing.assert_array_equal(found, expected)
