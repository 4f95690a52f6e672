"""How long each action takes: what `simulate` asks of a cost model, or of a measurement, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.schedules.schedule import Schedule
from meshwright.spec.errors import BadInput

Table = Sequence[Sequence[float]]
"""Seconds by stage and unit of the stage."""


@dataclass(frozen=True, slots=True)
class Link:
    """What carries messages from one pipeline rank to another."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")

    def seconds(self, size: float) -> float:
        """Time for a message of `size` bytes."""
        return self.latency_seconds + size / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Durations of a step's actions. A rank here is a pipeline rank and stands for all devices that share its stages.

    Communication inside a stage (tensor, context, expert) is part of its compute seconds.
    """

    forward: Table
    """One micro-batch forward."""
    backward_input: Table
    """Its gradient with respect to the input, recomputation included."""
    backward_weight: Table
    """Its gradient with respect to the weights; a whole backward takes both."""
    boundary_bytes: Sequence[float] = ()
    """Bytes of a micro-batch's activation behind each stage but the last; its gradient has the same size. Empty: nothing."""
    link: Link = Link()
    """Between pipeline ranks."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """The link of a (sender, receiver) pair of ranks that differs from `link`."""
    unshard: Table = ()
    """Gathering a unit's parameters over the shard axis."""
    reduce: Table = ()
    """Reducing a unit's gradients over the shard axis."""
    replicate: Table = ()
    """Summing a unit's gradient shards over the replicate axis, once a step: after its last `reduce`."""
    copy_out: Table = ()
    """Compute's time to copy a unit's weights out of the buffer that they were gathered in, before their first use."""
    copy_in: Table = ()
    """Compute's time to copy a unit's gradients into the buffer that is reduced."""
    accumulate: Table = ()
    """Compute seconds to accumulate a micro-batch's gradients of a unit onto earlier ones, of those reduced together."""
    one_reduction: bool = False
    """Compute waits for a reduction before it copies the next one in, as FSDP2 does to have one buffer of each."""
    one_communicator: bool = True
    """Gathers and reductions of the shard axis wait for each other, as FSDP2's do in torch 2.11; false gives each its own."""
    gather_slowdown: float = 1.0
    """Compute takes this many times as long while the same rank gathers; where several collectives go on the largest counts."""
    reduce_slowdown: float = 1.0
    """The same while it reduces over the shard axis."""
    replicate_slowdown: float = 1.0
    """The same while it sums over replicas."""
    overlap_hidden: float = 0.0
    """Part of the shorter side of an overlap that disappears under the longer: 0 one after the other, 1 all of it."""
    tied_seconds: float = 0.0
    """Adding up a weight's gradient over the first and the last rank, once both have theirs; the norm waits for it."""
    norm_seconds: float = 0.0
    """The gradient norm over all ranks, once all have arrived."""
    optim_seconds: Sequence[float] = ()
    """By rank, the optimizer. Empty: nothing."""
    inside: Mapping[str, float] = field(default_factory=dict)
    """Exposed communication inside a step's compute by axis, mean over ranks; `host` is the wait for launches.

    It is reported, not simulated.
    """

    def between(self, sender: int, receiver: int) -> Link:
        """The link from one pipeline rank to another."""
        return self.links.get((sender, receiver), self.link)

    def stretched(self, times: float) -> Timing:
        """With micro-batches that are so many times as large."""

        def longer(table: Table) -> Table:
            return [[times * seconds for seconds in row] for row in table]

        return replace(
            self, forward=longer(self.forward), backward_input=longer(self.backward_input), backward_weight=longer(self.backward_weight),
            accumulate=longer(self.accumulate), boundary_bytes=[times * size for size in self.boundary_bytes],
        )  # fmt: skip

    def check(self, schedule: Schedule) -> None:
        """Raise BadInput when a table does not cover the schedule."""
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
                raise BadInput(f"timing.{name}: expected a row for each of {schedule.stages} stages, got {len(table)}")
            for stage, row in enumerate(table):
                if schedule.units and len(row) != schedule.units[stage]:
                    raise BadInput(f"timing.{name}[{stage}]: expected {schedule.units[stage]} units, got {len(row)}")
        self._check_length("boundary_bytes", self.boundary_bytes, schedule.stages - 1)
        self._check_length("optim_seconds", self.optim_seconds, schedule.ranks)

    @staticmethod
    def _check_length(name: str, values: Sequence[float], expected: int) -> None:
        if values and len(values) != expected:
            raise BadInput(f"timing.{name}: expected {expected} numbers, got {len(values)}")


def even(
    stages: int, units: int = 1, *, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0
) -> Timing:
    """Every stage alike and messages free: the ideal in which papers draw schedules. Seconds are of a whole stage."""

    def table(seconds: float) -> Table:
        return ((seconds / units,) * units,) * stages

    return Timing(forward=table(forward), backward_input=table(backward_input), backward_weight=table(backward_weight))
