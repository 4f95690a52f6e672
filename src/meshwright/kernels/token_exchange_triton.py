"""Triton kernels that move rows between ranks which map each other's memory; imported only where they run.

Each rank has a window of memory, which all ranks map. `peers` `(ranks,)` has the base addresses of the windows as int64, so several
windows may lie on one device. An exchange has four steps, each a kernel:

1. `write_rows`: a rank writes its rows into the windows of their targets.
2. `signal`: it sets its flag in each window.
3. `wait`: it waits for the flags of all ranks in its own window.
4. `read_rows`: it copies the received rows out of its window.

Before that, `signal` with `load` sends the numbers of rows, with flags of their own, and `route` computes the target of each row from
them. The host reads no value. If ranks share a stream, all of them must signal before one of them waits.

A target is an int64: the rank in the upper 32 bits, and the row in that rank's window in the lower 32; -1 if there is none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.fp8_matmuls import E4M3
from meshwright.kernels.row_quantize_triton import ELEMENTS_PER_THREAD, _store_rounded

PROCESSOR_THREADS = 2048
"""Threads of a multiprocessor; the programs of a copy fill all of them and take one row after another."""
SEARCHED = 8192
"""Comparisons of one program that finds the segments of rows."""


def signal(peers: Tensor, rank: int, number: int, flags: int, load: Tensor | None = None, counts: int = 0) -> None:
    """Set this rank's flag to `number` in each window, after all earlier writes of the stream.

    `flags` is the byte of a window at which its flags `(ranks,)`, int32, start. A `load` `(experts,)`, int32, is also written into each
    window: as line `rank` of a table `(ranks, experts)` that starts at byte `counts`.
    """
    experts = 0 if load is None else load.shape[0]
    _signal[(peers.shape[0],)](
        peers,
        peers if load is None else load,
        rank,
        number,
        flags,
        counts,
        EXPERTS=experts,
        BLOCK=triton.next_power_of_2(max(experts, 1)),
        num_warps=1,
    )


def wait(flags: Tensor, number: int) -> None:
    """Make the stream wait until each of this rank's `flags` `(ranks,)`, int32, is at least `number`."""
    _wait[(flags.shape[0],)](flags, number, num_warps=1)


