"""The Triton kernel of `rotate_and_write`; imported only with a CUDA device, as CPU builds of torch lack Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.dependent_launch_triton import await_previous, options
from meshwright.kernels.norm import HeadNorms
from meshwright.kernels.rope import RotaryTables

MAX_HEADS = 16
"""Heads of a token that one program rotates."""


def rotate_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: RotaryTables | None,
    positions: Tensor,
    cache_layer: Tensor,
    slots: Tensor,
    out: Tensor | None,
    rotated_keys: Tensor | None,
    scales: Tensor | None,
    norms: HeadNorms | None = None,
    *,
    neighbours: bool = False,
) -> None:
    """Rotate q into `out`, and k into the cache and `rotated_keys`, and copy v into the cache; see `paged_attention`.

    Without `out`, q is neither read nor written.
    """
    heads = q.shape[1]
    kv_heads = k.shape[1]
    head_dim = k.shape[2]
    tile = min(MAX_HEADS, triton.next_power_of_2(kv_heads))
    query_parts = 0 if out is None else triton.cdiv(heads, tile)
    key_parts = triton.cdiv(kv_heads, tile)
    cos, sin = (q, q) if tables is None else tables
    if len(k) == 0:
        return
    _rotate_write[(len(k), query_parts + 2 * key_parts)](
        q,
        k,
        v,
        cos,
        sin,
        positions,
        cache_layer,
        slots,
        q if out is None else out,
        k if rotated_keys is None else rotated_keys,
        q if scales is None else scales,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *cache_layer.stride()[:3],
        PLUS_ONE=norms is not None and norms.plus_one,
        QUERY_PARTS=query_parts,
        KEY_PARTS=key_parts,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        TILE=tile,
        BLOCK=cache_layer.shape[3],
        ROTATED=0 if tables is None else tables[0].shape[-1],
        NEIGHBOURS=neighbours,
        KEEP_KEYS=rotated_keys is not None,
        SCALED=scales is not None,
        num_warps=2 if tile * head_dim <= 1024 else 4,
        **options(k.device),
        enable_fp_fusion=False,  # the trainer rounds both products of a rotation before it adds them
    )


@triton.jit
def _pair_dims(lane, half: tl.constexpr, rotated: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The two dimensions of each pair of a head. The first `rotated` pairs, (i, i + rotated), are rotated.

    The other dimensions form pairs too, which are copied. Example: with 8 dimensions and 2 rotated pairs, the pairs are (0, 2), (1, 3) and
    (4, 6), (5, 7).
    """
    first = lane
    second = lane + half
    if rotated > 0 and rotated < half:
        first = tl.where(lane < rotated, lane, lane + rotated)
        second = tl.where(lane < rotated, lane + rotated, second)
    return first, second


