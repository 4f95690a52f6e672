"""Token exchange by kernels that write into the other ranks' memory: the host reads no count and does not wait.

All ranks first share their numbers of rows per expert. From these numbers each rank computes on the device the target of every row. It
writes its rows directly to their positions in the target's window, where they are sorted by expert. The target then copies them out of the
window, because a later exchange overwrites them. On the way back, outputs are written to the positions that their rows had at the source.

A window has two slots, which exchanges use in turn: exchange 1 uses slot 1, exchange 2 slot 0, exchange 3 slot 1 again. A rank sets its
flag for exchange 2 only after it has read its slot of exchange 1. A rank that has waited for all flags of exchange 2 can therefore write
into slot 1 for exchange 3.

Shapes are static: a rank receives at most `bound` times as many rows as it sends. If any rank would receive more, all ranks learn this from
the counts. The rows that return are then NaN, and a `start_route` after the device has finished this exchange raises BadInput.

All ranks of a group make the same calls in the same order, with equal numbers of rows. Each start is finished before the next start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.parallel.peers import aligned
from meshwright.spec.errors import BadInput
from meshwright.workload.buffers import TOKEN_SLOTS


class MappedWindow(NamedTuple):
    """Memory `(bytes,)` of this rank that all ranks map, and the int64 addresses `(ranks,)` of every rank's window."""

    memory: Tensor
    addresses: Tensor


class Route(NamedTuple):
    """Targets of the rows of one layer and one micro-batch, computed by `kernels.token_exchange_triton.route`.

    - `sent` `(rows,)`: the target of each row that this rank sends.
    - `received` `(maximum of rows received,)`: the target of each received row's output on the way back.
    - `totals` `(3,)`: number of rows sent, number of rows received, and 1 if any rank's rows exceed the bound.
    """

    sent: Tensor
    received: Tensor
    totals: Tensor


