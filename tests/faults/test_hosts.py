"""A supervised run of two agents on this host, which stand for two hosts, and a spare one."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

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
        folder.mkdir()
        token = folder / "token"
        token.write_text("an old token of this test\n".replace(" ", "-"))
        token.chmod(0o600)
        env = {"MESHWRIGHT_COORDINATOR": f"127.0.0.1:{free_port()}", "MESHWRIGHT_TOKEN_FILE": str(token)}
        cluster = ["cluster.nodes=2", "cluster.gpus_per_node=1", "plan.shard=2"]
        words = [
            "train",
            tiny,
            *cluster,
            f"train.steps={STEPS}",
            "checkpoint.every=10",
            *more,
            "--runs",
            folder,
            "--agent",
        ]
        self.run = folder / "tiny"
        self.agents = [Job(words, self.run, env) for _ in range(count)]

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
def test_a_spare_host_replaces_a_lost_one_and_the_losses_are_those_of_an_undisturbed_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    calm = Hosts(tmp_path / "calm", tiny, 2)
    assert calm.codes() == [0, 0], calm.output
    hosts = Hosts(tmp_path / "lost", tiny, 3, "supervision.spares=1", "checkpoint.every=5")
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
