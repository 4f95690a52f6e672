"""Figures of a run's folder, from files written by hand: goodput and state by closed forms."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.progress_file import JobProgress, ProgressFile
from meshwright.launch.run_figures import FigureReader, RunFigures

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
    step = {"kind": "step", "loss": 2.0, "step_seconds": seconds, "phases": {"data": 1.0}, "tokens_per_second": 5.0}
    return [{**step, "step": number, "tokens": 100 * number} for number in range(1, count + 1)]


def test_goodput_counts_all_jobs_but_not_the_time_between(tmp_path: Path) -> None:
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
    figures = FigureReader(tmp_path).read()
    assert figures.wall_seconds == pytest.approx(180, abs=0.01) and figures.productive_seconds == 90
    assert figures.goodput == pytest.approx(0.5, abs=0.001)
    assert (figures.state, figures.running, figures.restarts, figures.incidents) == ("finished", False, 1, 7)
    assert (figures.step, figures.steps, figures.seconds_left, figures.checkpoint_step) == (10, 40, 300.0, 8)
    assert (figures.tokens, figures.mfu) == (1000, None)


def test_a_running_job_counts_from_the_begin_of_its_process_to_now(tmp_path: Path) -> None:
    now = time.time()
    lines(tmp_path / "supervision.jsonl", [supervision(now, "preparing", 1), supervision(now, "running", 1)])
    reader = FigureReader(tmp_path)
    file = ProgressFile(tmp_path, lambda: JobProgress("a", 1, "running"))
    file.close()
    figures = reader.read(now + 5)
    assert reader.progress is not None and figures.wall_seconds == pytest.approx(now + 5 - reader.progress.began)
    assert (figures.state, figures.running, figures.goodput) == ("starting", True, 0.0)
    lines(tmp_path / "metrics.jsonl", steps(1, seconds=2.0))
    assert reader.read(now + 5).state == "running"
    lines(tmp_path / "supervision.jsonl", [supervision(now + 5, "ending", 1)])
    assert reader.read(now + 6).state == "ending"
    os.utime(tmp_path / "progress.json", (now - 600, now - 600))
    assert reader.read(now + 6).state == "not running"


def state_of(folder: Path) -> tuple[str, float | None]:
    figures: RunFigures = FigureReader(folder).read()
    return figures.state, figures.goodput


def test_a_run_without_supervision_has_no_goodput(tmp_path: Path) -> None:
    assert state_of(tmp_path) == ("starting", None)
    lines(tmp_path / "metrics.jsonl", steps(3))
    assert state_of(tmp_path) == ("running", None)
    os.utime(tmp_path / "metrics.jsonl", (1, 1))
    assert state_of(tmp_path) == ("not running", None)
    (tmp_path / "config.yaml").write_text("train: {steps: 3}\n")
    assert state_of(tmp_path) == ("finished", None)
