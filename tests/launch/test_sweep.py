"""Tests of sweeps: their files, their runs one after another and together, early stops, and going on after an end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Answer, meshwright
from tests.training.tiny import make_tiny

from meshwright.config.sweep_file import load_sweep, swept_runs
from meshwright.launch import sweep as sweeping
from meshwright.launch.sweep import Sweep, loss_at
from meshwright.spec.errors import BadConfig, BadInput

TRAIN = """\
import json, os, signal, sys, time
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[2:-2])
folder = Path(sys.argv[-1]) / words["name"]
folder.mkdir(exist_ok=True)
lr, steps = float(words["train.learning_rate"]), int(words["train.steps"])
with open(folder.parent / "calls", "a") as calls:
    calls.write(f"{words['name']} {os.environ.get('CUDA_VISIBLE_DEVICES')} {time.monotonic()} ")
if lr == 7:
    sys.exit(6)
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
(folder / "config.yaml").write_text(f"train: {{steps: {steps}}}")
with open(folder / "metrics.jsonl", "w", buffering=1) as file:
    for step in range(1, steps + 1):
        file.write(json.dumps({"kind": "step", "step": step, "loss": 1000 * lr, "tokens": step, "step_seconds": 1}) + "\\n")
        time.sleep(SECONDS)
os.utime(folder / "metrics.jsonl", (0, 0))
"""
"""A command that writes the metrics of a run whose loss is a thousand times the learning rate."""


@pytest.fixture
def sweep_file(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a sweep file; its runs take `seconds` a step and compute nothing."""
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")

    def write(text: str, seconds: float = 0.0) -> Path:
        script = tmp_path / "train.py"
        script.write_text(TRAIN.replace("SECONDS", str(seconds)))
        monkeypatch.setattr(sweeping, "TRAIN", (sys.executable, "-S", str(script)))
        monkeypatch.setattr(sweeping, "POLL_SECONDS", 0.02)
        monkeypatch.setattr(sweeping, "continues", lambda run, folder: True)
        file = tmp_path / "lr.yaml"
        file.write_text(f"run: {tiny}\nset: {{train.steps: 4, cluster.gpus_per_node: 1}}\n{text}\n")
        return file

    return write


def calls(file: Path) -> list[str]:
    """The runs that were started, in order."""
    return (file.parent / "runs" / "lr" / "calls").read_text().split()[::3]


def run(file: Path, *options: str) -> Answer:
    return meshwright("sweep", file, "--runs", file.parent / "runs", *options)


def test_runs_are_all_combinations_with_names_that_stay(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "run: r.yaml\ngrid: {train.learning_rate: [1e-3, 3e-4], seed: [0, 1]}\nlist: [{model.init: 'hf:a/b'}, {}]"
    )
    names = [swept.name for swept in swept_runs(load_sweep(file))]
    assert names[:2] == ["init-hf-a-b_learning_rate-0.001_seed-0", "init-hf-a-b_learning_rate-0.001_seed-1"]
    assert len(names) == 8 and names[4] == "learning_rate-0.001_seed-0"
    file.write_text("run: r.yaml\ngrid: {train.steps: [1], checkpoint.steps: [2], data.mix: ['" + "x" * 200 + "']}")
    (name,) = [swept.name for swept in swept_runs(load_sweep(file))]
    assert name.startswith("train.steps-1_checkpoint.steps-2_mix-xxx") and len(name) == 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runn: r.yaml", "nearest: run"),
        ("run: r.yaml", "expected `grid`, `list` or both"),
        ("run: r.yaml\ngrid: {seed: 3}", "s.yaml:2:14: grid.seed: expected a list"),
        ("run: r.yaml\ngrid: {seed: []}", "grid.seed: expected at least one value"),
        ("run: r.yaml\nset: {seed: 1}\ngrid: {seed: [1]}", "seed: it is in `set` and in `grid` or `list`"),
        ("run: r.yaml\nlist: [{name: a}]", "name: the sweep names its runs"),
        ("run: r.yaml\ngrid: {seed: [1]}\nparallel: some", "parallel: expected"),
    ],
)
def test_mistakes_in_a_sweep_file_are_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises((BadConfig, BadInput)) as refused:
        load_sweep(file)
    assert expected in str(refused.value)


