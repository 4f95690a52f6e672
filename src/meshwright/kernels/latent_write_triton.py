"""The Triton kernel of `rotate_and_write_latents`. Import it only with a CUDA device, because CPU builds of torch lack Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.rope import RotaryTables

MAX_HEADS = 16
"""Maximum number of heads of a token that one program rotates."""


def rotate_write_latents(
    q: Tensor,
    key: Tensor,
    latent: Tensor,
    tables: RotaryTables,
    positions: Tensor,
    cache_layer: Tensor,
    slots: Tensor,
    out: Tensor,
    rotated_key: Tensor,
) -> None:
    """Rotate q into `out`, and key into `rotated_key` and into the cache, and copy latent into the cache.

    See `latent_attention.rotate_and_write_latents` for the shapes.
    """
    tokens, heads, rotated = q.shape
    if tokens == 0:
        return
    tile = min(MAX_HEADS, triton.next_power_of_2(heads))
    parts = triton.cdiv(heads, tile)
    _rotate_write[(tokens, parts + 1)](
        q,
        key,
        latent,
        *tables,
        positions,
        cache_layer,
        slots,
        out,
        rotated_key,
        *q.stride()[:2],
        key.stride(0),
        latent.stride(0),
        cache_layer.stride(0),
        PARTS=parts,
        HEADS=heads,
        ROTATED=rotated,
        PAIRS=triton.next_power_of_2(rotated // 2),
        RANK=latent.shape[1],
        DIMS=triton.next_power_of_2(latent.shape[1]),
        TILE=tile,
        BLOCK=cache_layer.shape[1],
        SCALED=cache_layer.element_size() == 1,
        num_warps=4,
        enable_fp_fusion=False,  # the trainer rounds both products of a rotation before it adds them
    )


@triton.jit
def _rotated(source, cos, sin, used) -> tuple[tl.tensor, tl.tensor]:
    """Return both halves of the rotated pairs (2i, 2i + 1) at `source`, computed in fp32 and rounded once.

    `source` points to the first number of each pair. The result pairs (i, i + width / 2).
    """
    first = tl.load(source, mask=used, other=0.0).to(tl.float32)
    second = tl.load(source + 1, mask=used, other=0.0).to(tl.float32)
    dtype = source.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _store_limited(target, x, used, SCALED: tl.constexpr) -> None:
    """Store x at `target`. With SCALED, the cache is e4m3, and x is limited to its range first."""
    if SCALED:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    tl.store(target, x.to(target.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_write(
    q,
    key,
    latent,
    cosines,
    sines,
    positions,
    cache,
    slots,
    out,
    rotated_key,
    q_stride,
    head_stride,
    key_stride,
    latent_stride,
    block_stride,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,
    RANK: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Rotate TILE heads of q for one token, or (with part == PARTS) rotate its key and write the cache entry.

    Grid: (tokens, PARTS + 1).
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half: tl.constexpr = ROTATED // 2
    pair = tl.arange(0, PAIRS)
    inside = pair < half
    angle = tl.load(positions + token).to(tl.int64) * half + pair
    cos = tl.load(cosines + angle, mask=inside, other=0.0)
    sin = tl.load(sines + angle, mask=inside, other=0.0)
    if part < PARTS:
        head = (part * TILE + tl.arange(0, TILE))[:, None]
        used = (head < HEADS) & inside[None, :]
        source = q + token * q_stride + head * head_stride + 2 * pair[None, :]
        first, second = _rotated(source, cos[None, :], sin[None, :], used)
        target = out + (token * HEADS + head) * ROTATED + pair[None, :]
        tl.store(target, first, mask=used)
        tl.store(target + half, second, mask=used)
    else:
        key_first, key_second = _rotated(key + token * key_stride + 2 * pair, cos, sin, inside)
        copy = rotated_key + token * ROTATED + pair
        tl.store(copy, key_first, mask=inside)
        tl.store(copy + half, key_second, mask=inside)
        slot = tl.load(slots + token).to(tl.int64)
        written = slot >= 0
        entry = cache + slot // BLOCK * block_stride + slot % BLOCK * (RANK + ROTATED)
        dim = tl.arange(0, DIMS)
        row = tl.load(latent + token * latent_stride + dim, mask=dim < RANK, other=0.0)
        _store_limited(entry + dim, row, (dim < RANK) & written, SCALED)
        _store_limited(entry + RANK + pair, key_first, inside & written, SCALED)
        _store_limited(entry + RANK + half + pair, key_second, inside & written, SCALED)
