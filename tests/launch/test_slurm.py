"""The batch script for Slurm: its options exist, and it does with each exit code what the table says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.launch.scheduler import job_of, slurm_options, without_prediction

from meshwright.launch.scheduler_job import REQUEUE_CODES, STOP_CODES
from meshwright.launch.slurm import slurm_script


def options_of(script: str) -> dict[str, str]:
    """The script's options for sbatch."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))


def srun_arguments(script: str) -> list[str]:
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    return shlex.split(line)


def run_script(folder: Path, *codes: int, overrides: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """Run the script with an agent that ends with each of `codes` in turn.

    Returns the script's exit code, and a line for each call of `meshwright` and for each requeue.
    """
    calls = folder / "calls"
    quoted = shlex.quote(str(calls))
    commands = {
        "srun": 'while [ "$1" != bash ]; do shift; done\nexec "$@"',
        "scontrol": f'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$*" >> {quoted}; fi',
        "meshwright": (
            f'echo "meshwright $* coordinator=$MESHWRIGHT_COORDINATOR token=$(stat -c %a:%s "$MESHWRIGHT_TOKEN_FILE")" >> {quoted}\n'
            f"count=$(grep -c ^meshwright {quoted})\n"
            f"code=$(echo {' '.join(map(str, codes))} | cut -d' ' -f$count)\n"
            'if [ "$code" -gt 130 ]; then kill -$((code - 128)) $$; fi; exit "$code"'
        ),
    }
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    script = folder / "run.sbatch"
    script.write_text(slurm_script(job_of(*overrides)))
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node-[a-b]"}
    process = subprocess.run(["bash", script], cwd=folder, env=env, capture_output=True, text=True, check=False)
    lines = calls.read_text().splitlines()
    calls.unlink()
    return process.returncode, lines


@pytest.mark.parametrize("overrides", [(), ("supervision.spares=2",), ("cluster.gpu=cpu",), ("data.mix={it's: 1}",)])
def test_it_is_valid_bash_and_all_options_are_slurm_s(overrides: tuple[str, ...]) -> None:
    script = slurm_script(job_of(*overrides))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert set(options_of(script)) <= slurm_options()["sbatch"]
    options_used = [argument.partition("=")[0] for argument in srun_arguments(script) if argument.startswith("--")]
    assert {argument.removeprefix("--") for argument in options_used} <= slurm_options()["srun"]


def test_one_agent_runs_on_each_node_and_the_job_can_be_requeued() -> None:
    script = slurm_script(job_of("supervision.spares=1"))
    options = options_of(script)
    assert options["nodes"] == "5" and options["ntasks-per-node"] == "1" and options["gpus-per-node"] == "8"
    assert options["open-mode"] == "append" and "requeue" in options and "exclusive" in options
    assert {"--nodes=5", "--kill-on-bad-exit=0", "--wait=0", "--no-kill"} <= set(srun_arguments(script))
    assert "no-kill" in options


def test_a_lost_node_ends_the_job_only_if_the_run_cannot_continue_without_it() -> None:
    assert "no-kill" not in options_of(slurm_script(job_of()))
    assert "no-kill" in options_of(slurm_script(job_of("supervision.wait_seconds=60")))
    assert "gpus-per-node" not in options_of(slurm_script(job_of("cluster.gpu=cpu")))


def test_the_signal_leaves_time_for_a_step_and_the_last_checkpoint() -> None:
    assert options_of(slurm_script(job_of()))["signal"] == "USR1@120"
    slow = job_of("checkpoint.grace_seconds=300")
    assert options_of(slurm_script(slow))["signal"] == "USR1@350", "4.2 s of a step, 300, 30 for other ranks, 15"
    assert options_of(slurm_script(without_prediction(slow)))["signal"] == "USR1@405"
    assert options_of(slurm_script(job_of("checkpoint.grace_seconds=1e9")))["signal"] == "USR1@65535"


def test_a_finished_run_ends_the_job_and_removes_its_token(tmp_path: Path) -> None:
    code, (agent,) = run_script(tmp_path, 0)
    assert code == 0
    assert agent.startswith("meshwright train model=llama3-8b name=nightly_8B ")
    assert agent.endswith(" --runs runs --agent coordinator=node-a:24711 token=600:64")
    assert not list(tmp_path.glob(".meshwright-*"))


@pytest.mark.parametrize("code", REQUEUE_CODES)
def test_a_preempted_run_is_requeued_any_number_of_times(tmp_path: Path, code: int) -> None:
    for _ in range(5):
        assert run_script(tmp_path, code)[1][1:] == ["requeue 4711"]


@pytest.mark.parametrize("code", STOP_CODES)
def test_a_failure_that_would_repeat_is_not_requeued(tmp_path: Path, code: int) -> None:
    process, lines = run_script(tmp_path, code)
    assert process == code and len(lines) == 1, "one start of the agent, and no requeue"
    assert not list(tmp_path.glob(".meshwright-*"))


@pytest.mark.parametrize("code", [1, 5])
def test_other_failures_are_requeued_as_often_as_the_run_restarts(tmp_path: Path, code: int) -> None:
    overrides = ("supervision.restarts=2",)
    assert run_script(tmp_path, code, overrides=overrides)[1][1:] == ["requeue 4711"]
    assert run_script(tmp_path, code, overrides=overrides)[1][1:] == ["requeue 4711"]
    assert run_script(tmp_path, code, overrides=overrides) == (
        code,
        run_script(tmp_path, code, overrides=overrides)[1][:1],
    )


def test_a_preemption_starts_the_count_of_retries_again(tmp_path: Path) -> None:
    overrides = ("supervision.restarts=1",)
    for code in (5, 75, 5):
        assert run_script(tmp_path, code, overrides=overrides)[1][1:] == ["requeue 4711"]
    assert run_script(tmp_path, 5, overrides=overrides)[1][1:] == []


def test_a_killed_agent_is_started_again_on_its_node(tmp_path: Path) -> None:
    code, lines = run_script(tmp_path, 137, 0)
    assert code == 0 and len(lines) == 2
    code, lines = run_script(tmp_path, 137, 137, 137, 137)
    assert code == 137 and len(lines) == 5 and lines[-1] == "requeue 4711"
