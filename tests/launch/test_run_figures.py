"""Figures of a run's folder, from files written by hand: goodput by a closed form."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.progress_file import JobProgress, ProgressFile
from meshwright.launch.run_figures import RunFigureReader

HOUR = 3600.0


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def supervision(moment: float, status: str, attempt: int, job: str = "a", code: int | None = None) -> dict[str, Any]:
    return {
        "time": moment,
        "status": status,
        "attempt": attempt,
        "job": job,
        "stop": code is not None and {"code": code},
    }


def steps(count: int, seconds: float = 10.0) -> list[dict[str, Any]]:
    step = {"kind": "step", "loss": 2.0, "step_seconds": seconds, "tokens_per_second": 5.0}
    return [{**step, "step": number, "tokens": 100 * number} for number in range(1, count + 1)]


def test_figures_of_a_run_of_two_jobs(tmp_path: Path) -> None:
    begin = time.time() - 10 * HOUR
    lines(
        tmp_path / "supervision.jsonl",
        [
            supervision(begin, "preparing", 1),
            supervision(begin + 1, "running", 1),
            supervision(begin + 50, "ending", 1),
            supervision(begin + 60, "running", 2),
            supervision(begin + 100, "finished", 2, code=75),
            supervision(begin + HOUR, "running", 1, job="b"),
            supervision(begin + HOUR + 80, "finished", 1, job="b", code=0),
        ],
    )
    lines(tmp_path / "metrics.jsonl", steps(10))
    (tmp_path / "config.yaml").write_text("train: {steps: 40}\n")
    for name in ("checkpoints/step-00000008", "checkpoints/step-00000010", "incidents/0007-9"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000008" / "COMMITTED").touch()
    figures = RunFigureReader(tmp_path).read()
    assert (figures.state, figures.running, figures.restarts, figures.incidents) == ("finished", False, 1, 7)
    assert (figures.step, figures.steps, figures.seconds_left, figures.checkpoint_step) == (10, 40, 300.0, 8)
    assert (figures.tokens, figures.mfu, figures.goodput) == (1000, None, None)


def test_time_left_counts_the_samples_of_a_ramp(tmp_path: Path) -> None:
    """Ten steps of 2 sequences took 10 s each; two of 2 and four of 8 are left: as much as 18 of them."""
    lines(tmp_path / "metrics.jsonl", steps(10))
    train = {"steps": 16, "global_batch": 8, "batch_ramp": [{"until": 12, "batch": 2}]}
    (tmp_path / "config.yaml").write_text(json.dumps({"train": train}))
    assert RunFigureReader(tmp_path).read().seconds_left == pytest.approx(180.0)


def test_goodput_is_that_of_the_account_and_follows_its_file(tmp_path: Path) -> None:
    """A start of 30 s with a first step of 10 s, and steps of 10 s of which 1 s waits for data."""
    reader, file = RunFigureReader(tmp_path), tmp_path / "wall_time.jsonl"
    start = {"time": 130.0, "kind": "start", "step": 0, "seconds": 30.0, "first_step_seconds": 10.0}
    step = {"kind": "step", "data_seconds": 1.0}
    lines(file, [start, *({**step, "time": 130.0 + 10 * (number - 1), "step": number} for number in (1, 2))])
    figures = reader.read()
    assert figures.wall_seconds == 40.0 and figures.goodput == pytest.approx(18 / 40)
    lines(file, [{**step, "time": 150.0, "step": 3}])
    deadline = time.monotonic() + 10
    while reader.read().wall_seconds == 40.0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reader.read().goodput == pytest.approx(27 / 50)


def test_a_job_runs_while_its_progress_is_new(tmp_path: Path) -> None:
    now = time.time()
    lines(tmp_path / "supervision.jsonl", [supervision(now, "preparing", 1), supervision(now, "running", 1)])
    reader = RunFigureReader(tmp_path)
    file = ProgressFile(tmp_path, lambda: JobProgress("a", 1, "running"))
    file.close()
    figures = reader.read(now + 5)
    assert reader.progress is not None and (figures.state, figures.running) == ("starting", True)
    lines(tmp_path / "metrics.jsonl", steps(1, seconds=2.0))
    assert reader.read(now + 5).state == "running"
    lines(tmp_path / "supervision.jsonl", [supervision(now + 5, "ending", 1)])
    assert reader.read(now + 6).state == "ending"
    os.utime(tmp_path / "progress.json", (now - 600, now - 600))
    assert reader.read(now + 6).state == "not running"


def state_of(folder: Path) -> str:
    return RunFigureReader(folder).read().state


def test_states_of_a_run_without_supervision(tmp_path: Path) -> None:
    assert state_of(tmp_path) == "starting"
    lines(tmp_path / "metrics.jsonl", steps(3))
    assert state_of(tmp_path) == "running"
    os.utime(tmp_path / "metrics.jsonl", (1, 1))
    assert state_of(tmp_path) == "not running"
    (tmp_path / "config.yaml").write_text("train: {steps: 3}\n")
    assert state_of(tmp_path) == "finished"
