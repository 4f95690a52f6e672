"""Gradient sums over ranks outside of a unit's own reduction: replicas, tied ends, copies on tensor ranks."""

from __future__ import annotations

from meshwright.parallel.fsdp import Span
from meshwright.parallel.replicas import ReplicaSums
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.parallel.tensor import CopySums
from meshwright.parallel.tied import TiedSum


class GradientSums:
    """The sums of one rank; each is None where the plan does not need it."""

    def __init__(
        self, replicas: ReplicaSums | None = None, tied: TiedSum | None = None, copies: CopySums | None = None
    ) -> None:
        self._replicas, self._tied, self._copies = replicas, tied, copies

    @property
    def over_replicas(self) -> bool:
        return self._replicas is not None

    def start(self, unit: ShardedUnit, span: Span | None) -> None:
        """Start to sum a unit's shards over replicas, after the unit's last reduction of the step."""
        if self._replicas is not None:
            self._replicas.begin(unit.gradient_shards, unit.reduced_event, span)

    def finish(self) -> None:
        """Wait for the sums over replicas, then sum tied ends and tensor ranks' copies. Call it when every reduction has ended."""
        if self._replicas is not None:
            self._replicas.finish()
        if self._tied is not None:
            self._tied.sum()
        if self._copies is not None:
            self._copies.sum()
