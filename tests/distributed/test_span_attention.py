"""Attention of samples that any ranks divide equals attention of the whole sample: values and gradients, in float64.

The ranks of a sample pass keys and values round a ring or exchange tokens for heads.
Each rank runs its slots in order, one span after another with other ranks, as in a step; other tokens of a slot must not matter.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from meshwright.kernels.attention import attention
from meshwright.parallel.span_attention import span_attention
from meshwright.parallel.span_part import SpanPart, no_span
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.policies.sample_blocks import block_ranges
from meshwright.policies.sample_time import SampleTime
from tests.distributed.pool import Pool
from tests.slow import examples

Sample = tuple[int, tuple[int, ...], bool]
"""Tokens of a sample, the ranks that divide it, and whether they exchange tokens for heads."""
HEADS, KV_HEADS, HEAD_DIM = 24, 12, 2


def inputs(number: int, length: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result of a sample."""
    draw = torch.Generator().manual_seed(number)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, length, count, HEAD_DIM, generator=draw, dtype=torch.float64) for count in heads]


def part_of(x: torch.Tensor, sample: Sample, part: int) -> torch.Tensor:
    return torch.cat([x[:, block.start : block.stop] for block in block_ranges(sample[0], len(sample[1]), part)], dim=1)


def attend_on_rank(world, samples: list[Sample], capacity: int, recomputes: bool) -> list[list[torch.Tensor]]:
    """Forward of all of this rank's slots, then backward of all; returns result and gradients of each of its parts."""
    group, slots = torch.distributed.group.WORLD.group_name, []
    for number, sample in enumerate(samples):
        length, ranks, by_heads = sample
        if world.rank not in ranks:
            continue
        part = ranks.index(world.rank)
        span = SpanPart(length, ranks, part, by_heads)
        filler = [torch.full((1, capacity - span.tokens, *x.shape[2:]), 7.0).double() for x in inputs(number, 1)]
        parts = (part_of(x, sample, part) for x in inputs(number, length))
        q, k, v, grad = (torch.cat(pair, dim=1) for pair in zip(parts, filler, strict=True))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        encoded = span.encode(world.ranks)
        if recomputes:
            with torch.no_grad():
                span_attention(*leaves, encoded, group, reference=True)
        slots.append((span.tokens, leaves, grad, span_attention(*leaves, encoded, group, reference=True)))
    for _, _, grad, out in slots:
        out.backward(grad)
    results = []
    for tokens, leaves, _, out in slots:
        slot = [out.detach(), *(leaf.grad for leaf in leaves)]
        assert not any(x[:, tokens:].any() for x in slot), "tokens of others get no value and no gradient"
        results.append([x[:, :tokens] for x in slot])
    return results


def check(pool: Pool, ranks: int, samples: list[Sample], capacity: int, recomputes: bool = False) -> None:
    results = [iter(rank_results) for rank_results in pool.run(attend_on_rank, ranks, samples, capacity, recomputes)]
    for number, sample in enumerate(samples):
        q, k, v, grad = inputs(number, sample[0])
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, reference=True)
        out.backward(grad)
        for part, rank in enumerate(sample[1]):
            for ours, whole in zip(next(results[rank]), (out.detach(), *(leaf.grad for leaf in leaves)), strict=True):
                torch.testing.assert_close(ours, part_of(whole, sample, part), rtol=1e-10, atol=1e-12)


def drawn(seed: int, ranks: int, capacity: int) -> list[Sample]:
    """Samples one after another on any ranks, in any order of parts, down to parts of few or no tokens."""
    draw, samples = random.Random(seed), []
    for _ in range(draw.randint(3, 7)):
        chosen = tuple(draw.sample(range(ranks), draw.randint(2, ranks)))
        by_heads = draw.random() < 0.5
        least = 2 if by_heads else 2 * len(chosen) - 1
        samples.append((draw.randint(least, capacity * len(chosen) - 2 * len(chosen)), chosen, by_heads))
    return samples


@pytest.mark.parametrize("seed", range(examples(1, 60)))
def test_samples_on_any_ranks(pool: Pool, seed: int) -> None:
    check(pool, 4, drawn(seed, 4, 16), 16, recomputes=seed % 2 == 1)


def test_samples_where_a_balance_puts_them(pool: Pool) -> None:
    lengths = np.array([61, 50, 37, 21, 18, 17, 9, 4, 3])
    balance = balance_samples(lengths, RankPool(4, 16, SampleTime(1e-3, 1.0)))
    spans = {}
    for sample, parts, part, rank, slot in zip(
        balance.sample, balance.parts, balance.part, balance.rank, balance.slot, strict=True
    ):
        if parts > 1:
            spans.setdefault(int(sample), []).append((int(slot), int(part), int(rank)))
    assert {len(span) for span in spans.values()} >= {2, 4}
    ordered = sorted(spans.items(), key=lambda item: max(item[1])[0])
    samples = [
        (int(lengths[sample]), tuple(rank for _, _, rank in sorted(span, key=lambda p: p[1])), sample % 2 == 0)
        for sample, span in ordered
    ]
    check(pool, 4, samples, 16)


def test_a_slot_without_a_divided_sample_gets_zeros() -> None:
    q, k, v, _ = inputs(0, 5)
    out = span_attention(q.requires_grad_(), k, v, no_span(4), "unused", reference=True)
    out.sum().backward()
    assert not out.any() and q.grad is not None and not q.grad.any()


def test_a_part_survives_encoding() -> None:
    part = SpanPart(13, (3, 0), 1, by_heads=True)
    assert SpanPart.decode(part.encode(4)) == part
    assert part.encode(4).shape == no_span(4).shape and SpanPart.decode(no_span(4)) is None
