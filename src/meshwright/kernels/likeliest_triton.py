"""The Triton kernel of `keep_likeliest`; imported only with a CUDA device, as CPU builds of torch lack Triton.

The threshold of top-k is the smallest number with fewer than k scores above it; that of top-p the smallest with less than p of the
probability above it. Each is searched digit by digit: the bits of a float, as an ordered integer, are eight digits of base 16, and one
pass over the scores sums what is above each of the 16 candidates. So 8 passes find the exact threshold, where a sort needs more memory
traffic and several kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Scores that a program reads at a time."""
WARPS = 16
"""Warps of a program."""


def keep(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, block: int = BLOCK) -> Tensor:
    """Scores without those that are removed, in fp32; see `likeliest.keep_likeliest`."""
    samples, vocab = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    kept = torch.empty(samples, vocab, dtype=torch.float32, device=scores.device)
    if samples:
        options = top_k.int().contiguous(), top_p.float().contiguous(), min_p.float().contiguous()
        _keep[(samples,)](scores, kept, *options, vocab, scores.stride(0), BLOCK=block, num_warps=WARPS)
    return kept


@triton.jit(do_not_specialize_on_alignment=["top_k", "top_p", "min_p"])
def _keep(scores, kept, top_k, top_p, min_p, vocab, stride, BLOCK: tl.constexpr) -> None:
    sample = tl.program_id(0).to(tl.int64)
    scores += sample * stride
    kept += sample * vocab
    k = tl.load(top_k + sample)
    p = tl.load(top_p + sample)
    ratio = tl.load(min_p + sample)
    tokens = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        best = tl.maximum(best, _load(scores, start + tokens, vocab))
    largest = tl.max(best, 0)

    lowest = tl.full((), -(2**31), tl.int32)
    if (k > 0) & (k < vocab):
        lowest = _threshold(scores, vocab, largest, k.to(tl.float32), False, BLOCK)
    if p < 1:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _load(scores, start + tokens, vocab)
            sums += tl.where(_ordered(x) >= lowest, tl.exp(x - largest), 0.0)
        # With top_p = 0 the likeliest stays: nothing is above it.
        target = tl.maximum(p * tl.sum(sums, 0), 1e-30)
        lowest = tl.maximum(lowest, _threshold(scores, vocab, largest, target, True, BLOCK))
    for start in range(0, vocab, BLOCK):
        x = _load(scores, start + tokens, vocab)
        stays = (_ordered(x) >= lowest) & ((tl.exp(x - largest) >= ratio) | (x == largest))
        tl.store(kept + start + tokens, tl.where(stays, x, float("-inf")), start + tokens < vocab)


@triton.jit
def _threshold(scores, vocab, largest, target, PROBABILITY: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The smallest ordered number above which the sum of weights is less than `target`; a weight is 1 or the probability."""
    tokens = tl.arange(0, BLOCK)
    digits = tl.arange(0, 16)
    prefix = tl.full((), -(2**31), tl.int64)
    shift = tl.full((), 28, tl.int64)
    for _ in range(8):
        # The last number with each digit: it decides whether the threshold's digit is larger.
        ends = (prefix + ((digits + 1).to(tl.int64) << shift) - 1).to(tl.int32)
        sums = tl.zeros((16, BLOCK), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _load(scores, start + tokens, vocab)
            weights = tl.exp(x - largest) if PROBABILITY else tl.where(start + tokens < vocab, 1.0, 0.0)
            sums += tl.where(_ordered(x)[None, :] > ends[:, None], weights[None, :], 0.0)
        digit = tl.sum((tl.sum(sums, 1) >= target).to(tl.int64), 0)
        prefix += tl.minimum(digit, 15) << shift
        shift -= 4
    return prefix.to(tl.int32)


@triton.jit
def _load(scores, tokens, vocab) -> tl.tensor:
    """Scores in fp32, without a negative zero; -inf beyond the vocabulary."""
    return tl.load(scores + tokens, tokens < vocab, float("-inf")).to(tl.float32) + 0.0


@triton.jit
def _ordered(x) -> tl.tensor:
    """Integers in the order of the floats `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
