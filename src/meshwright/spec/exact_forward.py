"""Models whose forward the trainer and the inference engine compute with the same bits."""

from __future__ import annotations

from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.model import ModelSpec

ROWS = 16
"""Rows from which on a CPU's matmul computes each alike, and the multiple to which numbers of tokens are padded.

Of a number of elements that is no such multiple, torch computes the last ones by other instructions.
"""
VOCABULARY = 8
"""Multiple of a vocabulary whose head is not padded in training (`kernels.loss`)."""


def inexact_reason(model: ModelSpec) -> str | None:
    """What of a model has no exact forward in this release, in words; None if its forward is exact (`kernels.exact_attention`)."""
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
