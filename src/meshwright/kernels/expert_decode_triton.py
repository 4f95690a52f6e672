"""The Triton kernels of `expert_decode`; imported only with a CUDA device, as CPU builds of torch lack Triton.

There are three kernels: the router with the choice of experts; gate and up with SwiGLU; down. Each reads a weight once. With 1 to 16 rows
an expert the time is that of reading the weights. As in `fixed_matmul_triton`, the rows of a weight are the tensor
cores' first operand.

No kernel sorts. The router's kernel stores which copy of each token an expert computes (`Choices.places`), and the program of an expert
collects its rows from that table. Copy c of token t is row t · copies + c of the results, so the copies of a token are added in the same
order in every batch. The grids depend on the number of tokens only, so that a CUDA graph can replay them.

Sizes, each rounded up to a power of two:

- ROWS: copies of a tile. COLUMNS: outputs of a tile. INNER: numbers of a row that are added in a step.
- TOKENS: tokens of a tile of the router. BLOCK: experts. LANES: tokens of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.dependent_launch_triton import arrivals, await_previous, options, prefetch
from meshwright.kernels.expert_decode import Choices, Routing
from meshwright.kernels.fixed_matmul import TILE_BYTES
from meshwright.kernels.fixed_matmul_triton import sum_tiles
from meshwright.kernels.router_triton import divisor_of, keys_of, scores_of
from meshwright.kernels.row_quantize import RoundedMatrix

ROUTER_INNER = 128
"""Numbers of a row that one program of the router's kernel multiplies."""
ROUTER_TOKENS = 8
"""Maximum number of tokens of a program of the router's kernel."""
ROUTER_WARPS = 8
"""Warps of a program of the router's kernel."""
MOST_ROWS = 64
"""Maximum number of rows of a tile: with more rows an expert reads its weights again."""
STEPS_AHEAD = 4
"""`ExpertLaunch.ahead` of steps in which most experts have rows."""
SURE_ROWS = 4
"""Mean rows of an expert from which on few experts have none."""


Operand = Tensor | RoundedMatrix
"""Rows or matrices in bf16 or fp16, or in 8 bits with a scale for each row."""


class ExpertLaunch(NamedTuple):
    """The tile of a program, and how the program runs."""

    columns: int
    """Outputs of the tile; for gate and up, the gates and the ups together."""
    rows: int
    """Copies of the tile."""
    inner: int
    """Numbers of a row that are added in a step."""
    warps: int
    stages: int
    """Stages of the software pipeline."""
    ahead: int = 0
    """Steps whose weights are brought into the L2 cache while the kernel before still runs."""