@triton.jit
def _rotate(
    source,
    lane,
    angle,
    cosines,
    sines,
    half: tl.constexpr,
    used,
    ROTATED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    norm,
    eps,
    PLUS_ONE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return both dimensions of each pair of the heads at `source`, rotated, computed in fp32 and rounded once.

    With NEIGHBOURS the rotated pairs are read from dimensions 2i and 2i + 1. If `norm` points to the weights of a norm, the heads are
    normed before and rounded.
    """
    dim, second_dim = _pair_dims(lane, half, ROTATED)
    if NEIGHBOURS:
        dim = tl.where(lane < ROTATED, 2 * lane, dim)
        second_dim = tl.where(lane < ROTATED, 2 * lane + 1, second_dim)
    first = tl.load(source + dim, mask=used, other=0.0)
    second = tl.load(source + second_dim, mask=used, other=0.0)
    if norm is not None:
        wide = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        squares = tl.sum(wide * wide + wide_second * wide_second, 1)
        factor = tl.rsqrt(squares * (0.5 / half) + eps)[:, None]
        weight = tl.load(norm + dim).to(tl.float32)
        weight_second = tl.load(norm + second_dim).to(tl.float32)
        if PLUS_ONE:
            weight = 1.0 + weight
            weight_second = 1.0 + weight_second
        first = (wide * factor * weight).to(source.dtype.element_ty)
        second = (wide_second * factor * weight_second).to(source.dtype.element_ty)
    if ROTATED > 0:
        cos = tl.load(cosines + angle)
        sin = tl.load(sines + angle)
        wide = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        turned = (wide * cos - wide_second * sin).to(source.dtype.element_ty)
        turned_second = (wide_second * cos + wide * sin).to(source.dtype.element_ty)
        if half > ROTATED:
            turned = tl.where(lane < ROTATED, turned, first)
            turned_second = tl.where(lane < ROTATED, turned_second, second)
        first = turned
        second = turned_second
    return first, second


@triton.jit
def _store_pairs(
    target, lane, first, second, half: tl.constexpr, used, ROTATED: tl.constexpr, scale, SCALED: tl.constexpr
) -> None:
    """Store both dimensions of each pair at `target`; with SCALED divided by the scale of their head, and limited to the range of e4m3."""
    if SCALED:
        first = tl.minimum(tl.maximum(tl.div_rn(first.to(tl.float32), scale), -448.0), 448.0)
        second = tl.minimum(tl.maximum(tl.div_rn(second.to(tl.float32), scale), -448.0), 448.0)
    dim, second_dim = _pair_dims(lane, half, ROTATED)
    tl.store(target + dim, first.to(target.dtype.element_ty), mask=used)
    tl.store(target + second_dim, second.to(target.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_write(
    q,
    k,
    v,
    cosines,
    sines,
    positions,
    cache,
    slots,
    out,
    rotated_keys,
    scales,
    q_norm,
    k_norm,
    eps,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    value_stride,
    head_stride,
    PLUS_ONE: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    await_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, HALF)[None, :]
    inside = pair < half
    if half < HALF:
        # Lanes after the half read some number of it and store nothing. A minimum of indices would avoid that and prevent vector loads.
        pair = tl.minimum(pair, half - 1)
    lane = tl.arange(0, TILE)[:, None]
    angle = pair.to(tl.int64)
    if ROTATED > 0:
        if half > ROTATED:
            angle = tl.minimum(angle, ROTATED - 1)
        angle += tl.load(positions + token).to(tl.int64) * ROTATED
    if part < QUERY_PARTS:
        query_head = part * TILE + lane
        used = inside & (query_head < HEADS)
        source = q + token * q_stride + query_head * HEAD_DIM
        first, second = _rotate(
            source, pair, angle, cosines, sines, half, used, ROTATED, NEIGHBOURS, q_norm, eps, PLUS_ONE
        )
        target = out + token * (HEADS * HEAD_DIM) + query_head * HEAD_DIM
        _store_pairs(target, pair, first, second, half, used, ROTATED, 1.0, False)
    else:
        head = (part - QUERY_PARTS) % KEY_PARTS * TILE + lane
        key_used = inside & (head < KV_HEADS)
        slot = tl.load(slots + token).to(tl.int64)
        cached = cache + slot // BLOCK * block_stride + slot % BLOCK * HEAD_DIM + head * head_stride
        scale_index = head
        if part < QUERY_PARTS + KEY_PARTS:
            key_first, key_second = _rotate(
                k + token * k_stride + head * HEAD_DIM,
                pair,
                angle,
                cosines,
                sines,
                half,
                key_used,
                ROTATED,
                NEIGHBOURS,
                k_norm,
                eps,
                PLUS_ONE,
            )
            if KEEP_KEYS:
                copy = rotated_keys + token * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM
                _store_pairs(copy, pair, key_first, key_second, half, key_used, ROTATED, 1.0, False)
        else:
            values = v + token * v_stride + head * HEAD_DIM
            dim, second_dim = _pair_dims(pair, half, ROTATED)
            key_first = tl.load(values + dim, mask=key_used, other=0.0)
            key_second = tl.load(values + second_dim, mask=key_used, other=0.0)
            cached += value_stride
            scale_index += KV_HEADS
        scale = 1.0
        if SCALED:
            scale = tl.load(scales + scale_index, mask=head < KV_HEADS, other=1.0)
        _store_pairs(cached, pair, key_first, key_second, half, key_used & (slot >= 0), ROTATED, scale, SCALED)
