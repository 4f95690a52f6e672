"""Causal attention whose bits are the same in a decode, in a chunk of a prompt and in a training sequence.

Reinforcement learning compares two probabilities of a token: the one with which the engine sampled it, and the one that
the trainer computes. torch chooses the order of additions by the shapes of its operands, so the two would differ in
their last bits. Here the result of a query depends on its own sequence alone:

- Keys are read in parts of PART tokens, from the first token of the sequence. So all matmuls sum over equally many
  elements.
- The largest score does not depend on an order, and the sums of the parts are added one after another.
- Parts after the query add zeros, which change no bits.

So a decode that reads ten parts gives the same bits as a training sequence that reads all parts, provided that a row of
a matmul does not depend on the number of rows. On CPUs this holds with at least ROWS rows (`rows_are_alike` tests it).
Inputs with fewer rows are padded.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.attention import AttentionMask, attention
from meshwright.spec.exact_forward import ROWS

PART = 64
"""Number of keys in a part."""
TESTED_OUTPUTS = 1024
"""Width of the output of the layer with which `rows_are_alike` tests a CPU."""
QUERIES = 256
"""Number of queries of a sequence that are computed together. They read the keys up to the last of these queries."""


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Return the attention of q `(sequences, queries, heads, head_dim)`, shaped like q. It has no gradients.

    `positions` `(sequences, queries)` are the queries' positions in their sequences. k and v
    `(sequences, keys, kv_heads, head_dim)` begin with the first token of each sequence. A query attends to the keys up to
    its own position. Keys after a sequence's last query may have any finite values.
    """
    sequences, queries, heads, width = q.shape
    kv_heads = k.shape[2]
    # All query heads of one key/value head are rows of one matmul.
    # (sequences, kv_heads, queries · query heads of a kv head, head_dim)
    rows = q.view(sequences, queries, kv_heads, heads // kv_heads, width).permute(0, 2, 1, 3, 4).flatten(2, 3)
    places = positions.repeat_interleave(heads // kv_heads, 1)  # the position of each row: (sequences, rows)
    rows = padded(rows, 2, ROWS)
    places = padded(places, 1, ROWS)
    # (sequences, kv_heads, parts, PART, head_dim)
    keys, values = (padded(x, 1, PART).unflatten(1, (-1, PART)).permute(0, 3, 1, 2, 4) for x in (k, v))
    parts = keys.shape[2]
    # (sequences, kv_heads, parts, rows, PART)
    scores = torch.matmul(rows[:, :, None].expand(-1, -1, parts, -1, -1), keys.mT) / math.sqrt(width)
    # (parts, 1, PART): the position of each key.
    key = torch.arange(parts * PART, device=q.device).view(parts, 1, PART)
    scores = scores.masked_fill((key > places[:, None, :, None])[:, None], -math.inf)
    weights = (scores - scores.amax((2, 4), keepdim=True)).exp()
    # One sum for each part; the parts are then added in order.
    part_totals = weights.sum(-1, keepdim=True)
    part_sums = torch.matmul(weights, values)
    totals = part_totals[:, :, 0]
    sums = part_sums[:, :, 0]
    for part in range(1, parts):
        totals = totals + part_totals[:, :, part]
        sums = sums + part_sums[:, :, part]
    out = (sums / totals)[:, :, : queries * (heads // kv_heads)]
    return out.unflatten(2, (queries, -1)).transpose(1, 2).flatten(2, 3)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None = None, *, reference: bool = False
) -> Tensor:
    """Return `kernels.attention.attention` with the bits of `attend_exactly`, for training.

    q is `(batch, seq, heads, head_dim)`, k and v `(batch, seq, kv_heads, head_dim)`. `mask` is None, or a dense mask of
    packed documents. A document begins at each token that sees only itself. The backward is that of `attention`.
    """
    return _ExactAttention.apply(q, k, v, mask, reference)


class _ExactAttention(torch.autograd.Function):
    """`exact_attention` with the backward of `kernels.attention.attention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, reference: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.attention_mask = mask
        ctx.reference = reference
        out = torch.empty_like(q)
        for row, starts in enumerate(_document_starts(q, mask)):
            for start, stop in zip(starts, [*starts[1:], q.shape[1]], strict=True):
                for begin in range(start, stop, QUERIES):
                    end = min(begin + QUERIES, stop)
                    positions = torch.arange(begin - start, end - start, device=q.device)[None]
                    keys = k[row : row + 1, start:end]
                    values = v[row : row + 1, start:end]
                    # Queries `begin` to end - 1 of one document, over the document's keys up to the last of these queries.
                    out[row, begin:end] = attend_exactly(q[row : row + 1, begin:end], keys, values, positions)[0]
        return out

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's own signature is (ctx, *grad_outputs)
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = attention(q, k, v, ctx.attention_mask, reference=ctx.reference)
        return *torch.autograd.grad(out, inputs, grad_out), None, None


def _document_starts(q: Tensor, mask: AttentionMask | None) -> list[list[int]]:
    """Return the index of the first token of each document, for each sequence of the batch."""
    batch = q.shape[0]
    if mask is None:
        return [[0]] * batch
    assert mask.dense is not None and mask.cap is None, "exact attention has dense masks of documents"
    # A token that sees one key sees only itself, so it is the first of its document.
    single = (mask.dense[:, 0].sum(-1) == 1).expand(batch, -1)
    return [row.nonzero()[:, 0].tolist() for row in single]


@cache
def rows_are_alike(hidden: int, dtype: torch.dtype) -> bool:
    """Return whether this CPU computes a row of a matmul, a softmax and attention alike in batches of any number of rows.

    Batches have at least ROWS rows. The test uses layers of `hidden` inputs. CPUs with AVX2 and with AVX-512 pass in fp32
    with torch 2.13; others may not.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x = draw(4 * PART, hidden)
    weight = draw(TESTED_OUTPUTS, hidden)
    whole = F.linear(x, weight)
    # The same functions are computed for the first `count` rows below, and must give the same bits.
    log_sums = whole.logsumexp(-1)
    gates = F.silu(whole)
    q, k, v = (draw(1, 2 * PART, 2, 32) for _ in range(3))
    positions = torch.arange(2 * PART)[None]
    attended = attend_exactly(q, k, v, positions)
    for count in (ROWS, 3 * ROWS, 7 * ROWS):
        rows = F.linear(x[:count], weight)
        part = slice(count - 1, count)
        alone = attend_exactly(q[:, part], k[:, :count], v[:, :count], positions[:, part])
        pairs = ((rows, whole[:count]), (rows.logsumexp(-1), log_sums[:count]), (F.silu(rows), gates[:count]))
        if not all(torch.equal(*pair) for pair in pairs) or not torch.equal(alone, attended[:, part]):
            return False
    return True


def padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Return x with zeros after its last elements in dimension `dim`, up to a multiple of `multiple`."""
    missing = -x.shape[dim] % multiple
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
