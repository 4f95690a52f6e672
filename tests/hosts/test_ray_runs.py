"""The rendered program on a Ray cluster of several nodes on this machine: to the end, with lost nodes, and stopped.

Needs `pip install 'meshwright[ray]'`; `make test-hosts` installs it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.metrics import read_metrics
from tests.training.tiny import make_tiny

pytestmark = pytest.mark.slow
STEPS = 60


def parent(pid: int) -> int:
    """The parent of a process; 0 for one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Nodes:
    """A Ray cluster whose first node has no CPU for agents, and a run on it."""

    def __init__(self, folder: Path, count: int) -> None:
        from ray.cluster_utils import Cluster

        self.folder, self.run = folder, folder / "runs" / "tiny"
        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self.add() for _ in range(count)]
        self._driver: subprocess.Popen[str] | None = None

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1)

    def submit(self, *arguments: str) -> None:
        """Render the program as the page says, and start it."""
        launch = [sys.executable, "-m", "meshwright", "launch", "--to", "ray", str(make_tiny(self.folder)), *arguments]
        subprocess.run([*launch, "--runs", "runs", "--out", "run_ray.py"], cwd=self.folder, check=True)
        with (self.folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "run_ray.py"],
                cwd=self.folder,
                env={**os.environ, "RAY_ADDRESS": self._cluster.address},
                stdout=log,
                stderr=log,
                text=True,
            )

    def until(self, reached: Callable[[], bool], seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def code(self) -> int:
        """The exit code of the program, once it has ended."""
        driver = self._driver
        assert driver is not None
        self.until(lambda: driver.poll() is not None)
        return driver.returncode

    def stop(self, number: int) -> None:
        assert self._driver is not None
        self._driver.send_signal(number)

    def steps(self) -> list[int]:
        file = self.run / "metrics.jsonl"
        return [line["step"] for line in read_metrics(file) if line["kind"] == "step"] if file.exists() else []

    def members(self) -> list[int]:
        """Process ids of the agents of the present attempt, in the order of their ranks."""
        lines = (self.run / "supervision.jsonl").read_text().splitlines()
        return [int(name.partition("/")[2]) for name in json.loads(lines[-1])["members"]]

    def kill_node_of(self, agent: int) -> None:
        """Kill the processes of an agent's node at once, as its loss does. The kernel ends the agent with its actor."""
        actor = parent(agent)
        raylet = parent(actor)
        workers = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if parent(pid) == raylet]
        for pid in (raylet, *workers):
            os.kill(pid, signal.SIGKILL)
        self.until(lambda: not Path(f"/proc/{agent}").exists(), 10)

    def coordinator(self) -> int:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            arguments = file.read_bytes().split(b"\0") if file.exists() else []
            if b"coordinate" in arguments and os.fsencode(self.folder / "tiny.yaml") in arguments:
                return int(file.parent.name)
        raise AssertionError(self.log())

    def starter(self, coordinator: int) -> int:
        """The agent that started the coordinator."""
        return next(agent for agent in self.members() if agent == parent(coordinator))

    def log(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")

    def close(self) -> None:
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()
        self._cluster.shutdown()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    pytest.importorskip("ray")
    cluster = Nodes(tmp_path, 2)
    yield cluster
    cluster.close()


def arguments(steps: int = STEPS, *more: str) -> list[str]:
    return ["cluster.nodes=2", "cluster.gpus_per_node=1", f"train.steps={steps}", "checkpoint.every=10", *more]


def test_a_run_on_two_nodes_ends_with_code_0_and_leaves_no_token(nodes: Nodes) -> None:
    nodes.submit(*arguments(12))
    assert nodes.code() == 0, nodes.log()
    assert nodes.steps() == list(range(1, 13))
    assert not list(nodes.folder.glob(".meshwright-*"))


def test_an_agent_on_another_node_takes_the_place_of_one_whose_node_is_killed(nodes: Nodes) -> None:
    nodes.submit(*arguments())
    nodes.until(lambda: len(nodes.steps()) > 12)
    head, other = nodes.members()
    raylet = parent(parent(head))
    assert os.getpriority(os.PRIO_PROCESS, head) == os.getpriority(os.PRIO_PROCESS, raylet)
    nodes.kill_node_of(other)
    nodes.add()
    assert nodes.code() == 0, nodes.log()
    assert nodes.members()[0] == head and nodes.members()[1] != other
    assert nodes.steps() == list(range(1, STEPS + 1)), "no step is lost or trained twice"


def test_a_run_goes_on_with_the_nodes_that_are_left(nodes: Nodes) -> None:
    nodes.submit(*arguments(STEPS, "supervision.wait_seconds=1"))
    nodes.until(lambda: len(nodes.steps()) > 12)
    head, other = nodes.members()
    nodes.kill_node_of(other)
    assert nodes.code() == 0, nodes.log()
    assert nodes.members() == [head] and nodes.steps() == list(range(1, STEPS + 1))


def test_the_coordinator_moves_if_its_node_is_lost(nodes: Nodes) -> None:
    nodes.submit(*arguments())
    nodes.until(lambda: len(nodes.steps()) > 12)
    coordinator = nodes.coordinator()
    nodes.kill_node_of(nodes.starter(coordinator))
    os.kill(coordinator, signal.SIGKILL)  # a process of its own on this machine
    nodes.add()
    assert nodes.code() == 0, nodes.log()
    assert "start again" not in nodes.log()
    assert nodes.steps() == list(range(1, STEPS + 1))


def test_a_killed_agent_starts_again_on_its_node(nodes: Nodes) -> None:
    nodes.submit(*arguments())
    nodes.until(lambda: len(nodes.steps()) > 12)
    os.kill(nodes.members()[1], signal.SIGKILL)
    assert nodes.code() == 0, nodes.log()
    assert nodes.steps() == list(range(1, STEPS + 1))


def test_a_stop_signal_ends_the_run_with_a_checkpoint_and_code_75(nodes: Nodes) -> None:
    nodes.submit(*arguments())
    nodes.until(lambda: len(nodes.steps()) > 12)
    nodes.stop(signal.SIGTERM)
    assert nodes.code() == 75, nodes.log()
    assert "ended on request after step" in nodes.log() and len(nodes.steps()) < STEPS
    nodes.submit(*arguments())
    assert nodes.code() == 0, nodes.log()
    assert nodes.steps() == list(range(1, STEPS + 1))


def test_bad_data_ends_the_run_with_code_2_and_starts_nothing_again(nodes: Nodes) -> None:
    nodes.submit(*arguments(12, "data.mix={'gone': 1}"))
    assert nodes.code() == 2 and "start again" not in nodes.log()


def test_a_folder_that_a_node_does_not_see_is_said(tmp_path: Path) -> None:
    code = (
        "import asyncio; from meshwright.launch.ray_agents import NodeAgent; import ray; "
        "ray.util.get_node_ip_address = lambda: '10.0.0.7'; print(asyncio.run(NodeAgent().place('/no/such')))"
    )
    pytest.importorskip("ray")
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "node 10.0.0.7 has no folder /no/such; start the job in a folder that all nodes share" in answer.stdout
