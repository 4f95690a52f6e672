"""The rendered batch script in a Slurm of two emulated hosts: a run to its end, and a preemption in its middle."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from meshwright.chaos.hosts import INTERFACE, Hosts
from meshwright.observe.metrics import read_metrics
from tests.hosts.slurm import Slurm, slurm_obstacle
from tests.training.tiny import make_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(slurm_obstacle() is not None, reason=f"Slurm of two hosts: {slurm_obstacle()}"),
]
STEPS = 300


class Cluster:
    """A Slurm cluster, and a run in it."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder, self.run = slurm, folder, folder / "runs" / "tiny"
        (folder / "bin").mkdir()
        program = folder / "bin" / "meshwright"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
        program.chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self._env = {"PATH": path, "GLOO_SOCKET_IFNAME": INTERFACE}

    def submit(self, *arguments: str) -> int:
        """Render the run's script as the page says, and submit it; returns the job's number."""
        launch = ["meshwright", "launch", "--to", "slurm", *arguments, "--runs", "runs", "--out", "run.sbatch"]
        self.slurm.run(launch, self.folder, self._env)
        answer = self.slurm.run(["sbatch", "--time=00:10:00", "run.sbatch"], self.folder, self._env)
        return int(re.findall(r"\d+", answer)[-1])

    def state(self, job: int) -> dict[str, str]:
        """Fields of a job, such as JobState, ExitCode and Restarts."""
        shown = self.slurm.run(["scontrol", "show", "--oneliner", "job", str(job)])
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def until(self, reached: Callable[[], bool], seconds: float = 150.0) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def until_ended(self, job: int) -> dict[str, str]:
        self.until(lambda: self.state(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"))
        return self.state(job)

    def last_step(self) -> int:
        file = self.run / "metrics.jsonl"
        steps = [line["step"] for line in read_metrics(file) if line["kind"] == "step"] if file.exists() else []
        return steps[-1] if steps else 0

    def log(self) -> str:
        return "\n".join(file.read_text(errors="replace") for file in self.folder.glob("tiny-*.log"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with closing(Hosts(2, tmp_path)) as hosts, closing(Slurm(hosts, 2, tmp_path / "slurm")) as slurm:
        yield Cluster(slurm, tmp_path)


def arguments(folder: Path, steps: int) -> list[str]:
    return [
        str(make_tiny(folder)),
        "cluster.nodes=2",
        "cluster.gpus_per_node=1",
        f"train.steps={steps}",
        "checkpoint.every=20",
    ]


def test_a_run_on_two_nodes_ends_with_code_0(cluster: Cluster) -> None:
    ended = cluster.until_ended(cluster.submit(*arguments(cluster.folder, 12)))
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), cluster.log()
    assert cluster.last_step() == 12
    members = json.loads((cluster.run / "supervision.jsonl").read_text().splitlines()[-1])["members"]
    assert sorted(name.partition("/")[0] for name in members) == ["emulated0", "emulated1"]
    assert not list(cluster.folder.glob(".meshwright-*"))


def test_a_preempted_run_is_queued_again_and_continues_from_its_checkpoint(cluster: Cluster) -> None:
    job = cluster.submit(*arguments(cluster.folder, STEPS))
    cluster.until(lambda: cluster.last_step() >= 20)
    cluster.slurm.run(["scancel", "--signal=USR1", str(job)])
    cluster.until(lambda: cluster.state(job)["Restarts"] == "1")
    stopped_at = cluster.last_step()
    assert stopped_at < STEPS and "ended on request after step" in cluster.log()
    # By itself it begins two minutes after a requeue. A node refuses what begins in the second in which it ended the job.
    cluster.slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"])
    ended = cluster.until_ended(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), cluster.log()
    steps = [line["step"] for line in read_metrics(cluster.run / "metrics.jsonl") if line["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "no step is lost or trained twice"


def test_a_cancelled_run_saves_and_is_not_queued_again(cluster: Cluster) -> None:
    job = cluster.submit(*arguments(cluster.folder, STEPS))
    cluster.until(lambda: cluster.last_step() >= 20)
    cluster.slurm.run(["scancel", str(job)])
    cluster.until_ended(job)
    cluster.until(lambda: "ended on request after step" in cluster.log(), 30.0)
    state = cluster.state(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), cluster.log()


def test_a_run_with_bad_data_is_not_queued_again(cluster: Cluster) -> None:
    ended = cluster.until_ended(cluster.submit(*arguments(cluster.folder, 12), "data.mix={'gone': 1}"))
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0"), cluster.log()
