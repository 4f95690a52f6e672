"""Reinforcement learning of real processes is killed at every moment, and its reward function does whatever can go wrong.

The run goes on by itself and ends with the bits of an undisturbed one. No answer is judged twice or lost, and no process is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.models.single_device import load_model
from meshwright.launch.incidents import read_incidents
from tests.distributed.pool import Pool
from tests.distributed.test_training import same_bits, trained
from tests.rl import judge
from tests.rl.corpus import make_questions
from tests.slow import quick_first
from tests.training.test_processes import Job, last_step, until
from tests.training.tiny import ranks

STEPS, CALLS = 8, 32
"""Steps, and answers of each."""
SAME = ("loss", "grad_norm", "tokens", "reward", "answer_tokens", "entropy", "left_out_prompts", "epochs", "clipped")


def wild_judge_arguments(folder: Path, count: int) -> list[str]:
    """The words of a run on `count` ranks whose reward function is a copy of the wild judge in `folder`."""
    folder.mkdir()
    shutil.copy(judge.__file__, folder / "judge.py")
    reward = f"{{file: {folder / 'judge.py'}, function: wild, processes: 2, seconds: 0.4, memory_gib: 1}}"
    return [*ranks(count), f"rl.reward={reward}", "rl.updates=2", f"train.steps={STEPS}", "checkpoint.every=1"]


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    questions = make_questions(tmp_path_factory.getbasetemp() / "questions")
    runs = tmp_path_factory.mktemp(f"undisturbed-{request.param}-")
    trained(pool, questions, runs, *wild_judge_arguments(runs / "judge", request.param))
    (folder,) = [path.parent for path in runs.rglob("metrics.jsonl")]
    steps = steps_of(folder)
    # The function has failed in every way, each of which leaves out its question, and others were trained on.
    failures = [sum(step.get(f"rewards_{name}", 0) for step in steps) for name in ("error", "timeout")]
    assert failures[0] > 3 and failures[1] > 1, failures
    assert max(step["left_out_prompts"] for step in steps) > 0 and min(step["left_out_prompts"] for step in steps) < 8
    assert len({step["loss"] for step in steps}) == STEPS, steps
    return folder


def in_calls(*kills: str) -> Any:
    """Ask the reward function for kills; each is the number of a call, and the seconds after which it kills."""

    def disturb(job: Job, folder: Path) -> None:
        del job
        for kill in kills:
            (folder / f"kill-{kill}").touch()

    return disturb


def while_saving(job: Job, folder: Path) -> None:
    """Kill a rank as soon as a checkpoint of a later step is begun."""
    checkpoints = job.run / "checkpoints"
    until(lambda: last_step(job.run) >= 2, job)
    pids, before = job.ranks(), len(os.listdir(checkpoints))
    deadline = time.monotonic() + 60
    while len(os.listdir(checkpoints)) <= before and time.monotonic() < deadline:
        pass
    os.kill(pids[max(pids)], signal.SIGKILL)


def while_updating(job: Job, folder: Path) -> None:
    """Kill a rank at some moments after the last verdict of a batch, in which it trains."""
    calls = folder / "calls"
    for number, seconds in ((2, 0.02), (3, 0.06)):
        until(lambda number=number: calls.exists() and calls.stat().st_size >= 2 * CALLS * number, job)
        pids = job.ranks()
        time.sleep(seconds)
        if pids:
            os.kill(pids[0], signal.SIGKILL)
        until(lambda number=number: job.output().count("restart ") >= number - 1, job)


MOMENTS = {
    "rollout": (in_calls("70"), 1),
    "rewards": (in_calls("63-0.3", "170-0.3"), 2),
    "save": (while_saving, 1),
    "update": (while_updating, 2),
    "first rollout": (in_calls("3"), 1),
}
"""What kills, and how often."""


@pytest.mark.parametrize("moment", quick_first(1, MOMENTS))
def test_a_killed_run_ends_with_the_same_bits(
    undisturbed: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, moment: str
) -> None:
    questions = tmp_path_factory.getbasetemp() / "questions" / "tiny.yaml"
    folder, run, (disturb, kills) = tmp_path / "judge", tmp_path / "tiny", MOMENTS[moment]
    count = int(undisturbed.parent.name.split("-")[1])
    arguments = ["train", questions, *wild_judge_arguments(folder, count), "supervision.restarts=5", "--runs", tmp_path]
    job = Job(arguments, run)
    disturb(job, folder)
    assert job.process.wait(300) == 0, job.output()
    assert [incident["cause"] for incident in read_incidents(run)] == ["killed"] * kills, job.output()
    assert not list(folder.glob("kill-*"))
    ours, theirs = steps_of(run), steps_of(undisturbed)
    assert [step["step"] for step in ours] == list(range(1, STEPS + 1))
    for mine, other in zip(ours, theirs, strict=True):
        assert {name: mine.get(name) for name in SAME} == {name: other.get(name) for name in SAME}
        counts = [{key: step[key] for key in step if key.startswith("rewards_e")} for step in (mine, other)]
        assert counts[0] == counts[1]
    first, second = (
        dict(load_model(each, torch.device("cpu"), torch.float32).named_parameters()) for each in (run, undisturbed)
    )
    assert same_bits(first, second)
    deadline = time.monotonic() + 20
    while (left := started_by(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def started_by(folder: Path) -> list[str]:
    """Command lines of running processes that name this judge's folder."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in line and "-m meshwright" not in line:
            found.append(line)
    return found
