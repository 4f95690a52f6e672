"""Times the residual addition with its RMSNorm on a GPU: one fused kernel, and the separate operators.

`python benchmarks/add_norm.py [--width 4096] [--tokens 1 8 32 256 8192]` prints a JSON line per number of tokens with the median
microseconds of both, per addition and norm, in bf16. A CUDA graph runs them as a chain, as the layers of a model do, so that neither the
host nor an overlap of independent kernels counts.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

from meshwright.kernels.add_norm import add_rms_norm
from meshwright.observe.environment import environment

CHAIN, REPEATS = 64, 21
SEPARATE = {"fused": False, "separate": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 256, 8192])
    options = parser.parse_args()
    print(json.dumps({"environment": environment()}, default=str))
    for tokens in options.tokens:
        times = {name: round(microseconds(tokens, options.width, separate), 2) for name, separate in SEPARATE.items()}
        print(json.dumps({"tokens": tokens, "width": options.width} | times), flush=True)


@torch.inference_mode()
def microseconds(tokens: int, width: int, separate: bool) -> float:
    """Median microseconds of one addition with its norm, in a chain of CHAIN of them."""
    first, delta = torch.randn(2, tokens, width, device="cuda").bfloat16()
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)

    def chain() -> None:
        x, normed = first, delta
        for _ in range(CHAIN):
            if separate:
                x = x + normed
                normed = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)
            else:
                x, normed = add_rms_norm(x, normed, weight, 1e-5)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CHAIN)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
