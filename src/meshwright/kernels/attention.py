"""Causal attention with grouped key/value heads, optionally within documents and a sliding window.

Four implementations: plain (two matmuls and a softmax), scaled-dot-product attention (cuDNN preferred on CUDA), and,
for masks on CUDA, FlashAttention for some windows (`kernels.window_attention`) and otherwise flex attention with a block
mask. `make_mask` creates a mask once per forward; every layer receives it.
Under `torch.use_deterministic_algorithms` gradients are the same bits at every call: those of flex attention always are, which then
computes all windows, and cuDNN gives way to `fixed_order_attention`, to flex attention without its package, or to torch's FlashAttention
for wider heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from meshwright.kernels import fixed_order_attention, window_attention
from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.sinks import join_sinks, sink_attention, softmax_with_sinks
from meshwright.spec.blocks.attention import MASK_BLOCK

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Order of preference on CUDA: cuDNN is the fastest on Hopper. torch skips a backend that does not support the shapes."""


@dataclass(frozen=True)
class AttentionMask:
    """Tells which keys each query attends to, if not simply all earlier ones. Exactly one of the first three fields is set.

    - `dense`: booleans that broadcast to `(batch, heads, seq, seq)`, true where a query attends to a key.
    - `blocks`: the same for flex attention.
    - `flash`: the same for FlashAttention.
    - `cap`: the cap of scores (`AttentionSpec.score_cap`).
    - `documents` `(batch, seq)`: the document numbers that the mask was made from, if tokens attend to their own document only.
    """

    dense: Tensor | None = None
    blocks: BlockMask | None = None
    flash: window_attention.FlashWindow | None = None
    cap: float | None = None
    documents: Tensor | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None = None,
    *,
    sinks: Tensor | None = None,
    reference: bool = False,
) -> Tensor:
    """Causal attention of q `(batch, seq, heads, head_dim)` over k and v `(batch, seq, kv_heads, head_dim)`.

    The result is shaped like q, with the width of v, which may be narrower. `heads` is a multiple of `kv_heads`; consecutive query heads
    share a key/value head. Scores are scaled by 1/√head_dim.

    - `mask`: None means that each query attends to all earlier keys. If the mask was made for some `queries` only, q has only these
      queries; k and v have the whole sequence.
    - `sinks` `(heads,)`: a further score in the softmax of each head (`kernels.sinks`).
    - `reference`: use torch's basic operators; the mask must then be made with `reference=True`.

    With a dense mask and sinks, or with a cap on such a mask, all scores are computed explicitly.
    """
    if mask is not None and mask.flash is not None:
        return window_attention.window_attention(q, k, v, mask.flash, sinks)
    particular = sinks is not None or (mask is not None and mask.cap is not None)
    if reference or (particular and mask is not None and mask.blocks is None):
        return _reference_attention(q, k, v, mask, sinks)
    if particular:
        return _flex_attention(q, k, v, mask, sinks) if mask is not None else sink_attention(q, k, v, sinks)[0]
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
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
    cap: float | None = None,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    document_sizes: tuple[int, int] | None = None,
    reference: bool = False,
) -> AttentionMask | None:
    """Return the mask for `seq` tokens, or None if every query attends to all earlier tokens and scores have no `cap`.

    - `documents` `(batch, seq)`: document number of each token. A token attends to its own document only; the tokens of a document are
      consecutive.
    - `window`: number of tokens that a token attends to, including itself.
    - `queries` `(n,)`: ascending positions of the queries; None: all.
    - `head_dim`, `dtype`: of queries, keys and values. FlashAttention is chosen only if both are given.
    - `document_sizes`: number of documents, and tokens of the longest. If FlashAttention needs them and they are None, the host waits for
      the device.
    - `reference`: make the dense form on every device, for plain attention and for fp64, which flex attention lacks.
    """
    if window is not None and window >= seq:
        window = None
    in_fixed_order = torch.are_deterministic_algorithms_enabled() and not fixed_order_attention.INSTALLED
    if (
        documents is None
        and window is None
        and cap is None
        and not (in_fixed_order and device.type == "cuda" and not reference)
    ):
        return None
    if device.type == "cuda" and not reference:
        if window is not None and queries is None and window_attention.is_chosen(head_dim, window, cap, dtype, device):
            flash = window_attention.flash_window(window, documents, document_sizes)
            return AttentionMask(flash=flash, documents=documents)
        blocks = block_mask(documents, window, seq, device, queries)
        return AttentionMask(blocks=blocks, cap=cap, documents=documents)
    batch = torch.arange(1 if documents is None else documents.shape[0], device=device)
    key = torch.arange(seq, device=device)
    query = key if queries is None else torch.arange(len(queries), device=device)
    return AttentionMask(
        dense=_mask_function(documents, window, queries)(batch[:, None, None, None], batch, query[:, None], key),
        cap=cap,
        documents=documents,
    )


