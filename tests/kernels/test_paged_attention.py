"""The plain references of the paged cache: against attention and rotation over whole sequences, without blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.kernels.attention import attention, make_mask
from meshwright.kernels.paged_attention import paged_attention, prompt_attention, rotate_and_write, write_cache
from meshwright.kernels.rope import rotary_tables, rotate

CPU = torch.device("cpu")
LENGTHS, COUNTS = [7, 1, 16, 13, 0], [1, 1, 5, 13, 1]
"""Tokens and queries of the sequences of a step; the last is padding."""
BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


def draws(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def block_tables(lengths: list[int], block: int, seed: int = 0) -> tuple[Tensor, int]:
    """Distinct random blocks for each sequence, -1 behind its last one, and the number of blocks of the cache."""
    needed = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    tables = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    start = 0
    for sequence, count in enumerate(needed):
        tables[sequence, :count] = order[start : start + count]
        start += count
    return tables, len(order)


def slots_of(table: Tensor, first: int, length: int, block: int) -> Tensor:
    position = torch.arange(first, length)
    return table[position // block].long() * block + position % block


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def filled_cache(
    lengths: list[int], block: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """The view of layer 1 of 3 of a cache of NaN that `write_cache` filled, its block tables, and the keys and values."""
    tables, blocks = block_tables(lengths, block)
    cache = torch.full((blocks, 3, 2, kv_heads, block, dim), torch.nan, dtype=dtype)
    layer = cache[:, 1]
    sequences = []
    for index, length in enumerate(lengths):
        k, v = draws(index, (length, kv_heads, dim), (length, kv_heads, dim), dtype=dtype)
        write_cache(k, v, layer, slots_of(tables[index], 0, length, block), reference=True)
        sequences.append((k, v))
    assert cache[:, ::2].isnan().all(), "only the layer is written"
    return layer, tables, sequences


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_equals_attention_over_whole_sequences(window: int | None, reference: bool) -> None:
    layer, tables, sequences = filled_cache(LENGTHS, BLOCK, KV_HEADS, DIM, torch.float64)
    whole = [draws(50 + s, (length, HEADS, DIM))[0] for s, length in enumerate(LENGTHS)]
    counts = [min(count, length) or 1 for count, length in zip(COUNTS, LENGTHS, strict=True)]
    q = torch.cat([*(x[-count:] for x, count in zip(whole[:-1], counts[:-1], strict=True)), torch.ones(1, HEADS, DIM)])
    if window is not None:
        for sequence, (count, length) in enumerate(zip(counts, LENGTHS, strict=True)):
            tables[sequence, : max(0, length - count - window + 1) // BLOCK] = -1  # a freed block
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = paged_attention(q, layer, tables, lengths, starts_of(counts), window=window, reference=reference)
    expected = []
    for x, (k, v), count, length in zip(whole[:-1], sequences[:-1], counts[:-1], LENGTHS[:-1], strict=True):
        mask = make_mask(None, window, length, CPU, reference=True)
        expected.append(attention(x[None], k[None], v[None], mask, reference=True)[0, -count:])
    assert torch.allclose(out[:-1], torch.cat(expected), rtol=0, atol=1e-13)
    assert not out[-1].any(), "padding gives zeros"


@pytest.mark.parametrize("window", [None, 2])
def test_queries_before_the_first_token_are_padding(window: int | None) -> None:
    layer, tables, _ = filled_cache([2, 9], BLOCK, KV_HEADS, DIM, torch.float64)
    (q,) = draws(3, (8, HEADS, DIM))
    lengths = torch.tensor([2, 9], dtype=torch.int32)
    padded = paged_attention(q, layer, tables, lengths, starts_of([4, 4]), window=window)
    expected = paged_attention(q[2:], layer, tables, lengths, starts_of([2, 4]), window=window)
    assert torch.equal(padded[2:], expected) and not padded[:2].any()


@pytest.mark.parametrize("window", [None, 3])
def test_prompts_equal_attention_of_each(window: int | None) -> None:
    lengths = [5, 1, 9]
    q, k, v = draws(0, (15, HEADS, DIM), (15, KV_HEADS, DIM), (15, KV_HEADS, DIM))
    out = torch.empty_like(q)
    prompt_attention(q, k, v, lengths, out, window=window)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), lengths, strict=True)
    expected = [
        attention(*(x[None] for x in part), make_mask(None, window, length, CPU, reference=True), reference=True)[0]
        for *part, length in parts
    ]
    assert torch.allclose(out, torch.cat(expected), rtol=0, atol=1e-13)


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rotation_and_write(dtype: torch.dtype, rotary: bool) -> None:
    """The same bits as the trainer's rotation, in the slots of the tokens; padding writes nothing."""
    q, k, v = draws(0, (6, HEADS, DIM), (6, KV_HEADS, DIM), (6, KV_HEADS, DIM), dtype=dtype)
    positions, slots = torch.tensor([3, 0, 1, 30, 2, 0]), torch.tensor([9, -1, 3, 0, 4, -1])
    cos, sin = rotary_tables(torch.arange(32), DIM, 1e4, None, dtype)
    step_tables = rotary_tables(positions[None], DIM, 1e4, None, dtype)
    layer = torch.zeros(3, 2, 2, KV_HEADS, BLOCK, DIM, dtype=dtype)[:, 1]
    keys = torch.empty_like(k)
    rotated = rotate_and_write(
        q, k, v, (cos[0, :, 0], sin[0, :, 0]) if rotary else None, positions, layer, slots, rotated_keys=keys
    )
    expected_q, expected_k = (rotate(x[None], step_tables)[0] if rotary else x for x in (q, k))
    assert torch.equal(rotated, expected_q) and torch.equal(keys, expected_k)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(layer[slot // BLOCK, 0, :, slot % BLOCK], expected_k[token])
            assert torch.equal(layer[slot // BLOCK, 1, :, slot % BLOCK], v[token])
    assert layer.ne(0).any(dim=-1).sum() == 4 * 2 * KV_HEADS


def test_fp8_cache_divides_by_its_scales() -> None:
    """e4m3 has 3 bits of mantissa, so rounding changes a number by at most 1/16 of itself; large numbers are limited."""
    k, v = draws(0, (5, KV_HEADS, DIM), (5, KV_HEADS, DIM), dtype=torch.float32)
    k[0, 0, 0] = 1e6
    scales = torch.tensor([[0.5, 0.25], [0.125, 1.0]])
    layer = torch.zeros(2, 2, KV_HEADS, BLOCK, DIM).to(torch.float8_e4m3fn)
    write_cache(k, v, layer, torch.arange(5), scales=scales)
    stored = layer.float().transpose(2, 3) * scales[:, None, :, None]
    stored = stored.transpose(0, 1).flatten(1, 2)[:, :5]
    assert stored[0, 0, 0, 0] == 448 * 0.5
    k[0, 0, 0] = 448 * 0.5
    torch.testing.assert_close(stored, torch.stack((k, v)), rtol=1 / 16, atol=2**-10)
    q = draws(1, (1, HEADS, DIM), dtype=torch.float32)[0]
    step = [torch.tensor(values, dtype=torch.int32) for values in ([[0, 1]], [5], [0, 1])]
    out = paged_attention(q, layer, *step, scales=scales)
    mask = make_mask(None, None, 5, CPU)
    expected = attention(q.expand(5, -1, -1)[None], stored[0][None], stored[1][None], mask, reference=True)[0, -1:]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
