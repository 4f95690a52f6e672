"""Latent attention over the paged cache: the plain reference against expanded heads, the kernels against the reference.

The kernels run in Triton's interpreter, with small shapes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from meshwright.kernels.attention import attention
from meshwright.kernels.latent_attention import latent_attention, rotate_and_write_latents
from meshwright.kernels.rope import RotaryTables, rotary_tables, rotate_neighbours
from tests.kernels.test_paged_attention import BLOCK, COUNTS, LENGTHS, block_tables, draws, slots_of, starts_of

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
E4M3 = torch.float8_e4m3fn


def tables_of(rotated: int, dtype: torch.dtype, positions: int = 128) -> RotaryTables:
    cos, sin = rotary_tables(torch.arange(positions), rotated, 1e4, None, dtype)
    return cos[0, :, 0], sin[0, :, 0]


def filled(
    lengths: list[int], block: int, rank: int, rotated: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Layer 1 of 3 of a cache of NaN with some sequences, its block tables, and latents and keys before rotation."""
    tables, blocks = block_tables(lengths, block)
    cache = torch.full((blocks, 3, block, rank + rotated), torch.nan, dtype=dtype)
    sequences = []
    for index, length in enumerate(lengths):
        latent, key = draws(index, (length, rank), (length, rotated), dtype=dtype)
        slots, positions = slots_of(tables[index], 0, length, block), torch.arange(length)
        places = (tables_of(rotated, dtype), positions, cache[:, 1], slots)
        rotate_and_write_latents(torch.empty(length, 1, rotated, dtype=dtype), key, latent, *places, reference=True)
        sequences.append((latent, key))
    assert cache[:, ::2].isnan().all(), "only the layer is written"
    return cache[:, 1], tables, sequences


@pytest.mark.parametrize("reference", [True, False])
def test_equals_attention_with_expanded_heads(reference: bool) -> None:
    """Random matrices of each head give its keys and values; the reference absorbs them into queries and results."""
    heads, rank, rotated, unrotated, width, dtype = 3, 10, 6, 5, 4, torch.float64
    layer, tables, sequences = filled(LENGTHS, BLOCK, rank, rotated, dtype)
    key_matrices, value_matrices = draws(70, (heads, unrotated, rank), (heads, width, rank))
    counts = [min(count, length) or 1 for count, length in zip(COUNTS, LENGTHS, strict=True)]
    queries, expected = [], []
    for index, ((latent, key), count) in enumerate(zip(sequences, counts, strict=True)):
        length, (cos, sin) = len(latent), tables_of(rotated, dtype)
        ((plain_q, rotary_q),) = [draws(50 + index, (length or 1, heads, unrotated), (length or 1, heads, rotated))]
        at = slice(0, length or 1)
        step_tables = cos[at, None], sin[at, None]
        rotary_q = rotate_neighbours(rotary_q, step_tables)
        queries.append((plain_q[-count:], rotary_q[-count:]))
        if length:
            shared = rotate_neighbours(key[:, None], step_tables).expand(-1, heads, -1)
            k = torch.cat((torch.einsum("hdr,tr->thd", key_matrices, latent), shared), dim=-1)
            v = torch.einsum("hdr,tr->thd", value_matrices, latent)
            q = torch.cat((plain_q, rotary_q), dim=-1)
            expected.append(attention(q[None], k[None], v[None], reference=True)[0, -count:])
    absorbed = torch.einsum("qhd,hdr->qhr", torch.cat([q for q, _ in queries]), key_matrices)
    step = (layer, tables, torch.tensor(LENGTHS, dtype=torch.int32), starts_of(counts))
    scale = 1 / math.sqrt(unrotated + rotated)
    sums = latent_attention(absorbed, torch.cat([r for _, r in queries]), *step, scale=scale, reference=reference)
    out = torch.einsum("qhr,hdr->qhd", sums, value_matrices)
    assert torch.allclose(out[:-1], torch.cat(expected), rtol=0, atol=1e-13)
    assert not out[-1].any(), "padding gives zeros"


def test_fp8_rows_are_rounded_and_limited() -> None:
    latent, key = draws(0, (5, 8), (5, 4), dtype=torch.float32)
    latent[2, 3] = 1e4
    cache, slots = torch.zeros(2, 4, 12).to(E4M3), torch.tensor([6, 1, -1, 0, 3])
    places = (tables_of(4, torch.float32), torch.arange(5), cache, slots)
    _, rotated = rotate_and_write_latents(torch.empty(5, 1, 4), key, latent.roll(1, 0), *places, reference=True)
    rows = torch.cat((latent.roll(1, 0), rotated), dim=-1).clamp(-448, 448).to(E4M3).float()
    stored = cache.float().flatten(0, 1)
    assert torch.equal(stored[slots[slots >= 0]], rows[slots >= 0]) and stored.max() == 448
    assert not stored[[2, 4, 5, 7]].any()


