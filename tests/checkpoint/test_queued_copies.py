"""The update waits until a thread has given the copies of a group to the device, then has the device wait for them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.checkpoint.write import staging
from meshwright.checkpoint.write.staging import Copies


def test_the_update_of_a_group_waits_for_its_copies_to_be_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    stream = SimpleNamespace(wait_event=order.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    events = iter(range(10))
    monkeypatch.setattr(staging, "_recorded_event", lambda: next(events))
    copies = Copies([("a",), ("b",), ("empty",)])
    copies.begin_device_copies([0, 1])
    copies.start_device_copies()
    copies.wait(["empty"])
    copies.release(0)
    copies.wait(["a"])
    assert order == [1]
    update = threading.Thread(target=lambda: (copies.wait(["b"]), order.append("updated")))
    update.start()
    update.join(0.2)
    assert update.is_alive() and order == [1]
    copies.release(1)
    update.join(60)
    assert order == [1, 2, "updated"]


def test_a_failure_of_the_thread_lets_updates_go_on_and_fails_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_recorded_event", lambda: SimpleNamespace(synchronize=lambda: None))
    copies = Copies([("a",)])
    copies.begin_device_copies([0])
    copies.start_device_copies()
    copies.failure = RuntimeError("a copy failed")
    copies.end_device_copies()
    copies.wait(["a"])
    with pytest.raises(RuntimeError, match="a copy failed"):
        copies.join()
