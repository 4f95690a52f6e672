"""Sizes of one rank's training step: micro-batches, parts of sequences, and experts.

They follow from the plan alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape


@dataclass(frozen=True)
class StepShape:
    """Sizes of one rank's step. Each field is a number, or an array with one element per case.

    Two sequences of 4,096 tokens, each divided over two context ranks:

    >>> StepShape(micro_batches=8, segments=2, segment_tokens=2048, experts=1, expert_rows=0).tokens
    4096
    """

    micro_batches: Array
    """Number of micro-batches."""
    segments: Array
    """Number of sequences in a micro-batch. A context rank has one segment of each."""
    segment_tokens: Array
    """Tokens of a segment: the part of a sequence that one context rank computes."""
    experts: Array
    """Number of routed experts of a layer on the rank."""
    expert_rows: Array
    """Rows that each expert of the busiest rank computes for one micro-batch.

    A token that is sent to two experts is two rows.
    """

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on a context rank."""
        return self.segments * self.segment_tokens


def step_shape(shape: Shape, layout: Layouts) -> StepShape:
    """Return the sizes of a step for sequences of equal length that are divided evenly.

    The busiest expert rank gets `layout.imbalance` times the mean number of rows.
    """
    tokens = layout.micro_batch * layout.seq / layout.context
    experts = np.maximum(shape.experts, 1.0) / np.maximum(layout.expert, 1.0)
    return StepShape(
        micro_batches=layout.micro_batches,
        segments=layout.micro_batch,
        segment_tokens=layout.seq / layout.context,
        experts=experts,
        expert_rows=tokens / layout.tensor * shape.top_k / experts * layout.imbalance,
    )
