"""Functions of a block that parallel training and the inference engine replace.

Model code is one-device PyTorch. A rank that has a part of a model, or an engine with a cache, differs in the functions of this list. A
block calls them through `Block.hooks`. No other function of `models` is assigned from outside (`tests/house/test_hooks.py`). Modules with
parameters are replaced as modules, because checkpoints, optimizers and FSDP find parameters by their names.
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
    """The block's output for the inputs of `Block.forward`."""
    return block.compute(*inputs)


def sum_of_branches(block: Block, normed: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
    """Sum of the attention and feed-forward outputs of a parallel block for its normed input, without the residual."""
    return block.hooks.sum_ranks(block.attention(normed, rope, mask) + block.mlp(normed))


def unchanged(x: Tensor, *context: Any) -> Tensor:
    """Return x: on one rank there is nothing to exchange."""
    del context
    return x


@dataclass(eq=False)
class BlockHooks:
    """The replaceable functions of one block; the block, its attention and its MoE layer share one instance.

    torch.compile compiles one function for all blocks of a kind. So a replacement is a function at module level, a `partial` of one, or an
    object with `__call__`. A closure that is made for each layer would be compiled again for each.
    """

    run: Callable[..., Tensor | RoutedOutput] = run_block
    """`run(block, x, rope, mask, counted)` computes what `Block.forward` returns: x `(batch, seq, hidden)` gives the same shape, or a
    RoutedOutput.

    `parallel.apply` wraps the default in recompute, compilation and the taps of a split backward.
    """
    add_branches: Callable[[Block, Tensor, RotaryTables | None, AttentionMask | None], Tensor] = sum_of_branches
    """Both branches of a parallel block for its normed input `(batch, seq, hidden)`, added, without the residual.

    `parallel.tensor` lets the branches share one all-gather and one reduce-scatter.
    """
    norm_all_heads: Callable[[Attention, Tensor, Tensor], tuple[Tensor, Tensor]] = norm_all_heads
    """`norm_all_heads(attention, q, k)`: queries and keys `(batch, seq, heads, head_dim)`, each normed over all heads of a token together.

    `parallel.tensor` and `parallel.tensor_inference` add the sums of squares of the ranks, which have a part of the heads.
    """
    attend: Callable[..., Tensor] = attention
    """`attend(q, k, v, mask, plain=)`: attention of q `(batch, seq, heads, head_dim)` to k and v with `kv_heads`; shaped like q, with
    the width of v. The default computes it for whole sequences.

    `parallel.context` and `parallel.hybrid` compute it for sequences that ranks divide, `serve.cached_attention` over a paged cache.
    """
    attend_latents: Callable[..., Tensor] = expand_and_attend
    """`attend_latents(attention, q, latent, shared_key, rope, mask)`: latent attention between its projections; shapes are those of
    `models.latent_attention.expand_and_attend`, which expands keys and values of all heads and calls `attend`.

    `serve.cached_attention` writes latents into the cache and attends to them in the absorbed form.
    """
    gather_tokens: Callable[[Tensor], Tensor] = unchanged
    """All tokens' shared part of the keys of latent attention `(batch, seq, rotated)`, of those of this rank.

    `parallel.tensor` all-gathers them: its ranks compute them for their own tokens only, but attend with their heads to all tokens.
    """
    sum_ranks: Callable[[Tensor], Tensor] = unchanged
    """An output of attention, feed-forward network or experts `(batch, seq, hidden)`, or of both of a parallel block, summed over ranks;
    may be in place.

    `parallel.tensor_inference` all-reduces it: its ranks have all tokens and a part of each weight.
    """
    whole_sequence_loads: Callable[[Tensor], Tensor] = unchanged
    """Loads of a router's experts `(batch, experts)` over whole sequences, of those over this rank's tokens.

    `parallel.experts` sums them where context and tensor ranks have a part of each sequence: the balance loss is one of whole sequences.
    """
    whole_sample_loads: Callable[[Tensor, CountedTokens], Tensor] = unchanged
    """Loads of a router's experts `(samples, experts)` over whole samples, of those over this rank's counted tokens.

    `parallel.hybrid` sums those of a sample that several ranks divide.
    """
