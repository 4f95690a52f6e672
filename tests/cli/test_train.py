"""`meshwright train`: what a run leaves, when it resumes, when it refuses, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.observe.metrics import read_metrics
from tests.cli.command import meshwright, train_here
from tests.cli.conftest import ONE


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


def test_the_same_command_finds_a_finished_run_finished(finished: Path, tiny: Path) -> None:
    before = (finished / "metrics.jsonl").read_text()
    answer = train_here(tiny, ONE, "checkpoint.every=3", "--runs", finished.parent)
    assert answer.code == 0 and "is finished: 6 of 6 steps" in answer.err
    assert [line for line in read_metrics(finished / "metrics.jsonl") if line["kind"] == "step"] == [
        line for line in map(json.loads, before.splitlines()) if line["kind"] == "step"
    ]


@pytest.mark.parametrize("launched", [False, True], ids=["here", "by a launcher"])
def test_another_configuration_is_not_resumed(finished: Path, tiny: Path, launched: bool) -> None:
    words = [tiny, ONE, "train.learning_rate=1e-3", "train.steps=7", "model.ffn_hidden=16", "--runs", finished.parent]
    answer = train_here(*words) if launched else meshwright("train", *words)
    assert answer.code == 2
    for line in (
        "train.learning_rate: 0.01 there, 0.001 now",
        "train.steps: 6 there, 7 now",
        "model.ffn_hidden: 32 there, 16 now",
    ):
        assert line in answer.err
    assert "train.seq_len" not in answer.err and "--fresh" in answer.err


def test_fresh_starts_beside_it(finished: Path, tiny: Path) -> None:
    for name in ("tiny-2", "tiny-3"):
        short = ["train.steps=1", "train.warmup_steps=0"]
        assert train_here(tiny, ONE, *short, "--fresh", "--runs", finished.parent).code == 0
        steps = [line for line in read_metrics(finished.parent / name / "metrics.jsonl") if line["kind"] == "step"]
        assert len(steps) == 1


def test_a_numerical_failure_ends_with_code_6(tiny: Path, tmp_path: Path) -> None:
    wild = ["train.learning_rate=1e38", "train.warmup_steps=0", "train.clip_norm=none", "checkpoint.every=1"]
    answer = train_here(tiny, ONE, *wild, "--runs", tmp_path)
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
