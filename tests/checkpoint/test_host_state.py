"""Snapshots of optimizer state in host memory: updates do not change them, and do not wait if memory suffices."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.write import staging
from meshwright.checkpoint.write.layout import plan_layout
from meshwright.checkpoint.write.staging import PinnedSnapshotBuffer, Stager
from meshwright.optim.chunks import ALIGNED
from meshwright.optim.fused import MOMENTS, UpdateInputs
from meshwright.optim.host import HostAdamW
from meshwright.optim.packing import MASTER
from meshwright.spec.plan import Moments
from meshwright.state.parts import StateParts
from tests.optim.test_host import RATE, SHAPES, gradients, offloaded_optimizer
from tests.slow import quick_first

GROUPS = [["a"], ["b", "empty"], ["c"], ["d", "e"]]


def state_of(optimizer: HostAdamW) -> dict[str, torch.Tensor]:
    return {f"{state}.{name}": optimizer.state(state, name) for state in (*MOMENTS, MASTER) for name in SHAPES}


class Snapshots:
    """Takes snapshots of an optimizer's state, and stops before or after a copy."""

    def __init__(self, optimizer: HostAdamW, monkeypatch: pytest.MonkeyPatch) -> None:
        self._optimizer = optimizer
        state = {f"{state}.{name}": optimizer.part(state, name) for state in (*MOMENTS, MASTER) for name in SHAPES}
        parts = {name: replace(StateParts.of_whole(name, part), encoded=optimizer) for name, part in state.items()}
        layout = plan_layout(RankGroup(None), {name: entry for name, entry in parts.items() if entry.local.numel()})
        self._names = [(piece.name, piece.start, piece.end) for piece in layout.pieces]
        self._buffer = PinnedSnapshotBuffer(SnapshotBuffer.create(layout.bytes), torch.device("cpu"))
        self._stager = Stager(layout, self._buffer, GROUPS, {name: name.partition(".")[2] for name in state})
        self.copies = len(layout.pieces)
        self._made, self._stop_before, self._go_on = 0, 0, threading.Event()
        copy = staging._copy

        def stopping(target: torch.Tensor, source: torch.Tensor) -> None:
            if self._made == self._stop_before:
                assert self._go_on.wait(60)
            copy(target, source)
            self._made += 1

        monkeypatch.setattr(staging, "_copy", stopping)

    def step_beside(self, step: int, stop_before: int, *, waits: bool) -> dict[str, torch.Tensor]:
        """Run a step beside a snapshot that stops before copy `stop_before`; returns the snapshot."""
        self._made, self._stop_before = 0, stop_before
        self._go_on.clear()
        copies = self._stager.start(self._optimizer.host_state())
        inputs = UpdateInputs(RATE, torch.ones(()), torch.zeros(()))
        update = threading.Thread(
            target=self._optimizer.step, args=(gradients(step, torch.float32), inputs, None, copies)
        )
        update.start()
        if not waits:
            update.join(60)
            assert not update.is_alive(), "the update does not wait for copies"
        elif stop_before < self.copies:
            time.sleep(0.01)
            assert update.is_alive(), "the update waits for the copies"
        self._go_on.set()
        update.join(60)
        copies.join()
        data = self._buffer.data
        return {name: data[start:end].clone() for name, start, end in self._names}


@pytest.mark.parametrize(
    ("second_buffers", "form"),
    quick_first(
        2, [(True, ("fp32", 1.0)), (False, ("fp32", 0.5)), (True, ("int8", 0.5)), (False, ("bf16", 1.0))], unpack=True
    ),
)
def test_no_update_reaches_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, second_buffers: bool, form: tuple[Moments, float]
) -> None:
    """Steps before and after the copy of every piece; the state is that of a run without snapshots, bit for bit."""
    optimizer, on_device = offloaded_optimizer(torch.float32, 2 * ALIGNED, True, *form)
    reference, expected_on_device = offloaded_optimizer(torch.float32, 2 * ALIGNED, True, *form)
    snapshots = Snapshots(optimizer, monkeypatch)
    if second_buffers:
        optimizer.allocate_second_buffers()
    for step in range(2 * snapshots.copies):
        at_snapshot = {name: tensor.clone() for name, tensor in state_of(optimizer).items()}
        inputs = UpdateInputs(RATE, torch.ones(()), torch.zeros(()))
        if step % 2:  # a step without a snapshot between two with one
            optimizer.step(gradients(step, torch.float32), inputs)
        else:
            snapshot = snapshots.step_beside(step, step // 2, waits=not second_buffers)
            assert all(torch.equal(data, bytes_of(at_snapshot[name])) for name, data in snapshot.items()) and snapshot
        reference.step(gradients(step, torch.float32), inputs)
    assert all(torch.equal(tensor, state_of(reference)[name]) for name, tensor in state_of(optimizer).items())
    assert all(torch.equal(on_device[name], expected_on_device[name]) for name in SHAPES)


def test_weights_that_are_updated_in_place_have_no_second_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU whose master weights are the parameters themselves, the update waits."""
    optimizer, _ = offloaded_optimizer(torch.float32, 4 * ALIGNED, False)
    optimizer.allocate_second_buffers()
    waited: list[Any] = []

    class Copies:
        groups = GROUPS

        def wait(self, parameters: Any, *, host: bool = True) -> None:
            waited.append(host)

    optimizer.step(gradients(0, torch.float32), UpdateInputs(RATE, torch.ones(()), torch.zeros(())), None, Copies())
    assert waited and all(waited)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
