"""Functions of a block that parallel training and the inference engine replace.

Model code is written for one device. A rank that has a part of a model, or an engine with a cache, needs other functions at a few places;
these are listed here. A block calls them through `Block.hooks`. No other function of `models` is assigned from outside
(`tests/house/test_hooks.py`). Modules with parameters are replaced as modules instead, because checkpoints, optimizers and FSDP find
parameters by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshwright.kernels.attention import attention
from meshwright.models.attention import Attention, norm_all_heads
from meshwright.models.latent_attention import expand_and_attend

if TYPE_CHECKING:
    from meshwright.kernels.attention import AttentionMask
    from meshwright.kernels.rope import RotaryTables
    from meshwright.models.block import Block
    from meshwright.models.moe import CountedTokens, RoutedOutput


def run_block(block: Block, *inputs: Any) -> Tensor | RoutedOutput:
    """Return the block's output; `inputs` are the inputs of `Block.forward`."""
    return block.compute(*inputs)


def sum_of_branches(block: Block, normed: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
    """Return the sum of the attention and feed-forward outputs of a parallel block for its normed input, without the residual."""
    return block.hooks.sum_ranks(block.attention(normed, rope, mask) + block.mlp(normed))


def unchanged(x: Tensor, *context: Any) -> Tensor:
    """Return x. On one rank there is nothing to exchange."""
    del context
    return x


@dataclass(eq=False)
class BlockHooks:
    """The replaceable functions of one block; the block, its attention and its MoE layer share one instance.

    torch.compile compiles one function for all blocks of a kind. Therefore a replacement must be a function at module level, a `partial` of
    such a function, or an object with `__call__`. A closure made for each layer would be compiled again for each layer.
    """

    run: Callable[..., Tensor | RoutedOutput] = run_block
    """`run(block, x, rope, mask, counted)` computes what `Block.forward` returns for x `(batch, seq, hidden)`: a tensor of the same shape,
    or a RoutedOutput.

    `parallel.apply` adds recompute, compilation and the taps of a split backward to the default.
    """
    sum_of_branches: Callable[[Block, Tensor, RotaryTables | None, AttentionMask | None], Tensor] = sum_of_branches
    """`sum_of_branches(block, normed, rope, mask)` returns the sum of both branches of a parallel block, without the residual.

    `normed` is `(batch, seq, hidden)`. In `parallel.tensor` the branches share one all-gather and one reduce-scatter.
    """
    norm_all_heads: Callable[[Attention, Tensor, Tensor], tuple[Tensor, Tensor]] = norm_all_heads
    """`norm_all_heads(attention, q, k)` norms queries and keys `(batch, seq, heads, head_dim)` over all heads of a token together.

    In `parallel.tensor` and `parallel.tensor_inference` each rank has a part of the heads, and the sums of squares are added over ranks.
    """
    attend: Callable[..., Tensor] = attention
    """`attend(q, k, v, mask, reference=…)` returns the attention of q `(batch, seq, heads, head_dim)` over k and v with `kv_heads`.

    The result is shaped like q, with the width of v. The default computes it for whole sequences. If `reference` is true, it uses the
    kernels' reference implementations, which have PyTorch operators only.

    `parallel.context` and `parallel.hybrid` compute it for sequences that ranks divide, `serve.cached_attention` over a paged cache.
    """
    attend_latents: Callable[..., Tensor] = expand_and_attend
    """`attend_latents(attention, q, latent, shared_key, rope, mask)` computes latent attention between its projections. Shapes are those of
    `models.latent_attention.expand_and_attend`, which expands keys and values of all heads and calls `attend`.

    `serve.cached_attention` writes latents into the cache and attends to them in the absorbed form.
    """
    gather_tokens: Callable[[Tensor], Tensor] = unchanged
    """`gather_tokens(shared_key)` returns the part of the keys that all heads of latent attention share, `(batch, seq, rotated)`, for all
    tokens, given it for this rank's tokens.

    `parallel.tensor` all-gathers it: a rank computes it for its own tokens only, but its heads attend to all tokens.
    """
    sum_ranks: Callable[[Tensor], Tensor] = unchanged
    """`sum_ranks(output)` returns the sum over ranks of an output of attention, of a feed-forward network or of experts
    `(batch, seq, hidden)`; of a parallel block, of both outputs together. It may change its argument.

    `parallel.tensor_inference` all-reduces the output: its ranks have all tokens and a part of each weight.
    """
    whole_sequence_loads: Callable[[Tensor], Tensor] = unchanged
    """`whole_sequence_loads(loads)` returns the loads `(batch, experts)` of whole sequences, given the loads of this rank's tokens.

    The balance loss needs loads of whole sequences. `parallel.experts` sums loads over context and tensor ranks, which divide sequences.
    """
    whole_sample_loads: Callable[[Tensor, CountedTokens], Tensor] = unchanged
    """`whole_sample_loads(loads, counted)` returns the loads `(samples, experts)` of whole samples, given the loads of this rank's counted
    tokens.

    `parallel.hybrid` sums the loads of a sample that several ranks divide.
    """
