"""Meshwright from Python: a run with callbacks, its stop and its errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.observe.metrics import STEP_KEYS, read_metrics
from tests.training.tiny import make_tiny

ONE_RANK = ["cluster.gpus_per_node=1", "supervision.restarts=0"]
"""Without restarts no spare process is started."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def test_every_public_name_is_there_and_nothing_heavy_is_imported_for_it() -> None:
    for name in meshwright.__all__:
        assert getattr(meshwright, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = meshwright.trian
    code = "import sys, meshwright; assert not {m for m in sys.modules if m.startswith('meshwright.')}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mistakes_and_plans_need_no_ranks(tiny: Path) -> None:
    with pytest.raises(meshwright.BadConfig, match="train.stepz"):
        meshwright.load_run(tiny, ["train.stepz=3"])
    plan = meshwright.plan(meshwright.load_run(tiny))
    assert plan.ranks == 2
    with pytest.raises(meshwright.BadInput, match="load_run"):
        meshwright.train(meshwright.load_run(tiny), ["train.steps=3"])


def test_a_run_calls_back_stops_continues_and_returns_its_result(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[Mapping[str, Any]] = []
    losses: list[tuple[int, float]] = []
    saved: list[tuple[int, Path]] = []

    def on_step(figures: Mapping[str, Any]) -> None:
        steps.append(figures)
        if figures["step"] == 3 and len(steps) == 3:
            raise meshwright.StopTraining

    def train() -> meshwright.TrainResult:
        return meshwright.train(
            tiny,
            [*ONE_RANK, "train.steps=60"],
            runs=tmp_path,
            on_step=on_step,
            on_validation=lambda step, loss: losses.append((step, loss)),
            on_checkpoint=lambda step, folder: saved.append((step, folder)),
        )

    first = train()
    output = "".join(capfd.readouterr())
    assert "ending after the running step" in output and "the run tiny continues" in output
    assert "SIG" not in output and "--fresh" not in output and "preempt" not in output
    assert not first.finished and 3 <= first.step < 60 and first.held_out_loss is None
    assert first.checkpoint == tmp_path / "tiny" / "checkpoints" / f"step-{first.step:08d}"
    assert [figures["step"] for figures in steps] == [1, 2, 3] and set(steps[0]) == set(STEP_KEYS)
    second = train()
    assert second.finished and second.step == 60 and second.held_out_loss == losses[-1][1]
    assert saved[-1] == (60, second.checkpoint)
    lines = [line for line in read_metrics(tmp_path / "tiny" / "metrics.jsonl") if line["kind"] == "step"]
    by_step = {line["step"]: line["loss"] for line in lines}
    assert all(figures["loss"] == by_step[figures["step"]] for figures in steps[3:])


@pytest.mark.slow
def test_what_a_callback_raises_is_raised_after_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    def on_step(figures: Mapping[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        meshwright.train(tiny, [*ONE_RANK, "train.steps=60"], runs=tmp_path, on_step=on_step)
    assert list((tmp_path / "tiny" / "checkpoints").glob("step-*/COMMITTED"))


@pytest.mark.slow
def test_what_a_run_fails_with_is_raised(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(meshwright.NumericalFailure, match="not finite"):
        meshwright.train(
            tiny,
            [*ONE_RANK, "name=hot", "train.learning_rate=1e30", "train.clip_norm=none"],
            runs=tmp_path,
        )
