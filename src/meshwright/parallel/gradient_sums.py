"""All-reduces of gradients that follow a unit's own reduce-scatter: over replicas, of tied weights, and of copies on tensor ranks.

A unit is a part of the model whose parameters are gathered and reduced together: the embedding, a block, or the head.
"""

from __future__ import annotations

from meshwright.parallel.fsdp import Span
from meshwright.parallel.replicas import ReplicaSums
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.parallel.tensor import TensorCopySums
from meshwright.parallel.tied import TiedGradientSum


class GradientSums:
    """Runs the all-reduces of one rank. An argument is None if the plan does not need that all-reduce."""

    def __init__(
        self,
        replicas: ReplicaSums | None = None,
        tied: TiedGradientSum | None = None,
        copies: TensorCopySums | None = None,
    ) -> None:
        self._replicas = replicas
        self._tied = tied
        self._copies = copies

    @property
    def over_replicas(self) -> bool:
        """Whether gradients are summed over replicas."""
        return self._replicas is not None

    def start(self, unit: ShardedUnit, span: Span | None) -> None:
        """Start to sum a unit's gradient shards over replicas. Call it after the unit's last reduction of the step."""
        if self._replicas is not None:
            self._replicas.start(unit.gradient_shards, unit.reduced_events, span)

    def finish(self) -> None:
        """Make compute wait for the sums over replicas, then sum the gradients of tied weights and of copies on tensor ranks.

        Call it when every unit's reduction has ended.
        """
        if self._replicas is not None:
            self._replicas.finish()
        if self._tied is not None:
            self._tied.sum()
        if self._copies is not None:
            self._copies.sum()
