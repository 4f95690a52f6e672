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
    if block.routed:
        x, normed = mixture_input(block, x, delta)
        return x, block.moe(normed).x
    x, normed = add_and_norm(x, delta, block.attention_norm, input_format(block.attention))
    if block.parallel:
        return x, block.add_branches(block, cast("Tensor", normed), None, None)
    x, normed = add_and_norm(x, block.attention(normed, None, None), block.mlp_norm, input_format(block.mlp))
    return x, block.mlp(normed)


def mixture_input(block: Block, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The residual stream behind the attention of a routed block, and what its mixture gets."""
    rounded = None if block.parallel else input_format(block.attention)
    x, normed = add_and_norm(x, delta, block.attention_norm, rounded)
    attended = block.attention(normed, None, None)
    if block.parallel:
        return x + attended, cast("Tensor", normed)
    x, normed = add_and_norm(x, attended, block.mlp_norm)
    return x, cast("Tensor", normed)


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
