"""Rates of grouped matmuls of experts beside one dense matmul of as many rows, and beside what the memory allows.

    python benchmarks/grouped_matmuls.py --out FILE.json             # one GPU, about a minute
    python benchmarks/grouped_matmuls.py --rows 8 --experts 4 --hidden 64 --expert-hidden 32 --rounds 1     # a try,
    also on a CPU

The matmuls of a gated expert layer (Qwen3-30B-A3B's by default) in forward, for the input's gradient and for the
weight's, in bf16 and fp8, with `--rows` rows for each expert on average, equal or drawn by a Zipf distribution. `bound`
is the share of the dense rate at which a matmul that reads and writes each number once takes as long as its bytes at
the rate of a copy: below 1 no kernel can reach the dense rate. Rounding to fp8 is not part of the times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import fp8_matmuls as fp8
from meshwright.kernels.fp8_matmuls import Fp8Matrix
from meshwright.kernels.grouped import grouped_linear, grouped_weight_gradient
from meshwright.kernels.grouped_fp8 import grouped_matmul
from meshwright.kernels.row_quantize import quantize_rows
from meshwright.observe.environment import environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COPIED_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rows", type=int, nargs="*", default=[256, 1024, 2048], help="mean rows of an expert")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--expert-hidden", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of a matmul, of which the median counts")
    options = parser.parse_args()
    copy_rate = measured_copy_rate(options.rounds)
    lines = []
    for rows in options.rows:
        for loads in ("equal", "zipf"):
            for line in measured(options, rows, loads, copy_rate):
                print(json.dumps(line), flush=True)
                lines.append(line)
    report = {
        "benchmark": "grouped_products",
        "experts": options.experts,
        "hidden": options.hidden,
        "expert_hidden": options.expert_hidden,
        "copy_terabytes_per_second": copy_rate / 1e12,
        "environment": environment(),
        "lines": lines,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measured(options: argparse.Namespace, rows: int, loads: str, copy_rate: float) -> Iterator[dict[str, Any]]:
    """A line for each matrix and matmul with `rows` rows for each expert on average."""
    sizes = row_counts(options.experts, rows, loads)
    offsets = sizes.cumsum(0).to(DEVICE, torch.int32)
    total = int(sizes.sum())
    for matrix, outer, inner in (
        ("gate_up", 2 * options.expert_hidden, options.hidden),
        ("down", options.hidden, options.expert_hidden),
    ):
        x, grad = (torch.randn(total, width, device=DEVICE).bfloat16() for width in (inner, outer))
        weight = torch.randn(options.experts, outer, inner, device=DEVICE).bfloat16()
        flops = 2 * total * outer * inner
        for product, dtype, call, dense in matmuls(x, grad, weight, offsets):
            took, alone = seconds(call, options.rounds), seconds(dense, options.rounds)
            width = 1 if dtype == "fp8" else 2
            numbers = {"forward": (inner, outer), "input gradient": (outer, inner)}.get(product, (inner + outer, 0))
            read = width * (numbers[0] * total + (weight.numel() if product != "weight gradient" else 0))
            written = 2 * (numbers[1] * total if product != "weight gradient" else weight.numel())
            yield {
                "rows": rows,
                "loads": loads,
                "matrix": matrix,
                "product": product,
                "dtype": dtype,
                "microseconds": round(1e6 * took, 1),
                "teraflops": round(flops / took / 1e12, 1),
                "dense_teraflops": round(flops / alone / 1e12, 1),
                "share": round(alone / took, 3),
                "bound": round(min(1.0, alone * copy_rate / (read + written)), 3),
            }


def matmuls(
    x: Tensor, grad: Tensor, weight: Tensor, offsets: Tensor
) -> Iterator[tuple[str, str, Callable[[], object], Callable[[], object]]]:
    """Name, dtype and call of each matmul, and of the dense matmul with one matrix for all rows."""
    matrix, transposed = weight[0], weight.transpose(1, 2).contiguous()
    with torch.no_grad():
        yield "forward", "bf16", lambda: grouped_linear(x, weight, offsets), lambda: x @ matrix.t()
        yield "input gradient", "bf16", lambda: F.grouped_mm(grad, weight, offs=offsets), lambda: grad @ matrix
        yield (
            "weight gradient",
            "bf16",
            lambda: grouped_weight_gradient(grad, x, weight, offsets),
            lambda: grad.t() @ x,
        )
        for product, left, matrices in (("forward", x, weight), ("input gradient", grad, transposed)):
            rounded, grouped = quantize_rows(left), quantize_rows(matrices)
            one = Fp8Matrix(grouped.values[0], grouped.scale[0])
            yield (
                product,
                "fp8",
                lambda rounded=rounded, grouped=grouped: grouped_matmul(rounded, grouped, offsets, torch.bfloat16),
                lambda rounded=rounded, one=one: fp8.matmul(rounded, one, torch.bfloat16, fast=True),
            )


def row_counts(experts: int, rows: int, loads: str) -> Tensor:
    """Rows of each expert `(experts,)`: `rows` on average, equal or falling with the expert's rank in a drawn order."""
    if loads == "equal":
        return torch.full((experts,), rows)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    shares = 1 / (order + experts / 4)
    return (shares / shares.sum() * experts * rows).long()


def measured_copy_rate(rounds: int) -> float:
    """Bytes per second of a copy, read and written."""
    count = COPIED_BYTES if DEVICE == "cuda" else COPIED_BYTES >> 6
    source, target = (torch.empty(count, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return 2 * count / seconds(lambda: target.copy_(source), rounds)


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Median duration of a call after two that are not counted."""
    durations = []
    for number in range(rounds + 2):
        if DEVICE == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
        if number >= 2:
            durations.append(took)
    return sorted(durations)[len(durations) // 2]


if __name__ == "__main__":
    main()
