"""Checkpoints under a lease: a start that lost the run's folder commits nothing, wherever in a save it was stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.format.manifest import MANIFEST, commit_line, read_manifest, step_name
from meshwright.checkpoint.format.verify import newest_commit, verify
from meshwright.checkpoint.store import CheckpointStore
from meshwright.durable.lease import LEASE, take_lease
from meshwright.launch.folder import take_over
from meshwright.spec.errors import BadInput
from tests.checkpoint.crash import count, intercept_calls
from tests.checkpoint.made import holds, save

REFUSED = 3


def checkpoints(run: Path) -> Path:
    return run / "checkpoints"


def owned(run: Path) -> CheckpointStore:
    """The checkpoints of a run whose folder this process takes over."""
    run.mkdir(exist_ok=True)
    checkpoints(run).mkdir(exist_ok=True)
    return CheckpointStore(checkpoints(run), lease=take_over(run))


def stopped_at(k: int, work: Callable[[], object]) -> int:
    """The id of a child process that does `work` and was stopped before its k-th call; it exits with `REFUSED` for a BadInput."""
    child = os.fork()
    if child == 0:

        def act(number: int, name: str, arguments: tuple[Any, ...]) -> None:
            if number == k:
                os.kill(os.getpid(), signal.SIGSTOP)

        code = 1
        try:
            with intercept_calls(act):
                work()
            code = 0
        except BadInput as error:
            code = REFUSED if "taken over by process" in str(error) and "\n" not in str(error) else 1
        finally:
            os._exit(code)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    return child


def woken(child: int) -> int:
    """Wake a stopped process; returns its exit code."""
    os.kill(child, signal.SIGCONT)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_commit_names_the_run_and_the_epoch(tmp_path: Path) -> None:
    first = owned(tmp_path)
    path = save(checkpoints(tmp_path), 1, first)
    second = owned(tmp_path)
    later = save(checkpoints(tmp_path), 2, second)
    first_manifest, second_manifest = read_manifest(path), read_manifest(later)
    assert (first_manifest.epoch, second_manifest.epoch) == (
        1,
        2,
    ) and first_manifest.run_id == second_manifest.run_id == take_lease(tmp_path).run_id
    assert newest_commit(checkpoints(tmp_path)) == (second_manifest.run_id, 2)


@pytest.mark.slow
def test_a_start_woken_at_any_call_of_a_save_commits_nothing_once_another_took_over(tmp_path: Path) -> None:
    """Nothing is lost either: what it committed before the other took over is what the other continues from."""
    save(checkpoints(tmp_path / "count"), 1, owned(tmp_path / "count"))
    store = owned(tmp_path / "count")
    calls = count(lambda: save(checkpoints(tmp_path / "count"), 2, store))
    renamed = len(calls) - 1 - calls[::-1].index("rename")
    codes = []
    for k in range(len(calls)):
        run = tmp_path / str(k)
        save(checkpoints(run), 1, owned(run))
        first = owned(run)
        child = stopped_at(k, lambda run=run, first=first: save(checkpoints(run), 2, first))
        second = owned(run)
        newest = second.newest_good()
        assert newest is not None and newest.name == step_name(1 if k <= renamed else 2)
        save(checkpoints(run), 3, second)
        codes.append(woken(child))
        assert second.newest_good() == checkpoints(run) / step_name(3)
        assert read_manifest(checkpoints(run) / step_name(3)).epoch == 3
        expected = {step_name(1), step_name(3)} | ({step_name(2)} if k > renamed else set())
        assert {path.name for path in checkpoints(run).iterdir()} == expected
        assert all(not verify(path) for path in checkpoints(run).iterdir())
    assert codes == [REFUSED] * (renamed + 1) + [0] * (len(calls) - renamed - 1)


def test_a_start_that_lost_the_folder_neither_begins_a_save_nor_deletes(tmp_path: Path) -> None:
    first = owned(tmp_path)
    for step in (1, 2, 3):
        save(checkpoints(tmp_path), step, first)
    owned(tmp_path)
    for act in (lambda: save(checkpoints(tmp_path), 4, first), lambda: first.retain(1)):
        with pytest.raises(BadInput, match=r"taken over by process \d+ on \S+ \(epoch 2; this job has epoch 1\)"):
            act()
    assert sorted(path.name for path in checkpoints(tmp_path).iterdir()) == [step_name(step) for step in (1, 2, 3)]


def test_retention_leaves_attempts_of_later_epochs(tmp_path: Path) -> None:
    """A start that lost the folder between its look at the lease and its clearing up takes nothing from the other."""
    first = owned(tmp_path)
    save(checkpoints(tmp_path), 1, first)
    for name in (".step-00000002.1-ab.partial", ".step-00000002.2-cd.partial", ".step-00000002.ef.partial"):
        (checkpoints(tmp_path) / name).mkdir()
    first.retain(1)
    assert {path.name for path in checkpoints(tmp_path).iterdir()} == {step_name(1), ".step-00000002.2-cd.partial"}


def test_a_lost_lease_is_rebuilt_from_the_newest_commit(tmp_path: Path) -> None:
    owned(tmp_path)
    store = owned(tmp_path)
    path = save(checkpoints(tmp_path), 1, store)
    (tmp_path / LEASE).unlink()
    with pytest.raises(BadInput, match="missing or damaged"):
        save(checkpoints(tmp_path), 2, store)
    save(checkpoints(tmp_path), 2, owned(tmp_path))
    later = read_manifest(checkpoints(tmp_path) / step_name(2))
    assert (later.run_id, later.epoch) == (read_manifest(path).run_id, 3)


def test_checkpoints_from_before_there_were_leases_are_read(tmp_path: Path) -> None:
    path = save(checkpoints(tmp_path), 1)
    data = json.loads((path / MANIFEST).read_bytes())
    del data["run_id"], data["epoch"]
    text = json.dumps(data).encode()
    (path / MANIFEST).write_bytes(text)
    (path / "COMMITTED").write_bytes(commit_line(text))
    manifest = read_manifest(path)
    assert (manifest.run_id, manifest.epoch) == (None, None) and newest_commit(checkpoints(tmp_path)) is None
    store = owned(tmp_path)
    assert store.newest_good() == path and holds(path, 1)
    save(checkpoints(tmp_path), 2, store)
    assert read_manifest(checkpoints(tmp_path) / step_name(2)).epoch == 1
