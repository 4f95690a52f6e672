"""`Timing`: the durations of a schedule's actions, from the cost model or from a measurement. It is the input of `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.schedules.schedule import Schedule
from meshwright.spec.errors import BadInput

Table = Sequence[Sequence[float]]
"""Seconds by stage and unit: `table[stage][unit]`."""


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and bandwidth between two pipeline ranks.

    A message of 1 MB takes 10 µs of latency and 1 ms at 1 GB/s:

    >>> Link(latency_seconds=1e-5, bytes_per_second=1e9).seconds(1e6)
    0.00101
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")

    def seconds(self, size: float) -> float:
        """Time for a message of `size` bytes."""
        return self.latency_seconds + size / self.bytes_per_second


@dataclass(frozen=True, kw_only=True, eq=False)  # a key of caches, and its tables are lists
class Timing:
    """Durations of a step's actions. A rank here is a pipeline rank and stands for all devices that share its stages.

    Communication inside a stage (tensor, context, expert) is part of its compute seconds.
    """

    forward: Table
    """Forward of one micro-batch."""
    backward_input: Table
    """Gradient of one micro-batch with respect to the input, including recomputation."""
    backward_weight: Table
    """Gradient of one micro-batch with respect to the weights. A whole backward takes the sum of both."""
    boundary_bytes: Sequence[float] = ()
    """Bytes of a micro-batch's activation after each stage but the last; the gradient has the same size. Empty: 0 bytes."""
    link: Link = Link()
    """The default link between pipeline ranks."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """By (sender, receiver) ranks, links that differ from `link`."""
    unshard: Table = ()
    """All-gather of a unit's parameters over the shard axis."""
    reduce: Table = ()
    """Reduce-scatter of a unit's gradients over the shard axis."""
    replicate: Table = ()
    """All-reduce of a unit's gradient shards over the replicate axis, once a step after the last `reduce`."""
    copy_out: Table = ()
    """Compute seconds to copy a unit's weights out of the all-gather buffer, before their first use."""
    copy_in: Table = ()
    """Compute seconds to copy a unit's gradients into the reduce-scatter buffer."""
    accumulate: Table = ()
    """Compute seconds to accumulate a micro-batch's gradients of a unit, where one reduction covers several micro-batches."""
    single_reduce_buffer: bool = False
    """FSDP2 has one reduce-scatter buffer: compute waits for a reduction before it copies the next gradients in."""
    shared_communicator: bool = True
    """Gathers and reductions of the shard axis run one after another, as in FSDP2 of torch 2.11; false: side by side."""
    gather_slowdown: float = 1.0
    """Factor on compute time while the same rank gathers. If several collectives run, the largest factor applies."""
    reduce_slowdown: float = 1.0
    """Factor on compute time while the same rank reduces over the shard axis."""
    replicate_slowdown: float = 1.0
    """Factor on compute time while the same rank reduces over the replicate axis."""
    tied_gradient_seconds: float = 0.0
    """All-reduce of a tied weight's gradient over the first and the last rank, before the gradient norm."""
    norm_seconds: float = 0.0
    """The gradient norm over all ranks, from the moment at which the last rank has arrived."""
    optim_seconds: Sequence[float] = ()
    """By rank, the optimizer. Empty: 0 seconds."""
    exposed_in_compute: Mapping[str, float] = field(default_factory=dict)
    """By axis, exposed communication that the compute seconds of a step include, mean over ranks.

    `host` is the time in which the device waits for kernel launches. The simulator reports these values unchanged.
    """

    def between(self, sender: int, receiver: int) -> Link:
        """The link from one pipeline rank to another."""
        return self.links.get((sender, receiver), self.link)

    def with_larger_micro_batches(self, factor: float) -> Timing:
        """Return the timing for micro-batches that have `factor` times as many samples: compute and messages grow, collectives do not."""

        def scaled(table: Table) -> Table:
            return [[factor * seconds for seconds in by_unit] for by_unit in table]

        return replace(
            self,
            forward=scaled(self.forward),
            backward_input=scaled(self.backward_input),
            backward_weight=scaled(self.backward_weight),
            accumulate=scaled(self.accumulate),
            boundary_bytes=[factor * size for size in self.boundary_bytes],
        )

    def check(self, schedule: Schedule) -> None:
        """Raise BadInput if a table does not have an entry for each stage and unit of the schedule."""
        tables = {
            "forward": self.forward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }
        optional = {"unshard": self.unshard, "reduce": self.reduce, "replicate": self.replicate}
        optional |= {"copy_out": self.copy_out, "copy_in": self.copy_in, "accumulate": self.accumulate}
        tables |= {name: table for name, table in optional.items() if table}
        for name, table in tables.items():
            if len(table) != schedule.stages:
                raise BadInput(f"timing.{name}: expected a list for each of {schedule.stages} stages, got {len(table)}")
            for stage, by_unit in enumerate(table):
                if schedule.units and len(by_unit) != schedule.units[stage]:
                    raise BadInput(
                        f"timing.{name}[{stage}]: expected {schedule.units[stage]} units, got {len(by_unit)}"
                    )
        self._check_length("boundary_bytes", self.boundary_bytes, schedule.stages - 1)
        self._check_length("optim_seconds", self.optim_seconds, schedule.ranks)

    @staticmethod
    def _check_length(name: str, values: Sequence[float], expected: int) -> None:
        if values and len(values) != expected:
            raise BadInput(f"timing.{name}: expected {expected} numbers, got {len(values)}")


def uniform_timing(
    stages: int, units: int = 1, *, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0
) -> Timing:
    """Return a timing with equal stages, and messages that take no time, as in the schedule figures of papers.

    `forward`, `backward_input` and `backward_weight` are the seconds of one micro-batch in a whole stage.
    """

    def table(seconds: float) -> Table:
        return ((seconds / units,) * units,) * stages

    return Timing(forward=table(forward), backward_input=table(backward_input), backward_weight=table(backward_weight))
