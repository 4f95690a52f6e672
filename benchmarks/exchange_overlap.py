"""How much of the exchange of tokens between expert ranks other kernels hide, in the last step of a profiler's trace.

`python benchmarks/exchange_overlap.py TRACE…` prints a JSON line for each trace of `meshwright train --profile-steps A:B`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from kernel_times import last_step, read_trace
from kernel_trace import Kernel

EXCHANGE = "SendRecv"
"""Part of the name of NCCL's all-to-all kernels, whose time includes the wait for the other ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    for trace in parser.parse_args().traces:
        print(json.dumps({"trace": trace.name} | exchange_overlap(read_trace(trace))))


def exchange_overlap(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Seconds of the step and of its exchanges, and the share of these beside which compute runs.

    Raises BadInput for a trace without two steps.
    """
    begin, end = last_step(kernels)
    exchanges = _union((kernel for kernel in kernels if EXCHANGE in kernel.name), begin, end)
    compute = _union((kernel for kernel in kernels if kernel.kernel_class != "communication"), begin, end)
    seconds = sum(stop - start for start, stop in exchanges)
    hidden = sum(
        max(0.0, min(stop, other_stop) - max(start, other_start))
        for start, stop in exchanges
        for other_start, other_stop in compute
    )
    return {
        "step_seconds": end - begin,
        "exchange_seconds": seconds,
        "hidden_share": hidden / seconds if seconds else 0.0,
    }


def _union(kernels: Iterable[Kernel], begin: float, end: float) -> list[tuple[float, float]]:
    """Disjoint intervals between `begin` and `end` in which any of the kernels runs."""
    joined: list[tuple[float, float]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        start, stop = max(kernel.start, begin), min(kernel.end, end)
        if stop <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


if __name__ == "__main__":
    main()
