"""The task for SkyPilot: its resources, and what its script does on a machine. `tests/hosts/test_sky_tasks.py` has SkyPilot's loader."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.scheduler import PLAN, WORDS, job_of, run_of

from meshwright.config.load import load_run, plan_yaml
from meshwright.launch.kubernetes import Container
from meshwright.launch.scheduler_job import REQUEUE_CODES, STOP_CODES, scheduler_job
from meshwright.launch.skypilot import skypilot_yaml

CONTAINER = Container("registry.example/meshwright:1", "shared")


def task_of(*overrides: str, container: Container = CONTAINER) -> dict[str, Any]:
    return yaml.safe_load(skypilot_yaml(job_of(*overrides), container))


def run_script(
    folder: Path, script: str, *codes: int, ips: str = "10.0.0.1\n10.0.0.2\n"
) -> tuple[int, list[str], list[Path]]:
    """Run a task's script with an agent that ends with each of `codes` in turn.

    Returns its exit code, a line for each call of `meshwright`, and the files in the home folder.
    """
    calls, home, workspace = folder / "calls", folder / "home", folder / "workspace"
    home.mkdir(exist_ok=True)
    quoted = shlex.quote(str(calls))
    program = folder / "meshwright"
    program.write_text(
        "#!/bin/bash\n"
        'token=$(stat -c %a:%s "$MESHWRIGHT_TOKEN_FILE")\n'
        f'echo "$* at=$MESHWRIGHT_COORDINATOR token=$token secret=${{MESHWRIGHT_TOKEN-}} in=$PWD" >> {quoted}\n'
        f"exit $(echo {' '.join(map(str, codes))} | cut -d' ' -f$(wc -l < {quoted}))\n"
    )
    program.chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(home)}
    env |= {"SKYPILOT_NODE_IPS": ips, "MESHWRIGHT_TOKEN": "5" * 64}
    text = script.replace("/workspace", str(workspace))
    ended = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=False)
    lines = calls.read_text().splitlines()
    calls.unlink()
    return ended.returncode, lines, sorted(file for file in home.rglob("*") if file.is_file())


def test_the_task_asks_for_the_hosts_and_the_volume() -> None:
    task = task_of("supervision.spares=1", "cluster.host_memory_gib=500.5")
    assert (task["name"], task["num_nodes"]) == ("nightly-8b", 5)
    assert task["volumes"] == {"/workspace": "shared"} and task["secrets"] == {"MESHWRIGHT_TOKEN": None}
    assert task["resources"] == {
        "accelerators": {"H100": 8},
        "memory": "500.5+",
        "image_id": "docker:registry.example/meshwright:1",
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]},
    }
    assert task_of("cluster.gpu=cpu")["resources"]["cpus"] == "8+"


def test_one_host_needs_no_volume_if_its_checkpoints_are_copied(tmp_path: Path) -> None:
    task = task_of("cluster.nodes=1", "checkpoint.mirror=s3://bucket/runs", container=replace(CONTAINER, claim=None))
    assert "volumes" not in task
    code, (agent,), _ = run_script(tmp_path, task["run"], 0, ips="10.0.0.1")
    assert code == 0 and agent.endswith(f"in={tmp_path}/home/.meshwright/nightly_8B/work")


def test_every_machine_starts_an_agent_with_the_run(tmp_path: Path) -> None:
    code, (agent,), files = run_script(tmp_path, task_of()["run"], 0)
    folder = tmp_path / "home" / ".meshwright" / "nightly_8B"
    assert code == 0 and agent == (
        f"train {folder}/run.yaml --runs runs --agent at=10.0.0.1:29400 token=600:64 secret= in={tmp_path}/workspace"
    )
    assert files == [folder / "run.yaml", folder / "token"]
    assert load_run(folder / "run.yaml") == run_of()


def test_the_plan_of_the_run_is_in_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_yaml(PLAN) + "# $edited: END\n")
    job = scheduler_job(run_of(f"plan={plan}"), PLAN, WORDS, Path("runs"))
    _, _, files = run_script(tmp_path, yaml.safe_load(skypilot_yaml(job, CONTAINER))["run"], 0)
    kept = {file.name: file for file in files}
    assert kept["plan.yaml"].read_text() == plan.read_text()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_run(kept["run.yaml"]).plan == str(kept["plan.yaml"])


@pytest.mark.parametrize("code", [0, *STOP_CODES, *REQUEUE_CODES])
def test_skypilot_learns_of_the_end_of_the_job(tmp_path: Path, code: int) -> None:
    """It starts the job again after the codes of `recover_on_exit_codes`, and after no others."""
    ended, calls, _ = run_script(tmp_path, task_of()["run"], code)
    assert ended == code and len(calls) == 1


def test_other_failures_start_the_agent_again_as_often_as_the_run_restarts(tmp_path: Path) -> None:
    script = task_of("supervision.restarts=2")["run"]
    assert run_script(tmp_path, script, 5, 137, 0)[0] == 0
    ended, calls, _ = run_script(tmp_path, script, 5, 1, 137, 0)
    assert ended == 137 and len(calls) == 3


@pytest.mark.parametrize(
    ("chip", "name"), [("A100", "A100-80GB"), ("A100-40GB", "A100"), ("V100", "V100-32GB"), ("L4", "L4")]
)
def test_chips_have_the_names_of_skypilot(chip: str, name: str) -> None:
    assert task_of(f"cluster.gpu={chip}")["resources"]["accelerators"] == {name: 8}
