"""Tests of `meshwright runs`: states, stopping, and what may not be deleted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.durable.lease import LEASE, take_lease
from meshwright.durable.lock import this_process
from meshwright.launch.lease_store import LEASE_FOLDER, FolderLeases
from meshwright.launch.run_list import delete_run, list_run, runs_in
from meshwright.policies.coordinator_lease import CoordinatorLease
from meshwright.spec.fields import to_sealed_json
from tests.cli.command import meshwright

OWNER = """\
import signal, sys, time
from pathlib import Path
from meshwright.durable.lease import take_lease
folder = Path(sys.argv[1])
def end(*_):
    (folder / "supervision.jsonl").open("a").write('{"job": "b", "status": "finished", "attempt": 1, "stop": {"code": 75}}\\n')
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
take_lease(folder)
print("ready", flush=True)
time.sleep(60)
"""
"""A job that ends at SIGTERM with the code of a checkpoint written."""


def make_run(folder: Path, *, step: int = 3, steps: int = 10, code: int | None = None, config: str = "") -> Path:
    """A folder with the files of a run whose last job ended with `code`; None for one that was killed."""
    folder.mkdir(parents=True)
    line = {"step": step, "loss": 2.5, "tokens": 96, "step_seconds": 0.1}
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "step", **line, "step": n + 1}) + "\n" for n in range(step))
    )
    (folder / "config.yaml").write_text(f"train: {{steps: {steps}}}\n{config}")
    records = [{"job": "a", "status": "running", "attempt": 1}]
    records += [] if code is None else [{"job": "a", "status": "finished", "attempt": 1, "stop": {"code": code}}]
    (folder / "supervision.jsonl").write_text(
        "".join(to_sealed_json({"term": 1, **record}) + "\n" for record in records)
    )
    lease = take_lease(folder)
    values = {**json.loads((folder / LEASE).read_text()), "process_start": lease.process_start + 1}  # another process
    (folder / LEASE).write_text(json.dumps(values))
    return folder


@contextmanager
def owned(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process takes the lease of the folder, as a running job does."""
    records = folder / "supervision.jsonl"
    records.write_text(records.read_text() + '{"job": "b", "status": "running", "attempt": 1}\n')
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_list_has_state_step_loss_tokens_and_size_of_every_run(tmp_path: Path) -> None:
    make_run(tmp_path / "done", step=10, code=0)
    make_run(tmp_path / "preempted", code=75)
    make_run(tmp_path / "broken", code=6)
    make_run(tmp_path / "killed")
    make_run(tmp_path / "a-sweep" / "first", step=0)
    (tmp_path / "notes").mkdir()
    with owned(make_run(tmp_path / "going")):
        listed = meshwright("runs", tmp_path, "--json").json["runs"]
        text = meshwright("runs", tmp_path).out
    assert {run["name"]: run["state"] for run in listed} == {
        "a-sweep/first": "stopped",
        "broken": "failed",
        "done": "finished",
        "going": "running",
        "killed": "stopped",
        "preempted": "stopped",
    }
    done = next(run for run in listed if run["name"] == "done")
    assert (done["step"], done["steps"], done["loss"], done["tokens"]) == (10, 10, 2.5, 96)
    assert done["bytes"] == sum(file.stat().st_size for file in (tmp_path / "done").iterdir())
    assert "failed (6)" in text and "3/10" in text and "2.5000" in text


def test_a_finished_run_shows_its_plan(finished: Path) -> None:
    run = list_run(finished)
    assert (run.state, run.step, run.plan) == ("finished", 6, "one device")


def test_a_folder_without_runs_or_that_does_not_exist(tmp_path: Path) -> None:
    assert "no runs in" in meshwright("runs", tmp_path).out
    (tmp_path / "runs").mkdir()
    answer = meshwright("runs", tmp_path / "rusn")
    assert answer.code == 2 and "nearest: runs" in answer.err
    assert "nearest: stop" in meshwright("runs", "stpo").err


def test_stop_asks_the_job_and_waits_for_its_end(tmp_path: Path) -> None:
    with owned(make_run(tmp_path / "going")) as process:
        answer = meshwright("runs", "stop", tmp_path / "going")
        assert process.wait(10) == 75
    assert answer.code == 0, answer.err
    assert f"asked process {process.pid} to stop" in answer.out
    assert "ended with code 75 after step 3; no checkpoint" in answer.out


