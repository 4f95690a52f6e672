"""Milliseconds of the head with its loss, forward and backward, for an aligned vocabulary and an unaligned one.

    python benchmarks/head.py                       # GPT-3 13B's head on a GPU, 50304 against 50257
    python benchmarks/head.py --tokens 256 --hidden 64 --vocab 512 509 --device cpu

Prints a JSON line for each vocabulary: the shortest and the median call, its three matmuls' TFLOP/s, and the loss of
the last call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from meshwright.kernels.loss import linear_cross_entropy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--vocab", type=int, nargs="+", default=[50304, 50257])
    parser.add_argument("--z-loss", type=float, default=0.0)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    for vocab in options.vocab:
        print(json.dumps(measure(options, vocab)), flush=True)


def measure(options: argparse.Namespace, vocab: int) -> dict[str, float]:
    """Times of the calls for a vocabulary size."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(vocab, options.hidden, device=device, dtype=torch.bfloat16)).requires_grad_()
    targets = torch.randint(vocab, (options.tokens,), device=device)
    seconds, loss = [], 0.0
    for call in range(options.calls + 3):
        start = synchronized_time(device)
        value = linear_cross_entropy(hidden, weight, targets, options.chunk, z_loss=options.z_loss).loss
        torch.autograd.grad(value / options.tokens, (hidden, weight))
        if call >= 3:  # the first ones compile and choose kernels
            seconds.append(synchronized_time(device) - start)
        loss = value.item() / options.tokens
    flops = 6 * options.tokens * options.hidden * vocab
    median_seconds = statistics.median(seconds)
    return {
        "vocab": vocab,
        "tokens": options.tokens,
        "hidden": options.hidden,
        "chunk": options.chunk,
        "z_loss": options.z_loss,
        "ms": 1e3 * median_seconds,
        "ms_least": 1e3 * min(seconds),
        "tflops": flops / median_seconds / 1e12,
        "loss": loss,
    }


def synchronized_time(device: torch.device) -> float:
    """Host time in seconds, after the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