class Step(NamedTuple):
    """Queries `(queries, heads, ·)` for latents and rotated keys, the latter's cache, and the tensors of a step."""

    q: Tensor
    rotary: Tensor
    layer: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def of(cls, lengths: list[int], counts: list[int], block: int, heads: int, rank: int, rotated: int) -> Step:
        layer, tables, _ = filled(lengths, block, rank, rotated, torch.float32)
        # As a matmul for each head leaves them: heads first in memory.
        q, rotary = draws(9, (heads, sum(counts), rank), (sum(counts), heads, rotated), dtype=torch.float32)
        return cls(
            q.transpose(0, 1), rotary, layer, tables, torch.tensor(lengths, dtype=torch.int32), starts_of(counts)
        )


@interpreted
@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "block", "splits", "fp8"),
    [
        (3, 20, 6, 8, 2, False),
        pytest.param(20, 16, 16, 32, 1, False, marks=pytest.mark.slow),
        pytest.param(2, 32, 8, 16, 3, True, marks=pytest.mark.slow),
    ],
)
def test_decode(heads: int, rank: int, rotated: int, block: int, splits: int, fp8: bool) -> None:
    pytest.importorskip("triton")
    from meshwright.kernels.latent_attention_triton import latent_decode
    from meshwright.kernels.paged_decode_triton import AttentionLaunch

    step = Step.of([0, 50, 3], [1, 1, 1], block, heads, rank, rotated)
    if fp8:
        step = step._replace(layer=step.layer.nan_to_num(0.0).to(E4M3))
    out = torch.full((3, heads, rank), torch.nan)
    latent_decode(*step[:5], out, scale=0.3, splits=splits, launch=AttentionLaunch(16, 4, 1))
    expected = latent_attention(*step, scale=0.3, reference=True)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)


@interpreted
@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "block", "fp8"),
    [
        (3, 20, 6, 8, False),
        pytest.param(20, 16, 16, 32, False, marks=pytest.mark.slow),
        pytest.param(16, 32, 8, 16, True, marks=pytest.mark.slow),
    ],
)
def test_chunks(heads: int, rank: int, rotated: int, block: int, fp8: bool) -> None:
    """Chunks at the begin, in the middle and at the end of prompts, longer and shorter than a program's queries."""
    pytest.importorskip("triton")
    from meshwright.kernels.latent_attention_triton import latent_chunks
    from meshwright.kernels.paged_decode_triton import AttentionLaunch

    counts = [12, 7, 1, 9]
    step = Step.of([12, 40, 5, 9], counts, block, heads, rank, rotated)
    if fp8:
        step = step._replace(layer=step.layer.nan_to_num(0.0).to(E4M3))
    first, out = counts[0], torch.full((sum(counts), heads, rank), torch.nan)
    behind = (step.layer, step.tables[1:], step.lengths[1:], step.starts[1:])
    latent_chunks(*step[:2], *behind, out, queries=len(out) - first, scale=0.3, launch=AttentionLaunch(16, 4, 1))
    expected = latent_attention(*step, scale=0.3, reference=True)
    torch.testing.assert_close(out[first:], expected[first:], rtol=2e-6, atol=2e-6)
    assert out[:first].isnan().all(), "rows of other sequences are not written"


@interpreted
@pytest.mark.parametrize("heads", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_rotation_and_write(heads: int) -> None:
    """Views of the projections, as the model gives them."""
    pytest.importorskip("triton")
    from meshwright.kernels.latent_write_triton import rotate_write_latents

    rank, rotated, unrotated = 20, 6, 5
    q, down = draws(0, (4, heads, unrotated + rotated), (4, 7 + rank + rotated), dtype=torch.float32)
    q, latent, key = q[..., unrotated:], down[:, 7 : 7 + rank], down[:, 7 + rank :]
    tables, positions, slots = (
        tables_of(rotated, torch.float32),
        torch.tensor([3, 0, 1, 30]),
        torch.tensor([9, -1, 3, 4]),
    )
    caches = torch.zeros(2, 3, 3, 4, rank + rotated)
    out, rotated_key = torch.empty(4, heads, rotated), torch.empty(4, rotated)
    rotate_write_latents(q, key, latent, tables, positions, caches[0, :, 1], slots, out, rotated_key)
    expected = rotate_and_write_latents(q, key, latent, tables, positions, caches[1, :, 1], slots, reference=True)
    assert torch.equal(out, expected[0]) and torch.equal(rotated_key, expected[1])
    assert torch.equal(caches[0], caches[1]) and caches[0].any()
