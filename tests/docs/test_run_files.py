"""The examples: every file loads, is planned as the table says, and is rendered or run in short form."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.pages import table
from tests.docs.run_files import FILES, FOLDER, PAGE, in_a_copy, loaded, machine, prediction, purpose

from meshwright.spec.deployment import DeploymentSpec
from meshwright.spec.run import RunSpec

LONG_SEARCHES = {"plan-70b.yaml", "several-hosts.yaml", "stream.yaml"}
DEPLOYMENTS = ("serve-one.yaml", "serve-eight.yaml")
CLOSE = 0.1
"""How far a predicted figure may be from the table's, as a share: constants of the planner are fitted now and then."""


@pytest.fixture(scope="module", autouse=True)
def copy() -> Iterator[None]:
    """The working folder is a copy of the examples."""
    with in_a_copy():
        yield


def meshwright(*arguments: str) -> str:
    command = [sys.executable, "-m", "meshwright", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def rows() -> dict[str, dict[str, str]]:
    """The rows of the table by file."""
    return {row["file"].partition("]")[0][1:]: row for row in table(PAGE, "file")}


def test_the_table_has_every_file() -> None:
    assert {name: row["what it does"] for name, row in rows().items()} == {file.name: purpose(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_loads_for_the_devices_of_the_table(file: Path) -> None:
    assert machine(loaded(file)) == rows()[file.name]["devices"]


def runs() -> list[object]:
    """Files of training runs; those that are searched for seconds are slow."""
    files = [file for file in FILES if file.name not in DEPLOYMENTS]
    slow = dict.fromkeys(LONG_SEARCHES, pytest.mark.slow)
    return [pytest.param(file, id=file.name, marks=slow.get(file.name, ())) for file in files]


@pytest.mark.parametrize("file", runs())
def test_a_run_is_planned_as_the_table_says(file: Path) -> None:
    run, row = loaded(file), rows()[file.name]
    assert isinstance(run, RunSpec)
    made = prediction(run)
    assert row["GB on the fullest rank"] != "–"
    shown = {"a step": made.seconds, "tokens/s a GPU": made.tokens_per_second, "GB on the fullest rank": made.gigabytes}
    for column, value in shown.items():
        if value is None:
            assert row[column] == "–"
        else:
            figure = float(row[column].removesuffix(" s").replace(",", ""))
            assert figure == pytest.approx(value, rel=CLOSE), f"{column}: run python -m tests.docs.run_files"


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment_is_planned(name: str) -> None:
    assert isinstance(loaded(Path(name)), DeploymentSpec)
    meshwright("plan", name, "--out", f"{name}.plan")
    assert Path(f"{name}.plan").exists()


@pytest.mark.parametrize("to", ["slurm", "ray", "skypilot", "jobset", "trainjob"])
def test_several_hosts_are_rendered(to: str) -> None:
    image = ["--image", "IMAGE", "--claim", "shared-data"] if to not in ("slurm", "ray") else []
    meshwright("launch", "--to", to, "several-hosts.yaml", *image, "--out", f"{to}.out")
    assert "several-hosts" in Path(f"{to}.out").read_text()


@pytest.mark.slow
def test_the_file_for_two_cores_runs() -> None:
    short = [
        "train.steps=4",
        "train.global_batch=4",
        "train.seq_len=64",
        "data.validation_tokens=128",
        "train.warmup_steps=1",
    ]
    meshwright("train", "pretrain-nano.yaml", *short)
    assert Path("runs/pretrain-nano/report.html").exists()


@pytest.mark.parametrize(
    ("answer", "right"), [("so\n42", True), (" 42 \n", True), ("43", False), ("", False), ("42\nor 43", False)]
)
def test_the_reward_compares_last_lines(answer: str, right: bool) -> None:
    names: dict[str, object] = {}
    exec((FOLDER / "rewards.py").read_text(), names)
    assert names["reward"]("question", answer, {"reference": "6 × 7 =\n42"}) is right  # type: ignore[operator]
