"""The trainer's blocks with each residual addition fused into the next norm.

Between attention and feed-forward network, and between blocks, the residual stream is a pair `(x, delta)`: `delta` is the newest output,
which the next norm adds to x. Results are rounded at the same places as in `models.decoder.Block`. All tensors are `(1, tokens, hidden)`. A
norm before layers with weights in 8 bits (`serve.formats`) also rounds its result to that format.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

from torch import Tensor

from meshwright.kernels.add_norm import add_copies_rms_norm, add_rms_norm
from meshwright.kernels.row_quantize import RoundedMatrix, quantize_add_copies_rms_norm, quantize_add_rms_norm
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.hooks import unchanged
from meshwright.models.norm import Norm
from meshwright.serve.formats import input_format
from meshwright.spec.weight_scheme import LayerFormat


class CopyOutputs(NamedTuple):
    """The output of an MoE layer before its sum, which the next norm computes: outputs of experts, and of a shared expert if any."""

    copies: Tensor
    """`(tokens, copies, hidden)`."""
    shared: Tensor | None

    def sum(self) -> Tensor:
        """The output `(1, tokens, hidden)`."""
        total = self.copies.sum(1)[None]
        return total if self.shared is None else total + self.shared


Delta = Tensor | CopyOutputs
"""A branch's output that is not yet added to the residual stream."""


def residual_stream(model: Decoder, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Delta | None]:
    """`(x, delta)` after the last block, for tokens and positions `(tokens,)`."""
    x = model.embed_tokens(tokens[None], positions[None])
    delta = None
    for layer in cast("Iterable[Block]", model.layers.values()):
        x, delta = block_forward(layer, x, delta)
    return x, delta


def selected(x: Tensor, delta: Delta | None, tokens: Tensor) -> tuple[Tensor, Delta | None]:
    """`x` and `delta` of some tokens of a step."""
    if isinstance(delta, CopyOutputs):
        shared = None if delta.shared is None else delta.shared[:, tokens]
        return x[:, tokens], CopyOutputs(delta.copies[tokens], shared)
    return x[:, tokens], None if delta is None else delta[:, tokens]


def block_forward(block: Block, x: Tensor, delta: Delta | None) -> tuple[Tensor, Delta]:
    """`(x, delta)` after the block. Its attention rotates and masks by itself. The first block gets no delta."""
    if block.routed:
        x, normed = moe_input(block, x, delta)
        return x, moe_output(block, normed)
    x, normed = add_and_norm(x, delta, block.attention_norm, input_format(block.attention))
    if block.parallel:
        return x, block.hooks.add_branches(block, cast("Tensor", normed), None, None)
    x, normed = add_and_norm(x, block.attended(normed, None, None), block.mlp_norm, input_format(block.mlp))
    return x, block.added_output(block.mlp(normed))


def moe_output(block: Block, normed: Tensor) -> Delta:
    """The output of a block's MoE layer: as `CopyOutputs`, unless ranks sum it or a norm or a factor follows."""
    moe = block.moe
    alone = block.hooks.sum_ranks is unchanged and block.mlp_output_norm is None and block.residual_factor == 1
    if alone and (copies := moe.copy_outputs(normed)) is not None:
        return CopyOutputs(copies, moe.shared_output(normed))
    return block.added_output(moe(normed, losses=False))


def moe_input(block: Block, x: Tensor, delta: Delta | None) -> tuple[Tensor, Tensor]:
    """The residual stream after the attention of a block with experts, and the input of its MoE layer."""
    rounded = None if block.parallel else input_format(block.attention)
    x, normed = add_and_norm(x, delta, block.attention_norm, rounded)
    attended = block.attended(normed, None, None)
    if block.parallel:
        return x + attended, cast("Tensor", normed)
    x, normed = add_and_norm(x, attended, block.mlp_norm)
    return x, cast("Tensor", normed)


def add_and_norm(
    x: Tensor, delta: Delta | None, norm: Norm | None, rounded: LayerFormat | None = None
) -> tuple[Tensor, Tensor | RoundedMatrix]:
    """x + delta (x if there is no delta), and its norm, `rounded` to a format if that is given; the sum itself if there is no norm."""
    if norm is None:
        if delta is not None:
            x = x + (delta.sum() if isinstance(delta, CopyOutputs) else delta)
        return x, x
    if delta is None:
        return x, norm(x)
    if isinstance(delta, CopyOutputs):
        if norm.bias is None and rounded:
            return quantize_add_copies_rms_norm(
                x, *delta, norm.weight, norm.eps, rounded, plus_one=norm.plus_one, plain=norm.plain
            )
        if norm.bias is None:
            return add_copies_rms_norm(x, *delta, norm.weight, norm.eps, plus_one=norm.plus_one, plain=norm.plain)
        delta = delta.sum()
    if norm.bias is None and rounded:
        return quantize_add_rms_norm(x, delta, norm.weight, norm.eps, rounded, plus_one=norm.plus_one, plain=norm.plain)
    if norm.bias is None:
        return add_rms_norm(x, delta, norm.weight, norm.eps, plus_one=norm.plus_one, plain=norm.plain)
    x = x + delta
    return x, norm(x)
