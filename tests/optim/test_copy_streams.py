"""The offloaded optimizer on streams, recorded on a CPU: no race for any durations, and a link busy both ways."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from meshwright.optim import copy_streams, host
from meshwright.optim.chunks import ALIGNED
from meshwright.optim.copy_streams import CopyStreams
from meshwright.optim.fused import Coefficients, UpdateInputs
from meshwright.optim.host import HostAdamW
from meshwright.optim.packing import MASTER
from meshwright.simulator.update_timeline import Interval, StepWork, UpdateOperation, play, step_operations
from meshwright.workload.buffers import STAGING_BUFFERS

UNITS, CHUNKS, STEPS = 5, 4, 3
COPY, UPDATE, FORWARD, BACKWARD = 2.0, 0.25, 1.5, 3.0
NAMES = [f"layers.{unit}.weight" for unit in range(UNITS)]


class RecordedEvent(frozenset[int]):
    """Operations; as the host sees it they end at once, or never."""

    ends = True

    def query(self) -> bool:
        return self.ends


@dataclass
class RecordedStream:
    """A stream that records its operations; `waits` are those that its next operation waits for."""

    runtime: RecordedRuntime
    name: str
    waits: set[int] = field(default_factory=set)
    last: frozenset[int] = frozenset()

    def record_event(self) -> RecordedEvent:
        return RecordedEvent(self.last | self.waits)

    def wait_event(self, event: frozenset[int]) -> None:
        self.waits |= event

    def wait_stream(self, other: RecordedStream) -> None:
        self.wait_event(other.record_event())


class RecordedRuntime:
    """The part of `torch.cuda` that the optimizer uses."""

    def __init__(self) -> None:
        self.operations: list[UpdateOperation] = []
        self.compute = self.current = RecordedStream(self, "compute")
        self._names = iter(("in", "update", "out"))

    def Stream(self, device: torch.device) -> RecordedStream:
        del device
        return RecordedStream(self, next(self._names))

    def current_stream(self, device: torch.device) -> RecordedStream:
        del device
        return self.current

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def add(self, name: str, seconds: float) -> int:
        stream, index = self.current, len(self.operations)
        engine = {"in": "to device", "out": "to host"}.get(stream.name)
        self.operations.append(UpdateOperation(stream.name, seconds, tuple(sorted(stream.waits)), engine, name))
        stream.waits, stream.last = set(), frozenset([index])
        return index


def recorded(
    monkeypatch: pytest.MonkeyPatch, ahead: int, buffers: int = 0, backward: float = BACKWARD
) -> tuple[RecordedRuntime, list[int]]:
    """The operations of STEPS steps with a forward and a backward by unit, and the last backward of each."""
    runtime = RecordedRuntime()
    monkeypatch.setattr(host, "CopyStreams", partial(CopyStreams, runtime=runtime))
    update_segment = host.update_segment

    def update(*arguments: Any, position: int, **options: Any) -> None:
        runtime.add(f"update {position // ALIGNED}", UPDATE)
        update_segment(*arguments, position=position, **options)

    @contextmanager
    def span(name: str, lane: str) -> Iterator[None]:
        runtime.add(name.replace("optimizer", lane), COPY)
        yield

    monkeypatch.setattr(host, "update_segment", update)
    monkeypatch.setattr(host, "_span", lambda _, number, lane: span(f"optimizer {number}", lane))
    weights = {name: torch.randn(CHUNKS * ALIGNED) for name in NAMES}
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    release: dict[str, Callable[[], torch.Tensor]] = {name: partial(rounded.__getitem__, name) for name in NAMES}
    optimizer = HostAdamW(
        weights,
        dict.fromkeys(NAMES, 0.1),
        release,
        coefficients=Coefficients((0.9, 0.95), 1e-8),
        chunk=ALIGNED,
        ahead=ahead,
        staging=buffers * 10 * ALIGNED,
    )
    monkeypatch.setattr(optimizer._copy_streams, "finish", lambda: None)
    optimizer.release_master_weights()
    optimizer.deferred = True
    ends = []
    runtime.operations.clear()
    for stream in (runtime.compute, optimizer._copy_streams._in, optimizer._copy_streams._update):
        stream.last, stream.waits = frozenset(), set()
    optimizer._fetched = 0
    optimizer.launch_copies()
    for step in range(STEPS):
        optimizer.complete_updates(NAMES[:1])
        for unit in range(UNITS):
            optimizer.launch_copies()
            optimizer.complete_updates(NAMES[unit + 1 : unit + 2])
            runtime.add(f"forward {unit}", FORWARD)
        assert optimizer._pending is None
        ends.append([runtime.add(f"backward {unit}", backward) for unit in reversed(range(UNITS))][-1])
        gradients = {name: torch.full((CHUNKS * ALIGNED,), 0.5) for name in NAMES}
        optimizer.step(gradients, UpdateInputs(1e-3, torch.ones(()), torch.zeros(())))
        assert step or optimizer._pending is not None
    optimizer.complete_updates()
    assert not torch.equal(optimizer.state(MASTER, NAMES[-1]), weights[NAMES[-1]])
    return runtime, ends


def check_order(operations: list[UpdateOperation], intervals: list[Interval], buffers: int = STAGING_BUFFERS) -> None:
    """No operation begins before those that it depends on have ended; operations are listed as the host launches them.

    A chunk is fetched after its last copy to the host, and after that of the chunk that was in its buffer.
    """
    latest: dict[str, float] = {}
    contents: list[int] = []
    launched: list[str] = []
    for operation, (begin, end) in zip(operations, intervals, strict=True):
        kind, number = operation.name.split()[0], int(operation.name.split()[1])
        needed = {
            "fetch": [f"offload {number}", *(f"offload {other}" for other in contents[-buffers:][:1])],
            "update": [f"fetch {number}", "backward 0"],
            "offload": [f"update {number}"],
            "forward": [f"update {chunk}" for chunk in range(number * CHUNKS, (number + 1) * CHUNKS)],
            "backward": [],
        }[kind]
        assert all(latest.get(name, 0.0) <= begin for name in needed), (operation, needed)
        latest[operation.name] = end
        if kind == "fetch":
            assert contents.count(number) == sum(name == f"offload {number}" for name in launched), "of one step"
            contents.append(number)
        launched.append(operation.name)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("ahead", "buffers"), [(0, 6), (3, 6), (UNITS * CHUNKS, 6), (3, 13), (3, UNITS * CHUNKS)])
def test_no_operation_begins_too_early_for_any_durations(
    ahead: int, buffers: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host sees no copy end, so that copies are launched as late as possible."""
    monkeypatch.setattr(RecordedEvent, "ends", ends)
    monkeypatch.setattr(copy_streams, "QUEUED_COPIES", 4)
    runtime, _ = recorded(monkeypatch, ahead, buffers)
    draw = random.Random(0)
    for _ in range(20):
        operations = [
            UpdateOperation(o.stream, draw.choice((0.01, 1.0, 10.0)), o.after, o.engine, o.name)
            for o in runtime.operations
        ]
        check_order(operations, play(operations), buffers)


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyStreams, "wait_for_update", lambda self, event: None)
    with pytest.raises(AssertionError, match="forward"):
        test_no_operation_begins_too_early_for_any_durations(UNITS * CHUNKS, 6, True, monkeypatch)


