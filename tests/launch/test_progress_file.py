"""`progress.json` holds what the coordinator knows of the ranks, and a hanging storage delays nobody."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from meshwright.events.messages import ProgressMessage
from meshwright.events.progress import PendingWait
from meshwright.launch import progress_file
from meshwright.launch.coordinator import Coordinator
from meshwright.launch.outcome import RankState
from meshwright.launch.progress_file import JobProgress, ProgressFile, RankSnapshot, read_progress
from meshwright.launch.reports import Report
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.supervision import Rules


def test_a_coordinator_writes_where_its_ranks_are(tmp_path: Path) -> None:
    now = [10.0]
    coordinator = Coordinator(tmp_path, Rules(2, 8, RestartPolicy(3)), 1, lambda state: tmp_path, clock=lambda: now[0])
    for host in "ab":
        coordinator.receive(Report(host, port=1))
    while coordinator.state.status != "running":
        coordinator.tick()
        time.sleep(0.001)
    wait = PendingWait("recv", 1, 2, -1, 0, 123)
    states = (
        RankState(0, progress=ProgressMessage("train", 7, 3), progress_count=9),
        RankState(1, pending=wait, stopped=True),
    )
    for host, state in zip("ab", states, strict=True):
        coordinator.receive(Report(host, attempt=1, ended=False, ranks=(state,)))
    now[0] = 12.5
    file = ProgressFile(tmp_path, coordinator.progress)
    file.close()
    coordinator.close()
    found = read_progress(tmp_path)
    assert found is not None and (found.attempt, found.status) == (1, "running")
    assert found.ranks == (
        RankSnapshot(0, "a", "train", 7, 3, 2.5),
        RankSnapshot(1, "b", "start", 0, -1, 2.5, True, None, PendingWait("recv", 1, 2, -1, 0, 0)),
    )
    assert abs(found.time - time.time()) < 60


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"job": 1}), json.dumps({"hosts": [], "rank": [1]})])
def test_another_file_is_no_progress(tmp_path: Path, content: str) -> None:
    assert read_progress(tmp_path) is None
    (tmp_path / "progress.json").write_text(content)
    assert read_progress(tmp_path) is None


def test_a_storage_that_hangs_or_fails_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written, release = [0.0], list[str](), threading.Event()

    def write(path: Path, content: bytes) -> None:
        written.append(json.loads(content)["status"])
        if len(written) == 1:
            raise OSError("no space")
        release.wait(100)

    monkeypatch.setattr(progress_file, "write_replacing", write)
    monkeypatch.setattr(progress_file, "CLOSE_SECONDS", 0.01)
    status = ["first"]
    file = ProgressFile(tmp_path, lambda: JobProgress("job", 1, status[0]), clock=lambda: now[0])
    for moment in (0.0, 1.5):
        now[0] = moment
        status[0] = f"at {moment}"
        file.update()
        file.update()  # not due
        while len(written) < 1 + (moment > 0):
            time.sleep(0.001)
    now[0] = 3.0
    file.update()
    file.close()
    assert written == ["at 0.0", "at 1.5"] and not release.is_set()  # closed while the second write hangs
    release.set()
