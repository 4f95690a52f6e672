"""Times the addition of a micro-batch's weight gradient to the sum: inside the matmul, and by a separate pass.

    python benchmarks/gradient_sums.py                       # weights of Llama-3-8B, and a chunk of Llama 3.2 1B's head, on a GPU
    python benchmarks/gradient_sums.py --weights 64x32x48 --device cpu

Prints a JSON line for each weight: its gradient in bf16, as a new sum in fp32, and added to one in fp32; then what a pass takes that adds
it in bf16 instead, ours and torch's. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from head import now

from meshwright.kernels.sums import add, add_product, matmul

WEIGHTS = ("28672x4096x8192", "4096x14336x8192", "6144x4096x8192", "4096x4096x8192", "128256x2048x4096")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", default=WEIGHTS, metavar="OUTxINxTOKENS")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    for text in options.weights:
        print(json.dumps({"weight": text} | measured(text, options)), flush=True)


def measured(text: str, options: argparse.Namespace) -> dict[str, float]:
    """Times for a weight."""
    device, wide = torch.device(options.device), torch.float32
    rows, columns, tokens = map(int, text.split("x"))
    torch.manual_seed(0)
    slope, x = (torch.randn(tokens, width, device=device).bfloat16() for width in (rows, columns))
    total = torch.zeros(rows, columns, device=device, dtype=wide)
    made = slope.t() @ x
    calls: dict[str, Callable[[], object]] = {
        "bf16": lambda: matmul(slope.t(), x, slope.dtype),
        "fp32": lambda: matmul(slope.t(), x, wide),
        "added": lambda: add_product(total, slope.t(), x),
        "pass": lambda: add(total, made),
        "pass_torch": lambda: add(total, made, plain=True),
    }
    return {name: 1e3 * typical(call, options.calls, device) for name, call in calls.items()}


def typical(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Median seconds of a call, without the first ones, which select kernels."""
    seconds = []
    for number in range(calls + 3):
        started = now(device)
        call()
        if number >= 3:
            seconds.append(now(device) - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