def test_equal_runs_and_unknown_keys_are_refused_before_a_start(sweep_file: Any) -> None:
    file = sweep_file("grid: {seed: [1, 1]}")
    assert "two runs with the values" in run(file).err
    answer = run(sweep_file("grid: {train.learnign_rate: [1]}"))
    assert answer.code == 2 and "run learnign_rate-1:" in answer.err and "nearest: learning_rate" in answer.err
    assert not (file.parent / "runs").exists()
    assert "nearest:" in meshwright("sweep", file.with_name("lrr.yaml")).err


def test_runs_are_ranked_and_finished_ones_are_not_repeated(sweep_file: Any) -> None:
    answer = run(sweep_file("grid: {train.learning_rate: [3.0, 1.0, 2.0]}"))
    assert answer.code == 0, answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert [row[1] for row in rows if row[0] in ("1", "2", "3")] == ["1.0", "2.0", "3.0"]
    file = sweep_file("grid: {train.learning_rate: [3.0, 1.0, 2.0, 0.5]}")
    again = run(file, "--json")
    assert again.json["best"] == "learning_rate-0.5"
    assert calls(file) == [f"learning_rate-{lr}" for lr in ("3.0", "1.0", "2.0", "0.5")]
    page = (file.parent / "runs" / "lr" / "sweep.html").read_text()
    assert "Ranking" in page and "4 of 4 have ended" in page and page.index("0.5") < page.index("3.0")
    listed = meshwright("runs", file.parent / "runs", "--json").json["runs"]
    assert next(found["name"] for found in listed) == "lr/learning_rate-0.5"


def test_a_dry_run_starts_nothing(sweep_file: Any) -> None:
    file = sweep_file("grid: {train.learning_rate: [3.0, 1.0]}")
    assert run(file, "--dry-run").out.splitlines()[0] == "learning_rate-3.0: train.learning_rate=3.0"
    assert not (file.parent / "runs").exists()


def test_a_run_that_fails_does_not_end_the_others_and_is_tried_again(sweep_file: Any) -> None:
    file = sweep_file("grid: {train.learning_rate: [7, 1]}")
    answer = run(file)
    assert answer.code == 6 and "learning_rate-7: failed with code 6" in answer.out
    assert "learning_rate-1: finished" in answer.out
    run(file)
    assert calls(file) == ["learning_rate-7", "learning_rate-1", "learning_rate-7"]


def test_runs_share_the_devices_of_the_host(sweep_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "visible_gpus", lambda: 4)
    monkeypatch.setattr(sweeping, "found_cluster", lambda: {"gpu": "H200", "nodes": 1, "gpus_per_node": 4})
    text = "grid: {train.learning_rate: [3.0, 2.0, 1.0]}\nlist: [{cluster.gpu: H200, train.optimizer.name: adamw}]\nparallel: auto"
    file = sweep_file(text, seconds=0.05)
    file.write_text(file.read_text().replace("gpus_per_node: 1", "gpus_per_node: 2"))
    assert run(file).code == 0
    used = (file.parent / "runs" / "lr" / "calls").read_text().split()[1::3]
    assert set(used[:2]) == {"0,1", "2,3"} and used[2] in used[:2]
    file.write_text(file.read_text().replace("gpus_per_node: 2", "gpus_per_node: 8"))
    answer = run(file)
    assert answer.code == 2 and "this host has 4 GPUs" in answer.err


