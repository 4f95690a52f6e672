"""Causal attention with grouped key/value heads, optionally cut at document borders and to a sliding window.

Three ways to the same values: the plain twin (two products and a softmax), scaled-dot-product attention (cuDNN first on
CUDA), and, for masks on CUDA, flex attention over a block mask. A mask is made once per forward by `make_mask` and
handed to every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from meshwright.kernels.norm import accumulate_dtype

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Order of preference on CUDA, cuDNN being the fastest on Hopper; one that cannot take the shapes is passed over."""
BLOCK = 128
"""Tokens along the side of one block of a block mask."""


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query may see, beyond plain causality: one of the two forms is set.

    `dense` broadcasts to `(batch, heads, seq, seq)`, true where attended; `blocks` is the same for flex attention.
    """

    dense: Tensor | None = None
    blocks: BlockMask | None = None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None = None, *, plain: bool = False) -> Tensor:
    """Causal attention of q `(batch, seq, heads, head_dim)` over k and v `(batch, seq, kv_heads, head_dim)`.

    The result is shaped like q. `kv_heads` divides `heads`; consecutive query heads share a key/value head. Scores are
    scaled by 1/√head_dim. The plain twin needs a mask made with `plain=True`. With a mask made for some `queries` only, q has
    these and k and v the whole sequence.
    """
    if plain:
        return _plain_attention(q, k, v, mask)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if mask is None:
        out = _causal_attention(q, k, v, grouped)
    elif mask.blocks is not None:
        out = _flex()(q, k, v, block_mask=mask.blocks, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, enable_gqa=grouped)
    return out.transpose(1, 2)


def make_mask(
    documents: Tensor | None,
    window: int | None,
    seq: int,
    device: torch.device,
    *,
    queries: Tensor | None = None,
    plain: bool = False,
) -> AttentionMask | None:
    """The mask of `seq` tokens, or None when causality says it all.

    documents `(batch, seq)` numbers the document of each token: a token sees its own document only. `window` is how
    many tokens it sees, itself included. `queries` `(n,)` are the places of those that ask, rising; None is all of them.
    `plain` asks for the dense form on every device (the plain twin, and fp64, which flex attention lacks).
    """
    if window is not None and window >= seq:
        window = None
    if documents is None and window is None:
        return None
    if device.type == "cuda" and not plain:
        return AttentionMask(blocks=block_mask(documents, window, seq, device, queries))
    batch = torch.arange(1 if documents is None else documents.shape[0], device=device)
    key = torch.arange(seq, device=device)
    query = key if queries is None else torch.arange(len(queries), device=device)
    return AttentionMask(
        dense=_rule(documents, window, queries)(batch[:, None, None, None], batch, query[:, None], key)
    )


def block_mask(
    documents: Tensor | None, window: int | None, seq: int, device: torch.device, queries: Tensor | None = None
) -> BlockMask:
    """The block mask of flex attention, from each block's extremes alone: no (seq, seq) tensor is made.

    A block is skipped when its borders rule out every pair, is taken whole when they admit every pair, and is looked
    into otherwise; so document numbers may come in any order, and rising ones skip the most.
    """
    first, last = _ends(torch.arange(seq, device=device))
    asked_first, asked_last = (first, last) if queries is None else _ends(queries)
    asked_first, asked_last = asked_first[:, None], asked_last[:, None]
    some, every = first <= asked_last, last < asked_first
    if window is not None:
        some = some & (asked_first - last < window)
        every = every & (asked_last - first < window)
    some, every = some[None, None], every[None, None]
    if documents is not None:
        low, high = _extremes(documents)
        asked_low, asked_high = (low, high) if queries is None else _extremes(documents[:, queries])
        asked_low, asked_high = asked_low[..., :, None], asked_high[..., :, None]
        some = some & (asked_low <= high[..., None, :]) & (low[..., None, :] <= asked_high)
        one, asked_one = (low == high)[..., None, :], asked_low == asked_high
        every = every & asked_one & one & (asked_low == low[..., None, :])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(some & every),
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(documents, window, queries),
        seq_lengths=(seq if queries is None else len(queries), seq),
    )


def _rule(documents: Tensor | None, window: int | None, queries: Tensor | None) -> Rule:
    """Whether query may see key; all arguments are index tensors that broadcast together."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query if queries is None else queries[query]
        allowed = key <= place
        if window is not None:
            allowed = allowed & (place - key < window)
        if documents is not None:
            allowed = allowed & (documents[batch, place] == documents[batch, key])
        return allowed

    return sees


def _ends(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last of rising places `(n,)` in each block."""
    return positions[::BLOCK], torch.cat((positions[BLOCK - 1 :: BLOCK], positions[-1:]))[: -(-len(positions) // BLOCK)]


def _extremes(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest document number in each block, `(batch, 1, blocks)`; its last token fills the last block."""
    seq = documents.shape[1]
    blocks = -(-seq // BLOCK)
    filler = documents[:, -1:].expand(-1, blocks * BLOCK - seq)
    filled = torch.cat((documents, filler), dim=1).view(-1, 1, blocks, BLOCK)
    return filled.amin(dim=-1), filled.amax(dim=-1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, and their numbers first, as flex attention reads them."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    with sdpa_kernel(BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _flex() -> Callable[..., Tensor]:
    """Flex attention, compiled by the caller's graph or else here: run eagerly it would write out every score."""
    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None) -> Tensor:
    wide = accumulate_dtype(q.dtype)
    share = q.shape[2] // k.shape[2]
    keys = k.to(wide).repeat_interleave(share, dim=2).transpose(1, 2)
    values = v.to(wide).repeat_interleave(share, dim=2).transpose(1, 2)
    scores = q.to(wide).transpose(1, 2) @ keys.transpose(2, 3) / math.sqrt(q.shape[3])
    seq = q.shape[1]
    seen = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril() if mask is None else mask.dense
    assert seen is not None, "the plain twin takes a dense mask"
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return (weights @ values).transpose(1, 2).to(q.dtype)
