"""Records of torch's flight recorder about collectives of Gloo, in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.observe import flight_recorder
from meshwright.observe.flight_recorder import recorded_collectives, write_collectives


@pytest.fixture
def groups() -> list[dist.ProcessGroupGloo]:
    """Both ranks of a group, in this process."""
    store, ranks = dist.HashStore(), [0, 1]
    made: dict[int, dist.ProcessGroupGloo] = {}

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, len(ranks), timedelta(seconds=60))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in ranks]


def unfinished() -> list[str]:
    entries = recorded_collectives().get("gloo", {"entries": []})["entries"]
    return [entry["profiling_name"] for entry in entries if not entry["finished"]]


def until(reached: Callable[[], bool]) -> None:
    for _ in range(1000):
        if reached():
            return
        threading.Event().wait(0.01)
    pytest.fail("it did not occur in 10 s")


def test_a_collective_is_unfinished_until_every_rank_has_joined(
    groups: list[dist.ProcessGroupGloo], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not unfinished()
    waiting = groups[0].allreduce([torch.ones(4)])
    until(lambda: unfinished() == ["gloo:all_reduce"])
    monkeypatch.setattr(flight_recorder, "KEPT_OPERATIONS", 1)
    write_collectives(tmp_path / "record")
    (line,) = (tmp_path / "record").read_text().splitlines()
    assert not json.loads(line)["gloo"]["entries"][-1]["finished"]
    for work in (groups[1].allreduce([torch.ones(4)]), waiting):
        work.wait()
    until(lambda: not unfinished())
    assert len(recorded_collectives()["gloo"]["entries"]) == 1


def test_old_finished_entries_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(number: int, state: str) -> dict[str, object]:
        return {"collective_seq_id": number, "state": state, "retired": False}

    entries = [entry(1, "started"), entry(2, "completed"), entry(3, "completed")]
    module = type("Module", (), {"_dump_nccl_trace_json": staticmethod(lambda: json.dumps({"entries": entries}))})
    monkeypatch.setitem(flight_recorder.sys.modules, "torch._C._distributed_c10d", module)
    monkeypatch.setattr(flight_recorder, "KEPT_OPERATIONS", 1)
    (dump,) = recorded_collectives().values()
    assert [(each["collective_seq_id"], each["finished"]) for each in dump["entries"]] == [(1, False), (3, True)]
