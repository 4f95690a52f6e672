"""The folder of a run: one job at a time may use it, and a failed start leaves nothing that blocks the next."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
from tests.training.tiny import make_tiny, tiny_run

from meshwright.config.load import resolved_yaml
from meshwright.durable.lease import owner_is_alive, read_lease
from meshwright.launch.folder import continues, folder_lock, renamed, take_over
from meshwright.spec.errors import BadInput
from meshwright.spec.run import RunSpec


def test_a_second_job_is_refused_by_the_process_that_has_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    refusal = rf"run: process {os.getpid()} on \S+ is writing here; wait for it, or give this run another name \(name=…, or --fresh\)"
    with folder_lock(folder):
        with pytest.raises(BadInput, match=refusal), folder_lock(folder):
            pass
        (folder / "config.yaml").touch()
    with folder_lock(folder):
        pass
    assert [file.name for file in folder.iterdir()] == ["config.yaml"]


def test_a_job_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with folder_lock(tmp_path):
                os.write(theirs, b"held")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(ours, 4) == b"held"
    with pytest.raises(BadInput, match=f"process {child} "), folder_lock(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").exists()
    with folder_lock(tmp_path):
        pass


@pytest.mark.parametrize("third", [False, True], ids=["two starts", "three starts"])
def test_a_start_wins_when_the_holder_ends_between_its_open_and_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: bool
) -> None:
    """The holder removes lock file and folder; a third start locks the removed file for a moment, which refuses nobody."""
    folder, flock = tmp_path / "run", fcntl.flock
    holder = ExitStack()
    holder.enter_context(folder_lock(folder))
    removed = (folder / ".lock").open("a+")

    def late(file: TextIO, how: int) -> None:
        holder.close()
        if third:
            flock(removed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with removed, folder_lock(folder):
        assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} ")


def test_one_of_several_starts_at_once_wins(tmp_path: Path) -> None:
    start_count = 4
    begin_barrier, end_barrier = threading.Barrier(start_count), threading.Barrier(start_count)

    def start(folder: Path) -> str:
        begin_barrier.wait(60)
        try:
            with folder_lock(folder):
                end_barrier.wait(60)
                return "wins"
        except BadInput:
            end_barrier.wait(60)
            return "refused"

    with ThreadPoolExecutor(start_count) as pool:
        for number in range(50):
            folder = tmp_path / f"run-{number}"
            outcomes = list(pool.map(start, [folder] * start_count))
            assert sorted(outcomes) == ["refused"] * (start_count - 1) + ["wins"]
            assert not folder.exists()


def test_a_start_that_fails_leaves_no_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), folder_lock(tmp_path / "runs" / "run"):
        raise ZeroDivisionError
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: TextIO, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)


@pytest.mark.usefixtures("without_locks")
def test_where_a_file_system_has_no_locks_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with folder_lock(tmp_path), folder_lock(tmp_path):
        assert "the folder cannot be locked against other processes: No locks available" in caplog.text


@pytest.mark.usefixtures("without_locks")
def test_without_locks_a_living_process_of_this_host_keeps_its_folder(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with folder_lock(tmp_path):
                take_over(tmp_path)
                os.write(theirs, b"held")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(ours, 4) == b"held"
    with pytest.raises(BadInput, match=rf"process {child} on \S+ is writing here"), folder_lock(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with folder_lock(tmp_path):
        assert take_over(tmp_path).epoch == 2


@pytest.mark.usefixtures("without_locks")
def test_without_locks_a_job_that_ended_leaves_the_folder_to_the_next_though_its_process_lives(tmp_path: Path) -> None:
    with folder_lock(tmp_path):
        lease = take_over(tmp_path)
        assert owner_is_alive(lease)
    ended_lease = read_lease(tmp_path)
    assert ended_lease is not None and ended_lease.epoch == lease.epoch and not owner_is_alive(ended_lease)


def test_a_holder_that_was_replaced_leaves_the_other_s_lock(tmp_path: Path) -> None:
    """Its lock was removed by hand, to take over from a process that is stopped."""
    first = ExitStack()
    first.enter_context(folder_lock(tmp_path))
    (tmp_path / ".lock").unlink()
    with folder_lock(tmp_path):
        first.close()
        with pytest.raises(BadInput, match="is writing here"), folder_lock(tmp_path):
            pass
    assert not tmp_path.exists()


def test_a_run_continues_once_it_has_begun(tmp_path: Path) -> None:
    run = replace(tiny_run(make_tiny(tmp_path / "tiny")), name="run")
    folder = tmp_path / "run"
    assert not continues(run, folder) and renamed(run, tmp_path).name == "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(resolved_yaml(run), encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"kind": "event", "step": 0, "text": "failed"}\n', encoding="utf-8")
    changed_run = replace(run, seed=1)
    assert not continues(run, folder) and not continues(changed_run, folder)
    assert renamed(run, tmp_path).name == "run-2"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert continues(run, folder)
    (folder / "checkpoints" / "step-00000001").rmdir()
    (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n', encoding="utf-8")
    assert continues(run, folder)
    with pytest.raises(BadInput, match="seed: 0 there, 1 now"):
        continues(changed_run, folder)


@pytest.fixture
def begun(tmp_path: Path) -> tuple[RunSpec, Path]:
    """A run of 6 steps whose third is in a checkpoint, and its folder."""
    run = replace(tiny_run(make_tiny(tmp_path / "tiny")), name="run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    for folder in (tmp_path / "run", checkpoint):
        (folder / "config.yaml").write_text(resolved_yaml(run), encoding="utf-8")
    return run, tmp_path / "run"


def test_steps_may_be_raised_and_not_lowered(begun: tuple[RunSpec, Path]) -> None:
    run, folder = begun
    assert continues(replace(run, train=replace(run.train, steps=7)), folder)
    with pytest.raises(BadInput, match=r"train.steps: 6 there, 5 now \(steps may be raised, not lowered\)"):
        continues(replace(run, train=replace(run.train, steps=5)), folder)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("learning_rate", 1.0, "it would change the learning rate of steps that are done"),
        ("min_learning_rate", 0.5, "it would change the learning rate of steps that are done"),
        ("warmup_steps", 3, "it would change the learning rate of steps that are done"),
        ("schedule", "wsd", "it would change the learning rate of steps that are done"),
        ("decay_fraction", 0.5, "it would change the learning rate of steps that are done"),
        (
            "global_batch",
            16,
            "the 3 steps that are done keep their batch; another one after them: "
            "train.global_batch=16 'train.batch_ramp=[{until: 3, batch: 8}]'",
        ),
        ("weight_decay", 0.5, "the steps that are done were trained with the other value"),
    ],
)
def test_what_changes_the_past_is_refused_with_its_reason(
    begun: tuple[RunSpec, Path], key: str, value: object, reason: str
) -> None:
    run, folder = begun
    changed = replace(run, train=replace(run.train, steps=7, **{key: value}))
    with pytest.raises(BadInput) as caught:
        continues(changed, folder)
    _, *lines, _ = str(caught.value).splitlines()
    assert lines == [f"  train.{key}: {getattr(run.train, key)!r} there, {value!r} now ({reason})"]


def test_a_run_whose_configuration_was_lost_is_held_to_its_newest_checkpoint_s(begun: tuple[RunSpec, Path]) -> None:
    run, folder = begun
    (folder / "config.yaml").unlink()
    assert continues(run, folder)
    with pytest.raises(BadInput, match="seed: 0 there, 1 now"):
        continues(replace(run, seed=1), folder)
