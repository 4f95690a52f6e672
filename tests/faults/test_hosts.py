"""A supervised run of two agents on this host, which stand for two hosts, and a spare one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from meshwright.chaos.processes import command
from meshwright.checkpoint.format.manifest import steps_in
from meshwright.observe.metrics import read_metrics
from tests.training.test_processes import Job, alive, last_step, until
from tests.training.tiny import make_tiny

STEPS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hosts:
    """Agents of one run, with a coordinator that the first of them starts."""

    def __init__(self, folder: Path, tiny: Path, count: int, *more: str) -> None:
        folder.mkdir(exist_ok=True)
        token = folder / "token"
        token.write_text("an old token of this test\n".replace(" ", "-"))
        token.chmod(0o600)
        env = {"MESHWRIGHT_COORDINATOR": f"127.0.0.1:{free_port()}", "MESHWRIGHT_TOKEN_FILE": str(token)}
        cluster = ["cluster.nodes=2", "cluster.gpus_per_node=1", f"train.steps={STEPS}", "checkpoint.every=10"]
        self._arguments, self._env = ["train", tiny, *cluster, *more, "--runs", folder, "--agent"], env
        self.run = folder / "tiny"
        self.agents: list[Job] = []
        for _ in range(count):
            self.add_agent()

    def add_agent(self) -> Job:
        """Start the agent of one more host."""
        self.agents.append(Job(self._arguments, self.run, self._env))
        return self.agents[-1]

    @property
    def output(self) -> str:
        return "\n".join(agent.output() for agent in self.agents)

    def members(self) -> list[Job]:
        """The agents of the current attempt, in the order of their ranks."""
        last = json.loads((self.run / "supervision.jsonl").read_text().splitlines()[-1])
        by_pid = {agent.process.pid: agent for agent in self.agents}
        return [by_pid[int(host.rpartition("/")[2])] for host in last["members"]]

    def children(self) -> list[int]:
        """Processes that the agents have started."""
        pids = [agent.process.pid for agent in self.agents if agent.process.poll() is None]
        files = [Path(f"/proc/{pid}/task/{pid}/children") for pid in pids]
        return [int(pid) for file in files for pid in file.read_text().split()]

    def codes(self) -> list[int]:
        return [agent.process.wait(120) for agent in self.agents]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["shard", "replicate"])
def test_the_partner_of_a_lost_host_has_its_newest_step(
    axis: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The run's storage has lost all checkpoints when a spare host replaces the lost one."""
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    plan = f"plan.{axis}=2"
    calm = Hosts(tmp_path / "calm", tiny, 2, plan)
    assert calm.codes() == [0, 0], calm.output
    hosts = Hosts(
        tmp_path / "lost", tiny, 3, plan, "supervision.spares=1", "checkpoint.partner=host", "checkpoint.at_end=false"
    )
    until(lambda: last_step(hosts.run) >= 25, hosts.agents[0])
    lost = hosts.members()[1]
    lost.process.send_signal(signal.SIGKILL)
    until(lambda: "has not answered for 8 s" in hosts.output, hosts.agents[0])
    for checkpoint in (hosts.run / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    assert sorted(hosts.codes()) == [-9, 0, 0], hosts.output
    resumed = [line for line in hosts.output.splitlines() if "resumed after step" in line]
    assert resumed and "from partner memory" in resumed[-1], hosts.output
    assert losses(hosts.run) == losses(calm.run)


@pytest.mark.slow
def test_a_spare_host_replaces_a_lost_one_and_the_losses_are_those_of_an_undisturbed_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    calm = Hosts(tmp_path / "calm", tiny, 2, "plan.shard=2")
    assert calm.codes() == [0, 0], calm.output
    hosts = Hosts(tmp_path / "lost", tiny, 3, "plan.shard=2", "supervision.spares=1", "checkpoint.every=5")
    until(lambda: last_step(hosts.run) >= 22, hosts.agents[0])
    children, lost = hosts.children(), hosts.members()[1]
    lost.process.send_signal(signal.SIGKILL)
    codes = hosts.codes()
    assert sorted(codes) == [-9, 0, 0], hosts.output
    assert "has not answered for 8 s" in hosts.output and "restart 1 of 3 from the checkpoint of step" in hosts.output
    assert losses(hosts.run) == losses(calm.run)
    deadline = time.monotonic() + 15  # the coordinator ends once all agents know that the job is over
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


@pytest.mark.slow
def test_a_coordinator_that_was_stopped_finds_another_one_in_its_place(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its process is suspended and continues: it ends, the ranks train on, and the losses are those of an undisturbed run."""
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    calm = Hosts(tmp_path / "calm", tiny, 2, "plan.shard=2")
    assert calm.codes() == [0, 0], calm.output
    hosts = Hosts(tmp_path / "stopped", tiny, 2, "plan.shard=2", "supervision.hang_seconds=100")
    until(lambda: last_step(hosts.run) >= 5, hosts.agents[0])
    (coordinator,) = [pid for pid in hosts.children() if "coordinate" in command(pid)]
    ranks = {pid: number for agent in hosts.agents for number, pid in agent.ranks().items()}
    for pid in (coordinator, *ranks):
        os.kill(pid, signal.SIGSTOP)
    until(lambda: "has not renewed the coordinator's lease for 6 s" in hosts.output, hosts.agents[0])
    for pid in (*ranks, coordinator):
        os.kill(pid, signal.SIGCONT)
    assert hosts.codes() == [0, 0], hosts.output
    assert not alive(coordinator) and "coordinates now; this process ends" in hosts.output
    assert "the coordinator answers again, at 127.0.0.1:" in hosts.output and "restart" not in hosts.output
    assert losses(hosts.run) == losses(calm.run)


def copy_at(run: Path, step: int, folder: Path) -> None:
    """Copy a run's folder as the checkpoint of `step` left it into `folder`, without its supervision."""
    shutil.copytree(run, folder / run.name, ignore=shutil.ignore_patterns("supervision.jsonl"))
    for path in steps_in(folder / run.name / "checkpoints"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)


def plan_of(run: Path) -> object:
    """The Plan with which a run's ranks were started last."""
    return json.loads((run / "assignment.json").read_text())["plan"]


@pytest.mark.slow
def test_a_run_that_shrinks_and_grows_has_the_losses_of_undisturbed_runs_with_the_same_plans(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A host is lost without a spare, and another one joins while the remaining host trains."""
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    waits = ["supervision.wait_seconds=1", "supervision.hang_seconds=100", "checkpoint.every=5", "checkpoint.keep=20"]
    hosts = Hosts(tmp_path / "elastic", tiny, 2, *waits)
    run = hosts.run
    until(lambda: last_step(run) >= 12, hosts.agents[0])
    lost = hosts.members()[1]
    (remaining,) = [agent for agent in hosts.agents if agent is not lost]
    lost.process.kill()
    until(lambda: "the run continues on 1 of 2 hosts, with a new plan" in hosts.output, remaining)
    until(lambda: bool(remaining.ranks()) and "resumed after step" in hosts.output, remaining)
    for rank in remaining.ranks().values():
        os.kill(rank, signal.SIGSTOP)
    shrunk_plan, returned = plan_of(run), hosts.add_agent()
    until(lambda: f"/{returned.process.pid} is ready and waits" in hosts.output, remaining)
    for rank in remaining.ranks().values():
        os.kill(rank, signal.SIGCONT)
    assert sorted(hosts.codes()) == [-9, 0, 0], hosts.output
    shrunk_at, grown_at = (
        int(re.findall(text, hosts.output)[-1])
        for text in (r"restart 1 of 3 from the checkpoint of step (\d+)", r"2 hosts are ready again; .* of step (\d+)")
    )
    assert shrunk_at < grown_at < STEPS and [step for step, _ in losses(run)] == list(range(1, STEPS + 1))

    copy_at(run, shrunk_at, tmp_path / "shrunk")
    arguments = [
        "train",
        tiny,
        "cluster.gpus_per_node=1",
        f"train.steps={STEPS}",
        *waits,
        "--runs",
        tmp_path / "shrunk",
    ]
    shrunk = Job(arguments, tmp_path / "shrunk" / "tiny")
    assert shrunk.process.wait(120) == 0, shrunk.output()
    copy_at(run, grown_at, tmp_path / "grown")
    grown = Hosts(tmp_path / "grown", tiny, 2, *waits)
    assert grown.codes() == [0, 0], grown.output
    assert f"resumed after step {shrunk_at}" in shrunk.output() and f"resumed after step {grown_at}" in grown.output
    assert plan_of(shrunk.run) == shrunk_plan and plan_of(grown.run) == plan_of(run) != shrunk_plan
    assert losses(run)[shrunk_at:grown_at] == losses(shrunk.run)[shrunk_at:grown_at]
    assert losses(run)[grown_at:] == losses(grown.run)[grown_at:]
