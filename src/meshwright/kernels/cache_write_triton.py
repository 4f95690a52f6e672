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
) -> None:
    """Rotate q into `out`, and k into the cache and `rotated_keys`, and copy v into the cache; see `paged_attention`.

    Without `out`, q is neither read nor written.
    """
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], k.shape[2]
    tile = min(MAX_HEADS, triton.next_power_of_2(kv_heads))
    query_parts, key_parts = 0 if out is None else triton.cdiv(heads, tile), triton.cdiv(kv_heads, tile)
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
        ROTARY=tables is not None,
        KEEP_KEYS=rotated_keys is not None,
        SCALED=scales is not None,
        num_warps=2 if tile * head_dim <= 1024 else 4,
        **options(k.device),
        enable_fp_fusion=False,  # the trainer rounds both products of a rotation before it adds them
    )


@triton.jit
def _load_halves(source, half: tl.constexpr, used) -> tuple[tl.tensor, tl.tensor]:
    """Load both halves of the heads at `source`."""
    return tl.load(source, mask=used, other=0.0), tl.load(source + half, mask=used, other=0.0)


@triton.jit
def _rotate(
    source,
    angle,
    cosines,
    sines,
    half: tl.constexpr,
    used,
    ROTARY: tl.constexpr,
    norm,
    dim,
    eps,
    PLUS_ONE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return both halves of the rotated heads at `source`, computed in fp32 and rounded once.

    If `norm` points to the weights of a norm, the heads are normed before and rounded.
    """
    first, second = _load_halves(source, half, used)
    if norm is not None:
        wide, wide_second = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(wide * wide + wide_second * wide_second, 1)
        factor = tl.rsqrt(squares * (0.5 / half) + eps)[:, None]
        weight, weight_second = tl.load(norm + dim).to(tl.float32), tl.load(norm + half + dim).to(tl.float32)
        if PLUS_ONE:
            weight, weight_second = 1.0 + weight, 1.0 + weight_second
        first = (wide * factor * weight).to(source.dtype.element_ty)
        second = (wide_second * factor * weight_second).to(source.dtype.element_ty)
    if ROTARY:
        cos, sin = tl.load(cosines + angle), tl.load(sines + angle)
        wide, wide_second = first.to(tl.float32), second.to(tl.float32)
        first = (wide * cos - wide_second * sin).to(source.dtype.element_ty)
        second = (wide_second * cos + wide * sin).to(source.dtype.element_ty)
    return first, second


@triton.jit
def _store_halves(target, first, second, half: tl.constexpr, used, scale, SCALED: tl.constexpr) -> None:
    """Store both halves at `target`; with SCALED divided by the scale of their head, and limited to the range of e4m3."""
    if SCALED:
        first = tl.minimum(tl.maximum(tl.div_rn(first.to(tl.float32), scale), -448.0), 448.0)
        second = tl.minimum(tl.maximum(tl.div_rn(second.to(tl.float32), scale), -448.0), 448.0)
    tl.store(target, first.to(target.dtype.element_ty), mask=used)
    tl.store(target + half, second.to(target.dtype.element_ty), mask=used)


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
    ROTARY: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    await_previous(DEPENDENT)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, HALF)[None, :]
    inside = dim < half
    if half < HALF:
        # Lanes behind the half read some number of it and store nothing. Otherwise loads stay vectors, which a minimum prevents.
        dim = tl.minimum(dim, half - 1)
    lane = tl.arange(0, TILE)[:, None]
    angle = dim.to(tl.int64)
    if ROTARY:
        angle += tl.load(positions + token).to(tl.int64) * half
    if part < QUERY_PARTS:
        query_head = part * TILE + lane
        query_used = inside & (query_head < HEADS)
        offset = query_head * HEAD_DIM + dim
        turned, turned_second = _rotate(
            q + token * q_stride + offset, angle, cosines, sines, half, query_used, ROTARY, q_norm, dim, eps, PLUS_ONE
        )
        _store_halves(out + token * (HEADS * HEAD_DIM) + offset, turned, turned_second, half, query_used, 1.0, False)
    else:
        head = (part - QUERY_PARTS) % KEY_PARTS * TILE + lane
        used = inside & (head < KV_HEADS)
        slot = tl.load(slots + token).to(tl.int64)
        target = cache + slot // BLOCK * block_stride + slot % BLOCK * HEAD_DIM + head * head_stride + dim
        scale_index = head
        if part < QUERY_PARTS + KEY_PARTS:
            first, second = _rotate(
                k + token * k_stride + head * HEAD_DIM + dim,
                angle,
                cosines,
                sines,
                half,
                used,
                ROTARY,
                k_norm,
                dim,
                eps,
                PLUS_ONE,
            )
            if KEEP_KEYS:
                copy = rotated_keys + token * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM + dim
                _store_halves(copy, first, second, half, used, 1.0, False)
        else:
            first, second = _load_halves(v + token * v_stride + head * HEAD_DIM + dim, half, used)
            target += value_stride
            scale_index += KV_HEADS
        scale = 1.0
        if SCALED:
            scale = tl.load(scales + scale_index, mask=head < KV_HEADS, other=1.0)
        _store_halves(target, first, second, half, used & (slot >= 0), scale, SCALED)
