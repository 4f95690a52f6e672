"""The phases of a start: one after another, over processes, adding up."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from meshwright.events.start import START_TIME_VARIABLE, StartClock, process_start_time, start_line


def test_phases_add_up_to_what_passed() -> None:
    clock = StartClock(100.0)
    clock.end("command", at=100.5)
    clock.end("imports", at=103.0)
    clock.end("model", at=104.0)
    clock.end("weights", at=104.25)
    clock.end("model", at=104.5)
    clock.add("first step", 2.0)
    assert clock.phases == {"command": 0.5, "imports": 2.5, "model": 1.25, "weights": 0.25, "first step": 2.0}
    assert sum(clock.phases.values()) == 6.5
    clock.end("after", at=107.0)
    assert clock.phases["after"] == 0.5


def test_a_process_knows_when_it_began() -> None:
    before = time.monotonic()
    code = "import time; from meshwright.events.start import process_start_time as f; time.sleep(0.2); print(f(), time.monotonic())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    start_time, now = map(float, said.split())
    assert before - 0.02 <= start_time <= now - 0.2  # the kernel counts in hundredths
    assert now <= time.monotonic()


def test_a_rank_goes_on_where_its_parent_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_TIME_VARIABLE, str(process_start_time() - 5.0))
    clock = StartClock.for_rank()
    assert clock.phases["command"] == pytest.approx(5.0, abs=0.03)
    monkeypatch.delenv(START_TIME_VARIABLE)
    assert StartClock.for_rank().phases["command"] == pytest.approx(0.0, abs=0.03)


def test_the_line_leaves_out_what_took_no_time_and_a_compiler_that_did_nothing() -> None:
    phases = {"command": 0.52, "imports": 3.1, "plan": 0.01, "first step": 5.0}
    assert start_line(phases, {}) == "start took 8.6 s: command 0.5, imports 3.1, first step 5.0"
    idle = {"compiled": 0, "from_cache": 0, "seconds": 0.0}
    assert start_line(phases, idle) == start_line(phases, {})
    assert start_line(phases, {"compiled": 1, "from_cache": 3, "seconds": 2.25}).endswith(
        "first step 5.0 (compiler 2.2: 1 graphs compiled, 3 from its cache)"
    )
