"""The Triton kernels of `expert_decode`; imported only with a CUDA device, as CPU builds of torch lack Triton.

Three kernels read each weight once: router with the choice of experts, gate and up with SwiGLU, down. With 1 to 16 rows an expert the
time is that of reading the weights. As in `fixed_product_triton` the weight's rows are the first operand of the tensor cores.

No kernel sorts. The router's stores for each expert which copy of each token it computes; a program of an expert collects its rows from
that. A copy's place in the results is `token · copies + copy`, so a token's copies are added in one order, whatever the batch. The grids
depend on the number of tokens only, so that a CUDA graph can replay them.

Sizes: ROWS copies and COLUMNS outputs of a tile, INNER numbers of a row that are added in a step, TOKENS the tokens of a tile of the
router, BLOCK the experts and LANES the tokens of the step, each rounded up to a power of two.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.expert_decode import Choices, Routing
from meshwright.kernels.fixed_product_triton import sum_tiles
from meshwright.kernels.router_triton import keys_of, pick_copies, scores_of

ROUTER_INNER = 64
"""Numbers of a row that the router's kernel adds in a step."""
ROUTER_SPLITS = 16
"""Parts of the inner dimension, of which each has a program."""
MOST_TILES = 1 << 12
"""Tiles of tokens whose programs count their arrivals."""


class Launch(NamedTuple):
    """Outputs and rows of a tile, numbers of a step, warps of a program, stages of the software pipeline."""

    columns: int
    rows: int
    inner: int
    warps: int
    stages: int


def rows_of(tokens: int, experts: int, copies: int) -> int:
    """Rows of a tile: at least all rows of an expert if each has the same, and all tokens if these are as few."""
    if tokens <= 32:
        return 16 if tokens <= 16 else 32
    usual = 2 * tokens * copies // experts
    return min(64, max(16, triton.next_power_of_2(usual)))


def gate_up_launch(tokens: int, experts: int, copies: int) -> Launch:
    """The tile of the first product; `columns` counts gates and ups."""
    rows = rows_of(tokens, experts, copies)
    return Launch(64, rows, 128, warps=4, stages=4 if rows <= 32 else 3)


def down_launch(tokens: int, experts: int, copies: int) -> Launch:
    """The tile of the second product."""
    rows = rows_of(tokens, experts, copies)
    return Launch(64, rows, 128, warps=4, stages=4 if rows <= 32 else 3)