@pytest.mark.parametrize("elsewhere", [False, True])
def test_stop_asks_the_coordinator_that_has_the_place_of_a_lost_one(tmp_path: Path, elsewhere: bool) -> None:
    leases = tmp_path / "leases"
    leases.mkdir()
    run = make_run(tmp_path / "moved", config=f"supervision: {{lease: {leases}}}\n" if elsewhere else "")
    with owned(run) as process:
        values = {**json.loads((run / LEASE).read_text()), "host": "other"}
        (run / LEASE).write_text(json.dumps(values))
        (run / "progress.json").write_text("{}")
        coordinator = CoordinatorLease(1, "b", this_process(process.pid), "here", "127.0.0.1:1")
        folder = leases / "moved" if elsewhere else run
        assert FolderLeases(folder / LEASE_FOLDER).replace(None, coordinator)
        answer = meshwright("runs", "stop", run)
        assert process.wait(10) == 75
    assert answer.code == 0 and f"asked process {process.pid} to stop" in answer.out


def test_what_cannot_be_stopped(tmp_path: Path) -> None:
    finished = make_run(tmp_path / "done", step=10, code=0)
    answer = meshwright("runs", "stop", finished)
    assert answer.code == 2 and "is not running: it is finished at step 10" in answer.err
    elsewhere = make_run(tmp_path / "elsewhere")
    values = {**json.loads((elsewhere / LEASE).read_text()), "host": "other", "pid": os.getpid()}
    (elsewhere / LEASE).write_text(json.dumps(values))
    (elsewhere / "progress.json").write_text("{}")
    answer = meshwright("runs", "stop", elsewhere)
    assert answer.code == 2 and "on other" in answer.err and "runs stop` there" in answer.err


def test_delete_removes_runs_alone(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "old"), make_run(tmp_path / "other")
    answer = meshwright("runs", "delete", run)
    assert answer.code == 2 and "--yes" in answer.err and run.is_dir()
    assert meshwright("runs", "delete", run, "--yes").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "config.yaml").write_text("mine: true\n")
    for refused, why in ((folder, "is not a run's folder"), (tmp_path, "is not a run's folder")):
        answer = meshwright("runs", "delete", other, refused, "--yes")
        assert answer.code == 2 and why in answer.err
    link = tmp_path / "link"
    link.symlink_to(other)
    assert "is a link to" in meshwright("runs", "delete", link, "--yes").err
    (other / ".git").mkdir()
    assert "holds .git besides a run" in meshwright("runs", "delete", other, "--yes").err
    assert folder.is_dir() and runs_in(tmp_path) == [link, other]


def test_delete_refuses_a_running_run(tmp_path: Path) -> None:
    with owned(make_run(tmp_path / "going")):
        answer = meshwright("runs", "delete", tmp_path / "going", "--yes")
    assert answer.code == 2 and "is running at step 3; stop it first" in answer.err
    assert (tmp_path / "going" / "metrics.jsonl").is_file()


@pytest.mark.parametrize(
    "config",
    [
        "model: {init: 'checkpoint:base'}",
        "model: {init: 'hf:FOLDER/base/hf'}",
        "data: {mix: {FOLDER/base/corpus: 1.0}}",
    ],
)
def test_delete_refuses_a_run_that_another_one_needs(tmp_path: Path, config: str) -> None:
    base = make_run(tmp_path / "base", code=0)
    needs = make_run(tmp_path / "tuned", config=config.replace("FOLDER", str(tmp_path)))
    answer = meshwright("runs", "delete", base, "--yes")
    assert answer.code == 2 and f"is needed by {needs}, whose {config.split(':')[0]}" in answer.err
    assert meshwright("runs", "delete", base, needs, "--yes").code == 0
    assert not list(tmp_path.iterdir())


def test_a_deletion_that_is_interrupted_leaves_no_half_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(folder: Path) -> None:
        raise KeyboardInterrupt

    run = make_run(tmp_path / "old")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupt)
        delete_run(run)
    assert not run.exists() and runs_in(tmp_path) == []
