"""Agents of a job on Ray without Ray: which start again, and the code of the job. `tests/hosts/test_ray_runs.py` has a cluster."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.launch.fake_ray import FakeRay, RayError
from tests.launch.scheduler import job_of

from meshwright.launch import ray_agents
from meshwright.launch.ray_agents import SETTLE_SECONDS, Agents, RayJob, _Driver, _Stop, run_on_ray
from meshwright.launch.ray_script import ray_script
from meshwright.launch.scheduler_job import AGENT_STARTS, REQUEUE_CODES, STOP_CODES
from meshwright.spec.errors import BadInput


def placed(count: int = 3) -> Agents:
    """Agents that all run."""
    agents = Agents()
    for bundle in range(count):
        agents.placed(bundle, 0.0)
    assert agents.due(0.0) == list(range(count))
    return agents


def rendered(*overrides: str) -> RayJob:
    """The job that the rendered program starts."""
    text = ray_script(job_of(*overrides))
    names: dict[str, object] = {"__name__": "rendered"}
    exec(compile(text, "run_ray.py", "exec"), names)
    job = names["job"]
    assert isinstance(job, RayJob)
    return job


def test_the_program_has_the_job() -> None:
    job = rendered("supervision.spares=1", "supervision.restarts=2")
    assert (job.hosts, job.restarts, job.resources) == (5, 2, {"CPU": 8, "GPU": 8})
    assert job.arguments[0] == "train" and job.arguments[-3:] == ["--runs", "runs", "--agent"]
    assert rendered("cluster.gpu=cpu").resources == {"CPU": 8}
    assert rendered("checkpoint.grace_seconds=300").stop_seconds == 350


def test_words_are_literal_text() -> None:
    arguments = ('data.mix={"it\'s {x}": 1}', "data.mix={'a\\\\b': 1}")
    assert set(arguments) <= set(rendered(*arguments).arguments)


def test_agents_run_once_their_bundle_is_placed() -> None:
    agents = Agents()
    agents.placed(2, 5.0)
    agents.placed(0, 6.0)
    assert agents.due(5.5) == [2] and agents.due(6.0) == [0]


@pytest.mark.parametrize("code", [0, *STOP_CODES, *REQUEUE_CODES])
def test_the_end_of_the_job_is_the_end_of_its_agents(code: int) -> None:
    agents = placed(2)
    agents.ended(0, code, 10.0)
    assert not agents.is_over(10.0) and agents.due(100.0) == [], "the other one runs, and no one takes its place"
    agents.ended(1, code, 11.0)
    assert agents.is_over(11.0) and agents.code == code


def test_an_agent_that_a_signal_killed_starts_again_at_once_a_few_times() -> None:
    agents = placed(1)
    for number in range(1, AGENT_STARTS):
        agents.ended(0, -9, 10.0 * number)
        assert not agents.is_over(10.0 * number) and agents.due(10.0 * number) == [0]
    agents.ended(0, -9, 100.0)
    assert agents.is_over(100.0) and agents.code == 5


def test_an_agent_that_failed_alone_starts_again_while_the_others_train() -> None:
    agents = placed()
    agents.ended(1, 5, 10.0)
    assert agents.due(10.0) == [] and agents.due(10.0 + SETTLE_SECONDS) == [1]


def test_if_all_agents_fail_none_starts_again_before_the_job_does() -> None:
    agents = placed()
    for bundle in range(3):
        agents.ended(bundle, 5, 10.0 + bundle)
    assert agents.is_over(12.0) and agents.code == 5


def test_lost_nodes_are_no_end_and_begin_anew() -> None:
    agents = placed()
    agents.ended(0, -9, 0.5)
    assert agents.due(0.5) == [0]
    for bundle in range(3):
        agents.lost(bundle)
    assert not agents.is_over(1.0)
    agents.placed(1, 20.0)
    assert agents.due(20.0) == [1]
    agents.ended(1, 0, 30.0)
    assert agents.is_over(30.0) and agents.code == 0


def test_the_code_of_the_job_is_that_of_most_weight() -> None:
    for codes, expected in (((-9, 0, 5), 0), ((5, 2, 75), 2), ((1, 75), 75), ((-9, 1), 1), ((), 5)):
        agents = Agents(codes=dict(enumerate(codes)))
        assert agents.code == expected


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_on_ray(rendered(), Path()) == 2
    assert "pip install 'meshwright[ray]'" in capfd.readouterr().err


Drive = Callable[[FakeRay], int]


@pytest.fixture
def stop() -> _Stop:
    return _Stop()


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: _Stop) -> Drive:
    """Run the driver of a job on two nodes; returns its exit code."""
    for name in ("POLL_SECONDS", "SETTLE_SECONDS", "PLACE_SECONDS"):
        monkeypatch.setattr(ray_agents, name, 0.001)
    strategies = SimpleNamespace(
        PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: SimpleNamespace(
            placement_group_bundle_index=placement_group_bundle_index
        )
    )
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    job = RayJob(("train", "--agent"), hosts=2, resources={"CPU": 1}, restarts=2, stop_seconds=0.05)
    return lambda ray: _Driver(ray, job, tmp_path, "token", stop).run()


def test_one_agent_starts_on_each_node_of_one_group(drive: Drive) -> None:
    ray = FakeRay(lambda bundle, number: 0)
    assert drive(ray) == 0
    assert ray.groups == [([{"CPU": 1}] * 2, "STRICT_SPREAD")]
    assert ray.runs == [(0, "10.0.0.0:29400"), (1, "10.0.0.0:29400")]


def test_a_lost_node_is_replaced_within_the_same_start(drive: Drive) -> None:
    def behave(bundle: int, number: int) -> object:
        if bundle == 1:
            return RayError("node died") if number == 1 else 0
        return lambda: 0 if len(ray.runs) == 3 else None  # trains until the other one is back

    ray = FakeRay(behave)
    assert drive(ray) == 0
    assert ray.runs == [(bundle, "10.0.0.0:29400") for bundle in (0, 1, 1)]


def test_after_a_failure_of_all_the_first_placed_node_has_the_coordinator(drive: Drive) -> None:
    ray = FakeRay(lambda bundle, number: 5 if number == 1 else 0)
    ray.placed = lambda bundle, number: (f"10.0.{number}.{bundle}", 29400, "")
    assert drive(ray) == 0
    assert ray.runs == [(0, "10.0.1.0:29400"), (1, "10.0.1.0:29400"), (0, "10.0.2.0:29400"), (1, "10.0.2.0:29400")]


@pytest.mark.parametrize(("code", "starts"), [(5, 3), (2, 1)])
def test_failures_of_all_agents_are_counted(drive: Drive, code: int, starts: int) -> None:
    ray = FakeRay(lambda bundle, number: code)
    assert drive(ray) == code
    assert len(ray.runs) == 2 * starts


def test_preemptions_are_not_counted(drive: Drive) -> None:
    ray = FakeRay(lambda bundle, number: 75 if number < 6 else 0)
    assert drive(ray) == 0 and len(ray.runs) == 12


def test_a_stop_is_passed_on_once_and_has_its_time(drive: Drive, stop: _Stop) -> None:
    ray = FakeRay(lambda bundle, number: None)

    def run(bundle: int, number: int) -> None:
        if bundle == 1:
            stop._take(signal.SIGTERM, None)

    ray.behave = run
    assert drive(ray) == 75
    assert sorted(ray.stops) == [(0, signal.SIGTERM), (1, signal.SIGTERM)]


def test_a_node_without_the_folder_ends_the_job_with_its_message(drive: Drive) -> None:
    ray = FakeRay(lambda bundle, number: 0)
    ray.placed = lambda bundle, number: ("10.0.0.1", 1, "node 10.0.0.1 has no folder /shared")
    with pytest.raises(BadInput, match="has no folder /shared"):
        drive(ray)


def test_an_actor_that_never_begins_ends_the_job(drive: Drive) -> None:
    ray = FakeRay(lambda bundle, number: 0)
    ray.placed = lambda bundle, number: RayError("No module named meshwright") if bundle else ("10.0.0.0", 1, "")
    ray.behave = lambda bundle, number: None
    with pytest.raises(BadInput, match="Ray cannot start an agent: No module named meshwright"):
        drive(ray)
