"""The trainer's blocks with each residual addition fused into the next norm.

The residual stream between two halves of a block is a pair `(x, delta)`: `delta` is the output of the last half, and the next norm adds it
to x. The roundings are those of `models.decoder.Block`. All tensors are `(1, tokens, hidden)`. A norm before layers with weights in 8 bits
(`serve.formats`) also rounds its result to that format.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor

from meshwright.kernels.add_norm import add_rms_norm
from meshwright.kernels.row_quantize import RoundedMatrix, quantize_add_rms_norm
from meshwright.models.decoder import Block, Decoder, Norm, SharedInputs
from meshwright.serve.formats import input_format
from meshwright.spec.engine import WeightFormat


def residual_stream(model: Decoder, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return `(x, delta)` behind the last block, for tokens and positions `(tokens,)`."""
    x, delta = model.embed_tokens(tokens[None], SharedInputs(positions[None], None, None)), None
    for layer in cast("Iterable[Block]", model.layers.values()):
        x, delta = block_forward(layer, x, delta)
    return x, delta


def block_forward(block: Block, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `(x, delta)` behind the block, whose attention rotates and masks by itself; the first block has no delta."""
    dense = not block.routed
    rounded = input_format(block.attention) if dense or not block.parallel else None
    x, normed = add_and_norm(x, delta, block.attention_norm, rounded)
    if block.parallel and dense:
        return x, block.add_branches(block, cast("Tensor", normed), None, None)
    attended = block.attention(normed, None, None)
    if block.parallel:
        x = x + attended
    else:
        x, normed = add_and_norm(x, attended, block.mlp_norm, input_format(block.mlp) if dense else None)
    return x, block.moe(normed).x if block.routed else block.mlp(normed)


def add_and_norm(
    x: Tensor, delta: Tensor | None, norm: Norm, rounded: WeightFormat | None = None
) -> tuple[Tensor, Tensor | RoundedMatrix]:
    """Return `x + delta`, or x without a delta, and its norm, which may be `rounded` to a format."""
    if delta is None:
        return x, norm(x)
    if norm.bias is None and rounded:
        return quantize_add_rms_norm(x, delta, norm.weight, norm.eps, rounded, plain=norm.plain)
    if norm.bias is None:
        return add_rms_norm(x, delta, norm.weight, norm.eps, plain=norm.plain)
    x = x + delta
    return x, norm(x)
