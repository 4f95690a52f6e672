"""The process that reads a host's health, as its agent sees it, and reports with findings."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.training.tiny import make_tiny, tiny_run

from meshwright.chaos.health_faults import FOLDER
from meshwright.launch.agent import Agent
from meshwright.launch.coordinator import Coordinator
from meshwright.launch.health_monitor import HealthMonitor, health_monitor
from meshwright.launch.host_readings import HostReader
from meshwright.launch.hosts import checked_report
from meshwright.launch.local import Ranks
from meshwright.launch.reports import Directive, Report
from meshwright.policies.host_health import HealthFinding
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.supervision import Rules
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import to_plain
from meshwright.spec.rank_environment import PROGRAM_STOP


class World:
    """A fake NVML, and a monitor whose process reads it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.write()

    def write(self, **more: object) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps({"gpus": [{}, {}], **more}))
        part.replace(self.file)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return World(tmp_path / "nvml.json")


@pytest.fixture
def monitor(world: World) -> Iterator[HealthMonitor]:
    with closing(HealthMonitor(2)) as made:
        yield made


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def rules_of(monitor: HealthMonitor) -> set[tuple[str, str]]:
    """Rules and parts that are found on GPUs; this machine itself may lack space."""
    return {(finding.rule, finding.part) for finding in monitor.findings() if finding.part.startswith("GPU")}


def test_an_xid_arrives_at_once_and_a_state_with_the_next_readings(world: World, monitor: HealthMonitor) -> None:
    until(lambda: bool(monitor.findings() or monitor.known))
    assert rules_of(monitor) == set()
    world.write(events=[[1, 79]])
    until(lambda: ("xid-lost", "GPU 1") in rules_of(monitor), 10.0)


