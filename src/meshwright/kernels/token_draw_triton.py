"""The Triton kernel of `draw_from_scores`; imported only with a CUDA device, as CPU builds of torch lack Triton.

It reads the scores once. The plain operations would write several integers of 64 bits for each score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.token_draw import SERIES_BELOW

BLOCK = 1024
"""Tokens that a program reads at a time."""
BLOCKS = 8
"""Blocks that a program reads. A large vocabulary is spread over several programs."""


def draw(scores: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, blocks: int = BLOCKS) -> Tensor:
    """Draw a token for each row of scores; see `token_draw.draw_from_scores`."""
    count, vocab = scores.shape
    parts = triton.cdiv(vocab, BLOCK * blocks)
    best = torch.empty(count, parts, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(count, parts, dtype=torch.int64, device=scores.device)
    if count == 0:
        return tokens[:, 0]
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    _draw_part[(count, parts)](
        scores,
        temperatures.float().contiguous(),
        seeds.contiguous(),
        positions.contiguous(),
        best,
        tokens,
        vocab,
        scores.stride(0),
        parts,
        SERIES_BELOW=SERIES_BELOW,
        BLOCK=BLOCK,
        BLOCKS=blocks,
    )
    return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]


@triton.jit(do_not_specialize_on_alignment=["temperatures", "seeds", "positions"])
def _draw_part(
    scores,
    temperatures,
    seeds,
    positions,
    best_out,
    tokens_out,
    vocab,
    stride,
    parts,
    SERIES_BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + index)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    seed = tl.load(seeds + index)
    position = tl.load(positions + index).to(tl.uint32)
    key = _mix(_mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
    key = _mix(key ^ position)

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = tl.full((BLOCK,), vocab, tl.int32)
    for block in range(BLOCKS):
        tokens = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(scores + index * stride + tokens, tokens < vocab, float("-inf")).to(tl.float32)
        hashes = _mix(_mix(key + tokens.to(tl.uint32)) ^ key)
        v = (hashes.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
        series = v * (1.0 + v * (0.5 + v / 3.0))
        noise = -tl.log(tl.where(v < SERIES_BELOW, series, -tl.log(1.0 - v)))
        x = x / divisor
        x = tl.where(temperature > 0, x + noise, x)
        # Of equal scores the first token is taken, as by `argmax`; also if all are -inf.
        better = (x > best) | ((chosen == vocab) & (tokens < vocab))
        best = tl.where(better, x, best)
        chosen = tl.where(better, tokens, chosen)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, chosen, vocab), 0)
    tl.store(best_out + index * parts + part, largest)
    tl.store(tokens_out + index * parts + part, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit
def _mix(x) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
