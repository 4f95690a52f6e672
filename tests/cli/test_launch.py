"""`meshwright launch`: files for schedulers, and what it refuses."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cli.command import meshwright

RUN = """
model: llama3-8b
train: {steps: 10, global_batch: 16, seq_len: 8192}
cluster: {gpu: H100, nodes: 2, gpus_per_node: 8}
"""
POD = ["--image", "registry.example/meshwright:1", "--claim", "shared"]


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return Path("run.yaml")


def test_slurm_gets_the_run_file_as_it_was_named(run_file: Path) -> None:
    answer = meshwright("launch", "--to", "slurm", run_file, "train.steps=20", "--runs", "my runs")
    assert answer.code == 0, answer.err
    script = next(part for part in shlex.split(answer.out, comments=True) if part.startswith("agent="))
    assert "\n  meshwright train run.yaml train.steps=20 --runs 'my runs' --agent\n" in script
    subprocess.run(["bash", "-n"], input=answer.out, text=True, check=True)
    assert not Path("my runs").exists(), "nothing is started"


def test_ray_gets_the_run_file_as_it_was_named(run_file: Path) -> None:
    answer = meshwright("launch", "--to", "ray", run_file, "train.steps=20")
    assert answer.code == 0, answer.err
    assert (
        "    arguments=['train', 'run.yaml', 'train.steps=20', '--runs', 'runs', '--agent'],\n    hosts=2,\n"
        in answer.out
    )


def test_skypilot_gets_the_run_in_a_file(run_file: Path) -> None:
    answer = meshwright("launch", "--to", "skypilot", run_file, *POD, "--out", "run.sky.yaml")
    assert answer.code == 0, answer.err
    task = yaml.safe_load(Path("run.sky.yaml").read_text())
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, {"H100": 8})
    assert task["volumes"] == {"/workspace": "shared"} and "/run.yaml" in task["run"]


@pytest.mark.parametrize("target", ["jobset", "trainjob"])
def test_kubernetes_gets_all_objects_in_a_file(run_file: Path, target: str) -> None:
    answer = meshwright("launch", "--to", target, run_file, *POD, "--out", "job.yaml")
    assert answer.code == 0, answer.err
    assert answer.out == "" and "run: 2 hosts with 8 × H100; plan " in answer.err
    kinds = [document["kind"] for document in yaml.safe_load_all(Path("job.yaml").read_text())]
    assert kinds[:2] == ["ConfigMap", "NetworkPolicy"]
    assert kinds[2:] == (["JobSet"] if target == "jobset" else ["TrainingRuntime", "TrainJob"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "slrum"], "--to slrum: expected slurm, ray, skypilot, jobset, trainjob, serving (nearest: slurm)"),
        ([], "--to : expected slurm, ray, skypilot, jobset, trainjob"),
        (["--to", "jobset", "--claim", "shared"], "--to jobset needs --image IMAGE"),
        (["--to", "trainjob", "--image", "x"], "--to trainjob needs --claim NAME"),
        (["--to", "slurm", "--image", "x"], "--to slurm needs no --image"),
        (["--to", "slurm", "--queue", "x"], "--to slurm needs no --queue"),
        (
            ["--to", "ray", "--claim", "x"],
            "--claim x: --to ray needs no --claim; expected --to skypilot or --to jobset",
        ),
        (["--to", "jobset", *POD, "--leader-worker-set"], "--leader-worker-set: --to jobset needs no"),
        (["--to", "skypilot"], "--to skypilot needs --image IMAGE"),
        (["--to", "skypilot", "--image", "x"], "--to skypilot needs --claim NAME: 2 hosts share"),
        (
            ["--to", "skypilot", "--image", "x", "cluster.nodes=1"],
            "expected --claim NAME, a volume, or checkpoint.mirror",
        ),
        (["--to", "jobset", *POD, "--topology", "x"], "--topology x needs --queue NAME"),
        (["--to", "slurm", "--out", "gone/job"], "there is no folder gone"),
        (["--to", "slurm", "cluster=auto"], "name them, e.g. cluster.gpu=H100"),
        (["--to", "slurm", "plan.tensor=3"], "plan"),
    ],
)
def test_it_refuses_in_one_message(run_file: Path, options: list[str], message: str) -> None:
    answer = meshwright("launch", run_file, *options)
    assert answer.code == 2 and message in answer.err, answer.err


def test_it_needs_no_torch(run_file: Path) -> None:
    import sys

    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['meshwright', 'launch', '--to', 'slurm', 'run.yaml']\n"
        "from meshwright.cli.main import main; main()"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
