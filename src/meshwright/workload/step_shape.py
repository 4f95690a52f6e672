"""Sizes of one rank's step: micro-batches, sequence segments and the experts present; today a function of the plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape


@dataclass(frozen=True)
class StepShape:
    """Numbers or arrays of one length.

    Two sequences of 4,096 tokens, each divided over two context ranks:

    >>> StepShape(micro_batches=8, segments=2, segment_tokens=2048, experts=1, expert_rows=0).tokens
    4096
    """

    micro_batches: Array
    segments: Array
    """Sequence segments of one micro-batch: each sequence's part on one context rank."""
    segment_tokens: Array
    """Tokens of each segment."""
    experts: Array
    """Routed experts of a layer that are present on the rank."""
    expert_rows: Array
    """Token copies of one micro-batch that each expert of the busiest rank receives."""

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on a context rank."""
        return self.segments * self.segment_tokens


def step_shape(shape: Shape, layout: Layouts) -> StepShape:
    """The step's sizes for sequences of equal length, evenly divided; expert tokens have the layout's imbalance."""
    tokens = layout.micro_batch * layout.seq / layout.context
    experts = np.maximum(shape.experts, 1.0) / np.maximum(layout.expert, 1.0)
    return StepShape(
        micro_batches=layout.micro_batches,
        segments=layout.micro_batch,
        segment_tokens=layout.seq / layout.context,
        experts=experts,
        expert_rows=tokens / layout.tensor * shape.top_k / experts * layout.imbalance,
    )
