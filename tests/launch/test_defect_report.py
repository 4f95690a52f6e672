"""The command that tells a site about an excluded host."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.training.tiny import make_tiny, tiny_run

from meshwright.launch.agent import Agent
from meshwright.launch.defect_report import DefectReporter
from meshwright.launch.local import Ranks
from meshwright.launch.reports import Directive
from meshwright.spec.run import RunSpec


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    return tiny_run(make_tiny(tmp_path))


def with_command(run: RunSpec, command: str) -> RunSpec:
    return replace(run, supervision=replace(run.supervision, report_command=command))


def test_an_excluded_host_is_reported_once_with_its_cause(run: RunSpec, tmp_path: Path) -> None:
    code = f"import sys; open({str(tmp_path / 'reports')!r}, 'a').write(sys.stdin.read() + chr(10))"
    command = f"{sys.executable} -c {shlex.quote(code)}"
    with closing(DefectReporter(with_command(run, command))) as reporter:
        agent = Agent("node7/123", lambda spare: Ranks(), tmp_path, report_defect=reporter)
        for _ in range(3):
            agent.obey(Directive("idle", cause="is not healthy: GPU 3: XID 79"))
    (line,) = (tmp_path / "reports").read_text().splitlines()
    record = json.loads(line)
    assert (record["run"], record["host"], record["cause"]) == (run.name, "node7", "is not healthy: GPU 3: XID 79")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{sys.executable} -c 'import sys; sys.exit(\"no rights\")'", "ended with code 1: no rights"),
        ("/no/such/command", "No such file or directory"),
        ("'unclosed", "No closing quotation"),
    ],
)
def test_a_command_that_fails_is_said_and_harms_nothing(
    run: RunSpec, command: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(DefectReporter(with_command(run, command))) as reporter:
        reporter("node7/1", "it failed")
    assert f"meshwright: supervision.report_command: {said}" in capfd.readouterr().err.replace("[Errno 2] ", "")


def test_without_a_command_nothing_starts(run: RunSpec) -> None:
    reporter = DefectReporter(run)
    reporter("node7/1", "it failed")
    assert reporter._threads == []
