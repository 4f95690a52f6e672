"""A Triton kernel that combines two partial results of attention, for `kernels.partial`. Import it only with CUDA.

With context parallelism every sample has another length, and the parts of it are slices with different strides. A function
compiled by torch would be compiled again for each kind of slice, and torch gives up after eight. This kernel takes
lengths and strides as ordinary numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements per program. A program takes whole heads of one query."""


def combine(out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Overwrite `out` and `logsumexp` with the attention over the keys of both partial results.

    `out` and `other` are `(batch, queries, heads, head_dim)`; the logsumexps are `(batch, heads, queries)`. Any tensor may
    be a slice. `out`, `logsumexp` and `other_logsumexp` are fp32 or fp64.
    """
    batch, queries, heads, head_dim = out.shape
    if not out.numel():
        return
    width = triton.next_power_of_2(head_dim)
    block = min(max(BLOCK // width, 1), triton.next_power_of_2(heads))
    strides = (*out.stride(), *other.stride(), *logsumexp.stride(), *other_logsumexp.stride())
    grid = (batch * queries, triton.cdiv(heads, block))
    _combine[grid](out, other, logsumexp, other_logsumexp, queries, heads, head_dim, *strides, block, width)


_NUMBERS = [
    "queries",
    *(f"{tensor}_{dim}" for tensor in ("out", "other") for dim in ("batch", "query", "head", "element")),
    *(f"{sums}_{dim}" for sums in ("sum", "other_sum") for dim in ("batch", "head", "query")),
]


@triton.jit(do_not_specialize=_NUMBERS)
def _combine(
    out,
    other,
    logsumexp,
    other_logsumexp,
    queries,
    heads,
    head_dim,
    out_batch,
    out_query,
    out_head,
    out_element,
    other_batch,
    other_query,
    other_head,
    other_element,
    sum_batch,
    sum_head,
    sum_query,
    other_sum_batch,
    other_sum_head,
    other_sum_query,
    block: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Combine `block` heads of one query. Grid: (batch · queries, parts of the heads).

    `out_batch`, `out_query` … are the strides of the tensors in elements.
    """
    batch = (tl.program_id(0) // queries).to(tl.int64)
    query = (tl.program_id(0) % queries).to(tl.int64)
    head = tl.program_id(1) * block + tl.arange(0, block)
    element = tl.arange(0, width)
    is_head = head < heads
    is_element = is_head[:, None] & (element < head_dim)[None, :]
    sums = logsumexp + batch * sum_batch + query * sum_query + head * sum_head
    other_sums = other_logsumexp + batch * other_sum_batch + query * other_sum_query + head * other_sum_head
    own = tl.load(sums, is_head, other=0.0)
    others = tl.load(other_sums, is_head, other=0.0)
    largest = tl.maximum(own, others)
    combined = largest + tl.log(tl.exp(own - largest) + tl.exp(others - largest))
    values = out + batch * out_batch + query * out_query + head[:, None] * out_head + element[None, :] * out_element
    summand = other + batch * other_batch + query * other_query + head[:, None] * other_head
    added = tl.load(summand + element[None, :] * other_element, is_element, other=0.0).to(out.dtype.element_ty)
    kept = tl.load(values, is_element, other=0.0)
    weight = tl.exp(own - combined)
    other_weight = tl.exp(others - combined)
    tl.store(values, kept * weight[:, None] + added * other_weight[:, None], is_element)
    tl.store(sums, combined, is_head)
