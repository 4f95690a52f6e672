"""`meshwright chaos`: its list, its errors, and the keys of its answer; `tests/faults` runs the scenarios."""

from __future__ import annotations

from pathlib import Path

from tests.cli.command import meshwright


def test_the_list_names_each_scenario_with_its_promise() -> None:
    answer = meshwright("chaos", "--list", "--json")
    entries = answer.json["scenarios"]
    names = [entry["scenario"] for entry in entries]
    assert answer.code == 0 and {"kill-rank", "lose-host", "nan"} <= set(names) and len(names) == len(set(names))
    assert all(entry["promise"].endswith(".") for entry in entries)


def test_an_unknown_scenario_brings_the_nearest(tiny: Path, tmp_path: Path) -> None:
    answer = meshwright("chaos", tiny, "--scenario", "kil-rank", "--runs", tmp_path, "--json")
    assert answer.code == 2 and answer.json["ok"] is False and "kill-rank" in answer.out
    assert not list(tmp_path.iterdir())
