"""The lease of a run's folder: epochs only grow, whatever happens to the file, and one start at a time owns the folder."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.durable import lease as leases
from meshwright.durable.lease import LEASE, check_lease, owner_is_alive, read_lease, release_lease, take_lease
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.run import Lease
from tests.checkpoint.crash import CALLS, FILE_OPEN, count, die_at
from tests.slow import examples

WRITES = (*CALLS, FILE_OPEN)


def taken_by_a_child(folder: Path, then: Callable[[], object] = lambda: None) -> int:
    """The id of a process that took the lease, did `then`, and has ended."""
    child = os.fork()
    if child == 0:
        try:
            take_lease(folder)
            then()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return child


def test_each_start_has_the_next_epoch_of_the_same_run(tmp_path: Path) -> None:
    first, second = take_lease(tmp_path), take_lease(tmp_path)
    assert (first.epoch, second.epoch) == (1, 2) and first.run_id == second.run_id
    assert second.pid == os.getpid() and read_lease(tmp_path) == second
    (tmp_path / "other").mkdir()
    assert take_lease(tmp_path / "other").run_id != first.run_id


def test_only_the_newest_lease_is_valid(tmp_path: Path) -> None:
    first = take_lease(tmp_path)
    check_lease(tmp_path, first)
    second = take_lease(tmp_path)
    check_lease(tmp_path, second)
    message = (
        rf"taken over by process {os.getpid()} on \S+ \(epoch 2; this job has epoch 1\); this job commits nothing more"
    )
    with pytest.raises(BadInput, match=message):
        check_lease(tmp_path, first)
    with pytest.raises(
        BadInput, match="taken over"
    ):  # two starts took the lease at once on a file system without locks
        check_lease(tmp_path, replace(second, pid=second.pid + 1))


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"epoch": 1}', b'{"no": "field"}', b"\xff"])
def test_without_a_readable_lease_nothing_is_committed(tmp_path: Path, content: bytes | None) -> None:
    mine = take_lease(tmp_path)
    (tmp_path / LEASE).unlink() if content is None else (tmp_path / LEASE).write_bytes(content)
    with pytest.raises(BadInput, match="missing or damaged"):
        check_lease(tmp_path, mine)
    # The run id and the epoch of the newest checkpoint.
    again = take_lease(tmp_path, newest_commit=lambda: ("run", 6))
    assert (again.run_id, again.epoch) == ("run", 7)


def test_the_errors_of_a_missing_folder_and_of_a_lost_lease_differ(tmp_path: Path) -> None:
    with pytest.raises(OutOfResources, match="no longer exists"):
        check_lease(tmp_path / "run", take_lease(tmp_path))


def test_the_lease_of_an_ended_process_has_no_living_owner(tmp_path: Path) -> None:
    child = taken_by_a_child(tmp_path)
    stale = read_lease(tmp_path)
    assert stale is not None and stale.pid == child and not owner_is_alive(stale)
    assert take_lease(tmp_path).epoch == stale.epoch + 1


def test_an_owner_is_alive_if_the_same_process_of_the_same_boot_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = take_lease(tmp_path)
    assert owner_is_alive(mine)
    for other in (
        replace(mine, host="elsewhere"),
        replace(mine, boot_id="before"),
        replace(mine, process_start=mine.process_start + 1),  # the process id was used again
        replace(mine, pid=2**22 + 1),
    ):
        assert not owner_is_alive(other)
    release_lease(tmp_path)
    released = read_lease(tmp_path)
    assert released is not None and not owner_is_alive(released)
    monkeypatch.setattr(leases, "_process_start", lambda pid: None)
    assert not owner_is_alive(take_lease(tmp_path))


def test_a_stopped_owner_is_alive(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            take_lease(tmp_path)
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    lease = read_lease(tmp_path)
    assert lease is not None and lease.pid == child and owner_is_alive(lease)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not owner_is_alive(lease)


def test_only_the_owner_releases(tmp_path: Path) -> None:
    release_lease(tmp_path)
    assert read_lease(tmp_path) is None
    taken_by_a_child(tmp_path)
    before = read_lease(tmp_path)
    release_lease(tmp_path)
    assert read_lease(tmp_path) == before


@settings(deadline=None, max_examples=examples(15, 60))
@given(st.lists(st.sampled_from(["take", "die", "lose", "damage", "commit"]), max_size=12), st.data())
def test_epochs_grow_whatever_happens_to_the_file(actions: list[str], data: st.DataObject) -> None:
    """Every epoch that was taken is above those taken before, as long as the file or a commit of the last one is there."""
    with tempfile.TemporaryDirectory() as name:
        folder, commits = Path(name), [("run", 0)]

        def take() -> Lease:
            return take_lease(folder, lambda: commits[-1])

        calls = len(count(take, WRITES))
        highest = 1  # counting the writes has taken the first epoch
        for action in actions:
            if action == "take":
                epoch = take().epoch
                assert epoch > highest
                highest = epoch
            elif action == "die":  # the new lease is there, or the old one
                die_at(data.draw(st.integers(0, calls - 1)), take, WRITES)
                lease_left = read_lease(folder)
                assert lease_left is None or lease_left.epoch in (highest, highest + 1)
                highest = max(highest, lease_left.epoch if lease_left else 0)
            elif action == "commit":
                mine = take()
                commits.append((mine.run_id, mine.epoch))
                assert mine.epoch > highest
                highest = mine.epoch
            elif commits[-1][1] == highest:
                (folder / LEASE).unlink(missing_ok=True) if action == "lose" else (folder / LEASE).write_bytes(b"{")