def test_only_the_gpus_of_the_host_are_used_and_cpu_runs_take_cores(
    sweep_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES names a GPU that the host does not have."""
    monkeypatch.setattr(sweeping, "visible_gpus", lambda: 1)
    monkeypatch.setattr(sweeping, "usable_cores", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,99")
    file = sweep_file("grid: {train.learning_rate: [1, 2, 3]}\nparallel: auto", seconds=0.02)
    found = Sweep(load_sweep(file), file, file.parent / "runs")
    found.folder.mkdir(parents=True)
    started = []
    found.train(started.append, lambda: None)
    assert [text.partition(":")[2].split(",")[0] for text in started[:3]] == [" started"] * 3, "all train at once"
    monkeypatch.setattr(sweeping, "found_cluster", lambda: {"gpu": "H200", "nodes": 1, "gpus_per_node": 1})
    text = "grid: {train.learning_rate: [3.0, 2.0]}\nlist: [{cluster.gpu: H200, train.optimizer.name: adamw}]\nparallel: auto"
    file = sweep_file(text)
    assert run(file).code == 0
    assert (file.parent / "runs" / "lr" / "calls").read_text().split()[-5::3] == ["0", "0"]


def test_a_run_above_the_median_is_stopped_and_not_continued(sweep_file: Any) -> None:
    file = sweep_file("grid: {train.learning_rate: [1, 2, 9]}\nstop_early: {steps: [3], runs: 2}", seconds=0.02)
    file.write_text(file.read_text().replace("train.steps: 4", "train.steps: 200"))
    answer = run(file)
    assert answer.code == 0, answer.err
    assert (
        "learning_rate-9: stopped early: loss 9000.0000 at step 3, above 1500.0000, the median of 2 runs" in answer.out
    )
    assert len(calls(file)) == 3
    assert "3 of 3 runs have ended already" in run(file).out and len(calls(file)) == 3


def test_an_interrupted_sweep_stops_its_runs_and_continues(sweep_file: Any) -> None:
    file = sweep_file("grid: {train.learning_rate: [1, 2]}", seconds=0.05)
    file.write_text(file.read_text().replace("train.steps: 4", "train.steps: 100"))
    first = file.parent / "runs" / "lr" / "learning_rate-1" / "metrics.jsonl"

    def interrupt() -> None:
        while not (first.exists() and first.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    answer = run(file)
    thread.join()
    assert answer.code == 130 and "learning_rate-1: stopped" in answer.out and calls(file) == ["learning_rate-1"]
    os.utime(first, (0, 0))
    assert run(sweep_file("grid: {train.learning_rate: [1, 2]}")).code == 0
    assert calls(file) == ["learning_rate-1", "learning_rate-1", "learning_rate-2"]


def test_an_error_of_the_sweep_leaves_no_run_behind(sweep_file: Any) -> None:
    file = sweep_file("grid: {train.learning_rate: [1, 2]}\nparallel: 2", seconds=0.1)
    found = Sweep(load_sweep(file), file, file.parent / "runs")
    found.folder.mkdir(parents=True)

    def fail() -> None:
        raise RuntimeError("no page")

    sooner = found.runs[0].overrides
    sooner[sooner.index("train.steps=4")] = "train.steps=1"
    found._cores = ["core 0", "core 1"]
    with pytest.raises(RuntimeError, match="no page"):
        found.train(lambda text: None, fail)
    assert found.runs[1].process is not None and found.runs[1].process.returncode in (75, -signal.SIGTERM)


def test_two_sweeps_do_not_share_a_folder(sweep_file: Any, tmp_path: Path) -> None:
    from meshwright.durable.lock import locked

    file = sweep_file("grid: {train.learning_rate: [1]}")
    with locked(file.parent / "runs" / "lr", wait=False):
        answer = run(file)
    assert answer.code == 2 and "give this sweep another `name`" in answer.err


def test_a_run_begun_with_another_configuration_is_refused(sweep_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sweep_file("grid: {train.learning_rate: [1]}")
    assert run(file).code == 0

    def refuse(run: object, folder: Path) -> bool:
        raise BadInput(f"{folder} is a run with another configuration")

    monkeypatch.setattr(sweeping, "continues", refuse)
    answer = run(file)
    assert answer.code == 2 and "another configuration" in answer.err and len(calls(file)) == 1


def test_the_loss_at_a_step_is_a_mean_of_ten(tmp_path: Path) -> None:
    lines = [{"kind": "step", "step": step, "loss": float(step)} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert loss_at(tmp_path, 20) == sum(range(11, 21)) / 10
    assert loss_at(tmp_path, 31) is None and loss_at(tmp_path / "none", 1) is None
