"""Ranks of a token exchange that share one device: each step runs on all ranks before the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallel.token_exchange_peers import MappedWindow, PeerExchange, Route


class EmulatedRanks:
    """The exchanges of `ranks` ranks on `device`; arguments and results are lists by rank."""

    def __init__(self, ranks: int, device: str, bound: float, fp8: bool = False) -> None:
        self._windows: dict[int, list[MappedWindow]] = {}
        self._device, self._fp8 = device, fp8
        self.exchanges = [PeerExchange(rank, ranks, bound, fp8, self._opener(rank, ranks)) for rank in range(ranks)]

    def _opener(self, rank: int, ranks: int) -> Callable[[int], MappedWindow]:
        def open_window(size: int) -> MappedWindow:
            if size not in self._windows:
                memories = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(ranks)]
                addresses = torch.tensor([memory.data_ptr() for memory in memories], device=self._device)
                self._windows[size] = [MappedWindow(memory, addresses) for memory in memories]
            return self._windows[size][rank]

        return open_window

    def route(self, loads: Tensor, activations: Sequence[Tensor]) -> tuple[list[Tensor], list[Route]]:
        for exchange, load, own_rows in zip(self.exchanges, loads, activations, strict=True):
            exchange.start_route(load, own_rows)
        answers = [exchange.finish_route(len(own)) for exchange, own in zip(self.exchanges, activations, strict=True)]
        return [offsets for offsets, _ in answers], [route for _, route in answers]

    def move(self, activations: Sequence[Tensor], routes: Sequence[Route], back: bool) -> list[Tensor]:
        """Move rows into new tensors filled with -7, so that a test sees what the kernels did not write."""
        fp8 = self._fp8 and not back
        for exchange, own, route in zip(self.exchanges, activations, routes, strict=True):
            exchange.start_move(own, route, back, fp8)
        sizes = [len(route.sent) if back else len(route.received) for route in routes]
        outputs = [own.new_full((size, own.shape[1]), -7.0) for own, size in zip(activations, sizes, strict=True)]
        return [
            exchange.finish_move(route, back, out, fp8)
            for exchange, route, out in zip(self.exchanges, routes, outputs, strict=True)
        ]


@dataclass(frozen=True)
class Loads:
    """Rows of each rank for each expert `(ranks, experts)`; `bound` as a multiple of a rank's rows."""

    counts: Tensor
    bound: float

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.counts.shape[1] // self.counts.shape[0]

    def segment(self, source: int, expert: int) -> slice:
        """The rows of a rank for an expert, among its rows sorted by expert."""
        start = int(self.counts[source, :expert].sum())
        return slice(start, start + int(self.counts[source, expert]))

    def received(self, activations: Sequence[Tensor], rank: int) -> Tensor:
        """The rows that `rank` gets of all ranks' rows, sorted by expert, then by source."""
        experts = range(rank * self.local, (rank + 1) * self.local)
        ranks = range(len(self.counts))
        return torch.cat([activations[source][self.segment(source, expert)] for expert in experts for source in ranks])

    def returned(self, outputs: Sequence[Tensor], source: int) -> Tensor:
        """The rows that `source` gets back of all ranks' received rows, in the order in which it sent them."""
        parts = []
        for expert in range(self.counts.shape[1]):
            owner = expert // self.local
            start = int(self.counts[:, owner * self.local : expert].sum() + self.counts[:source, expert].sum())
            parts.append(outputs[owner][start : start + int(self.counts[source, expert])])
        return torch.cat(parts)


def drawn_loads(name: str, ranks: int, experts: int, row_count: int) -> Loads:
    """Loads by name: even, uneven (a few experts are popular), and all rows to the last expert or to one rank's experts."""
    draw = torch.Generator().manual_seed(len(name))
    weights = {
        "even": torch.ones(ranks, experts),
        "uneven": torch.rand(ranks, experts, generator=draw).pow(8),
        "one expert": torch.eye(experts)[-1:].expand(ranks, -1),
        "one rank": (torch.arange(experts) // (experts // ranks) == 1).float().expand(ranks, -1),
    }[name]
    chosen = weights.multinomial(row_count, replacement=True, generator=draw)
    return Loads(torch.stack([line.bincount(minlength=experts) for line in chosen]), float(ranks))


def check_exchanges(loads: Sequence[Loads], device: str, row_count: int, width: int, dtype: torch.dtype) -> None:
    """Exchange rows for each of `loads` in turn, out and back, in the same windows; all rows arrive with the same bits."""
    ranks, _ = loads[0].counts.shape
    emulated = EmulatedRanks(ranks, device, loads[0].bound)
    for number, case in enumerate(loads):
        draw = torch.Generator(device).manual_seed(number)
        sent, answers = (
            [torch.randn(size, width, generator=draw, device=device).to(dtype) for _ in range(ranks)]
            for size in (row_count, emulated.exchanges[0].most_received(row_count))
        )
        offsets, routes = emulated.route(case.counts.to(device), sent)
        received = emulated.move(sent, routes, back=False)
        returned = emulated.move(answers, routes, back=True)
        totals = case.counts.view(ranks, ranks, -1).sum(0)
        for rank in range(ranks):
            expected = case.received(sent, rank)
            assert torch.equal(offsets[rank].cpu(), totals[rank].cumsum(0).int())
            assert torch.equal(received[rank][: len(expected)], expected)
            assert bool((received[rank][len(expected) :] == -7.0).all()), "only received rows are written"
            assert torch.equal(returned[rank], case.returned(answers, rank))
        for exchange in emulated.exchanges:
            exchange.check()
