"""Simulates the copies and updates of an offloaded optimizer on the streams of a device.

Each stream runs its operations in order. An operation may also wait for operations of other streams. A copy needs a copy engine, one for
each direction of the host link, and an engine serves one stream at a time. `step_operations` builds the operations of a step in the order
that the program uses now (`optim/copy_streams.py`), or in one of two earlier orders. So the measured step times of all three orders can
be compared with predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Order = Literal["after_backward", "compute_stream", "update_stream"]
"""When and on which stream the optimizer updates run.

after_backward: all updates run after the backward, on the compute stream.
compute_stream: the updates of a unit run in the next step before the unit's gather, on the compute stream.
update_stream (used now): all updates run on a separate stream. The compute stream waits for a unit's updates before the unit's gather.
"""
Interval = tuple[float, float]
"""(begin, end) in seconds."""


@dataclass(frozen=True)
class UpdateOperation:
    """Work on a stream: a computation or a copy."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    """Indices of operations that must end first. They are earlier in the list of operations."""
    engine: str | None = None
    """The copy engine that the operation needs; None for a computation."""
    name: str = ""


def play(operations: Sequence[UpdateOperation]) -> list[Interval]:
    """Return when each operation begins and ends. If several wait for an engine, it serves the operation that was ready first.

    A stream makes two copies. The update waits for the first copy, and runs at the same time as the second copy:

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
    """The sizes and times of one step. All units have the same size; the optimizer state of each is divided into chunks."""

    units: int
    chunks: int
    """Chunks of each unit."""
    copy: float
    """Seconds to copy the state of a chunk in one direction, while the other direction is busy too."""
    update: float
    """Seconds to update a chunk."""
    forward: float
    """Seconds of the forward of a unit."""
    backward: float
    """Seconds of the backward of a unit."""
    buffers: int
    """Device buffers, each for the state of one chunk."""
    tables: float = 0.0
    """Seconds to copy a table of addresses to the device in the middle of each update; 0: there is no such copy."""


@dataclass
class _Builder:
    """Builds the list of operations of several steps. Values that refer to an operation are its index in `operations`."""

    work: StepWork
    order: Order
    operations: list[UpdateOperation] = field(default_factory=list)
    fetched: dict[int, int] = field(default_factory=dict)
    """By number of a chunk, the last operation that copies its state to the device."""
    sent: dict[int, int] = field(default_factory=dict)
    """By number of a buffer, the last operation that copies its content to the host; then the buffer can be used again."""
    updated: int = 0
    """How many chunks were updated in all steps so far. With `update_stream`, buffers are used in turn over all steps."""

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
        """Add the update of chunk `number`, after the operation `gradients`, and the copies that follow. Returns the update's index."""
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
    """Build the operations of `steps` steps. Also returns, for each step, the index of the operation that ends it.

    A step ends with its last backward; in the order `after_backward` it ends with its last update.
    """
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
    """Return the seconds of the last of `steps` simulated steps, when copies and updates have reached a steady state."""
    operations, ends = step_operations(work, order, steps)
    intervals = play(operations)
    return intervals[ends[-1]][1] - intervals[ends[-2]][1]
