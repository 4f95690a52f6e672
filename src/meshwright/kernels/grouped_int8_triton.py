"""The Triton kernel of `int8_matmuls.grouped_int8`. Import it only with a CUDA device; CPU builds of torch lack Triton.

A program computes a tile of one group's rows. The host does not know the sizes of the groups, so the grid has as many
tiles as any sizes may need. Each program finds its group from `offsets`. Programs after the last tile end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.fixed_matmul import TILE_BYTES
from meshwright.kernels.fixed_matmul_triton import Tile, store_matmul, sum_tiles, tile_of


def grouped_matmul(
    x: Tensor,
    matrices: Tensor,
    x_scale: Tensor,
    scales: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply each row of x `(rows, in)` by the transposed matrix of its group, times both scales: `(rows, out)`.

    `matrices` is `(groups, out, in)` in int8, `x_scale` `(rows, 1)`, `scales` `(groups, out, 1)`, `offsets` `(groups,)`
    int32 (the end of each group's rows). All tensors are contiguous. The result is in `dtype`.
    """
    rows, inner = x.shape
    groups, columns = matrices.shape[:2]
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if not rows:
        return out
    tile = tile or tile_of(triton.cdiv(rows, groups), x.element_size())
    most_tiles = rows // tile.tokens + min(groups, rows)
    _grouped_matmul[(most_tiles, triton.cdiv(columns, tile.columns))](
        x,
        matrices,
        x_scale,
        scales,
        offsets,
        out,
        columns,
        inner,
        GROUPS=groups,
        PADDED_GROUPS=max(2, triton.next_power_of_2(groups)),
        COLUMNS=tile.columns,
        TOKENS=tile.tokens,
        INNER=TILE_BYTES,
        EVEN=inner % TILE_BYTES == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _find_rows(
    offsets, number, TOKENS: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the group of tile `number`, the tile's first row, and the end of the group's rows.

    After the last tile the group is PADDED_GROUPS.
    """
    groups = tl.arange(0, PADDED_GROUPS)
    ends = tl.load(offsets + groups, mask=groups < GROUPS, other=0)
    begins = tl.load(offsets + groups - 1, mask=(groups > 0) & (groups < GROUPS), other=0)
    tiles = (ends - begins + TOKENS - 1) // TOKENS
    # Number of tiles of the groups up to and including each group. Example: 3 and 2 tiles give 3 and 5. Tile 3 is the first
    # tile of group 1, because one group ends at or before it.
    tiles_through = tl.cumsum(tiles, 0)
    group = tl.sum((tiles_through <= number).to(tl.int32), 0)
    chosen = groups == group
    first = tl.sum(tl.where(chosen, begins + (number - tiles_through + tiles) * TOKENS, 0), 0)
    return group, first, tl.sum(tl.where(chosen, ends, 0), 0)


@triton.jit
def _grouped_matmul(
    x,
    matrices,
    x_scale,
    scales,
    offsets,
    out,
    columns,
    inner,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """Compute one tile of one group's rows. Grid: (upper bound of row tiles, column tiles)."""
    group, first, end = _find_rows(offsets, tl.program_id(0), TOKENS, GROUPS, PADDED_GROUPS)
    if group < GROUPS:
        token = first + tl.arange(0, TOKENS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        token_used = token < end
        first_output = group.to(tl.int64) * columns
        rows = x + token.to(tl.int64) * inner
        # Columns after the last one load the last column's weights; their results are not stored.
        outputs = matrices + (first_output + tl.minimum(column, columns - 1)) * inner
        sums = sum_tiles(
            rows, outputs, 0, tl.cdiv(inner, INNER), token_used, inner, COLUMNS, TOKENS, INNER, EVEN, 0, tl.int32
        )
        store_matmul(
            sums, out, x_scale, scales + first_output, out, token, column, end, columns, SCALED=True, BIAS=False
        )