class PeerExchange:
    """One rank's side of the exchanges between `ranks` ranks.

    - `bound`: the maximum number of rows that a rank receives, as a multiple of the rows that it sends.
    - `fp8`: rows go to the experts in e4m3 with one scale per row. Gradients and outputs keep their dtype.
    - `open_window(size)`: allocates and maps a window of `size` zero bytes on each rank; collective.

    A method that starts an exchange writes rows and sets flags. The method that finishes it waits for the flags and reads.
    """

    def __init__(
        self, rank: int, ranks: int, bound: float, fp8: bool, open_window: Callable[[int], MappedWindow]
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.fp8 = fp8
        self._bound = min(bound, float(ranks))
        self._open = open_window
        self._areas = _Areas(ranks, 0, 0, 0)
        self._routes = self._moves = 0
        self._exceeded = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())

    def most_received(self, row_count: int) -> int:
        """Maximum number of rows that a rank receives if each rank sends `row_count`."""
        return math.ceil(self._bound * row_count)

    def start_route(self, load: Tensor, activations: Tensor) -> None:
        """Send this rank's number of rows for each expert, `load` `(experts,)`, to all ranks. `activations` are the rows to be sent later.

        Raises BadInput if the rows of an earlier exchange exceeded the bound.
        """
        from meshwright.kernels.token_exchange_triton import signal

        self.check()
        self._reserve(
            load.shape[0], max(activations.shape[0], self.most_received(activations.shape[0])), activations[:1].nbytes
        )
        self._routes += 1
        slot = self._routes % TOKEN_SLOTS
        load = load.to(torch.int32)
        signal(self._window.addresses, self.rank, self._routes, self._areas.count_flags, load, self._areas.counts(slot))

    def finish_route(self, row_count: int) -> tuple[Tensor, Route]:
        """Wait for all ranks' counts. Returns the ends of the local experts' received rows `(local experts,)`, and the route."""
        from meshwright.kernels.token_exchange_triton import route, wait

        wait(self._view(self._areas.count_flags, (self.ranks,), torch.int32), self._routes)
        table = self._view(
            self._areas.counts(self._routes % TOKEN_SLOTS), (self.ranks, self._areas.experts), torch.int32
        )
        offsets, *targets = route(table, self.rank, row_count, self.most_received(row_count), self._exceeded)
        return offsets, Route(*targets)

    def start_move(self, activations: Tensor, route: Route, back: bool, fp8: bool = False) -> None:
        """Write rows `(rows, width)` to the ranks of their experts, or with `back` to their source ranks. `fp8` rounds them to e4m3."""
        from meshwright.kernels.token_exchange_triton import signal, write_rows

        self._moves += 1
        slot = self._moves % TOKEN_SLOTS
        targets, count = (route.received, route.totals[1:]) if back else (route.sent, route.totals)
        assert activations.shape[0] <= self._areas.row_count and activations[:1].nbytes <= self._areas.row_bytes, (
            "rows that fit a slot"
        )
        scales = self._areas.scales(slot) if fp8 else None
        write_rows(activations, targets, count, self._window.addresses, self._areas.slot(slot), scales)
        signal(self._window.addresses, self.rank, self._moves, self._areas.row_flags)

    def finish_move(self, route: Route, back: bool, out: Tensor, fp8: bool = False) -> Tensor:
        """Wait for the rows of all ranks, copy them into `out` `(rows, width)` and return it. `back` and `fp8` as in `start_move`.

        On the way to the experts, rows of `out` beyond the number received are undefined.
        """
        from meshwright.kernels.fp8_matmuls import E4M3
        from meshwright.kernels.token_exchange_triton import read_rows, wait

        slot = self._moves % TOKEN_SLOTS
        wait(self._view(self._areas.row_flags, (self.ranks,), torch.int32), self._moves)
        received = self._view(self._areas.slot(slot), tuple(out.shape), E4M3 if fp8 else out.dtype)
        scales = self._view(self._areas.scales(slot), (out.shape[0],), torch.float32) if fp8 else None
        read_rows(received, out, route.totals, back, scales)
        return out

    def check(self) -> None:
        """Raise BadInput if an exchange that the device has finished had more rows than the bound. Does not wait for the device."""
        if self._exceeded.item():
            raise BadInput(
                f"plan.expert_receive_bound = {self._bound:g}: an expert rank would receive more than {self._bound:g} times the rows "
                f"that it sends; raise it (at most to {self.ranks}, the ranks of the experts) or choose plan.expert_exchange: all_to_all"
            )

    def _reserve(self, experts: int, row_count: int, row_bytes: int) -> None:
        areas = self._areas
        if experts == areas.experts and row_count <= areas.row_count and row_bytes <= areas.row_bytes:
            return
        assert not areas.experts or experts == areas.experts, "all layers have the same number of experts"
        self._areas = _Areas(self.ranks, experts, max(row_count, areas.row_count), max(row_bytes, areas.row_bytes))
        self._window = self._open(self._areas.size)
        # A new window's flags are zero.
        self._routes = self._moves = 0

    def _view(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._window.memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class _Areas(NamedTuple):
    """Byte offsets of the areas of a window: the flags of counts, the flags of rows, then the counts, scales and rows of each slot."""

    ranks: int
    experts: int
    row_count: int
    row_bytes: int

    @property
    def count_flags(self) -> int:
        return 0

    @property
    def row_flags(self) -> int:
        return aligned(4 * self.ranks)

    def counts(self, slot: int) -> int:
        return 2 * self.row_flags + slot * aligned(4 * self.ranks * self.experts)

    def scales(self, slot: int) -> int:
        return self.counts(TOKEN_SLOTS) + slot * aligned(4 * self.row_count)

    def slot(self, slot: int) -> int:
        return self.scales(TOKEN_SLOTS) + slot * aligned(self.row_count * self.row_bytes)

    @property
    def size(self) -> int:
        return self.slot(TOKEN_SLOTS)
