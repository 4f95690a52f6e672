"""Crash replay: the power is cut before each system call of a save; changes that were not flushed are lost or kept."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from meshwright.launch.folder import take_over
from tests.checkpoint.replay import Disk, recorded
from tests.checkpoint.toy import newest
from tests.checkpoint.writers import Writers

# What is lost → whether unflushed names of an inode are kept, and whether its unflushed content is kept.
LOST = {
    "everything": (lambda inode: False, lambda inode: False),
    "content": (lambda inode: True, lambda inode: False),
    "names": (lambda inode: False, lambda inode: True),
    "nothing": (lambda inode: True, lambda inode: True),
}


def save_recorded(run: Path, ranks: int, *, replaces: bool = False) -> list[Disk]:
    """The states of the disk before each system call of a save of step 2, which follows a save of step 1.

    With `replaces` a checkpoint of step 2 exists already and is replaced.
    """
    (run / "checkpoints").mkdir(parents=True)
    writers = Writers(run, take_over(run), ranks, keep=3)
    for step in (1, 2)[: 2 if replaces else 1]:
        assert writers.save(step)["event"] == "committed"
    disks = recorded(run, lambda: writers.save(2))
    assert newest(run) == 2
    return disks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_power_cut_before_any_call_leaves_the_old_step_or_the_new_one(tmp_path: Path, ranks: int) -> None:
    disks = save_recorded(tmp_path / "run", ranks)
    steps_by_loss: dict[str, list[int | None]] = {name: [] for name in LOST}
    for number, disk in enumerate(disks):
        for name, (names, content) in LOST.items():
            disk.build(tmp_path / f"{number}-{name}", names, content)
            steps_by_loss[name].append(newest(tmp_path / f"{number}-{name}"))
    for name, steps in steps_by_loss.items():
        assert steps == sorted(steps) and set(steps) == {1, 2}, (name, steps)
        assert steps[-1] == 2, "the commit that was reported is durable"
    assert len(disks) > 20


@pytest.mark.parametrize(
    "count", [pytest.param(3, id="short"), pytest.param(60, id="long", marks=[pytest.mark.slow, pytest.mark.crash])]
)
def test_a_power_cut_that_loses_any_part_of_what_was_not_flushed(tmp_path: Path, count: int) -> None:
    disks = save_recorded(tmp_path / "run", 2)
    chance = random.Random(0)
    for trial in range(count):
        for number, disk in enumerate(disks):
            survives = {inode: (chance.random() < 0.5, chance.random() < 0.5) for inode in _inodes(disk)}
            target = tmp_path / f"{trial}-{number}"
            disk.build(
                target,
                lambda inode, survives=survives: survives[inode][0],
                lambda inode, survives=survives: survives[inode][1],
            )
            assert newest(target) in (1, 2), (trial, number)


def test_a_power_cut_while_a_step_is_replaced(tmp_path: Path) -> None:
    for number, disk in enumerate(save_recorded(tmp_path / "run", 1, replaces=True)):
        for name, (names, content) in LOST.items():
            disk.build(tmp_path / f"{number}-{name}", names, content)
            assert newest(tmp_path / f"{number}-{name}") == 2, (number, name)


def _inodes(disk: Disk) -> set[int]:
    return {*disk.names, *disk.content, *disk.flushed_names, *disk.flushed_content}
