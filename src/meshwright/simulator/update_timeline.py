"""A timeline of the offloaded optimizer: operations on streams, played with the engines of the link.

Streams run their operations in order. An operation waits for others, and for its engine if another stream uses it: a direction of the host
link copies for one stream at a time. `step_operations` lists the operations of the present order (`optim/copy_streams.py`) and of two
former ones, so that measured step times of all three can be compared with their predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Order = Literal["after_backward", "compute_stream", "update_stream"]
"""Time and stream of the updates.

after_backward: all after the backward, on the compute stream. compute_stream: a unit's before its gather, on the compute stream.
update_stream: all on a stream of their own; the compute stream waits for a unit's updates before its gather.
"""
Interval = tuple[float, float]


@dataclass(frozen=True)
class UpdateOperation:
    """`seconds` of work on a stream, after the operations with the indices `after`, all listed before it."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    engine: str | None = None
    name: str = ""


def play(operations: Sequence[UpdateOperation]) -> list[Interval]:
    """Begin and end of each operation in seconds. An engine serves the operation that is ready first.

    A stream copies twice; the update waits for the first copy and runs beside the second:

    >>> copies = [UpdateOperation("copy", 2.0), UpdateOperation("copy", 2.0)]
    >>> play([*copies, UpdateOperation("compute", 3.0, after=(0,))])
    [(0.0, 2.0), (2.0, 4.0), (2.0, 5.0)]
    """
    queues: dict[str, list[int]] = {}
    for index, operation in enumerate(operations):
        queues.setdefault(operation.stream, []).append(index)
    intervals: list[Interval | None] = [None] * len(operations)
    ends = dict.fromkeys(queues, 0.0)
    engine_ends = {}
    heads = dict.fromkeys(queues, 0)
    for _ in operations:
        options = []
        for stream, queue in queues.items():
            if heads[stream] < len(queue):
                operation = operations[index := queue[heads[stream]]]
                waits = [intervals[other] for other in operation.after]
                if None not in waits:
                    ready = max([ends[stream], *(wait[1] for wait in waits if wait)])
                    begin = max(ready, engine_ends.get(operation.engine, 0.0)) if operation.engine else ready
                    options.append((begin, ready, index))
        begin, _, index = min(options)
        operation = operations[index]
        end = begin + operations[index].seconds
        intervals[index] = begin, end
        ends[operation.stream] = end
        heads[operation.stream] += 1
        if operation.engine:
            engine_ends[operation.engine] = end
    return [interval for interval in intervals if interval is not None]


@dataclass(frozen=True)
class StepWork:
    """The work of one step. Units of equal size, each with `chunks` chunks."""

    units: int
    chunks: int
    copy: float
    """Seconds to copy a chunk in one direction while the other direction is busy too."""
    update: float
    """Seconds of a chunk's update."""
    forward: float
    """Seconds of a unit's forward."""
    backward: float
    """Seconds of a unit's backward."""
    buffers: int
    tables: float = 0.0
    """Seconds of a copy of addresses to the device inside each update; 0: none."""


@dataclass
class _Builder:
    work: StepWork
    order: Order
    operations: list[UpdateOperation] = field(default_factory=list)
    fetched: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    updated: int = 0
    """Chunks that were updated in all steps; in the present order buffers form a ring over all steps."""

    def add(
        self, stream: str, seconds: float, after: Sequence[int] = (), engine: str | None = None, name: str = ""
    ) -> int:
        self.operations.append(UpdateOperation(stream, seconds, tuple(after), engine, name))
        return len(self.operations) - 1

    @property
    def total(self) -> int:
        return self.work.units * self.work.chunks

    def fetch(self, turn: int) -> None:
        buffer = turn % self.work.buffers
        number = turn % self.total
        after = [self.sent[buffer]] if buffer in self.sent else []
        self.fetched[number] = self.add("in", self.work.copy, after, "to device", f"fetch {number}")

    def fetch_first(self) -> None:
        for number in range(min(self.work.buffers, self.total)):
            self.fetch(number)

    def update(self, number: int, gradients: int) -> int:
        """The updates of a chunk and its copies; returns the update."""
        stream = "update" if self.order == "update_stream" else "compute"
        parts = 2 if self.work.tables else 1
        last = self.add(stream, self.work.update / parts, [self.fetched[number], gradients], name=f"update {number}")
        if self.work.tables:
            self.add(stream, self.work.tables, engine="to device")
            last = self.add(stream, self.work.update / parts, name=f"update {number}")
        turn = self.updated if self.order == "update_stream" else number
        self.sent[turn % self.work.buffers] = self.add("out", self.work.copy, [last], "to host", f"offload {number}")
        if turn + self.work.buffers < self.total or self.order == "update_stream":
            self.fetch(turn + self.work.buffers)
        self.updated += 1
        return last


def step_operations(work: StepWork, order: Order, steps: int) -> tuple[list[UpdateOperation], list[int]]:
    """The operations of `steps` steps, and the index of each step's last backward or, with updates after it, last update."""
    builder = _Builder(work, order)
    ends = []
    builder.fetch_first()
    for step in range(steps):
        updates: dict[int, int] = {}
        if step and order == "update_stream":
            updates = {number: builder.update(number, ends[-1]) for number in range(builder.total)}
        for unit in range(work.units):
            after = []
            for gathered in dict.fromkeys((unit, min(unit + 1, work.units - 1))) if step else ():
                numbers = range(gathered * work.chunks, (gathered + 1) * work.chunks)
                if order == "compute_stream":
                    updates |= {number: builder.update(number, ends[-1]) for number in numbers if number not in updates}
                if order != "after_backward":
                    after.append(updates[numbers[-1]])
            if step and unit == max(0, work.units - 2) and order == "compute_stream":
                builder.fetch_first()
            builder.add("compute", work.forward, after, name=f"forward {unit}")
        last = [builder.add("compute", work.backward, name=f"backward {unit}") for unit in reversed(range(work.units))][
            -1
        ]
        if order == "after_backward":
            last = [builder.update(number, last) for number in range(builder.total)][-1]
            builder.fetch_first()
        ends.append(last)
    return builder.operations, ends


def step_seconds(work: StepWork, order: Order, steps: int = 4) -> float:
    """Seconds of a step after the first ones, played."""
    operations, ends = step_operations(work, order, steps)
    intervals = play(operations)
    return intervals[ends[-1]][1] - intervals[ends[-2]][1]
