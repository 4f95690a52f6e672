"""`meshwright profile`: measures this machine, writes a file that plans read, and corrects it from a measured run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.profile_engine import _question
from meshwright.config.load import resolved_yaml
from meshwright.config.profile_file import load_profile, to_json
from meshwright.config.yaml_positions import dump_yaml
from meshwright.profile.feedback import predicted_seconds
from meshwright.spec.plan_keys import plain_keys
from tests.cli.command import meshwright
from tests.profile.made import made_profile
from tests.profile.test_feedback import PLAN, RUN
from tests.server.helpers import write_folder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_measured_machine_prices_plans(capfd: pytest.CaptureFixture[str]) -> None:
    answer = meshwright(
        "profile", "cluster.gpus_per_node=1", "--seconds", "0.2", "--out", "here.json", env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert answer.code == 0, answer.err
    assert "matmuls fp32" in answer.out and "matmuls" in answer.out and "cluster.profile=here.json" in answer.err
    assert "interference" in capfd.readouterr().err, "the ranks say how far they are"
    result = load_profile("here.json")
    assert result.gpu == "cpu" and {"meshwright", "torch", "python"} <= set(result.versions)
    assert len(result.products) == 8 and not result.collectives
    question = [
        "simulate",
        "model=llama-nano",
        "cluster.gpu=cpu",
        "cluster.gpus_per_node=1",
        "train.seq_len=256",
        "--json",
    ]
    guessed, measured = meshwright(*question), meshwright(*question, "cluster.profile=here.json")
    assert guessed.code == measured.code == 0, guessed.err + measured.err
    assert guessed.json["step_seconds"] != measured.json["step_seconds"]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], "--out FILE is missing"),
        (["--out", "not/there.json"], "there is no folder not"),
        (["train.steps=3", "--out", "x.json"], "train.steps=3: profile takes keys of the cluster only"),
        (["cluster.gpus_per_nod=3", "--out", "x.json"], "nearest: gpus_per_node"),
        (["cluster.nodes=2", "--out", "x.json"], "torchrun --nnodes 2"),
        (["--from-run", "."], "config.yaml"),
        (["--json", "--out", "x.json"], "--json is for --serve"),
        (["--serve", "--out", "x.json"], "needs a model"),
        (["--serve", "cluster.gpu=cpu", "--out", "x.json"], "keys of the model only"),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(arguments: list[str], output: str) -> None:
    answer = meshwright("profile", *arguments)
    assert answer.code == 2 and output in answer.err


@pytest.mark.parametrize("longest", [1, 128, 4096])
def test_engines_of_any_context_are_measured(longest: int) -> None:
    """The length of sequences in training, which no word gives here, does not matter."""
    model, _, _ = _question(None, ["model=llama-nano", f"model.max_seq_len={longest}"])
    assert (model.layers, model.max_seq_len) == (4, longest)


def test_the_engine_is_measured_with_the_model_of_a_folder() -> None:
    folder = write_folder(Path("tiny"))
    Path("serve.yaml").write_text(
        f"model: {{init: hf:{folder}}}\ncluster: {{gpu: cpu, gpus_per_node: 2}}\n"
        "serve:\n  workload: {rate: 1, input_tokens: 8, output_tokens: 8}\n  limits: {ttft_seconds: 1, tpot_seconds: 1}\n"
    )
    for path, command in ((None, [f"model.init=hf:{folder}"]), (Path("serve.yaml"), [])):
        model, _, _ = _question(path, command)
        assert (model.layers, model.heads) == (2, 4)


@pytest.mark.slow
def test_the_engines_steps_join_a_machines_other_figures() -> None:
    Path("here.json").write_text(to_json(made_profile()))
    machine = load_profile("here.json")
    command = [
        "profile",
        "--serve",
        "model=llama-nano",
        "model.max_seq_len=128",
        "--seconds",
        "0.1",
        "--out",
        "here.json",
    ]
    for arguments in (["--json"], []):
        answer = meshwright(*command, *arguments, env={"CUDA_VISIBLE_DEVICES": ""})
        assert answer.code == 0, answer.err
    assert "modelled ms" in answer.out and " GFLOP/s" in answer.out
    result = load_profile("here.json")
    assert result.products and replace(result, engine=()) == replace(machine, engine=())
    (engine,) = result.engine
    assert (engine.model.layers, engine.model.max_seq_len, engine.overlap) == (4, 128, False)
    assert meshwright(*command, "--json").json["engine"]["model"]["layers"] == 4


def finished_run(folder: Path, seconds: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(RUN))
    (folder / "plan.yaml").write_text(dump_yaml(plain_keys(PLAN)))
    keys = {
        "loss": 1.0,
        "tokens": 1,
        "tokens_per_second": 1.0,
        "mfu": None,
        "grad_norm": 1.0,
        "lr": 1.0,
        "memory_peak_bytes": 1,
    }
    steps = [{"kind": "step", "step": n, **keys, "step_seconds": 50.0 if n <= 5 else seconds} for n in range(1, 15)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_a_run_corrects_its_machine_and_predictions_meet_it(tmp_path: Path) -> None:
    Path("h200.json").write_text(to_json(made_profile()))
    took = predicted_seconds(load_profile("h200.json"), RUN, PLAN, 1.3)
    finished_run(tmp_path / "runs" / "mine", took)
    answer = meshwright("profile", "--from-run", "runs/mine", "--out", "h200.json")
    assert answer.code == 0, answer.err
    assert "device time × 1.300" in answer.out
    result = load_profile("h200.json")
    assert [correction.run for correction in result.corrections] == ["mine"] and result.products
    (tmp_path / "run.yaml").write_text(resolved_yaml(replace(RUN, plan=str(tmp_path / "runs" / "mine" / "plan.yaml"))))
    corrected = meshwright("simulate", "run.yaml", "cluster.profile=h200.json", "--json")
    assert corrected.code == 0, corrected.err
    assert corrected.json["step_seconds"] == pytest.approx(took, rel=1e-3)


def test_a_run_alone_begins_a_profile_and_a_short_one_is_refused(tmp_path: Path) -> None:
    finished_run(tmp_path / "one", 2.0)
    assert meshwright("profile", "--from-run", "one").code == 2
    answer = meshwright("profile", "--from-run", "one", "--out", "new.json")
    assert answer.code == 0, answer.err
    result = load_profile("new.json")
    assert result.gpu == "H200" and not result.products and len(result.corrections) == 1
    shutil.copytree("one", "short")
    lines = Path("short/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("short/metrics.jsonl").write_text("".join(lines[:7]))
    refused = meshwright("profile", "--from-run", "short", "--out", "new.json")
    assert refused.code == 2 and "at least 8 steps" in refused.err
