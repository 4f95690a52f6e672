"""`meshwright simulate`: its output, the trace file, and plans that can be simulated but not trained."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from meshwright.config.load import load_run
from meshwright.costs.plan_costs import STACK
from meshwright.launch.folder import continues
from meshwright.simulator import failures, supervised
from tests.cli.command import meshwright

NODE = ["model=llama3-8b", "cluster.gpu=H200", "cluster.gpus_per_node=8", "train.seq_len=4096", "train.global_batch=32"]
PIPELINE = [*NODE, "plan.pipeline=2", "plan.schedule=1f1b", "plan.micro_batch=1"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")


def test_json_has_the_step_its_parts_and_every_rank(tmp_path: Path) -> None:
    answer = meshwright("simulate", *PIPELINE, "--trace", "one.json", "--json")
    assert answer.code == 0, answer.err
    result = answer.json
    assert result["low_seconds"] < result["step_seconds"] < result["high_seconds"]
    assert result["tokens_per_second"] == pytest.approx(32 * 4096 / result["step_seconds"])
    assert sum(result["breakdown"].values()) == pytest.approx(result["step_seconds"])
    assert 0 < result["bubble"] < 0.3 and result["chosen_by_planner"] is True
    first, second = result["ranks"]
    assert (first["layers"], second["layers"]) == ("0-16", "17-31")  # the head counts as some layers
    assert (first["peak_in_flight"], second["peak_in_flight"]) == (2, 1)
    assert first["memory_bytes"]["activations"] / 34 == pytest.approx(
        second["memory_bytes"]["activations"] / 15, rel=1e-3
    )
    events = json.loads((tmp_path / result["trace"]).read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "pipeline rank 0: layers 0-16", 1: "pipeline rank 1: layers 17-31"}
    event_ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
    assert max(event_ends) / 1e6 == pytest.approx(result["step_seconds"])


def test_a_plan_file_is_played_as_it_stands(tmp_path: Path) -> None:
    assert meshwright("plan", *PIPELINE, "--out", "plan.yaml").code == 0
    text = Path("plan.yaml").read_text().replace("0-16", "0-17").replace("17-31", "18-31")
    Path("edited.yaml").write_text(text)
    original = meshwright("simulate", *NODE, "plan=plan.yaml", "--json").json
    edited = meshwright("simulate", *NODE, "plan=edited.yaml", "--json").json
    assert original["chosen_by_planner"] is edited["chosen_by_planner"] is False
    assert [rank["layers"] for rank in edited["ranks"]] == ["0-17", "18-31"]
    assert edited["ranks"][0]["compute_seconds"] > original["ranks"][0]["compute_seconds"]


def test_it_prints_a_summary_a_picture_and_where_the_trace_is() -> None:
    answer = meshwright("simulate", *PIPELINE, "name=mine")
    assert answer.code == 0, answer.err
    for text in (
        "plan: PP 2 × ",
        "1F1B, 8 micro-batches of 1 × 4096 tokens",
        "the planner's choice",
        "bubble",
    ):
        assert text in answer.out
    assert f"runs of {STACK}, of devices" in " ".join(answer.out.split())
    file = Path("runs/mine/timelines/simulated.json.gz")
    assert f"trace: {file} " in answer.out
    rank_lines = [line for line in answer.out.splitlines() if line.startswith(("0  F0", "1  ."))]
    assert len(rank_lines) == 2 and "B0-" in rank_lines[0] and max(map(len, rank_lines)) <= 150
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(event["name"] == "forward 1.7/3" for event in events)


def test_the_timeline_goes_beside_the_run_and_does_not_begin_it(tiny: Path, tmp_path: Path) -> None:
    answer = meshwright("simulate", tiny, "--runs", tmp_path / "there")
    assert answer.code == 0, answer.err
    files_written = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    assert files_written == [Path("there/tiny/timelines/simulated.json.gz")]
    assert not continues(load_run(tiny, []), tmp_path / "there" / "tiny")


def test_too_narrow_a_terminal_gets_no_picture() -> None:
    answer = meshwright("simulate", *NODE, "plan.micro_batch=1", "plan.pipeline=8", "--width", "40")
    assert answer.code == 0 and "wider terminal" in answer.out
    assert not [line for line in answer.out.splitlines() if line.startswith("0  F0")]


def test_communication_inside_compute_is_told_apart() -> None:
    result = meshwright("simulate", *NODE, "plan.tensor=2", "plan.context_ring=2", "--json").json
    breakdown = result["breakdown"]
    assert breakdown["tensor"] > 0 and breakdown["context"] > 0
    assert sum(breakdown.values()) == pytest.approx(result["step_seconds"])
    assert breakdown["compute"] + breakdown["host"] + breakdown["tensor"] + breakdown["context"] == pytest.approx(
        result["ranks"][0]["compute_seconds"]
    )


def test_without_pins_the_planner_s_choice_is_played() -> None:
    result = meshwright("simulate", *NODE, "--json").json
    assert result["chosen_by_planner"] is True and len(result["ranks"]) == 1


@pytest.mark.parametrize("gpu", ["X9000", "cpu"])
def test_an_unknown_gpu_and_a_processor_are_a_guess(gpu: str) -> None:
    question = ["simulate", "model=llama3-1b", "cluster.memory_gib=1000", f"cluster.gpu={gpu}"]
    result = meshwright(*question, "--json").json
    assert result["high_seconds"] > 8 * result["low_seconds"]
    assert re.search(
        "not predicted without a profile|rates of X9000 are not known", " ".join(meshwright(*question).out.split())
    )


def test_a_trace_without_a_folder_is_a_mistake_of_the_caller() -> None:
    answer = meshwright("simulate", *PIPELINE, "--trace", "nowhere/step.json")
    assert answer.code == 2 and "nowhere" in answer.err


def test_it_needs_no_torch() -> None:
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['meshwright', 'simulate', *{PIPELINE!r}]\n"
        "from meshwright.cli.main import main; main()"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_what_only_simulation_takes_is_not_trained(tiny: Path, tmp_path: Path) -> None:
    pins = [
        "plan.offload=both",
        "plan.pipeline=2",
        "plan.schedule=zb_h1",
        "plan.micro_batch=1",
        "cluster.gpus_per_node=2",
    ]
    planned = meshwright("plan", tiny, *pins, "--json")
    assert planned.code == 0 and any(
        "cannot train offload both under zb_h1" in reason for reason in planned.json["plan"]["why"]
    )
    for command in ("train", "check"):
        refused = meshwright(command, tiny, *pins, "--runs", tmp_path / "runs")
        assert refused.code == 2, refused.err
        assert "cannot train offload both under zb_h1" in " ".join((refused.out + refused.err).split())
    assert not (tmp_path / "runs").exists()


def test_plan_shows_schedule_and_stages() -> None:
    answer = meshwright("plan", *NODE, "plan.pipeline=2", "plan.schedule=zbv")
    assert answer.code == 0, answer.err
    for text in ("pipeline 2", "zbv", "rank 0: layers 0-8, 26-31", "rank 1: layers 9-17, 18-25", "node 0"):
        assert text in answer.out


def test_a_processor_s_band_is_said_to_be_a_guess_and_no_rank_computes_longer_than_its_window() -> None:
    answer = meshwright(
        "simulate",
        "cluster.gpu=cpu",
        "cluster.gpus_per_node=2",
        "plan.shard=2",
        "plan.micro_batch=1",
        "train.seq_len=64",
    )
    assert answer.code == 0, answer.err
    output = " ".join(answer.out.split())
    assert "set by hand: the device is in no table" in output and "bubble 0.0%" in answer.out
    assert "CPU times are not predicted without a profile" in output


def test_failures_are_predicted_and_played_with_formula_and_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text and the JSON object of one question show one simulation."""
    monkeypatch.setattr(failures, "simulate_failures", cache(failures.simulate_failures))
    monkeypatch.setattr(supervised, "simulate_supervised", cache(supervised.simulate_supervised))
    pins = ["plan.tensor=1", "plan.pipeline=1", "plan.context_ring=1", "plan.context_ulysses=1", "plan.micro_batch=1"]
    question = ["simulate", *NODE, "cluster.nodes=4", "train.global_batch=128", "cluster.host_mtbf_hours=10", *pins]
    options = ["--failures", "--assume", "restart_seconds=60"]
    result = meshwright(*question, *options, "--json").json["effective_time"]
    assert result["effective"] == pytest.approx(result["simulated"], abs=0.005)
    assert result["inputs"]["mttf_seconds"] == pytest.approx(10 * 3600 / 4)
    assert all(failure["restart_seconds"] == 60 for failure in result["inputs"]["classes"])
    assert result["first_order"] == pytest.approx(1 - sum(result["losses"].values()))
    assert len(result["hosts"]) == 3
    assert result["supervised"]["effective"] == pytest.approx(result["effective"], abs=0.01)
    shrinking = meshwright(*question, *options, "supervision.wait_seconds=0", "--json").json["effective_time"]
    assert shrinking["supervised"] is None and shrinking["effective"] > result["effective"]
    output = " ".join(meshwright(*question, *options).out.split())
    assert f"effective training time: {result['effective']:.2%} of the time with a failure every 2.5 hours" in output
    assert result["formula"] in output and result["first_order_formula"] in output
    assert f"simulated: {result['simulated']:.2%}" in output
    wrong = meshwright(*question, "--assume", "restart=60")
    assert wrong.code == 2 and "nearest: restart_seconds" in wrong.err
