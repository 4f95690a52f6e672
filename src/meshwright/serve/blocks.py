"""The forward pass of the trainer's blocks, with each residual addition fused into the next norm.

The functions pass the residual stream as a pair `(x, delta)`. `delta` is the output of the last attention or feed-forward network, which is
not added to `x` yet; the next norm adds it. Results are rounded at the same places as in `models.decoder.Block`. All tensors are
`(1, tokens, hidden)`. If the layers after a norm have 8-bit weights (`serve.formats`), the norm also rounds its result to their format.
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
    """The output of an MoE layer as separate outputs of its experts, which are not added up yet. The next norm adds them up."""

    copies: Tensor
    """`(tokens, copies, hidden)`: the outputs of each token's experts."""
    shared: Tensor | None
    """`(1, tokens, hidden)`: the output of the shared expert; None if the layer has no shared expert."""

    def sum(self) -> Tensor:
        """Return the output of the MoE layer, `(1, tokens, hidden)`."""
        total = self.copies.sum(1)[None]
        return total if self.shared is None else total + self.shared


Delta = Tensor | CopyOutputs
"""The output of attention or of a feed-forward network that is not added to the residual stream yet."""


def residual_stream(model: Decoder, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Delta | None]:
    """Run all blocks on tokens at positions, both `(tokens,)`. Returns `(x, delta)` after the last block."""
    x = model.embed_tokens(tokens[None], positions[None])
    delta = None
    for layer in cast("Iterable[Block]", model.layers.values()):
        x, delta = block_forward(layer, x, delta)
    return x, delta


def selected(x: Tensor, delta: Delta | None, tokens: Tensor) -> tuple[Tensor, Delta | None]:
    """Return the rows of `x` and `delta` for some tokens of a step. `tokens` has their indices in the step."""
    if isinstance(delta, CopyOutputs):
        shared = None if delta.shared is None else delta.shared[:, tokens]
        return x[:, tokens], CopyOutputs(delta.copies[tokens], shared)
    return x[:, tokens], None if delta is None else delta[:, tokens]


def block_forward(block: Block, x: Tensor, delta: Delta | None) -> tuple[Tensor, Delta]:
    """Run a block on the residual stream `(x, delta)`. Returns `(x, delta)` after the block. `delta` is None before the first block.

    The attention gets no rotary tables and no mask, because the engine's attention (`serve.cached_attention`) rotates and masks itself.
    """
    if block.routed:
        x, normed = moe_input(block, x, delta)
        return x, moe_output(block, normed)
    x, normed = add_and_norm(x, delta, block.attention_norm, input_format(block.attention))
    if block.parallel:
        return x, block.hooks.sum_of_branches(block, cast("Tensor", normed), None, None)
    x, normed = add_and_norm(
        x, block.attention_branch_output(normed, None, None), block.mlp_norm, input_format(block.mlp)
    )
    return x, block.mlp_branch_output(block.mlp(normed))


def moe_output(block: Block, normed: Tensor) -> Delta:
    """Return the output of a block's MoE layer for the normed input `(1, tokens, hidden)`.

    The output is added up here if ranks all-reduce it, if a norm or a residual factor is applied to it, or if the layer cannot give
    separate outputs. Otherwise it is a `CopyOutputs`.
    """
    moe = block.moe
    alone = block.hooks.sum_ranks is unchanged and block.mlp_output_norm is None and block.residual_factor == 1
    if alone and (copies := moe.outputs_by_copy(normed)) is not None:
        return CopyOutputs(copies, moe.shared_output(normed))
    return block.mlp_branch_output(moe(normed, losses=False))


def moe_input(block: Block, x: Tensor, delta: Delta | None) -> tuple[Tensor, Tensor]:
    """Run the attention of a block with an MoE layer. Returns the residual stream after it, and the normed input of the MoE layer."""
    # The MoE layer of a parallel block reads the same normed input, and reads it in the compute dtype.
    number_format = None if block.parallel else input_format(block.attention)
    x, normed = add_and_norm(x, delta, block.attention_norm, number_format)
    attended = block.attention_branch_output(normed, None, None)
    if block.parallel:
        return x + attended, cast("Tensor", normed)
    x, normed = add_and_norm(x, attended, block.mlp_norm)
    return x, cast("Tensor", normed)


def add_and_norm(
    x: Tensor, delta: Delta | None, norm: Norm | None, number_format: LayerFormat | None = None
) -> tuple[Tensor, Tensor | RoundedMatrix]:
    """Return `(sum, normed)`, where sum is x + delta, or x if `delta` is None.

    `normed` is the norm of the sum, or the sum itself if `norm` is None. If `number_format` is given, the norm also rounds `normed`
    to this format where a fused kernel exists: for a norm without bias, and if `delta` is given.
    """
    if norm is None:
        if delta is not None:
            x = x + (delta.sum() if isinstance(delta, CopyOutputs) else delta)
        return x, x
    if delta is None:
        return x, norm(x)
    if isinstance(delta, CopyOutputs):
        if norm.bias is None and number_format:
            return quantize_add_copies_rms_norm(
                x, *delta, norm.weight, norm.eps, number_format, plus_one=norm.plus_one, reference=norm.reference
            )
        if norm.bias is None:
            return add_copies_rms_norm(
                x, *delta, norm.weight, norm.eps, plus_one=norm.plus_one, reference=norm.reference
            )
        delta = delta.sum()
    if norm.bias is None and number_format:
        return quantize_add_rms_norm(
            x, delta, norm.weight, norm.eps, number_format, plus_one=norm.plus_one, reference=norm.reference
        )
    if norm.bias is None:
        return add_rms_norm(x, delta, norm.weight, norm.eps, plus_one=norm.plus_one, reference=norm.reference)
    x = x + delta
    return x, norm(x)
