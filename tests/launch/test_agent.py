"""The self-test of waiting processes, which an agent runs on request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.launch.agent import Agent
from meshwright.launch.local import rank_starter, start_ranks
from meshwright.launch.reports import Directive, Evidence, HostTest
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    """Agents of two hosts with a rank each."""
    start = rank_starter(ClusterSpec(gpu="cpu", gpus_per_node=1), tmp_path / "run")
    pair = [Agent(name, start, tmp_path / "run") for name in ("a/1", "b/2")]
    yield pair
    for agent in pair:
        agent.close()


@pytest.fixture
def light_agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent of a process that waits and has imported nothing."""
    cluster = ClusterSpec(gpu="cpu", gpus_per_node=1)
    agent = Agent(
        "a/1",
        lambda spare: start_ranks("tests.launch.fake_rank", ["wait", str(tmp_path)], cluster=cluster, threads=1),
        tmp_path / "run",
    )
    yield agent
    agent.close()


def let_test(agents: list[Agent], attempt: int, port: int, seconds: float) -> list[HostTest | None]:
    """The results of a self-test that both hosts run together."""
    for first_rank, agent in enumerate(agents):
        agent.obey(Directive("test", attempt, first_rank, 2, "127.0.0.1", port, grace=seconds))
    deadline = time.monotonic() + 60
    while any((test := agent.report().test) is None or test.attempt != attempt for agent in agents):
        assert time.monotonic() < deadline
        assert all(agent.report().port == 0 or agent.report().test is not None for agent in agents)
        for agent in agents:
            agent.poll(0.01)
    return [agent.report().test for agent in agents]


@pytest.mark.slow
def test_two_hosts_test_themselves_and_their_exchanges_and_wait_on_until_one_does_not_answer(
    agents: list[Agent],
) -> None:
    """A host that does not answer fails its exchanges, and the processes of both are replaced."""
    ports = [agent.report().port for agent in agents]
    assert let_test(agents, 1, ports[0], 60) == [HostTest(1), HostTest(1)]
    assert let_test(agents, 2, ports[0], 60) == [HostTest(2), HostTest(2)]
    assert [agent.report().port for agent in agents] == ports
    stopped = agents[1]._waiting.processes[0].pid  # type: ignore[union-attr]
    os.kill(stopped, signal.SIGSTOP)
    first, second = let_test(agents, 3, ports[0], 6)
    assert first is not None and second is not None and not first.failure and not second.failure
    assert first.exchange.startswith("device 0: ") or first.exchange == "it did not answer in time"
    assert second.exchange == "it did not answer in time" and not first.complete and not second.complete
    for agent in agents:
        agent.obey(Directive("wait", 3))
    assert not {agent.report().port for agent in agents} & {0, *ports}
    assert not Path(f"/proc/{stopped}").exists()


def test_evidence_of_ranks_that_have_ended_is_collected_before_the_next_attempt(
    light_agent: Agent, tmp_path: Path
) -> None:
    agent, folder = light_agent, tmp_path / "run" / "incidents" / "0001-0"
    log = tmp_path / "run" / "logs" / "rank-00000.log"
    log.parent.mkdir(parents=True)
    log.write_text("ValueError: its last line\n")
    agent.obey(Directive("run", 1, 0, 1, "127.0.0.1", 1, assignment=str(tmp_path / "run" / "none")))
    os.kill(agent._running.processes[0].pid, signal.SIGKILL)
    while not agent.report().ended:
        agent.poll(0.01)
    agent.obey(
        Directive(
            "run", 2, 0, 1, "127.0.0.1", 1, assignment=str(tmp_path / "run" / "none"), evidence=Evidence(1, str(folder))
        )
    )
    assert agent._evidence is not None
    agent._evidence.join()
    text = (folder / "stacks" / "rank-0.txt").read_text()
    assert "was killed by signal 9" in text and "none: the process has ended" in text
    assert text.endswith("ValueError: its last line\n")
    (folder / "stacks" / "rank-0.txt").unlink()
    agent.obey(
        Directive(
            "run", 2, 0, 1, "127.0.0.1", 1, assignment=str(tmp_path / "run" / "none"), evidence=Evidence(1, str(folder))
        )
    )
    agent._evidence.join()
    assert not (folder / "stacks" / "rank-0.txt").exists()


def test_an_excluded_host_has_no_processes(light_agent: Agent) -> None:
    light_agent.obey(Directive("idle", 2))
    assert light_agent.report().port == 0 and light_agent._waiting is None


@pytest.mark.parametrize("spares", [False, True])
def test_processes_start_beside_ranks_that_end_only_if_these_have_spares(light_agent: Agent, spares: bool) -> None:
    light_agent._spares = spares
    light_agent.obey(Directive("run", 1, 0, 1, "127.0.0.1", 1, assignment=str(light_agent._folder / "none")))
    assert light_agent._running is not None
    light_agent.obey(Directive("end", 1, grace=60))
    assert not light_agent._running.ended and (light_agent._waiting is not None) == spares
    light_agent._running.kill()
    while not light_agent.report().ended:
        light_agent.poll(0.01)
    light_agent.obey(Directive("end", 1, grace=60))
    assert light_agent._waiting is not None


@pytest.mark.parametrize("spares", [False, True])
def test_no_processes_start_when_ranks_end_after_a_stop_signal(light_agent: Agent, spares: bool) -> None:
    light_agent._spares = spares
    light_agent.obey(Directive("run", 1, 0, 1, "127.0.0.1", 1, assignment=str(light_agent._folder / "none")))
    assert light_agent._running is not None
    light_agent.stop(signal.SIGTERM)
    light_agent.obey(Directive("end", 1, grace=60))
    light_agent._running.kill()
    while not light_agent.report().ended:
        light_agent.poll(0.01)
    light_agent.obey(Directive("end", 1, grace=60))
    assert light_agent._waiting is None


def test_no_directive_leads_out_of_the_run_folder(light_agent: Agent, tmp_path: Path) -> None:
    agent, run, outside = light_agent, tmp_path / "run", tmp_path / "secrets"
    outside.mkdir()
    run.mkdir()
    (run / "link").symlink_to(outside)
    for path in (outside / "a", run / ".." / "secrets" / "a", run / "link" / "a", Path("/etc/passwd")):
        with pytest.raises(BadInput, match="not in the run's folder"):
            agent.obey(Directive("run", 1, 0, 1, "127.0.0.1", 1, assignment=str(path)))
    agent.obey(Directive("run", 1, 0, 1, "127.0.0.1", 1, assignment=str(run / "none")))
    with pytest.raises(BadInput, match="not in the run's folder"):
        agent.obey(Directive("run", 1, evidence=Evidence(1, str(outside / "incidents" / "1"))))
    assert not list(outside.iterdir())
