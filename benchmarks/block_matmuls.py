"""Microseconds of the matmuls of Llama-3-8B in fp8 on a GPU, with scales for tokens and outputs and for blocks of 128 ×
128.

    python benchmarks/block_matmuls.py [--tokens 1 16 64 256 1024 4096 8192] [--tiles] [--out FILE]

`output` is the matmul with a scale for each output as the engine computes it; `kernel` and `library` are the two ways
of blocks, and `bf16` the matmul of the expanded weight. Calls run from a CUDA graph over copies of the weight that do
not fit the L2 cache together. `--tiles` also times other tiles of the kernel. One JSON line per shape and number of
tokens, and one for each rounding of activations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from fixed_matmul import SHAPES, microseconds
from torch import Tensor

from meshwright.kernels.block_matmuls import Fp8Blocks, Fp8Groups, library_agrees, library_matmul, quantize_blocks
from meshwright.kernels.fixed_matmul import fp8_linear
from meshwright.kernels.fixed_matmul_triton import Tile, block_matmul, block_tile_of
from meshwright.kernels.fp8_matmuls import Fp8Matrix, quantize
from meshwright.kernels.row_quantize import quantize_add_rms_norm, quantize_gated, quantize_rows

BYTES = 200 * 2**20
"""Of all copies of a weight in fp8."""
TILES = [
    Tile(64, 64, 4, 4),
    Tile(64, 64, 4, 6),
    Tile(64, 128, 4, 3),
    Tile(64, 128, 4, 4),
    Tile(64, 256, 8, 3),
    Tile(128, 64, 8, 4),
    Tile(128, 128, 8, 3),
    Tile(128, 128, 8, 4),
]


def main() -> None:
    options = _arguments()
    lines = [{"shape": name, "tokens": tokens, **times} for name, tokens, times in rounding_times(options.tokens)]
    for line in lines:
        print(json.dumps(line), flush=True)
    for name, (inner, outer) in SHAPES.items():
        copies = -(-BYTES // (inner * outer))
        weights = [torch.randn(outer, inner, device="cuda").bfloat16() for _ in range(copies)]
        agrees = library_agrees(torch.device("cuda", 0), outer, inner)
        for tokens in options.tokens:
            x = torch.randn(tokens, inner, device="cuda").bfloat16()
            line = {"benchmark": "block_products", "device": torch.cuda.get_device_name(), "shape": name}
            line |= {"tokens": tokens, "library_agrees": agrees, "microseconds": matmul_times(x, weights, agrees)}
            if options.tiles:
                line["tiles"] = tile_times(x, weights)
            print(json.dumps(line), flush=True)
            lines.append(line)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def matmul_times(x: Tensor, weights: list[Tensor], library: bool) -> dict[str, float]:
    groups, rows = _groups(x), quantize(x, "rowwise")
    blocks, outputs = (
        [quantize_blocks(weight) for weight in weights],
        [quantize(weight, "rowwise") for weight in weights],
    )
    found = {
        "bf16": _timed(lambda weight: F.linear(x, weight), weights),
        "output": _timed(lambda weight: fp8_linear(rows, Fp8Matrix(*weight), None, x.dtype), outputs),
        "kernel": _timed(lambda weight: block_matmul(groups, Fp8Blocks(*weight), None, x.dtype), blocks),
    }
    if library:
        found["library"] = _timed(lambda weight: library_matmul(groups, Fp8Blocks(*weight)), blocks)
    return found


def tile_times(x: Tensor, weights: list[Tensor]) -> list[dict[str, object]]:
    """The tiles with microseconds, the fastest first."""
    groups, blocks = _groups(x), [quantize_blocks(weight) for weight in weights]
    found = []
    for tile in {*TILES, block_tile_of(len(x))}:

        def matmul(weight: Fp8Blocks, tile: Tile = tile) -> Tensor:
            return block_matmul(groups, Fp8Blocks(*weight), None, x.dtype, tile=tile)

        try:
            found.append({"tile": tile, "microseconds": _timed(matmul, blocks)})
        except Exception as error:  # a tile that does not fit this GPU
            found.append({"tile": tile, "error": str(error)[:80], "microseconds": float("inf")})
    return sorted(found, key=lambda each: each["microseconds"])


def rounding_times(many: list[int]) -> list[tuple[str, int, dict[str, float]]]:
    """Microseconds of the roundings of an 8B model's activations, with a scale for each token and for each 128 numbers."""
    found = []
    for tokens in many:
        x, wide = (torch.randn(tokens, width, device="cuda").bfloat16() for width in (4096, 28672))
        calls = {
            "round": lambda number_format, x=x: quantize_rows(x, number_format),
            "round_norm": lambda number_format, x=x: quantize_add_rms_norm(x, x, x[0], 1e-5, number_format),
            "round_gated": lambda number_format, wide=wide: quantize_gated(wide, number_format),
        }
        for name, call in calls.items():
            times = {
                each: microseconds([lambda each=each, call=call: call(each)] * 8) for each in ("fp8", "fp8 blocks")
            }
            found.append((name, tokens, times))
    return found


def _groups(x: Tensor) -> Fp8Groups:
    groups = quantize_rows(x, "fp8 blocks")
    assert isinstance(groups, Fp8Groups)
    return groups


def _timed(call: Callable[..., Tensor], weights: list) -> float:
    return microseconds([lambda weight=weight: call(weight) for weight in weights])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096, 8192])
    parser.add_argument("--tiles", action="store_true", help="time other tiles of the kernel")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