def test_a_process_that_hangs_or_ends_is_said(
    world: World, monitor: HealthMonitor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    until(lambda: monitor.known or bool(monitor.findings()))
    os.kill(monitor._process.pid, signal.SIGSTOP)
    monitor.findings()
    later = time.monotonic() + 31.0
    monitor._clock = lambda: later
    assert monitor.findings()[-1].rule == "silent"
    os.kill(monitor._process.pid, signal.SIGKILL)
    until(lambda: monitor._ended or not monitor.findings())
    assert monitor.findings() == monitor._findings and "has ended" in capfd.readouterr().err


def test_a_host_is_ready_once_its_health_was_read_and_reports_what_is_wrong(world: World, tmp_path: Path) -> None:
    class Waiting(Ranks):
        def __init__(self) -> None:
            super().__init__()
            self.port = 7

    world.write(gpus=[{"remapped": [0, 1, 0, 1]}, {}])
    with (
        closing(HealthMonitor(2)) as monitor,
        closing(Agent("a/1", lambda spare: Waiting(), tmp_path, health=monitor)) as agent,
    ):
        monitor._read = False
        assert agent.report().port == 0
        until(lambda: agent.report().port == 7)
        (finding,) = (each for each in agent.report().findings if each.part.startswith("GPU"))
        assert finding == HealthFinding("remap-failed", "GPU 0", finding.text)
        report = agent.report()
        assert checked_report(to_plain(report)) == report


def test_reports_with_findings_of_no_rule_or_of_another_form_are_refused() -> None:
    good = Report("a/1", findings=(HealthFinding("thermal", "GPU 0", "hot"),))
    assert checked_report(to_plain(good)) == good
    for finding in (HealthFinding("none-such", "GPU 0", "x"), HealthFinding("thermal", "GPU 0", "x" * 2000)):
        with pytest.raises(ValueError, match="expected findings"):
            checked_report(to_plain(replace(good, findings=(finding,))))
    with pytest.raises(ValueError, match="expected findings"):
        checked_report(to_plain(replace(good, findings=good.findings * 2000)))


def test_a_warning_is_printed_once_although_each_report_repeats_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    coordinator = Coordinator(tmp_path, Rules(1, 8, RestartPolicy(3)), 1, lambda state: tmp_path)
    for value in range(5):
        coordinator.receive(Report("a", findings=(HealthFinding("disk-space", "host", f"{value} bytes"),)))
    coordinator.close()
    assert capfd.readouterr().err == "meshwright: host a: 0 bytes\n"


def test_an_excluded_member_ends_its_ranks_before_it_idles(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, Rules(2, 8, RestartPolicy(3)), 1, lambda state: tmp_path)
    for host in "ab":
        coordinator.receive(Report(host, port=1))
    until(lambda: coordinator.tick() or coordinator.state.status == "running")
    lost = (HealthFinding("xid-lost", "GPU 0", "XID 79"),)
    assert coordinator.receive(Report("b", attempt=1, ended=False, findings=lost)).order == "end"
    assert coordinator.receive(Report("a", attempt=1, ended=False)).order == "end"
    for report in (Report("b", attempt=1, findings=lost), Report("a", port=1, attempt=1)):
        coordinator.receive(report)  # the ranks have ended
    coordinator.tick()
    assert coordinator.receive(Report("a", port=1, attempt=1)).order == "wait"
    assert coordinator.receive(Report("b", attempt=1, findings=lost)).order == "idle"
    coordinator.close()


def test_health_is_read_where_ranks_use_gpus_or_where_it_is_wanted(world: World, tmp_path: Path) -> None:
    run = tiny_run(make_tiny(tmp_path))
    with health_monitor(run) as off:
        assert off is None
    with health_monitor(replace(run, supervision=replace(run.supervision, health=True))) as on:
        assert on is not None
    on_gpus = replace(run, cluster=ClusterSpec(gpu="H100", gpus_per_node=2))
    with health_monitor(on_gpus) as on:
        assert on is not None
    with health_monitor(replace(on_gpus, supervision=replace(run.supervision, health=False))) as off:
        assert off is None


def test_a_port_is_down_only_if_it_was_up_and_a_clock_that_is_set_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.launch import host_readings

    def port(name: str, state: str, **counters: int) -> None:
        folder = tmp_path / name / "ports" / "1"
        (folder / "counters").mkdir(parents=True, exist_ok=True)
        (folder / "state").write_text(state)
        for counter, value in counters.items():
            (folder / "counters" / counter).write_text(f"{value}\n")

    monkeypatch.setattr(host_readings, "INFINIBAND", tmp_path)
    port("mlx5_0", "4: ACTIVE", link_downed=1, symbol_error=3, port_rcv_errors=4)
    port("mlx5_1", "1: DOWN", link_downed=0)
    reader = HostReader()

    def values() -> dict[str, dict[str, float]]:
        return {reading.part: dict(reading.values) for reading in reader.read()}

    first = values()
    assert first["port mlx5_0/1"] == {"port_down": 0, "port_errors": 7, "link_downed": 1}
    assert first["port mlx5_1/1"]["port_down"] == 0 and first["host"]["clock_jump"] == 0
    port("mlx5_0", "1: DOWN", link_downed=2)
    now = time.time()
    monkeypatch.setattr(host_readings.time, "time", lambda: now + 3600)
    second = values()
    assert second["port mlx5_0/1"]["port_down"] == 1 and second["port mlx5_1/1"]["port_down"] == 0
    assert 3599 < second["host"]["clock_jump"] < 3601
    assert "port_errors" not in second["port mlx5_0/1"], "errors and new ports are looked for at every tenth reading"
    port("mlx5_0", "4: ACTIVE", symbol_error=5)
    port("mlx5_2", "4: ACTIVE")
    tenth = [values() for _ in range(host_readings.PORTS_EVERY - 1)][-1]
    assert tenth["port mlx5_0/1"]["port_errors"] == 9 and "port mlx5_2/1" in tenth


def test_a_drain_asks_the_ranks_of_its_attempt_to_save_and_end_once(tmp_path: Path) -> None:
    class Running(Ranks):
        stops: list[int] = []

        def begin(self, *arguments: object) -> None:
            pass

        def discard(self) -> None:
            pass

        def stop(self, number: int = 0) -> None:
            self.stops.append(number)

    with closing(Agent("a/1", lambda spare: Running(), tmp_path)) as agent:
        agent.obey(Directive("run", 1, ranks=1, assignment=str(tmp_path / "assignment.json")))
        assert Running.stops == []
        for _ in range(2):
            agent.obey(Directive("run", 1, drain=True))
        assert Running.stops == [PROGRAM_STOP]
        assert agent.report().stop == 0, "the job goes on"
        agent.obey(Directive("run", 2, ranks=1, assignment=str(tmp_path / "assignment.json"), drain=True))
        assert Running.stops == [PROGRAM_STOP, PROGRAM_STOP]