def route(
    counts: Tensor, rank: int, row_count: int, bound: int, exceeded: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Targets of rows on the way out and back, from `counts` `(ranks, experts)`, int32: the rows of each rank for each expert.

    Rank r has the experts from r · experts / ranks on. A rank sends its `row_count` rows sorted by expert. It receives at most `bound`
    rows, sorted by expert, then by sending rank, then as the sender sorted them. Returns:

    - `(experts / ranks,)` int32: the end of each own expert's received rows;
    - `(rows,)`: the targets of sent rows;
    - `(bound,)`: the targets of received rows on the way back;
    - `(3,)` int32: the rows sent, the rows received, and 1 if any rank would receive more than `bound` rows.

    Rows beyond the bound have no target; then `exceeded` `(1,)`, int32, which may be pinned host memory, becomes 1.
    """
    ranks, experts = counts.shape
    device = counts.device
    local = experts // ranks
    segments = torch.empty(2, 2, experts, dtype=torch.int32, device=device)
    offsets = torch.empty(local, dtype=torch.int32, device=device)
    totals = torch.empty(3, dtype=torch.int32, device=device)
    _route[(1,)](
        counts,
        segments,
        offsets,
        totals,
        exceeded,
        rank,
        bound,
        RANKS=ranks,
        LOCAL=local,
        RANK_BLOCK=triton.next_power_of_2(ranks),
        LOCAL_BLOCK=triton.next_power_of_2(local),
        num_warps=8,
    )
    sent, returned = (torch.empty(size, dtype=torch.int64, device=device) for size in (row_count, bound))
    block = triton.next_power_of_2(experts)
    search = max(16, SEARCHED // block)
    for back, (targets, limit) in enumerate(((sent, bound), (returned, 2**31 - 1))):
        if targets.numel():
            _targets[(triton.cdiv(targets.numel(), search),)](
                segments[back],
                targets,
                targets.numel(),
                limit,
                RANKS=ranks,
                LOCAL=local,
                BACK=bool(back),
                SEARCH=search,
                BLOCK=block,
                num_warps=4,
            )
    return offsets, sent, returned, totals


def write_rows(
    activations: Tensor,
    targets: Tensor,
    count: Tensor,
    peers: Tensor,
    first: int,
    scales: int | None = None,
    fp8: torch.dtype = E4M3,
) -> None:
    """Write the first `count` `(1,)` rows `(rows, width)` to their targets, as rows that start at byte `first` of each window.

    With `scales` they are rounded to `fp8` with one scale a row (`row_quantize.quantize_rows`); a window's scales, fp32, start at
    byte `scales`.
    """
    activations = activations.contiguous()
    width = activations.shape[1]
    if activations.numel():
        _write_rows[_programs(activations)](
            activations,
            targets,
            count,
            peers,
            first,
            scales or 0,
            WIDTH=width,
            BYTES=(activations if scales is None else torch.empty(0, dtype=fp8)).element_size(),
            FP8=None if scales is None else _TYPES[fp8],
            **_launch(width),
        )


def read_rows(received: Tensor, out: Tensor, totals: Tensor, back: bool, scales: Tensor | None = None) -> None:
    """Copy the rows that arrived from `received` `(≥ rows, width)` of this rank's window into `out` `(rows, width)`.

    `totals` is from `route`. On the way out the rows of `out` after the received ones are not written. On the way back all rows become
    NaN if a rank has received more rows than fit, so that no result lacks rows unnoticed. `scales` `(≥ rows,)` multiply the rows.
    """
    if out.numel():
        _read_rows[_programs(out)](
            received,
            out,
            totals,
            received if scales is None else scales,
            out.shape[0],
            WIDTH=out.shape[1],
            BACK=back,
            SCALED=scales is not None,
            **_launch(out.shape[1]),
        )


_TYPES = {E4M3: tl.float8e4nv, torch.float32: tl.float32}
"""Number formats of rounded rows; tests in Triton's interpreter, which rounds wrongly to fp8, take fp32."""


def _launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(32, max(1, block // (32 * ELEMENTS_PER_THREAD)))}


def _programs(activations: Tensor) -> tuple[int]:
    if not activations.is_cuda:
        return (min(activations.shape[0], 4),)
    processors = torch.cuda.get_device_properties(activations.device).multi_processor_count
    return (
        min(activations.shape[0], processors * PROCESSOR_THREADS // (32 * _launch(activations.shape[1])["num_warps"])),
    )


@triton.jit(do_not_specialize=["rank", "number"])
def _signal(peers, load, rank, number, flags, counts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    window = tl.load(peers + tl.program_id(0))
    if EXPERTS > 0:
        expert = tl.arange(0, BLOCK)
        table = (window + counts).to(tl.pointer_type(tl.int32)) + rank * EXPERTS
        tl.store(table + expert, tl.load(load + expert, mask=expert < EXPERTS), mask=expert < EXPERTS)
    # All threads have stored before the thread that signals. Its release covers them and the kernels before this one.
    tl.debug_barrier()
    tl.atomic_xchg((window + flags).to(tl.pointer_type(tl.int32)) + rank, number, sem="release", scope="sys")


@triton.jit(do_not_specialize=["number"])
def _wait(flags, number) -> None:
    while tl.atomic_add(flags + tl.program_id(0), 0, sem="acquire", scope="sys") < number:
        pass


@triton.jit(do_not_specialize=["rank", "bound"])
def _route(
    counts,
    segments,
    offsets,
    totals,
    exceeded,
    rank,
    bound,
    RANKS: tl.constexpr,
    LOCAL: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    LOCAL_BLOCK: tl.constexpr,
) -> None:
    """Segments `(2, 2, experts)`: for the way out and the way back, the end of each segment, and its targets minus its rows.

    A segment is a run of rows that go to one rank. On the way out it has the rows of an expert, on the way back the rows of an expert from
    one sending rank.
    """
    EXPERTS: tl.constexpr = RANKS * LOCAL
    source = tl.arange(0, RANK_BLOCK)
    expert = tl.arange(0, LOCAL_BLOCK)
    owner = source[None, :, None]
    inside = (source[:, None, None] < RANKS) & (owner < RANKS) & (expert[None, None, :] < LOCAL)
    cell = source[:, None, None] * EXPERTS + owner * LOCAL + expert[None, None, :]
    sizes = tl.load(counts + cell, mask=inside, other=0)

    total = tl.sum(sizes, 0)  # (owner, expert)
    own = tl.sum(tl.where(source[:, None, None] == rank, sizes, 0), 0)
    earlier = tl.sum(tl.where(source[:, None, None] < rank, sizes, 0), 0)
    of_owner = tl.sum(own, 1)
    ends = (tl.cumsum(of_owner, 0) - of_owner)[:, None] + tl.cumsum(own, 1)
    shifts = tl.cumsum(total, 1) - total + earlier - (ends - own)
    within = (source[:, None] < RANKS) & (expert[None, :] < LOCAL)
    position = source[:, None] * LOCAL + expert[None, :]
    tl.store(segments + position, ends, mask=within)
    tl.store(segments + EXPERTS + position, shifts, mask=within)

    arriving = tl.sum(tl.where(owner == rank, sizes, 0), 1)  # (source, expert)
    lower = tl.sum(tl.sum(tl.where(owner < rank, sizes, 0), 2), 1)
    of_expert = tl.sum(arriving, 0)
    expert_ends = tl.cumsum(of_expert, 0)
    back_ends = (expert_ends - of_expert)[None, :] + tl.cumsum(arriving, 0)
    back_shifts = lower[:, None] + tl.cumsum(arriving, 1) - back_ends
    back_position = expert[None, :] * RANKS + source[:, None]
    tl.store(segments + 2 * EXPERTS + back_position, back_ends, mask=within)
    tl.store(segments + 3 * EXPERTS + back_position, back_shifts, mask=within)

    tl.store(offsets + expert, tl.minimum(expert_ends, bound), mask=expert < LOCAL)
    tl.store(totals, tl.sum(of_owner, 0))
    tl.store(totals + 1, tl.minimum(tl.sum(of_expert, 0), bound))
    too_many = tl.max(tl.sum(total, 1), 0) > bound
    tl.store(totals + 2, too_many.to(tl.int32))
    tl.store(exceeded, 1, mask=too_many)


@triton.jit(do_not_specialize=["limit"])
def _targets(
    segments,
    targets,
    row_count,
    limit,
    RANKS: tl.constexpr,
    LOCAL: tl.constexpr,
    BACK: tl.constexpr,
    SEARCH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    EXPERTS: tl.constexpr = RANKS * LOCAL
    index = tl.program_id(0) * SEARCH + tl.arange(0, SEARCH)
    number = tl.arange(0, BLOCK)
    ends = tl.load(segments + number, mask=number < EXPERTS, other=2147483647)
    segment = tl.sum((ends[None, :] <= index[:, None]).to(tl.int32), 1)
    exists = (segment < EXPERTS) & (index < row_count)
    target = index + tl.load(segments + EXPERTS + segment, mask=exists, other=0)
    peer = segment % RANKS if BACK else segment // LOCAL
    packed = (peer.to(tl.int64) << 32) + target
    tl.store(targets + index, tl.where(exists & (target < limit), packed, -1), mask=index < row_count)


@triton.jit(do_not_specialize=["first", "scales"])
def _write_rows(
    activations,
    targets,
    count,
    peers,
    first,
    scales,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    end = tl.load(count)
    while index < end:
        target = tl.load(targets + index)
        if target >= 0:
            window = tl.load(peers + (target >> 32))
            position = target & 0xFFFFFFFF
            numbers = tl.load(activations + index * WIDTH + column, mask=inside, other=0.0)
            address = window + first + position * (WIDTH * BYTES)
            if FP8 is None:
                out = tl.multiple_of(address.to(activations.dtype), 16 if WIDTH * BYTES % 16 == 0 else BYTES)
                tl.store(out + column, numbers, mask=inside)
            else:
                out = tl.multiple_of(address.to(tl.pointer_type(FP8)), 16 if WIDTH * BYTES % 16 == 0 else BYTES)
                scale = (window + scales + position * 4).to(tl.pointer_type(tl.float32))
                _store_rounded(numbers.to(tl.float32), inside, out, scale, column, 0)
        index += tl.num_programs(0)


@triton.jit(do_not_specialize=["row_count"])
def _read_rows(
    received,
    out,
    totals,
    scales,
    row_count,
    WIDTH: tl.constexpr,
    BACK: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    end = row_count if BACK else tl.load(totals + 1)
    factor = tl.where(tl.load(totals + 2) != 0, float("nan"), 1.0)
    while index < end:
        offset = index * WIDTH + column
        numbers = tl.load(received + offset, mask=inside, other=0.0)
        if SCALED:
            numbers = numbers.to(tl.float32) * tl.load(scales + index)
        if BACK:
            numbers = numbers * factor
        tl.store(out + offset, numbers.to(out.dtype.element_ty), mask=inside)
        index += tl.num_programs(0)
