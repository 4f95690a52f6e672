"""What the hybrid axis requires of a model and of the other axes."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import CONTEXT_AXES, AxisName

REFUSED_BESIDE: tuple[AxisName, ...] = ("shard", "replicate", *CONTEXT_AXES, "pipeline")
"""Axes that cannot have several ranks beside the hybrid axis."""


def hybrid_error(spec: ModelSpec, sizes: Mapping[str, int]) -> str | None:
    """What hybrid ranks require of a model and of the other axes, by their `sizes`, in words; None if they have it."""
    other = next((axis for axis in REFUSED_BESIDE if sizes.get(axis, 1) > 1), None)
    if other is not None:
        return f"no {other} ranks beside it, as hybrid ranks take the place of shard and context ranks"
    if spec.sliding_window is not None:
        return "model.sliding_window = none, as a divided sample attends to all its tokens"
    if spec.experts:
        return "a dense model, as experts exchange tokens in every micro-batch and ranks have different numbers of them"
    if spec.prediction_depth:
        return "model.prediction_depth = 0, as further tokens of a divided sample are on other ranks"
    return None