def route(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Choices:
    """The choices for x `(tokens, hidden)`; see `expert_decode.route`."""
    (tokens, hidden), experts, copies = x.shape, weight.shape[0], routing.copies
    chosen = torch.empty(tokens, copies, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, copies, dtype=torch.float32, device=x.device)
    places = torch.empty(experts, tokens, dtype=torch.int8, device=x.device)
    block, tile = max(16, triton.next_power_of_2(experts)), 16
    parts = triton.cdiv(tokens, tile)
    splits = min(ROUTER_SPLITS, triton.cdiv(hidden, ROUTER_INNER))
    sums = torch.empty(parts * splits * tile, block, dtype=torch.float32, device=x.device)
    _route[(splits, parts)](
        x,
        weight,
        bias,
        chosen,
        weights,
        places,
        sums,
        _arrivals(x.device),
        tokens,
        hidden,
        experts,
        routing.scale,
        COPIES=copies,
        SLOTS=triton.next_power_of_2(copies),
        NORMALISED=routing.normalised,
        GROUPS=routing.groups,
        KEPT_GROUPS=routing.kept_groups,
        PADDED_GROUPS=triton.next_power_of_2(routing.groups),
        BLOCK=block,
        TOKENS=tile,
        CHOOSERS=min(tile, triton.next_power_of_2(tokens)),
        SPLITS=splits,
        INNER=ROUTER_INNER,
        EVEN=hidden % ROUTER_INNER == 0,
        num_warps=4,
        num_stages=3,
    )
    return Choices(chosen, weights, places)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Programs of each tile that have stored their part; every kernel leaves zeros."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def gate_up(x: Tensor, weight: Tensor, choices: Choices, *, launch: Launch | None = None) -> Tensor:
    """silu(gate) · up of each copy times its weight, `(tokens · copies, width)`, of x `(tokens, hidden)`."""
    (tokens, copies), (experts, width, hidden) = choices.chosen.shape, weight.shape
    out = torch.empty(tokens * copies, width // 2, dtype=x.dtype, device=x.device)
    launch = launch or gate_up_launch(tokens, experts, copies)
    _multiply_copies(x, weight, choices, out, width // 2, hidden, launch, GATED=True)
    return out


def down(x: Tensor, weight: Tensor, choices: Choices, *, launch: Launch | None = None) -> Tensor:
    """The outputs of copies `(tokens, copies, hidden)` of their activations x `(tokens · copies, width)`."""
    (tokens, copies), (experts, hidden, width) = choices.chosen.shape, weight.shape
    out = torch.empty(tokens, copies, hidden, dtype=x.dtype, device=x.device)
    launch = launch or down_launch(tokens, experts, copies)
    _multiply_copies(x, weight, choices, out, hidden, width, launch, GATED=False)
    return out


def _multiply_copies(
    x: Tensor, weight: Tensor, choices: Choices, out: Tensor, columns: int, inner: int, launch: Launch, *, GATED: bool
) -> None:
    """Launch the products of copies: `columns` outputs of `inner` inputs."""
    (tokens, copies), experts = choices.chosen.shape, len(weight)
    by_copy = tokens * copies < experts
    direct = tokens <= launch.rows
    column_tile = launch.columns // 2 if GATED else launch.columns
    grid = (triton.cdiv(columns, column_tile), tokens * copies if by_copy else experts)
    _copies_product[grid](
        x,
        weight,
        *choices,
        out,
        tokens,
        columns,
        inner,
        COPIES=copies,
        BY_COPY=by_copy,
        DIRECT=direct,
        LANES=launch.rows if direct else triton.next_power_of_2(tokens),
        COLUMNS=column_tile,
        ROWS=launch.rows,
        INNER=launch.inner,
        EVEN=inner % launch.inner == 0,
        GATED=GATED,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


@triton.jit(do_not_specialize=["tokens"])
def _route(
    x, weight, bias, chosen, weights, places, partial, arrivals, tokens, hidden, experts, scale, COPIES: tl.constexpr,
    SLOTS: tl.constexpr, NORMALISED: tl.constexpr, GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CHOOSERS: tl.constexpr,
    SPLITS: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr,
) -> None:  # fmt: skip
    split, part = tl.program_id(0), tl.program_id(1)
    token, expert = part * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    tiles = tl.cdiv(hidden, INNER)
    sums = sum_tiles(
        x + token.to(tl.int64) * hidden,
        weight + tl.minimum(expert, experts - 1).to(tl.int64) * hidden,
        tiles * split // SPLITS,
        tiles * (split + 1) // SPLITS,
        token < tokens,
        hidden,
        BLOCK,
        TOKENS,
        INNER,
        EVEN,
        0,
        tl.float32,
    )
    parts = partial + part.to(tl.int64) * (SPLITS * TOKENS * BLOCK)
    place = tl.arange(0, TOKENS)[None, :] * BLOCK + expert[:, None]
    tl.store(parts + split * (TOKENS * BLOCK) + place, sums, mask=(token < tokens)[None, :])
    # All threads have stored their numbers before one of them says so.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + part, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrivals + part, 0)
        slot, row = tl.arange(0, SLOTS), tl.arange(0, CHOOSERS)
        index = part * TOKENS + row
        exists, is_expert = (index < tokens)[:, None], (expert < experts)[None, :]
        logits = tl.zeros((CHOOSERS, BLOCK), tl.float32)
        for number in tl.static_range(SPLITS):
            # From the L2 cache: what the first level has may be older than the other programs' stores.
            logits += tl.load(
                parts + number * (TOKENS * BLOCK) + row[:, None] * BLOCK + expert[None, :],
                mask=exists,
                other=0.0,
                cache_modifier=".cg",
            )
        logits = logits.to(x.dtype.element_ty)
        scores, _, _ = scores_of(logits, is_expert, bias is not None)
        keys = keys_of(logits, scores, bias, expert, experts)
        free = is_expert & (index >= 0)[:, None]
        if KEPT_GROUPS < GROUPS:
            group = expert // (experts // GROUPS)
            free = free & _in_best_groups(
                keys, group, free, bias is not None, GROUPS, KEPT_GROUPS, PADDED_GROUPS, CHOOSERS, BLOCK
            )
        picked, numbers, places_of = pick_copies(keys, scores, free, COPIES, SLOTS, CHOOSERS, BLOCK)
        if NORMALISED:
            picked /= tl.sum(picked, 1)[:, None]
        target, stored = index[:, None] * COPIES + slot[None, :], exists & (slot < COPIES)[None, :]
        tl.store(weights + target, picked * scale, mask=stored)
        tl.store(chosen + target, numbers, mask=stored)
        target = places + expert[None, :].to(tl.int64) * tokens + index[:, None]
        tl.store(target, places_of.to(tl.int8), mask=exists & is_expert)


@triton.jit
def _in_best_groups(
    keys, group, free, two: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Whether each expert `(ROWS, BLOCK)` is in one of the KEPT best groups of its token.

    A group's score is its highest key, or with `two` the sum of its two highest.
    """
    expert, number = tl.arange(0, BLOCK)[None, :], tl.arange(0, PADDED)[None, :]
    best = tl.full((ROWS, PADDED), float("-inf"), tl.float32)
    for index in tl.static_range(GROUPS):
        inside = tl.where(free & (group == index)[None, :], keys, float("-inf"))
        highest = tl.max(inside, 1)
        if two:
            first = tl.min(tl.where(inside == highest[:, None], expert, BLOCK), 1)
            highest += tl.max(tl.where(expert == first[:, None], float("-inf"), inside), 1)
        best = tl.where(number == index, highest[:, None], best)
    kept = tl.zeros((ROWS, BLOCK), tl.int32)
    open_groups = (best == best) & (number < GROUPS)
    for _ in tl.static_range(KEPT):
        highest = tl.max(tl.where(open_groups, best, float("-inf")), 1)
        chosen = tl.min(tl.where(open_groups & (best == highest[:, None]), number, PADDED), 1)
        kept = tl.where(group[None, :] == chosen[:, None], 1, kept)
        open_groups = open_groups & (number != chosen[:, None])
    return kept > 0


@triton.jit(do_not_specialize=["tokens"])
def _copies_product(
    x, weight, chosen, gates, places, out, tokens, columns, inner, COPIES: tl.constexpr, BY_COPY: tl.constexpr,
    DIRECT: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of outputs of one expert for all copies that it computes.

    With BY_COPY there is a program for each copy, and that of an expert's first copy computes all. With DIRECT rows are tokens.
    With GATED the rows of x are tokens and a weight has gates before ups, and the result is their SwiGLU times `gates`; else the rows of x
    are copies.
    """
    item, lane = tl.program_id(1), tl.arange(0, LANES)
    expert = item
    if BY_COPY:
        expert = tl.load(chosen + item)
    place = tl.load(places + expert.to(tl.int64) * tokens + lane, mask=lane < tokens, other=-1).to(tl.int32)
    used = place >= 0
    count = tl.sum(used.to(tl.int32), 0)
    computes = count > 0
    if BY_COPY:
        computes = tl.min(tl.where(used, lane, LANES), 0) == item // COPIES
    if computes:
        matrix_rows: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
        output = tl.arange(0, matrix_rows)
        column = tl.program_id(0) * COLUMNS + output % COLUMNS
        # Columns behind the last read its weights, and nothing of them is stored.
        matrix = tl.minimum(column, columns - 1) + output // COLUMNS * columns
        first_row = expert.to(tl.int64) * columns
        if GATED:
            first_row *= 2
        matrix_begin = weight + (first_row + matrix) * inner
        if DIRECT:
            copy = lane * COPIES + place
            _multiply_rows(
                x, matrix_begin, gates, out, copy, used, columns, inner, COPIES, COLUMNS, ROWS, INNER, EVEN, GATED
            )
        else:
            rank = tl.cumsum(used.to(tl.int32), 0) - 1
            for first in range(0, count, ROWS):
                row = first + tl.arange(0, ROWS)
                same = used[None, :] & (rank[None, :] == row[:, None])
                copy = tl.sum(tl.where(same, (lane * COPIES + place)[None, :], 0), 1)
                _multiply_rows(
                    x,
                    matrix_begin,
                    gates,
                    out,
                    copy,
                    row < count,
                    columns,
                    inner,
                    COPIES,
                    COLUMNS,
                    ROWS,
                    INNER,
                    EVEN,
                    GATED,
                )


@triton.jit
def _multiply_rows(
    x, weight, gates, out, copy, used, columns, inner, COPIES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    INNER: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile of outputs of the copies `(ROWS,)` that are `used`; `weight` points to the rows of the matrix."""
    dtype = out.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    source = x + copy.to(tl.int64) * inner
    if GATED:
        source = x + (copy // COPIES).to(tl.int64) * inner
    matrix_rows: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    sums = sum_tiles(
        source, weight, 0, tl.cdiv(inner, INNER), used, inner, matrix_rows, ROWS, INNER, EVEN, 0, tl.float32
    )
    if GATED:
        # The trainer rounds the projection before it computes the activation in fp32.
        halves = sums.to(dtype).to(tl.float32).reshape(2, COLUMNS, ROWS).permute(1, 2, 0)
        gate, up = tl.split(halves)
        factor = tl.load(gates + copy, mask=used, other=0.0)
        sums = gate * tl.sigmoid(gate) * up * factor[None, :]
    target = out + copy.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, tl.trans(sums).to(dtype), mask=used[:, None] & (column < columns)[None, :])
