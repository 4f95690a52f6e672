"""What a disturbed job is observed to do: new lines of its files, detection, recovery, and the verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.chaos import scenario as scenarios
from meshwright.chaos.job import Tail
from meshwright.chaos.processes import TOKEN, kill_all, processes_with
from meshwright.chaos.scenario import Scenario, Stage, Template
from meshwright.chaos.scenarios import SCENARIOS
from meshwright.chaos.suite import scenario_named
from meshwright.spec.errors import BadInput

TEMPLATE = Template(("run.yaml",), "run", 60, 2, 10)


def test_a_tail_reads_new_complete_lines_and_follows_a_replaced_file(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = Tail(file)
    assert tail.read() == []
    file.write_text("a\nb\nhal")
    assert tail.read() == ["a", "b"]
    file.write_text("a\nb\nhalf\nc\n")
    assert tail.read() == ["half", "c"]
    other = tmp_path / "other"
    other.write_text("a\nd\n")
    os.replace(other, file)
    assert tail.read() == ["d"]


def observed(tmp_path: Path, job: dict[str, Any], injected: float = 10.0) -> Stage:
    """A stage whose job saw `steps`, `states` and `lines`."""
    stage = Stage(TEMPLATE, tmp_path)
    values = {"steps": [], "states": [], "lines": [], "started": 0.0, "code": 0, "processes": [], **job}
    stage.jobs.append(SimpleNamespace(**values))  # type: ignore[arg-type]
    stage.injected, stage._attempt = injected, 1
    return stage


def state(status: str, attempt: int) -> dict[str, Any]:
    return {"status": status, "attempt": attempt}


DISTURBED = {
    "steps": [(8.0, 14), (9.0, 15), (10.1, 16), (13.0, 11), (13.5, 12)],
    "states": [(1.0, state("running", 1)), (10.4, state("ending", 1)), (11.0, state("running", 2))],
}


def test_times_count_from_the_injection_and_repeated_steps_are_lost(tmp_path: Path) -> None:
    stage = observed(tmp_path, DISTURBED)
    assert stage.detected_seconds() == pytest.approx(0.4)
    assert stage.recovery() == (pytest.approx(3.0), 6)
    assert observed(tmp_path, DISTURBED, injected=12.0).detected_seconds() is None


def check(tmp_path: Path, job: dict[str, Any], losses: list[tuple[int, float]], **limits: Any) -> list[str]:
    """What `_violations` says of a job whose metrics have the loss 1.5 at step 60, against `losses` of an undisturbed run."""
    stage = observed(tmp_path, job)
    stage.run.mkdir(exist_ok=True)
    (stage.run / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 60, "loss": 1.5}) + "\n")
    entry = Scenario(name="x", promise="", play=lambda stage: None, **limits)
    return scenarios._violations(entry, stage, [], lambda: losses)


@pytest.mark.parametrize(
    ("job", "loss", "limits", "broken"),
    [
        ({}, 1.5, {"detect_within": 1.0, "recover_within": 5.0}, None),
        ({"code": 5}, 1.5, {}, "exit code 5 instead of 0"),
        ({}, 1.25, {}, "losses differ"),
        ({}, 1.25, {"same_losses": False}, None),
        ({}, 1.5, {"detect_within": 0.1}, "detected after 0.4 s"),
        ({}, 1.5, {"recover_within": 2.0}, "training again after 3.0 s"),
        ({"states": []}, 1.5, {"detect_within": 1.0}, "detected never"),
    ],
)
def test_each_part_of_a_promise_is_checked(
    tmp_path: Path, job: dict[str, Any], loss: float, limits: dict[str, Any], broken: str | None
) -> None:
    violations = check(tmp_path, DISTURBED | job, [(60, loss)], **limits)
    assert (not violations) if broken is None else (len(violations) == 1 and broken in violations[0])


def test_processes_of_a_job_are_found_by_their_token_and_killed() -> None:
    token = f"test-{os.getpid()}"
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, TOKEN: token}, start_new_session=True)
    try:
        while len(processes_with(token)) < 2:
            assert process.poll() is None
        assert len(kill_all(token)) >= 2
        assert processes_with(token) == []
    finally:
        process.kill()
        process.wait()


def test_names_are_unique_and_a_wrong_one_is_answered_with_the_nearest() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)
    with pytest.raises(BadInput, match="--scenario kill-rnk: there is no such scenario; nearest: kill-rank"):
        scenario_named("kill-rnk")
