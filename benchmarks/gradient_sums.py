"""Times the addition of a micro-batch's weight gradient to the sum: inside the matmul, and by a separate pass.

    python benchmarks/gradient_sums.py                       # weights of Llama-3-8B, and a chunk of Llama 3.2 1B's head, on a GPU
    python benchmarks/gradient_sums.py --weights 64x32x48 --device cpu

Prints a JSON line for each weight with median milliseconds: the matmul of the gradient with a bf16 result (`bf16`),
with an fp32 result (`fp32`), and with its result added to an fp32 sum (`added`); and a separate pass that adds a bf16
gradient to an fp32 sum, with our kernel (`pass`) and with torch (`pass_torch`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from head import synchronized_time

from meshwright.kernels.sums import add, add_matmul, matmul

WEIGHTS = ("28672x4096x8192", "4096x14336x8192", "6144x4096x8192", "4096x4096x8192", "128256x2048x4096")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", default=WEIGHTS, metavar="OUTxINxTOKENS")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    for shape_text in options.weights:
        print(json.dumps({"weight": shape_text} | measure(shape_text, options)), flush=True)


def measure(shape_text: str, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds by method for a weight of shape OUT x IN and a number of tokens, given as OUTxINxTOKENS."""
    device, sum_dtype = torch.device(options.device), torch.float32
    outputs, inputs_width, tokens = map(int, shape_text.split("x"))
    torch.manual_seed(0)
    output_gradient, inputs = (
        torch.randn(tokens, width, device=device).bfloat16() for width in (outputs, inputs_width)
    )
    gradient_sum = torch.zeros(outputs, inputs_width, device=device, dtype=sum_dtype)
    weight_gradient = output_gradient.t() @ inputs
    calls: dict[str, Callable[[], object]] = {
        "bf16": lambda: matmul(output_gradient.t(), inputs, output_gradient.dtype),
        "fp32": lambda: matmul(output_gradient.t(), inputs, sum_dtype),
        "added": lambda: add_matmul(gradient_sum, output_gradient.t(), inputs),
        "pass": lambda: add(gradient_sum, weight_gradient),
        "pass_torch": lambda: add(gradient_sum, weight_gradient, reference=True),
    }
    return {name: 1e3 * median_seconds(call, options.calls, device) for name, call in calls.items()}


def median_seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Median seconds of a call, without the first ones, which select kernels."""
    seconds = []
    for number in range(calls + 3):
        start = synchronized_time(device)
        call()
        if number >= 3:
            seconds.append(synchronized_time(device) - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
