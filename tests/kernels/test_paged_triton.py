"""The Triton kernels of the paged cache against the plain references, in Triton's interpreter, with small shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels.norm import HeadNorms
from meshwright.kernels.paged_attention import (
    INVARIANT_PART,
    INVARIANT_SPLITS,
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    decode_splits,
    paged_attention,
    part_tokens,
    rotate_and_write,
)
from meshwright.kernels.rope import rotary_tables
from tests.kernels.test_paged_attention import draws, filled_cache, starts_of

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")


def step(
    lengths: list[int], counts: list[int], block: int, heads: int, kv_heads: int, dim: int, window: int | None
) -> tuple[Tensor, ...]:
    """Queries, cache, block tables, lengths and starts of a step; blocks before the window are freed."""
    layer, tables, _ = filled_cache(lengths, block, kv_heads, dim, torch.float32)
    for sequence, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if window is not None:
            tables[sequence, : max(0, length - count - window + 1) // block] = -(2**30)
    (q,) = draws(9, (sum(counts), heads, dim), dtype=torch.float32)
    return q, layer, tables, torch.tensor(lengths, dtype=torch.int32), starts_of(counts)


def drawn_options(heads: int, names: Iterable[str]) -> dict[str, Any]:
    """Options of attention by name: sinks, and a cap within the range of the scores."""
    (sinks,) = draws(4, (heads,), dtype=torch.float32)
    return {name: value for name, value in {"sinks": sinks, "cap": 0.7}.items() if name in names}


@interpreted
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "queries", "splits", "least", "window", "further"),
    [
        (2, 2, 16, 32, 1, 1, 1, None, {}),
        (2, 1, 24, 4, 2, 2, 1, 20, {"sinks", "cap"}),
        (2, 1, 16, 4, 1, 3, 20, None, {}),  # 50 tokens are four tiles of 16, so they have two parts
        pytest.param(4, 2, 24, 16, 1, 3, 1, None, {"sinks"}, marks=pytest.mark.slow),
        pytest.param(3, 1, 16, 4, 2, 2, 1, None, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, 16, 32, 3, 4, 1, 20, {"cap"}, marks=pytest.mark.slow),
        pytest.param(2, 2, 16, 32, 1, 1, 1, None, {"sinks"}, marks=pytest.mark.slow),
        pytest.param(6, 1, 16, 8, 1, 2, 1, 13, {}, marks=pytest.mark.slow),
    ],
)
def test_decode(
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    queries: int,
    splits: int,
    least: int,
    window: int | None,
    further: set[str],
) -> None:
    from meshwright.kernels.paged_decode_triton import AttentionLaunch, paged_decode

    lengths = [0, 50, 3, 1]  # with more queries the last has some before its first token
    counts = [queries] * len(lengths)
    q, layer, tables, context, starts = step(lengths, counts, block, heads, kv_heads, dim, window)
    out = torch.full_like(q, torch.nan)
    paged_decode(
        q,
        layer,
        tables,
        context,
        out,
        queries=queries,
        splits=splits,
        least=least,
        window=window,
        scales=None,
        **(options := drawn_options(heads, further)),
        launch=AttentionLaunch(16, 4, 1),
    )
    expected = paged_attention(q, layer, tables, context, starts, window=window, **options, reference=True)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)


@interpreted
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "window", "further"),
    [
        (2, 1, 16, 32, None, {}),
        (3, 1, 24, 8, 20, {"sinks", "cap"}),
        pytest.param(4, 2, 16, 32, None, {"sinks"}, marks=pytest.mark.slow),
        pytest.param(3, 1, 24, 8, None, {}, marks=pytest.mark.slow),
        pytest.param(4, 2, 16, 32, 20, {"cap"}, marks=pytest.mark.slow),
        pytest.param(2, 1, 16, 4, 1, {"sinks"}, marks=pytest.mark.slow),
        pytest.param(2, 2, 16, 16, 40, {"cap"}, marks=pytest.mark.slow),
    ],
)
def test_chunks(heads: int, kv_heads: int, dim: int, block: int, window: int | None, further: set[str]) -> None:
    """Chunks at the begin, in the middle and at the end of prompts, longer and shorter than a program's queries."""
    from meshwright.kernels.paged_prefill_triton import AttentionLaunch, paged_prefill

    lengths, counts = [20, 60, 5, 18], [20, 17, 1, 18]
    q, layer, tables, context, starts = step(lengths, counts, block, heads, kv_heads, dim, window)
    out = torch.full_like(q, torch.nan)
    first = counts[0]
    paged_prefill(
        q,
        layer,
        tables[1:],
        context[1:],
        starts[1:],
        out,
        queries=len(q) - first,
        window=window,
        scales=None,
        **(options := drawn_options(heads, further)),
        launch=AttentionLaunch(16, 4, 1),
    )
    expected = paged_attention(q, layer, tables, context, starts, window=window, **options, reference=True)
    torch.testing.assert_close(out[first:], expected[first:], rtol=2e-6, atol=2e-6)
    assert out[:first].isnan().all(), "rows of other sequences are not written"


