"""A start computes the number and size of a run's checkpoints and checks that the disk has space for them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoint.made import save

from meshwright.checkpoint.format.files import add_reserve
from meshwright.config.load import load_run
from meshwright.launch.disk import check_disk, checkpoint_bytes, checkpoints_line
from meshwright.spec.errors import OutOfResources
from meshwright.spec.job import CheckpointSpec
from meshwright.spec.run import RunSpec

STEPS = 100


def run_of(**checkpoint: object) -> RunSpec:
    run = load_run(None, ["model=llama-nano", "model.vocab_size=512", f"train.steps={STEPS}"])
    return replace(run, checkpoint=CheckpointSpec(**checkpoint))


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10 * count, 9 * count, count))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("checkpoint", "existing", "count"),
    [
        ({"every": 0}, 0, 1),
        ({"every": 10, "keep": 2}, 0, 3),
        ({"every": 40, "keep": 9}, 0, 3),
        ({"every": 10, "keep": 2}, 2, 1),
    ],
)
def test_a_start_requires_space_for_the_checkpoints_that_exist_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, int], existing: int, count: int
) -> None:
    """While a checkpoint is written, `keep + 1` exist; existing checkpoints need no further space."""
    run = run_of(**checkpoint)
    for step in range(1, existing + 1):
        (tmp_path / "run").mkdir(exist_ok=True)
        save(tmp_path / "run" / "checkpoints", step)
    need = count * add_reserve(checkpoint_bytes(run.model))
    set_free_bytes(monkeypatch, need)
    check_disk(run, tmp_path / "run")
    set_free_bytes(monkeypatch, need - 1)
    with pytest.raises(OutOfResources, match=f"need(s)? {need:,} bytes and {need - 1:,} are free"):
        check_disk(run, tmp_path / "run")


def test_a_run_without_checkpoints_requires_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_bytes(monkeypatch, 0)
    check_disk(run_of(every=0, at_end=False), tmp_path)


@pytest.mark.parametrize(
    ("checkpoint", "line"),
    [
        ({}, "checkpoints: 10 minutes after the first step, then at least every 30 minutes, and after the last step; "),
        ({"every": 1000, "at_end": False}, "checkpoints: every 1,000 steps; "),
        ({"every": 0}, "checkpoints: after the last step alone (checkpoint.every is 0); "),
    ],
)
def test_a_start_says_when_checkpoints_are_written(checkpoint: dict[str, object], line: str) -> None:
    text = checkpoints_line(run_of(**checkpoint))
    assert text and text.startswith(line) and text.endswith(" each, the newest 3 stay")
    assert checkpoints_line(run_of(every=0, at_end=False)) is None
