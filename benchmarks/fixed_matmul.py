"""Microseconds of the matmuls of Llama-3-8B for few tokens on a GPU: bf16 and fp8, by torch and by the kernel of fixed
order.

    python benchmarks/fixed_matmul.py [--tokens 1 8 16 32 64 128] [--tiles] [--out FILE]

Calls run from a CUDA graph over copies of the weight that do not fit the L2 cache together. `--tiles` also times other tiles and
splits of the fp8 matmul. One JSON line per shape and number of tokens; about a minute, with `--tiles` two.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.fixed_matmul import fixed_linear, fp8_linear, inner_splits
from meshwright.kernels.fixed_matmul_triton import Tile, tile_of, tiled_matmul
from meshwright.kernels.fp8_matmuls import Fp8Matrix, matmul, quantize

SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
"""(inputs, outputs)."""
BYTES = 400 * 2**20
"""Of all copies of a weight in bf16."""
REPLAYS = 10


def main() -> None:
    options = _arguments()
    lines = []
    for name, (inner, outer) in SHAPES.items():
        copies = -(-BYTES // (2 * inner * outer))
        weights = [torch.randn(outer, inner, device="cuda").bfloat16() for _ in range(copies)]
        fp8_weights = [quantize(weight, "rowwise") for weight in weights]
        for tokens in options.tokens:
            x = torch.randn(tokens, inner, device="cuda").bfloat16()
            line = {
                "benchmark": "fixed_product",
                "device": torch.cuda.get_device_name(),
                "shape": name,
                "tokens": tokens,
            }
            line |= {"microseconds": times(x, weights, fp8_weights)}
            # 1 byte for each number of an fp8 weight.
            line["fp8_terabytes_per_second"] = inner * outer / line["microseconds"]["fp8_fixed"] / 1e6
            if options.tiles:
                line["tiles"] = tile_times(quantize(x, "rowwise"), fp8_weights)
            print(json.dumps(line), flush=True)
            lines.append(line)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def times(x: Tensor, weights: list[Tensor], fp8_weights: list[Fp8Matrix]) -> dict[str, float]:
    """Microseconds of a matmul by each kernel; the fp8 ones get an input in fp8."""
    rounded, dtype = quantize(x, "rowwise"), x.dtype
    return {
        "bf16": microseconds([lambda weight=weight: F.linear(x, weight) for weight in weights]),
        "bf16_fixed": microseconds([lambda weight=weight: fixed_linear(x, weight) for weight in weights]),
        "fp8": microseconds(
            [lambda weight=weight: matmul(rounded, weight, dtype, fast=True) for weight in fp8_weights]
        ),
        "fp8_fixed": microseconds(
            [lambda weight=weight: fp8_linear(rounded, weight, None, dtype, invariant=True) for weight in fp8_weights]
        ),
    }


def tile_times(x: Fp8Matrix, weights: list[Fp8Matrix]) -> list[dict[str, object]]:
    """The fastest tiles and splits, with microseconds."""
    outer, inner = weights[0].values.shape
    tile = tile_of(len(x.values), 1)
    tiles = {tile, tile._replace(stages=3), tile._replace(stages=8 if tile.tokens < 64 else 6)}
    tiles |= {Tile(128, tile.tokens, warps, 4) for warps in (4, 8)}
    found = []
    for candidate in tiles:
        for splits in {1, 2, 4, 8, 16, inner_splits(outer, inner, 1)}:

            def call(weight: Fp8Matrix, candidate: Tile = candidate, splits: int = splits) -> Tensor:
                fp8 = (x.values, weight.values, x.scale, weight.scale)
                return tiled_matmul(*fp8, None, torch.bfloat16, tile=candidate, splits=splits, across=True)

            duration = microseconds([lambda weight=weight, call=call: call(weight) for weight in weights])
            found.append({"tile": candidate, "splits": splits, "microseconds": duration})
    return sorted(found, key=lambda each: each["microseconds"])[:5]


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Of one call, the median over replays of a graph with all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    durations = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        durations.append(1000 * begin.elapsed_time(end) / len(calls))
    return sorted(durations)[REPLAYS // 2]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--tiles", action="store_true", help="time other tiles and splits")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