@interpreted
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [
        (3, 1, 24, True),
        pytest.param(8, 2, 16, False, marks=pytest.mark.slow),
        pytest.param(40, 20, 8, True, marks=pytest.mark.slow),
    ],
)
def test_rotation_and_write(heads: int, kv_heads: int, dim: int, rotary: bool) -> None:
    """Views of the fused projection, as the model gives them."""
    from meshwright.kernels.cache_write_triton import rotate_write

    (qkv,) = draws(0, (4, heads + 2 * kv_heads, dim), dtype=torch.float32)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    positions, slots = torch.tensor([3, 0, 1, 30]), torch.tensor([9, -1, 3, 4])
    cos, sin = rotary_tables(torch.arange(32), dim, 1e4, None, torch.float32)
    tables = (cos[0, :, 0], sin[0, :, 0]) if rotary else None
    layers = torch.zeros(2, 3, 3, 2, kv_heads, 4, dim)
    keys = torch.empty(2, 4, kv_heads, dim)
    out = torch.empty(4, heads, dim)
    rotate_write(q, k, v, tables, positions, layers[0, :, 1], slots, out, keys[0], None)
    expected = rotate_and_write(
        q, k, v, tables, positions, layers[1, :, 1], slots, rotated_keys=keys[1], reference=True
    )
    assert torch.equal(out, expected)
    assert torch.equal(layers[0], layers[1]) and torch.equal(keys[0], keys[1])
    rotate_write(k, k, v, None, slots, layers[0, :, 2], slots, None, None, None)
    rotate_and_write(q, k, v, None, positions, layers[1, :, 2], slots, reference=True)
    assert torch.equal(layers[0], layers[1])


@interpreted
@pytest.mark.parametrize(("dim", "plus_one"), [(24, True), pytest.param(16, False, marks=pytest.mark.slow)])
def test_heads_are_normed_before_rotation(dim: int, plus_one: bool) -> None:
    from meshwright.kernels.cache_write_triton import rotate_write

    (qkv,) = draws(0, (4, 7, dim), dtype=torch.float32)
    q, k, v = qkv.split((3, 2, 2), dim=1)
    query, key = draws(1, (dim,), (dim,), dtype=torch.float32)
    norms = HeadNorms(query, key, 1e-3, plus_one)
    positions, slots = torch.tensor([3, 0, 1, 30]), torch.tensor([9, -1, 3, 4])
    cos, sin = rotary_tables(torch.arange(32), dim, 1e4, None, torch.float32)
    tables = (cos[0, :, 0], sin[0, :, 0])
    layers, out = torch.zeros(2, 3, 2, 2, 4, dim), torch.empty(4, 3, dim)
    rotate_write(q, k, v, tables, positions, layers[0], slots, out, None, None, norms)
    expected = rotate_and_write(q, k, v, tables, positions, layers[1], slots, norms=norms, reference=True)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layers[0], layers[1], rtol=1e-6, atol=1e-6)


@interpreted
def test_fp8_cache() -> None:
    """A cache of e4m3 with a scale per head; torch fills it, because the interpreter rounds wrongly to fp8."""
    from meshwright.kernels.paged_decode_triton import AttentionLaunch, paged_decode
    from meshwright.kernels.paged_prefill_triton import paged_prefill

    q, layer, tables, context, starts = step([20, 9], [2, 2], 16, 2, 2, 16, None)
    layer, scales = layer.nan_to_num(0.0).to(torch.float8_e4m3fn), torch.tensor([[0.5, 2.0], [0.25, 1.5]])
    expected = paged_attention(q, layer, tables, context, starts, scales=scales, reference=True)
    launch, common = AttentionLaunch(16, 4, 1), {"queries": 2, "window": None, "scales": scales}
    decoded, chunked = torch.empty_like(q), torch.empty_like(q)
    paged_decode(q, layer, tables, context, decoded, splits=1, launch=launch, **common)
    paged_prefill(q, layer, tables, context, starts, chunked, launch=launch, **common | {"queries": 4})
    torch.testing.assert_close(decoded, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(chunked, expected, rtol=2e-6, atol=2e-6)


def test_parts_are_longer_where_programs_are_many() -> None:
    """A thousand tokens are divided where multiprocessors would be idle, and in fp8 until each has four programs."""
    assert part_tokens(1, 132) < MIN_SPLIT_TOKENS
    assert 3 <= 1056 // part_tokens(96, 132) <= 4
    for programs in (128, 256, 512):
        assert 2 * part_tokens(programs, 132) > 1056, "one part"
    assert part_tokens(128, 132) == 1489  # the docstring's example
    assert 1056 // part_tokens(128, 132, 1) == 4
    assert 1056 // part_tokens(256, 132, 1) == 2
    assert 32768 // part_tokens(128, 132) > 20, "a long context is divided beside short ones"


def test_splits_fill_the_device() -> None:
    """Enough programs for every multiprocessor, and no more parts than a context has tiles."""
    assert decode_splits(1024, 4096, 132) == 1
    assert decode_splits(256, 4096, 132) * 256 >= 2 * 132
    assert decode_splits(8, 1024, 132) == 16
    assert decode_splits(8, 10**6, 132) == MAX_SPLITS
    assert decode_splits(8, 1, 132) == 1
    for programs in (1, 8, 256, 4096):
        assert decode_splits(programs, 4096, 132, invariant=True) == INVARIANT_SPLITS


@pytest.mark.parametrize("tile", [64, 128])
def test_the_parts_of_an_invariant_context_depend_on_its_length_alone(tile: int) -> None:
    """Not on the longest context that the block table has room for, which decides how many programs there are."""
    least = INVARIANT_PART // tile
    for length in (1, 255, 256, 257, 400, 2000, 4096, 9000):
        tiles = -(-length // tile)
        parts = {
            max(min(tiles // least, decode_splits(8, room, 132, invariant=True)), 1)
            for room in range(length, 3 * length + 3000, 16)
        }
        assert parts == {max(min(tiles // least, INVARIANT_SPLITS), 1)}
