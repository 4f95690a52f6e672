"""Models whose forward has the same bits in the trainer and in the inference engine."""

from __future__ import annotations

from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.model import ModelSpec

ROWS = 16
"""Numbers of tokens are padded to a multiple of this.

From this number of rows on, a matmul on a CPU computes each row in the same way. And if the number of elements is no
multiple of it, torch computes the last elements with other instructions.
"""
VOCABULARY = 8
"""In training, the head is not padded if the vocabulary is a multiple of this (`kernels.loss`)."""


def inexact_reason(model: ModelSpec) -> str | None:
    """Return which part of a model has no exact forward in this release, as text.

    The result is None if the whole forward is exact (`kernels.exact_attention`).
    """
    for block in model.block_kinds:
        if block.moe is not None:
            return "routed experts"
        if not isinstance(block.mixer, AttentionSpec):
            return "latent attention"
        if block.mixer.window is not None:
            return "sliding windows"
        if block.mixer.sinks:
            return "attention sinks"
        if block.mixer.score_cap is not None:
            return "capped attention scores"
    return "modules that predict further tokens" if model.prediction_depth else None