def launch_of(tokens: int, experts: int, copies: int, itemsize: int = 2) -> ExpertLaunch:
    """The tile of both matmuls, found by trial on an H200.

    It depends on the next power of two of `tokens`, so that few kernels are compiled. `inner` is the same for all numbers of tokens,
    because it decides the order of addition.
    """
    tokens = triton.next_power_of_2(tokens)
    rows = min(MOST_ROWS, max(16, tokens if tokens <= 32 else triton.next_power_of_2(2 * tokens * copies // experts)))
    few_programs = _is_by_copy(tokens, experts, copies)
    ahead = STEPS_AHEAD if tokens * copies >= SURE_ROWS * experts else 0
    return ExpertLaunch(64, rows, TILE_BYTES // itemsize, warps=4, stages=8 if few_programs else 5, ahead=ahead)


def _is_by_copy(tokens: int, experts: int, copies: int) -> bool:
    """Whether there is a program for each copy, or else for each expert: whichever are fewer."""
    return triton.next_power_of_2(tokens) * copies < experts


def route(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Choices:
    """The choices for x `(tokens, hidden)`; see `expert_decode.route`."""
    tokens, hidden = x.shape
    experts = weight.shape[0]
    copies = routing.copies
    chosen = torch.empty(tokens, copies, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, copies, dtype=torch.float32, device=x.device)
    places = torch.empty(experts, tokens, dtype=torch.int8, device=x.device)
    block = max(16, triton.next_power_of_2(experts))
    tile = min(ROUTER_TOKENS, triton.next_power_of_2(tokens))
    parts = triton.cdiv(tokens, tile)
    splits = triton.cdiv(hidden, ROUTER_INNER)
    sums = torch.empty(parts * splits * tile, block, dtype=torch.float32, device=x.device)
    _route[(splits, parts)](
        x,
        weight,
        bias,
        chosen,
        weights,
        places,
        sums,
        arrivals(x.device),
        tokens,
        hidden,
        experts,
        routing.scale,
        COPIES=copies,
        SLOTS=triton.next_power_of_2(copies),
        SIGMOID=routing.sigmoid,
        NORMALISED=routing.normalised,
        GROUPS=routing.groups,
        KEPT_GROUPS=routing.kept_groups,
        PADDED_GROUPS=triton.next_power_of_2(routing.groups),
        BLOCK=block,
        TOKENS=tile,
        ROWS=tile,
        SPLITS=splits,
        INNER=ROUTER_INNER,
        num_warps=ROUTER_WARPS,
        **options(x.device),
    )
    return Choices(chosen, weights, places)


def gate_up(
    x: Operand, weight: Operand, choices: Choices, dtype: torch.dtype, *, launch: ExpertLaunch | None = None
) -> Tensor:
    """silu(gate) · up of each copy, `(tokens · copies, width)`, of x `(tokens, hidden)`.

    In bf16 and fp16 it is multiplied by the copy's weight; in 8 bits `down` does that, after the rounding.
    """
    return _multiply_copies(x, weight, choices, dtype, launch, gated=True)


def down(
    x: Operand, weight: Operand, choices: Choices, dtype: torch.dtype, *, launch: ExpertLaunch | None = None
) -> Tensor:
    """The outputs of copies `(tokens · copies, hidden)`, of their activations x `(tokens · copies, width)`; see `gate_up` for weights."""
    return _multiply_copies(x, weight, choices, dtype, launch, gated=False)


def _multiply_copies(
    x: Operand, weight: Operand, choices: Choices, dtype: torch.dtype, launch: ExpertLaunch | None, *, gated: bool
) -> Tensor:
    """Launch the kernel that multiplies each copy by the matrix of its expert."""
    rows, row_scales = _parts(x)
    matrices, scales = _parts(weight)
    tokens, copies = choices.chosen.shape
    experts, columns, inner = matrices.shape
    columns = columns // 2 if gated else columns
    out = torch.empty(tokens * copies, columns, dtype=dtype, device=rows.device)
    launch = launch or launch_of(tokens, experts, copies, rows.element_size())
    by_copy = _is_by_copy(tokens, experts, copies)
    direct = tokens <= launch.rows
    column_tile = launch.columns // 2 if gated else launch.columns
    integer = rows.dtype == torch.int8
    _copies_matmul[(triton.cdiv(columns, column_tile), tokens * copies if by_copy else experts)](
        rows,
        matrices,
        row_scales,
        scales,
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
        GATED=gated,
        AHEAD=0 if by_copy else launch.ahead,
        SUM=tl.int32 if integer else tl.float32,
        IMPRECISE=launch.inner if rows.element_size() == 1 and not integer else 0,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **options(rows.device),
    )
    return out


def _parts(x: Operand) -> tuple[Tensor, Tensor | None]:
    """The numbers of an operand and its scales."""
    return (x, None) if isinstance(x, Tensor) else (x.values, x.scale)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    x,
    weight,
    bias,
    chosen,
    weights,
    places,
    partial,
    arrivals,
    tokens,
    hidden,
    experts,
    scale,
    COPIES: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    INNER: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    split = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    inner = split * INNER + tl.arange(0, INNER)
    is_expert = expert < experts
    source = weight + expert.to(tl.int64)[:, None] * hidden + inner[None, :]
    matrix = tl.load(source, mask=is_expert[:, None] & (inner < hidden)[None, :], other=0.0)
    await_previous(DEPENDENT)
    # The tensor cores take at least 16 rows. The first of them are the tokens of this part, the others are 0.
    lane = tl.arange(0, 16)
    token = part * TOKENS + lane
    used = (lane < TOKENS) & (token < tokens)
    source = x + token.to(tl.int64)[:, None] * hidden + inner[None, :]
    inputs = tl.load(source, mask=used[:, None] & (inner < hidden)[None, :], other=0.0)
    sums = tl.dot(matrix, tl.trans(inputs), input_precision="ieee")
    parts = partial + part.to(tl.int64) * (SPLITS * TOKENS * BLOCK)
    place = lane[None, :] * BLOCK + expert[:, None]
    tl.store(parts + split * (TOKENS * BLOCK) + place, sums, mask=used[None, :])
    # Wait until all threads have stored their numbers. Then one of them counts this program as arrived.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + part, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrivals + part, 0)
        index = part * TOKENS + row
        exists = ((row < TOKENS) & (index < tokens))[:, None]
        logits = tl.zeros((ROWS, BLOCK), tl.float32)
        for number in tl.static_range(SPLITS):
            # Read from the L2 cache: the L1 cache may have values from before the other programs' stores.
            logits += tl.load(
                parts + number * (TOKENS * BLOCK) + row[:, None] * BLOCK + expert[None, :],
                mask=exists,
                other=0.0,
                cache_modifier=".cg",
            )
        logits = logits.to(x.dtype.element_ty)
        biased: tl.constexpr = bias is not None
        scores, _, total = scores_of(logits, is_expert[None, :], SIGMOID)
        keys = keys_of(logits, scores, bias, expert, experts)
        free = is_expert[None, :] & (index >= 0)[:, None]
        if KEPT_GROUPS < GROUPS:
            group = expert // (experts // GROUPS)
            free = free & _in_best_groups(keys, group, free, biased, GROUPS, KEPT_GROUPS, PADDED_GROUPS, ROWS, BLOCK)
        wide: tl.constexpr = biased or x.dtype.element_ty != tl.bfloat16
        picked, numbers, places_of = _pick(keys, scores, free, wide, biased, COPIES, SLOTS, ROWS, BLOCK)
        if not biased:
            highest = tl.max(tl.where(is_expert[None, :], logits.to(tl.float32), float("-inf")), 1)[:, None]
            picked = tl.where(slot[None, :] < COPIES, tl.exp(picked - highest) / total, 0.0)
        if NORMALISED:
            picked /= divisor_of(tl.sum(picked, 1), SIGMOID, biased)[:, None]
        target = index[:, None] * COPIES + slot[None, :]
        stored = exists & (slot < COPIES)[None, :]
        tl.store(weights + target, picked * scale, mask=stored)
        tl.store(chosen + target, numbers, mask=stored)
        target = places + expert[None, :].to(tl.int64) * tokens + index[:, None]
        tl.store(target, places_of.to(tl.int8), mask=exists & is_expert[None, :])


@triton.jit
def _pick(
    keys,
    scores,
    free,
    WIDE: tl.constexpr,
    GATHER: tl.constexpr,
    COPIES: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """As `router_triton.pick_copies`, with one reduction for each copy: the maximum of integers made of a key and an expert's number.

    If WIDE the integer has 64 bits. Else it has 32: the upper 16 bits of the key, which are all bits of a bf16 number, and the expert.
    With GATHER the scores of the chosen experts are returned, else their keys.
    """
    expert = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    bits = tl.where(keys == 0.0, 0.0, keys).to(tl.int32, bitcast=True)  # −0 is not below 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    if WIDE:
        codes = bits.to(tl.int64) * 65536
        none = tl.full((ROWS, BLOCK), -(2**62), tl.int64)
    else:
        codes = bits & -65536
        none = tl.full((ROWS, BLOCK), -(2**31), tl.int32)
    codes = tl.where(free, codes + (65535 - expert)[None, :], none)
    picked = tl.zeros((ROWS, SLOTS), tl.float32)
    numbers = tl.zeros((ROWS, SLOTS), tl.int32)
    places = tl.full((ROWS, BLOCK), -1, tl.int32)
    for copy in tl.static_range(COPIES):
        best = tl.max(codes, 1)
        number = 65535 - (best & 65535).to(tl.int32)
        taken = expert[None, :] == number[:, None]
        if GATHER:
            value = tl.sum(tl.where(taken, scores, 0.0), 1)
        else:
            value = (best >> 16).to(tl.int32) if WIDE else best
            value = value ^ ((value >> 31) & 0x7FFFFFFF)
            if not WIDE:
                value = value & -65536
            value = value.to(tl.float32, bitcast=True)
        here = slot[None, :] == copy
        picked = tl.where(here, value[:, None], picked)
        numbers = tl.where(here, number[:, None], numbers)
        places = tl.where(taken, copy, places)
        codes = tl.where(taken, none, codes)
    return picked, numbers, places


@triton.jit
def _in_best_groups(
    keys,
    group,
    free,
    two: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Whether each expert `(ROWS, BLOCK)` is in one of the KEPT best groups of its token.

    A group's score is its highest key, or with `two` the sum of its two highest.
    """
    expert = tl.arange(0, BLOCK)[None, :]
    number = tl.arange(0, PADDED)[None, :]
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
def _copies_matmul(
    x,
    weight,
    x_scale,
    weight_scale,
    chosen,
    gates,
    places,
    out,
    tokens,
    columns,
    inner,
    COPIES: tl.constexpr,
    BY_COPY: tl.constexpr,
    DIRECT: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    AHEAD: tl.constexpr,
    SUM: tl.constexpr,
    IMPRECISE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """A tile of outputs of one expert, for all its copies.

    - BY_COPY: there is a program for each copy. The program of an expert's first copy computes all copies of the expert.
    - DIRECT: the rows of the tile are all tokens of the step, used or not; else they are the expert's copies.
    - GATED: the rows of x are tokens, a weight has gates before ups, and the result is their SwiGLU. Else the rows of x are copies.
    """
    item = tl.program_id(1)
    lane = tl.arange(0, LANES)
    matrix_rows: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    output = tl.arange(0, matrix_rows)
    column = tl.program_id(0) * COLUMNS + output % COLUMNS
    # Columns after the last one read the weights of the last one, and their results are not stored.
    matrix = (tl.minimum(column, columns - 1) + output // COLUMNS * columns).to(tl.int64)
    all_rows = 2 * columns if GATED else columns
    if AHEAD > 0:
        source = weight + (item.to(tl.int64) * all_rows + matrix) * inner
        prefetch(source[:, None] + tl.minimum(tl.arange(0, AHEAD) * INNER, inner - 1)[None, :], DEPENDENT)
    await_previous(DEPENDENT)
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
        matrix += expert.to(tl.int64) * all_rows
        rank = tl.cumsum(used.to(tl.int32), 0) - 1
        for first in range(0, 1 if DIRECT else count, ROWS):
            if DIRECT:
                copy = lane * COPIES + place
                row_used = used
            else:
                row = first + tl.arange(0, ROWS)
                same = used[None, :] & (rank[None, :] == row[:, None])
                copy = tl.sum(tl.where(same, (lane * COPIES + place)[None, :], 0), 1)
                row_used = row < count
            _multiply_rows(
                x,
                weight,
                x_scale,
                weight_scale,
                gates,
                out,
                matrix,
                copy,
                row_used,
                columns,
                inner,
                COPIES,
                COLUMNS,
                ROWS,
                INNER,
                EVEN,
                GATED,
                SUM,
                IMPRECISE,
            )


@triton.jit
def _multiply_rows(
    x,
    weight,
    x_scale,
    weight_scale,
    gates,
    out,
    matrix,
    copy,
    used,
    columns,
    inner,
    COPIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    SUM: tl.constexpr,
    IMPRECISE: tl.constexpr,
) -> None:
    """Store a tile of outputs: of the copies `(ROWS,)` that are `used`, by the rows `matrix` of the stacked weights of all experts."""
    dtype = out.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    source = copy // COPIES if GATED else copy
    matrix_rows: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    sums = sum_tiles(
        x + source.to(tl.int64) * inner,
        weight + matrix * inner,
        0,
        tl.cdiv(inner, INNER),
        used,
        inner,
        matrix_rows,
        ROWS,
        INNER,
        EVEN,
        IMPRECISE,
        SUM,
    )
    if x_scale is not None:
        factor = tl.load(x_scale + source, mask=used, other=0.0)
        if not GATED:  # the scale of a row times its weight is the scale of the weighted row
            factor *= tl.load(gates + copy, mask=used, other=0.0)
        sums = sums.to(tl.float32) * tl.load(weight_scale + matrix)[:, None] * factor[None, :]
    if GATED:
        # The trainer rounds the projection before it computes the activation in fp32.
        halves = sums.to(dtype).to(tl.float32).reshape(2, COLUMNS, ROWS).permute(1, 2, 0)
        gate, up = tl.split(halves)
        sums = gate * tl.sigmoid(gate) * up
        if x_scale is None:
            sums *= tl.load(gates + copy, mask=used, other=0.0)[None, :]
    target = out + copy.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, tl.trans(sums).to(dtype), mask=used[:, None] & (column < columns)[None, :])
