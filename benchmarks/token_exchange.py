"""Times the token exchange by kernels on one GPU, whose memory has the windows of all emulated ranks.

`python benchmarks/token_exchange.py [--ranks 8] [--tokens 8192] [--copies 8] [--width 2048] [--experts 128] [--bound 2]` prints a JSON line
for each load and number format: the median microseconds of a rank for the route, the way out and the way back, and the GB/s of rows
moved, beside a device copy of the same rows. Each way writes rows into windows and copies them out, so it passes memory twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.observe.environment import environment
from meshwright.parallel.token_exchange_peers import MappedWindow, PeerExchange, Route

REPEATS = 21
LOADS = ("even", "uneven")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"ranks": 8, "tokens": 8192, "copies": 8, "width": 2048, "experts": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--bound", type=float, default=2.0, help="rows received at most, as a multiple of the rows sent"
    )
    options = parser.parse_args()
    print(json.dumps({"environment": environment()}, default=str))
    for load in LOADS:
        for fp8 in (False, True):
            print(json.dumps(vars(options) | {"load": load, "fp8": fp8} | measure(options, load, fp8)), flush=True)


@torch.inference_mode()
def measure(options: argparse.Namespace, load: str, fp8: bool) -> dict[str, float]:
    """Median microseconds per rank, and GB/s of the rows of a rank in bf16."""
    ranks, rows = options.ranks, options.tokens * options.copies
    weights = torch.ones(options.experts) if load == "even" else torch.rand(options.experts).pow(2)
    counts = torch.stack([weights.multinomial(rows, True).bincount(minlength=options.experts) for _ in range(ranks)])
    counts = counts.to("cuda", torch.int32)
    exchanges = emulated_ranks(ranks, options.bound, fp8)
    sent = [torch.randn(rows, options.width, device="cuda", dtype=torch.bfloat16) for _ in range(ranks)]
    received = [own.new_empty(exchanges[0].most_received(rows), options.width) for own in sent]
    routes: list[Route] = []

    def route() -> None:
        for exchange, load, own in zip(exchanges, counts, sent, strict=True):
            exchange.start_route(load, own)
        routes[:] = [exchange.finish_route(rows)[1] for exchange in exchanges]

    def move(source: list[Tensor], target: list[Tensor], back: bool) -> None:
        for exchange, own, way in zip(exchanges, source, routes, strict=True):
            exchange.start_move(own, way, back, fp8 and not back)
        for exchange, own, way in zip(exchanges, target, routes, strict=True):
            exchange.finish_move(way, back, own, fp8 and not back)

    copied = torch.empty_like(sent[0])
    seconds = {
        "copy": median_seconds(lambda: copied.copy_(sent[0])),
        "route": median_seconds(route) / ranks,
        "out": median_seconds(lambda: move(sent, received, False)) / ranks,
        "back": median_seconds(lambda: move(received, sent, True)) / ranks,
    }
    exchanges[0].check()
    busiest = counts.view(ranks, ranks, -1).sum((0, 2)).max().item() / rows
    rates = {f"{name}_gb_per_second": round(copied.nbytes / seconds[name] / 1e9, 1) for name in ("copy", "out", "back")}
    times = {f"{name}_microseconds": round(1e6 * value, 1) for name, value in seconds.items()}
    return {"busiest_rank": round(busiest, 3), **times, **rates}


def emulated_ranks(ranks: int, bound: float, fp8: bool) -> list[PeerExchange]:
    """The exchanges of ranks whose windows lie on this device."""
    memories: list[Tensor] = []

    def opener(rank: int) -> Callable[[int], MappedWindow]:
        def open_window(size: int) -> MappedWindow:
            if not memories:
                memories.extend(torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(ranks))
            addresses = torch.tensor([memory.data_ptr() for memory in memories], device="cuda")
            return MappedWindow(memories[rank], addresses)

        return open_window

    return [PeerExchange(rank, ranks, bound, fp8, opener(rank)) for rank in range(ranks)]


def median_seconds(run: Callable[[], object]) -> float:
    """Of device time; the first run compiles."""
    run()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
