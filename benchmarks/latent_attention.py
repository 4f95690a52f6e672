"""Times the kernels of latent attention on a GPU: decode, chunks with a prefix, and the rotation with its write.

`python benchmarks/latent_attention.py [--out FILE]` takes about a minute and prints one JSON line per shape, of DeepSeek-V2-Lite (27
layers, 16 heads, latents of 512, rotated keys of 64) and of DeepSeek-V3's 128 heads. Decode has the bytes of the cached tokens per second
and their share of a copy's rate, measured in the same run; all lines of attention have TFLOP/s, and the largest error against the plain
reference, as a share of its largest number. `--sweep` times launch parameters instead. CUDA graphs run a kernel once per layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from paged_attention import copy_rate, seconds
from torch import Tensor

from meshwright.kernels.fp8_matmuls import E4M3
from meshwright.kernels.latent_attention import latent_attention, rotate_and_write_latents
from meshwright.kernels.latent_attention_triton import latent_chunks, latent_decode
from meshwright.kernels.paged_attention import decode_splits
from meshwright.kernels.paged_decode_triton import AttentionLaunch
from meshwright.kernels.rope import rotary_tables
from meshwright.observe.environment import environment

LAYERS, RANK, ROTATED, SCALE = 27, 512, 64, 1 / math.sqrt(192)
HEADS, MANY_HEADS = 16, 128
DECODES = [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (32, 4096), (4, 32768)]
"""(sequences, tokens of each)."""
TARGETS = [(32, 1024), (128, 1024), (32, 4096)]
CHUNKS = [(1, 2048, 6144), (4, 512, 1536), (32, 16, 1008)]
"""(sequences, queries of each, tokens of its prefix)."""
ERROR_QUERIES = 16
"""Last queries of a sequence whose results are compared: the plain reference makes all scores."""


class Step:
    """A cache with random blocks for equal sequences, and the queries of their last tokens."""

    def __init__(
        self,
        sequences: int,
        tokens: int,
        queries: int,
        *,
        block: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        heads: int = HEADS,
        layers: int = LAYERS,
    ) -> None:
        per_sequence = -(-tokens // block)
        shape = (sequences * per_sequence, layers, block, RANK + ROTATED)
        self.cache = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_().to(dtype)
        order = torch.randperm(shape[0], device="cuda", dtype=torch.int32)
        self.tables = order.view(sequences, per_sequence)
        self.lengths = torch.full((sequences,), tokens, device="cuda", dtype=torch.int32)
        self.starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * queries
        self.q = torch.randn(heads, sequences * queries, RANK, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
        self.rotary = torch.randn(sequences * queries, heads, ROTATED, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        self.bytes = sequences * tokens * (RANK + ROTATED) * self.cache.element_size()
        pairs = sequences * queries * (tokens - queries + (queries + 1) / 2)
        self.flops = 2.0 * heads * (2 * RANK + ROTATED) * pairs

    def inputs(self, layer: int) -> tuple[Tensor, ...]:
        return self.q, self.rotary, self.cache[:, layer], self.tables, self.lengths

    def error(self, out: Tensor, queries: int) -> float:
        """Largest difference of `out` from the plain reference in layer 0, over the last queries of each sequence."""
        compared, sequences = min(queries, ERROR_QUERIES), len(self.lengths)
        q, rotary, ours = (
            x.unflatten(0, (sequences, queries))[:, -compared:].flatten(0, 1).float()
            for x in (self.q, self.rotary, out)
        )
        starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * compared
        step = (self.cache[:, 0], self.tables, self.lengths, starts)
        expected = latent_attention(q, rotary, *step, scale=SCALE, reference=True)
        return float((ours - expected).abs().max() / expected.abs().max())


def attention_line(step: Step, queries: int, copy: float, layers: int = LAYERS) -> dict[str, Any]:
    """Time and rates of one call per layer; decodes if there is one query of each sequence."""
    decodes = len(step.lengths) if queries == 1 else 0

    def run(layer: int) -> Tensor:
        return latent_attention(*step.inputs(layer), step.starts, scale=SCALE, decodes=decodes)

    took = seconds(run, layers)
    line = {"ms": took * 1e3, "tflops": step.flops / took / 1e12, "error": step.error(run(0), queries)}
    if decodes:
        line |= {"bytes_per_s": step.bytes / took, "share_of_copy": step.bytes / took / copy}
    return line


def decode_figures(copy: float) -> Iterator[dict[str, Any]]:
    cases: list[tuple[int, int, dict[str, Any]]] = [(*shape, {}) for shape in DECODES]
    cases += [(*shape, {"block": block}) for shape in TARGETS for block in (16, 32)]
    cases += [(*shape, {"dtype": E4M3}) for shape in TARGETS]
    cases += [(*shape, {"heads": MANY_HEADS}) for shape in TARGETS]
    for sequences, tokens, options in cases:
        named = {key: str(value) if key == "dtype" else value for key, value in options.items()}
        step = Step(sequences, tokens, 1, **options)
        yield {"kernel": "decode", "sequences": sequences, "tokens": tokens, **named, **attention_line(step, 1, copy)}


def chunk_figures(copy: float) -> Iterator[dict[str, Any]]:
    for heads, (sequences, queries, prefix) in itertools.product((HEADS, MANY_HEADS), CHUNKS):
        step = Step(sequences, prefix + queries, queries, heads=heads, layers=4)
        line = {"kernel": "chunk", "sequences": sequences, "queries": queries, "prefix": prefix, "heads": heads}
        yield line | attention_line(step, queries, copy, 4)


def write_figures(copy: float) -> Iterator[dict[str, Any]]:
    cos, sin = rotary_tables(torch.arange(8192, device="cuda"), ROTATED, 1e4, None, torch.bfloat16)
    for tokens in (1, 128, 8192):
        step = Step(1, tokens, 1)
        q = torch.randn(tokens, HEADS, 192, device="cuda", dtype=torch.bfloat16)[..., 128:]
        down = torch.randn(tokens, RANK + ROTATED, device="cuda", dtype=torch.bfloat16)
        positions = torch.arange(tokens, device="cuda")
        inputs = (q, down[:, RANK:], down[:, :RANK], (cos[0, :, 0], sin[0, :, 0]), positions)
        write = partial(_write, inputs, step.cache, positions)
        took, size = seconds(write, LAYERS), 2.0 * (q.numel() + down.numel()) * 2
        yield {"kernel": "rotate and write", "tokens": tokens, "ms": took * 1e3, "share_of_copy": size / took / copy}


def _write(inputs: tuple[Any, ...], cache: Tensor, slots: Tensor, layer: int) -> Tensor:
    return rotate_and_write_latents(*inputs, cache[:, layer], slots)[0]


def sweep_figures(copy: float, budget: float) -> Iterator[dict[str, Any]]:
    """Decode at the target shapes, then a chunk, with other launch parameters, until the budget in seconds is used."""
    begin = time.monotonic()
    for heads, (sequences, tokens) in itertools.product((HEADS, MANY_HEADS), TARGETS):
        step = Step(sequences, tokens, 1, heads=heads)
        share = budget * (0.4 if heads == HEADS else 0.8)
        for pairs, tile, stages, warps in itertools.product((16, 32, 64), (32, 64, 16), (2, 3, 4), (4, 8)):
            programs = sequences * -(-heads // pairs)
            usual = decode_splits(programs, tokens, torch.cuda.get_device_properties(0).multi_processor_count)
            for splits in sorted({max(1, usual // 2), usual, min(32, 2 * usual)}):
                if pairs > max(16, heads) or time.monotonic() - begin > share:
                    continue
                launch = AttentionLaunch(tile, warps, stages, pairs)
                run = partial(_decode, step, splits, launch)
                if (took := _timed(run, LAYERS)) is not None:
                    yield {
                        "sweep": "decode",
                        "heads": heads,
                        "sequences": sequences,
                        "tokens": tokens,
                        **launch._asdict(),
                        "splits": splits,
                        "ms": 1e3 * took,
                        "share_of_copy": step.bytes / took / copy,
                        "tflops": step.flops / took / 1e12,
                    }
    for heads in (HEADS, MANY_HEADS):
        step = Step(1, 8192, 2048, heads=heads, layers=4)
        for pairs, tile, stages, warps in itertools.product((64, 128, 16), (32, 64, 16), (2, 3, 1), (8, 4)):
            if time.monotonic() - begin > budget:
                return
            launch = AttentionLaunch(tile, warps, stages, pairs)
            if (took := _timed(partial(_chunk, step, launch), 4)) is not None:
                yield {
                    "sweep": "chunk",
                    "heads": heads,
                    **launch._asdict(),
                    "ms": 1e3 * took,
                    "tflops": step.flops / took / 1e12,
                }


def _decode(step: Step, splits: int, launch: AttentionLaunch, layer: int) -> None:
    latent_decode(*step.inputs(layer), step.out, scale=SCALE, splits=splits, launch=launch)


def _chunk(step: Step, launch: AttentionLaunch, layer: int) -> None:
    options = {"queries": len(step.q), "scale": SCALE, "launch": launch}
    latent_chunks(*step.inputs(layer), step.starts, step.out, **options)


def _timed(run: Callable[[int], Any], layers: int) -> float | None:
    """Seconds of a call; None when the parameters need more shared memory or registers than there are."""
    try:
        return seconds(run, layers)
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {str(error)[:100]}"}))
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--sweep", action="store_true", help="time other launch parameters")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for --sweep (default %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    begin, copy = time.monotonic(), copy_rate()
    lines: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> None:
        lines.append({key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in line.items()})
        print(json.dumps(lines[-1]), flush=True)

    report({"environment": environment(), "copy_bytes_per_s": copy})
    figures = [partial(sweep_figures, copy, options.budget)] if options.sweep else []
    for make in figures or [partial(part, copy) for part in (decode_figures, chunk_figures, write_figures)]:
        for line in make():
            report(line)
    report({"seconds": time.monotonic() - begin})
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