@pytest.mark.parametrize("buffers", [STAGING_BUFFERS, 13])
def test_the_recorded_order_takes_as_long_as_predicted_and_keeps_the_link_busy(
    buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, ends = recorded(monkeypatch, UNITS * CHUNKS, buffers)
    intervals = play(runtime.operations)
    work = StepWork(UNITS, CHUNKS, COPY, UPDATE, FORWARD, BACKWARD, buffers)
    operations, predicted_ends = step_operations(work, "update_stream", STEPS)
    predicted = play(operations)
    assert [intervals[end][1] for end in ends] == [predicted[end][1] for end in predicted_ends]
    # From the norm on the link copies every chunk both ways, but for those fetched before; then the last two units' forwards remain.
    begin, end = intervals[ends[-2]][1], intervals[ends[-1]][1]
    copies = UNITS * CHUNKS * COPY
    floor = UNITS * BACKWARD + copies - buffers * COPY + 2 * FORWARD
    assert floor <= end - begin <= floor + UPDATE + buffers * COPY
    window = begin, begin + copies - buffers * COPY
    for engine in ("to device", "to host"):
        busy = sum(
            max(0.0, min(stop, window[1]) - max(start, window[0]))
            for operation, (start, stop) in zip(runtime.operations, intervals, strict=True)
            if operation.engine == engine
        )
        assert busy >= (window[1] - window[0]) - 2 * (COPY + UPDATE), engine


@pytest.mark.parametrize("buffers", [UNITS * CHUNKS, UNITS * CHUNKS - 1])
def test_with_a_buffer_for_each_chunk_the_update_waits_for_no_copy(
    buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are fetched during the step if its compute takes longer than the copies; they return beside the next step."""
    backward = 12.0
    runtime, ends = recorded(monkeypatch, 3, buffers, backward)
    intervals = play(runtime.operations)
    begin, end = intervals[ends[-2]][1], intervals[ends[-1]][1]
    compute = UNITS * (FORWARD + backward)
    assert compute <= end - begin <= compute + 2 * CHUNKS * UPDATE


def test_all_copies_are_launched_before_the_host_launches_updates_that_wait_for_the_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many are queued: while the host waits in a full launch queue it launches none, and the link would idle."""
    monkeypatch.setattr(RecordedEvent, "ends", False)
    monkeypatch.setattr(copy_streams, "QUEUED_COPIES", 4)
    buffers = 13
    runtime, ends = recorded(monkeypatch, 3, buffers)
    kinds = [operation.name.split()[0] for operation in runtime.operations]
    for updates, end in enumerate(ends):
        launched = kinds[: kinds.index("update", end)]
        assert launched.count("offload") == updates * UNITS * CHUNKS
        assert launched.count("fetch") == updates * UNITS * CHUNKS + buffers
