"""`meshwright train`: what a run leaves, when it resumes, when it refuses, and how it fails."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from meshwright.cli.train import announce
from meshwright.config.load import load_plan, load_run
from meshwright.launch import machine
from meshwright.launch.folder import folder_lock
from meshwright.launch.prepare import PreparedRun, on_used_devices, plan_yaml, prepare_run
from meshwright.observe.closing import closing_lines, command_to_continue
from meshwright.observe.metrics import read_metrics
from meshwright.observe.prediction_check import read_check
from meshwright.spec.fields import to_plain
from meshwright.spec.plan import Predicted
from meshwright.spec.run import Assignment
from tests.cli.command import meshwright, train_here
from tests.cli.conftest import ONE_RANK


def test_the_run_folder_holds_what_is_promised(finished: Path) -> None:
    files = [
        "config.yaml",
        "plan.yaml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "tokenizer.json",
    ]
    assert all((finished / name).stat().st_size for name in [*files, "logs/rank-00000.log"])
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    summary = json.loads((finished / "summary.json").read_text())
    steps = [line for line in read_metrics(finished / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert summary["steps"] == 6 and summary["held_out_loss"] < steps[0]["loss"] and summary["unigram_entropy_nats"] > 2


@pytest.mark.parametrize("launched", [False, True], ids=["here", "by a launcher"])
def test_a_finished_run_is_not_changed(finished: Path, tiny: Path, launched: bool) -> None:
    """Whatever plan it is asked to run by now."""

    def contents() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in finished.rglob("*") if file.is_file()}

    contents_before = contents()
    arguments = ["train", tiny, ONE_RANK, "checkpoint.every=3", "plan.micro_batch=2", "--runs", finished.parent]
    answer = train_here(*arguments[1:]) if launched else meshwright(*arguments)
    assert answer.code == 0
    assert answer.out.splitlines()[0] == f"{finished} is finished: 6 of 6 steps; nothing is changed in it"
    assert contents() == contents_before


def test_the_command_to_continue_continues_the_run(finished: Path) -> None:
    answer = meshwright(*shlex.split(command_to_continue(finished))[1:])
    first, *closing = answer.out.splitlines()
    assert (answer.code, first) == (0, f"{finished} is finished: 6 of 6 steps; nothing is changed in it")
    assert closing == closing_lines(finished, 0)


@pytest.mark.parametrize("launched", [False, True], ids=["here", "by a launcher"])
def test_a_run_that_another_process_trains_is_refused(tiny: Path, tmp_path: Path, launched: bool) -> None:
    with folder_lock(tmp_path / "tiny"):
        answer = (
            train_here(tiny, ONE_RANK, "--runs", tmp_path)
            if launched
            else meshwright("train", tiny, "--runs", tmp_path)
        )
        assert answer.code == 2 and f"process {os.getpid()} on " in answer.err
        assert [file.name for file in (tmp_path / "tiny").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("override", "output"),
    [
        ("model.init=checkpoint:nope", "checkpoint:nope: nope is not a folder"),
        ("observe.wandb=project", "observe.wandb: the package wandb is not installed; `pip install wandb`"),
    ],
)
def test_what_a_start_lacks_is_said_before_it_and_leaves_no_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, output: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    answer = train_here(tiny, ONE_RANK, override, "--runs", tmp_path)
    assert answer.code == 2 and output in answer.err and not list(tmp_path.iterdir())
    checked = meshwright("check", tiny, ONE_RANK, override, "--runs", tmp_path, "--json")
    (mistake,) = checked.json["errors"]
    assert checked.code == 2 and output in mistake["got"] and override.startswith(mistake["key"])


@pytest.mark.parametrize(
    ("gpus", "output"),
    [
        (0, "on 1 × cpu"),
        (2, "on 1 × cpu (2 GPUs idle: cluster=auto uses the devices of this machine)"),
    ],
)
def test_a_start_says_what_it_trains_on(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus: int, output: str
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    announce(PreparedRun(Assignment.read(finished / "assignment.json"), finished, resumes=False))
    assert f"  {output}\n" in capsys.readouterr().out


def test_one_host_trains_on_the_devices_that_the_batch_divides_over(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, notes = [tiny, "cluster.gpus_per_node=3", "plan.pipeline=1", "plan.tensor=1"], list[str]()
    adjusted_run = on_used_devices(load_run(tiny, overrides[1:]), notes.append)
    assert adjusted_run.cluster.ranks == 2 and notes[0].startswith("uses 2 of 3 devices")
    assignment = prepare_run(adjusted_run, tmp_path, profile=None, note=notes.append)
    assert assignment is not None and assignment.assignment.plan.ranks == 2
    assert meshwright("check", *overrides, "--runs", tmp_path / "other").code == 0
    monkeypatch.setenv("RANK", "0")  # a launcher started its ranks
    assert on_used_devices(load_run(tiny, overrides[1:]), notes.append).cluster.ranks == 3


@pytest.mark.parametrize("launched", [False, True], ids=["here", "by a launcher"])
def test_another_configuration_is_not_resumed(finished: Path, tiny: Path, launched: bool) -> None:
    arguments = [
        tiny,
        ONE_RANK,
        "train.learning_rate=1e-3",
        "train.steps=5",
        "model.ffn_hidden=16",
        "--runs",
        finished.parent,
    ]
    answer = train_here(*arguments) if launched else meshwright("train", *arguments)
    assert answer.code == 2
    for line in (
        "train.learning_rate: 0.01 there, 0.001 now",
        "train.steps: 6 there, 5 now (steps may be raised, not lowered)",
        "model.ffn_hidden: 32 there, 16 now",
    ):
        assert line in answer.err
    assert "train.seq_len" not in answer.err and "--fresh" in answer.err


def test_a_run_on_a_cpu_without_a_profile_says_once_that_its_step_time_was_not_predicted(
    tiny: Path, tmp_path: Path
) -> None:
    answer = train_here(tiny, ONE_RANK, "train.steps=17", "--runs", tmp_path)
    assert answer.code == 0, answer.err
    (texts,) = [line for line in answer.out.splitlines() if line.startswith("steps ")]
    assert texts.startswith("steps 6 to 17: step ") and "CPU times are not predicted without a profile" in texts
    assert "GB resident, interpreter included, predicted about " in texts.replace("MB", "GB")
    assert "faster" not in texts and "outside of the predicted band" not in answer.out
    run = tmp_path / "tiny"
    plan = load_plan(run / "plan.yaml")
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "prediction_check"]
    assert [line["step"] for line in lines] == [17]
    assert plan.predicted is not None and plan.predicted.step_seconds is None and plan.predicted.breakdown is None
    assert lines[0]["memory_bytes"]["predicted"] == plan.predicted.memory_peak_bytes
    prediction_check = read_check(lines[-1])
    assert json.loads((run / "summary.json").read_text())["prediction_check"] == to_plain(prediction_check)
    steps = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]
    assert prediction_check.step_seconds.measured == pytest.approx(median(line["step_seconds"] for line in steps[5:]))
    page = (run / "report.html").read_text()
    assert "Predicted and measured" in page and "CPU times are not predicted without a profile" in page
    assert meshwright("report", run, "--json").json["prediction_check"] == to_plain(prediction_check)


def test_a_run_of_a_few_steps_has_no_account(finished: Path) -> None:
    assert not [line for line in read_metrics(finished / "metrics.jsonl") if line["kind"] == "prediction_check"]
    assert "prediction_check" not in json.loads((finished / "summary.json").read_text())
    assert meshwright("report", finished, "--json").json["prediction_check"] is None


def test_predictions_stored_in_a_plan_file_are_not_used(finished: Path, tiny: Path, tmp_path: Path) -> None:
    plan = load_plan(finished / "plan.yaml")
    file = tmp_path / "plan.yaml"
    file.write_text(plan_yaml(replace(plan, predicted=Predicted(memory_peak_bytes=1, step_seconds=1e-9))))
    assignment = prepare_run(load_run(tiny, [ONE_RANK, f"plan={file}"]), tmp_path, profile=None, note=print)
    assert assignment
    written_plan = load_plan(assignment.folder / "plan.yaml")
    assert written_plan.predicted == plan.predicted and written_plan.why == (f"as {os.path.relpath(file)} says",)


def test_fresh_starts_beside_it(finished: Path, tiny: Path) -> None:
    for name in ("tiny-2", "tiny-3"):
        one_step = ["train.steps=1", "train.warmup_steps=0"]
        assert train_here(tiny, ONE_RANK, *one_step, "--fresh", "--runs", finished.parent).code == 0
        steps = [line for line in read_metrics(finished.parent / name / "metrics.jsonl") if line["kind"] == "step"]
        assert len(steps) == 1


def test_a_numerical_failure_ends_with_code_6(tiny: Path, tmp_path: Path) -> None:
    wild = ["train.learning_rate=1e38", "train.warmup_steps=0", "train.clip_norm=none", "checkpoint.every=1"]
    answer = train_here(tiny, ONE_RANK, *wild, "--runs", tmp_path)
    assert answer.code == 6
    assert "meshwright: step 2: loss" in answer.err and "the update was not applied" in answer.err
    assert [path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir()] == ["step-00000001"]
    assert (tmp_path / "tiny" / "report.html").is_file()


@pytest.mark.parametrize("steps", ["3", "3:2", "0:1", "a:b"])
def test_steps_to_profile_are_checked_before_the_start(tiny: Path, tmp_path: Path, steps: str) -> None:
    answer = meshwright("train", tiny, "--profile-steps", steps, "--runs", tmp_path)
    assert answer.code == 2 and f"--profile-steps {steps}: expected A:B" in answer.err
    assert not list(tmp_path.iterdir())


def test_several_hosts_need_a_launcher(tiny: Path, tmp_path: Path) -> None:
    answer = meshwright("train", tiny, "cluster.nodes=2", "--runs", tmp_path)
    assert answer.code == 2 and "torchrun --nnodes 2 --nproc-per-node 2" in answer.err
    assert not list(tmp_path.iterdir())