def block_mask(
    documents: Tensor | None, window: int | None, seq: int, device: torch.device, queries: Tensor | None = None
) -> BlockMask:
    """Return flex attention's block mask. It is computed from the lowest and highest values per block, without a (seq, seq) tensor.

    If these bounds exclude all pairs of a block, flex attention skips the block. If they allow all pairs, it computes the block without a
    mask. Otherwise it applies the mask function. So document numbers may have any order; with ascending numbers most blocks are skipped.
    """
    first, last = _block_ends(torch.arange(seq, device=device))
    query_first, query_last = (first, last) if queries is None else _block_ends(queries)
    query_first = query_first[:, None]
    query_last = query_last[:, None]
    some = first <= query_last
    every = last < query_first
    if window is not None:
        some = some & (query_first - last < window)
        every = every & (query_last - first < window)
    some = some[None, None]
    every = every[None, None]
    if documents is not None:
        low, high = _extremes(documents)
        query_low, query_high = (low, high) if queries is None else _extremes(documents[:, queries])
        query_low = query_low[..., :, None]
        query_high = query_high[..., :, None]
        some = some & (query_low <= high[..., None, :]) & (low[..., None, :] <= query_high)
        single = (low == high)[..., None, :]
        query_single = query_low == query_high
        every = every & query_single & single & (query_low == low[..., None, :])
    return BlockMask.from_kv_blocks(
        *_block_lists(some & ~every),
        *_block_lists(some & every),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=_mask_function(documents, window, queries),
        seq_lengths=(seq if queries is None else len(queries), seq),
    )


def _mask_function(documents: Tensor | None, window: int | None, queries: Tensor | None) -> MaskFunction:
    """Return a function that tells whether a query attends to a key. Its arguments are index tensors that broadcast together."""

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query if queries is None else queries[query]
        allowed = key <= position
        if window is not None:
            allowed = allowed & (position - key < window)
        if documents is not None:
            allowed = allowed & (documents[batch, position] == documents[batch, key])
        return allowed

    return attends


def _block_ends(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last position in each block, for ascending positions `(n,)`."""
    return positions[::MASK_BLOCK], torch.cat((positions[MASK_BLOCK - 1 :: MASK_BLOCK], positions[-1:]))[
        : -(-len(positions) // MASK_BLOCK)
    ]


def _extremes(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest document number of each block, `(batch, 1, blocks)`. The last number pads the last block."""
    seq = documents.shape[1]
    blocks = -(-seq // MASK_BLOCK)
    filler = documents[:, -1:].expand(-1, blocks * MASK_BLOCK - seq)
    filled = torch.cat((documents, filler), dim=1).view(-1, 1, blocks, MASK_BLOCK)
    return filled.amin(dim=-1), filled.amax(dim=-1)


def _block_lists(selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return what flex attention expects: the number of selected blocks per row, and all block indices with the selected ones first."""
    order = torch.argsort(selected.to(torch.int32), dim=-1, descending=True, stable=True)
    return selected.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if torch.are_deterministic_algorithms_enabled() and fixed_order_attention.supports(q, v):
        return fixed_order_attention.fixed_order_attention(q, k, v, True)[0]
    # torch's cuDNN attention has no fixed order; the other backends obey torch's switch for deterministic algorithms.
    backends = BACKENDS[1:] if torch.are_deterministic_algorithms_enabled() else BACKENDS
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None) -> Tensor:
    """Flex attention with a cap of scores, or with sinks joined to its result. The log-sum-exp also has a gradient here."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]
    score_mod = None if mask.cap is None else _capping(mask.cap)
    options = {"score_mod": score_mod, "block_mask": mask.blocks, "enable_gqa": grouped}
    if sinks is None:
        return _flex()(*heads, **options).transpose(1, 2)
    results: Any = _flex()(*heads, **options, return_aux=AuxRequest(lse=True))
    out, further = results
    return join_sinks(out.transpose(1, 2), further.lse, sinks)[0]


@cache
def _capping(cap: float) -> Callable[..., Tensor]:
    """Return flex attention's function that caps a score. There is one function for each cap, so that it is compiled only once."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _flex() -> Callable[..., Tensor]:
    """Return flex attention: compiled in the caller's graph, or else compiled by itself. In eager mode it would materialise all scores."""
    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _reference_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, sinks: Tensor | None = None
) -> Tensor:
    wide = accumulate_dtype(q.dtype)
    group_size = q.shape[2] // k.shape[2]
    keys = k.to(wide).repeat_interleave(group_size, dim=2).transpose(1, 2)
    values = v.to(wide).repeat_interleave(group_size, dim=2).transpose(1, 2)
    scores = q.to(wide).transpose(1, 2) @ keys.transpose(2, 3) / math.sqrt(q.shape[3])
    if mask is not None and mask.cap is not None:
        scores = mask.cap * torch.tanh(scores / mask.cap)
    seq = q.shape[1]
    visible = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril() if mask is None else mask.dense
    assert visible is not None, "plain attention needs a dense mask"
    weights = softmax_with_sinks(scores.masked_fill(~visible, float("-inf")), None if sinks is None else sinks[:, None])
    return (weights @ values).transpose(1, 2).to(q.dtype)
