"""Observation of a disturbed job: new lines of its files, detection, recovery, and the verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.chaos import scenario as scenarios
from meshwright.chaos.job import ChaosJob as ObservedJob
from meshwright.chaos.job import Tail
from meshwright.chaos.processes import TOKEN, kill_all, processes_with
from meshwright.chaos.scenario import Scenario, Stage, Template
from meshwright.chaos.scenarios import SCENARIOS
from meshwright.chaos.suite import Suite, scenario_named
from meshwright.events.span_ring import SpanRing, ring_path
from meshwright.spec.errors import BadInput
from tests.diagnosis.injected import slow
from tests.diagnosis.played import Faults, Job, play
from tests.observe.played_run import write_spans
from tests.training.tiny import make_tiny, tiny_run

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
    values = {"steps": [], "losses": [], "states": [], "lines": [], "started": 0.0, "code": 0, "processes": [], **job}
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


def test_the_first_incident_has_to_name_the_disturbed_rank_or_host(tmp_path: Path) -> None:
    stage, entry = observed(tmp_path, {}), Scenario(name="x", promise="", play=lambda stage: None, same_losses=False)

    def broken(*expected: Any) -> bool:
        stage.expect_incident(*expected)
        return any("the incident says" in text for text in scenarios._violations(entry, stage, [], list))

    assert broken("hang", 1)
    for number, rank in ((1, 1), (2, 0)):
        folder = stage.run / "incidents" / f"{number:04d}-12"
        folder.mkdir(parents=True)
        record = {"cause": "hang", "rank": rank, "host": "emulated1/77", "step": 12}
        (folder / "incident.json").write_text(json.dumps(record))
    assert not broken("hang", 1) and not broken("hang", None, "emulated1") and not broken("hang")
    assert broken("hang", 0) and broken("killed", 1) and broken("hang", 1, "emulated0")


@pytest.mark.parametrize(
    ("faults", "straggler", "broken"),
    [
        (slow(lambda stage, dp: dp == 1, 1.5), {"cause": "compute", "rank": 1}, ""),
        (slow(lambda stage, dp: dp == 0, 1.5), {"cause": "compute", "rank": 0}, "'rank': 0}, expected is rank 1"),
        (lambda step, random: Faults(data={(0, 1): 0.3}), {"cause": "data", "rank": 1}, "expected is rank 1"),
        (lambda step, random: Faults(), None, "None}, expected is rank 1"),
    ],
)
def test_the_straggler_has_to_be_the_slowed_rank_if_it_computes_for_half_of_the_calm_steps(
    tmp_path: Path, faults: Any, straggler: Any, broken: str
) -> None:
    """A step computes for 1.8 s, 2.7 s on a slow rank; the calm steps are those up to 4."""
    stage, entry = (
        observed(tmp_path, {"last_step": 4}),
        Scenario(name="x", promise="", play=lambda _: None, same_losses=False),
    )
    stage.expect_straggler(1)
    write_spans(stage.run, Job(micro_batches=6), play(Job(micro_batches=6), 14, faults))
    computed = 2.7 if straggler == {"cause": "compute", "rank": 1} else 1.8
    for share, checked in ((0.55, True), (0.45, False)):
        steps = [
            {"kind": "step", "step": step, "step_seconds": computed / share if step <= 4 else 9.0}
            for step in range(1, 15)
        ]
        (stage.run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        assert stage.calm_compute_share() == pytest.approx(share, rel=0.05)
        assert stage.straggler() == straggler
        violations = scenarios._violations(entry, stage, [], list)
        assert (not violations) if not (checked and broken) else (broken in violations[0])
    assert "the straggler is not checked" in stage.notes[-1]


def test_no_straggler_has_to_be_named_among_tensor_ranks(tmp_path: Path) -> None:
    stage, entry = (
        observed(tmp_path, {"last_step": 4}),
        Scenario(name="x", promise="", play=lambda _: None, same_losses=False),
    )
    stage.expect_straggler(1)
    for rank in range(2):
        path = ring_path(stage.run, 1, 1, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        SpanRing(path, {"rank": rank, "coordinates": {"tensor": rank}}, 1).close()
    assert not scenarios._violations(entry, stage, [], list)
    assert stage.notes == ["the straggler is not checked: the ranks wait for each other inside compute"]


def test_the_time_of_a_step_is_that_of_the_last_ten(tmp_path: Path) -> None:
    job = ObservedJob([], tmp_path, tmp_path / "output", "token")
    assert job.step_seconds == 0.0
    job.steps = [(0.0, 1), *((100.0 + 0.5 * number, 2 + number) for number in range(10))]
    assert job.step_seconds == pytest.approx(0.5)


def check(tmp_path: Path, job: dict[str, Any], losses: list[tuple[int, float]], **limits: Any) -> list[str]:
    """Return the violations of a job with the loss 1.5 at step 60, against `losses` of an undisturbed run."""
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


@pytest.mark.parametrize(
    ("again", "violations"),
    [(2.01, []), (2.03, ["losses of repeated steps differ by more than 0.01"]), (None, ["losses of repeated steps"])],
)
def test_on_a_gpu_the_losses_of_repeated_steps_are_compared_and_no_undisturbed_run_is_made(
    tmp_path: Path, again: float | None, violations: list[str]
) -> None:
    stage = observed(tmp_path, {"losses": [(1, 3.0), (2, 2.0), (2, again)]})
    stage.template = replace(TEMPLATE, steps=2, gpu=True)
    assert stage.repeated_steps()[0][:2] == (2, 2.0)
    stage.run.mkdir()
    lines = [json.dumps({"kind": "step", "step": step, "loss": 2.0}) for step in (1, 2)]
    (stage.run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    entry = Scenario(name="x", promise="", play=lambda stage: None)
    broken = scenarios._violations(entry, stage, [], lambda: pytest.fail("an undisturbed run is made"))
    assert len(broken) == len(violations) and all(text in line for text, line in zip(violations, broken, strict=True))
    assert "losses of 1 repeated steps differ by at most" in stage.notes[0]


def test_a_run_is_shortened_but_its_own_checkpoint_keys_are_kept(tmp_path: Path) -> None:
    run = tiny_run(make_tiny(tmp_path / "tiny"), "checkpoint.keep=1")
    template = Suite(run, ["tiny.yaml", "checkpoint.keep=1"], tmp_path, 60)._template
    assert template.arguments == ("tiny.yaml", "checkpoint.keep=1", "train.steps=60", "checkpoint.every=10")
    assert not template.gpu and template.every == 10


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
