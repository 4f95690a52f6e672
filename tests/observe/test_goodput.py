"""The goodput breakdown of runs with known durations: restarts, hangs, rollbacks, skipped steps, pauses, damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.goodput import CATEGORIES, RunGoodput, goodput, run_goodput
from meshwright.observe.wall_time import WallTimeWriter

BEGIN = 1_790_000_000.0


class Run:
    """Writes lines as a run does whose steps take 2 s, 0.25 s of it for data; keeps the true seconds by category."""

    def __init__(self, path: Path) -> None:
        self.path, self.now, self.incidents = path, BEGIN, list[float]()
        self.true = dict.fromkeys(CATEGORIES, 0.0)
        self.writer = WallTimeWriter(path, lambda: self.now)

    def passes(self, seconds: float, category: str) -> None:
        self.now += seconds
        self.true[category] += seconds

    def start(self, step: int, seconds: float = 30.0, category: str = "productive") -> None:
        """A start whose first step takes 2 s and compiles for another 8 s."""
        self.passes(seconds + 8.0, "restarting")
        self.passes(1.75, category)
        self.passes(0.25, "waiting_for_data")
        self.writer.start(step, seconds + 10.0, 10.0)
        self.writer.step(step + 1, 0.25, skipped=False)

    def steps(self, first: int, last: int, category: str = "productive", *, skipped: bool = False) -> None:
        for step in range(first, last + 1):
            self.passes(1.75, category)
            self.passes(0.25, "waiting_for_data")
            self.writer.step(step, 0.25, skipped=skipped)

    def pause(self, activity: Any, step: int, seconds: float, category: str) -> None:
        self.passes(seconds, category)
        self.writer.pause(activity, step, seconds)

    def fails(self, noticed_after: float) -> None:
        """The ranks stop in the middle of a step; the failure is noticed later."""
        self.passes(2.0, "recomputing")
        self.passes(noticed_after, "detecting")
        self.incidents.append(self.now)

    def ends(self) -> None:
        self.writer.end(0)

    def breakdown(self) -> RunGoodput:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        found = goodput(lines, self.incidents)
        assert found is not None
        assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds, abs=1e-3)
        return found


def undisturbed(run: Run) -> None:
    run.start(0)
    run.steps(2, 20)
    run.pause("save", 20, 3.0, "saving")
    run.pause("validation", 20, 4.0, "productive")
    run.steps(21, 30)


def restarted(run: Run) -> None:
    run.start(0)
    run.steps(2, 20)
    run.pause("save", 20, 3.0, "saving")
    run.steps(21, 25, "recomputing")
    run.fails(60.0)
    run.ends()  # the ranks close their files when they are told to end
    run.passes(5.0, "restarting")
    run.start(20, 12.0)
    run.steps(22, 30)


def failed_twice_before_a_step(run: Run) -> None:
    restarted(run)
    run.fails(0.5)
    run.passes(40.0, "restarting")  # a start that fails has no line
    run.incidents.append(run.now)
    run.start(30, 9.0)


def undone_twice(run: Run) -> None:
    """The second start loses its steps to another failure, its first step included."""
    run.start(0)
    run.steps(2, 10)
    run.steps(11, 15, "recomputing")
    run.fails(1.0)
    run.start(10, 20.0, "recomputing")
    run.steps(12, 13, "recomputing")
    run.fails(1.0)
    run.start(10, 20.0)
    run.steps(12, 20)


def rolled_back(run: Run) -> None:
    run.start(0)
    run.steps(2, 10)
    run.steps(11, 14, "recomputing")
    run.pause("rollback", 10, 6.0, "restarting")
    run.steps(11, 20)


def skipping(run: Run) -> None:
    run.start(0)
    run.steps(2, 10)
    run.steps(11, 13, "recomputing", skipped=True)
    run.steps(14, 20)


def continued_the_next_day(run: Run) -> None:
    run.start(0)
    run.steps(2, 10)
    run.pause("save", 10, 2.0, "saving")
    run.ends()
    run.passes(86_400.0, "idle")
    run.start(10)
    run.steps(12, 20)
    run.passes(7.0, "idle")
    run.ends()


def noticed_while_training(run: Run) -> None:
    """An incident without a restart explains no later gap."""
    run.start(0)
    run.steps(2, 5)
    run.incidents.append(run.now - 0.5)
    run.steps(6, 10)
    run.pause("save", 10, 2.0, "saving")
    run.ends()
    run.passes(600.0, "idle")
    run.start(10)
    run.steps(12, 20)


def failed_for_good(run: Run) -> None:
    run.start(0)
    run.steps(2, 10)
    run.fails(30.0)
    run.passes(1.0, "idle")
    run.ends()


STORIES = [
    undisturbed,
    restarted,
    failed_twice_before_a_step,
    undone_twice,
    rolled_back,
    skipping,
    continued_the_next_day,
    noticed_while_training,
    failed_for_good,
]


@pytest.mark.parametrize("story", STORIES)
def test_every_second_is_in_its_category(tmp_path: Path, story: Callable[[Run], None]) -> None:
    run = Run(tmp_path / "wall_time.jsonl")
    story(run)
    found = run.breakdown()
    assert found.wall_seconds == pytest.approx(run.now - BEGIN, abs=1e-3)
    assert dict(found.seconds) == pytest.approx(run.true, abs=1e-3)
    assert found.goodput == pytest.approx(run.true["productive"] / (run.now - BEGIN))


LINES = st.builds(
    lambda kind, time, step, seconds, first, skipped: {
        "kind": kind,
        "time": BEGIN + time,
        "step": step,
        "seconds": seconds,
        "first_step_seconds": first,
        "data_seconds": first,
        "skipped": skipped,
    },
    st.sampled_from(["start", "step", "save", "validation", "rollback", "end"]),
    *(st.floats(0, 1000), st.integers(0, 20), st.floats(0, 400), st.floats(0, 50), st.booleans()),
)


@given(st.lists(LINES, min_size=1, max_size=30), st.lists(st.floats(0, 1000).map(BEGIN.__add__), max_size=4))
def test_the_categories_add_up_to_the_wall_time_for_any_lines(
    lines: list[dict[str, Any]], incidents: list[float]
) -> None:
    found = goodput(lines, sorted(incidents))
    assert found is not None
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds, abs=1e-3)
    assert min(found.seconds.values()) >= 0.0


def test_a_damaged_file_loses_only_its_damaged_lines(tmp_path: Path) -> None:
    run = Run(tmp_path / "wall_time.jsonl")
    run.start(0)
    run.steps(2, 3)
    run.path.write_text(
        run.path.read_text() + '[1]\n{"time": "x", "kind": "step", "step": 2}\n{"kind": "new"}\n{"time"'
    )
    found = run_goodput(tmp_path)
    assert found is not None and dict(found.seconds) == pytest.approx(run.true, abs=1e-3)


def test_incidents_come_from_the_folder(tmp_path: Path) -> None:
    run = Run(tmp_path / "wall_time.jsonl")
    restarted(run)
    for number, time in enumerate((*run.incidents, "no time")):
        folder = tmp_path / "incidents" / f"{number:04d}-1"
        folder.mkdir(parents=True)
        (folder / "incident.json").write_text(json.dumps({"time": time}))
    found = run_goodput(tmp_path)
    assert found is not None and found.seconds["detecting"] == pytest.approx(60.0, abs=1e-3)


def test_a_run_without_the_file_has_no_account(tmp_path: Path) -> None:
    assert run_goodput(tmp_path) is None and goodput([]) is None


def test_lines_that_the_disk_does_not_take_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "missing" / "wall_time.jsonl"
    writer = WallTimeWriter(file)
    writer.step(1, 0.0, skipped=False)
    writer.step(2, 0.0, skipped=False)
    assert len(caplog.records) == 1 and "written once that is possible" in caplog.text
    file.parent.mkdir()
    writer.step(3, 0.0, skipped=False)
    writer.step(4, 0.0, skipped=False)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4]
