"""Times the kernels of the paged cache on a GPU: decode, chunks with a prefix, and the rotation with its write.

`python benchmarks/paged_attention.py [--out FILE]` takes less than a minute and prints one JSON line per shape. Decode has the bytes of
the keys and values per second and their share of a copy's rate, measured in the same run; chunks have TFLOP/s. Each line has the
largest error against the plain reference, as a share of its largest number. `--sweep` times launch parameters instead (minutes).
All heads are those of Llama-3-8B unless a line says otherwise. A CUDA graph runs the kernel once per layer, over all layers of one cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import paged_attention as paged
from meshwright.kernels.fp8_matmuls import E4M3
from meshwright.kernels.paged_decode_triton import AttentionLaunch, paged_decode
from meshwright.kernels.paged_prefill_triton import paged_prefill
from meshwright.kernels.rope import rotary_tables
from meshwright.observe.environment import environment

LAYERS, HEADS, KV_HEADS, DIM = 32, 32, 8, 128
REPEATS = 7
DECODES = [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (32, 4096), (4, 32768)]
"""(sequences, tokens of each)."""
TARGETS = [(32, 1024), (128, 1024), (32, 4096)]
CHUNKS = [(1, 8192, 0), (1, 2048, 6144), (4, 512, 1536), (16, 512, 0), (32, 16, 1008)]
"""(sequences, queries of each, tokens of its prefix)."""
ERROR_QUERIES = 64
"""Last queries of a chunk whose results are compared: the plain reference makes all scores."""


class Step:
    """A cache with random blocks for equal sequences, and a query tensor of their last tokens."""

    def __init__(
        self,
        sequences: int,
        tokens: int,
        queries: int,
        block: int,
        dtype: torch.dtype,
        heads: int = HEADS,
        layers: int = LAYERS,
    ) -> None:
        per_sequence = -(-tokens // block)
        shape = (sequences * per_sequence, layers, 2, KV_HEADS, block, DIM)
        self.cache = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
        self.scales = None
        if dtype == E4M3:
            self.cache = self.cache.to(E4M3)
            self.scales = torch.ones(2, KV_HEADS, device="cuda")
        order = torch.randperm(sequences * per_sequence, device="cuda", dtype=torch.int32)
        self.tables = order.view(sequences, per_sequence)
        self.lengths = torch.full((sequences,), tokens, device="cuda", dtype=torch.int32)
        self.starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * queries
        self.q = torch.randn(sequences * queries, heads, DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.bytes = 2 * sequences * tokens * KV_HEADS * DIM * self.cache.element_size()

    def inputs(self, layer: int) -> tuple[Tensor, ...]:
        return self.q, self.cache[:, layer], self.tables, self.lengths

    def error(self, out: Tensor, queries: int) -> float:
        """Largest difference of `out` from the plain reference in layer 0, over the last queries of each sequence."""
        compared = min(queries, ERROR_QUERIES)
        last = self.q.view(len(self.lengths), queries, *self.q.shape[1:])[:, -compared:]
        starts = torch.arange(len(last) + 1, device="cuda", dtype=torch.int32) * compared
        wide = last.flatten(0, 1).float()
        cache = self.cache[:, 0] if self.scales is not None else self.cache[:, 0].float()
        expected = paged.paged_attention(
            wide, cache, self.tables, self.lengths, starts, scales=self.scales, reference=True
        )
        ours = out.view(len(last), queries, *out.shape[1:])[:, -compared:].flatten(0, 1).float()
        return float((ours - expected).abs().max() / expected.abs().max())


def seconds(run: Callable[[int], Any], layers: int = LAYERS) -> float:
    """Median device seconds of run(layer), in a CUDA graph of one call per layer."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[REPEATS // 2] / 1e3 / layers


def copy_rate() -> float:
    """Bytes read and written per second by a copy of 2 GB."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 4.0 * source.numel() / seconds(lambda _: target.copy_(source), 4)


def decode_figures(copy: float) -> Iterator[dict[str, Any]]:
    cases = [(sequences, tokens, 64, torch.bfloat16, HEADS) for sequences, tokens in DECODES]
    cases += [(*target, block, torch.bfloat16, HEADS) for target in TARGETS for block in (16, 32)]
    cases += [(*target, 64, E4M3, HEADS) for target in TARGETS]
    cases += [(128, 1024, 64, torch.bfloat16, 16)]
    for sequences, tokens, block, dtype, heads in cases:
        step = Step(sequences, tokens, 1, block, dtype, heads)

        def run(layer: int, *, invariant: bool = False, step: Step = step) -> Tensor:
            decodes = len(step.lengths)
            return paged.paged_attention(
                *step.inputs(layer), step.starts, decodes=decodes, scales=step.scales, invariant=invariant
            )

        line = {
            "kernel": "decode",
            "sequences": sequences,
            "tokens": tokens,
            "block": block,
            "heads": heads,
            "cache": str(dtype)[6:],
        }
        took = seconds(run)
        yield {
            **line,
            "ms": took * 1e3,
            "bytes_per_s": step.bytes / took,
            "share_of_copy": step.bytes / took / copy,
            "error": step.error(run(0), 1),
        }
        if (sequences, tokens) in TARGETS and block == 64 and heads == HEADS:
            fixed = seconds(partial(run, invariant=True))
            yield {**line, "invariant": True, "ms": fixed * 1e3, "share_of_copy": step.bytes / fixed / copy}


def chunk_figures() -> Iterator[dict[str, Any]]:
    for sequences, queries, prefix in CHUNKS:
        tokens, layers = prefix + queries, 4
        step = Step(sequences, tokens, queries, 64, torch.bfloat16, layers=layers)
        flops = 4.0 * HEADS * DIM * sequences * queries * (prefix + (queries + 1) / 2)
        line = {"kernel": "chunk", "sequences": sequences, "queries": queries, "prefix": prefix}

        def run(layer: int, step: Step = step) -> Tensor:
            return paged.paged_attention(*step.inputs(layer), step.starts)

        took = seconds(run, layers)
        yield {**line, "ms": took * 1e3, "tflops": flops / took / 1e12, "error": step.error(run(0), queries)}
        if prefix == 0:
            k, v = (torch.randn(len(step.q), KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            whole = partial(paged.prompt_attention, step.q, k, v, [queries] * sequences, step.out)
            took = seconds(lambda _, whole=whole: whole(), layers)
            yield {**line, "kernel": "prompts without the cache", "ms": took * 1e3, "tflops": flops / took / 1e12}


def write_figures(copy: float) -> Iterator[dict[str, Any]]:
    tables = tuple(
        table[0, :, 0] for table in rotary_tables(torch.arange(8192, device="cuda"), DIM, 5e5, None, torch.bfloat16)
    )
    for tokens in (1, 128, 8192):
        step = Step(1, tokens, 1, 64, torch.bfloat16)
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        positions = torch.arange(tokens, device="cuda")
        inputs = (*qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1), tables, positions)
        write = partial(_write, inputs, step, positions)
        took, size = seconds(write), 2.0 * qkv.numel() * qkv.element_size()
        yield {
            "kernel": "rotate and write",
            "tokens": tokens,
            "ms": took * 1e3,
            "bytes_per_s": size / took,
            "share_of_copy": size / took / copy,
            "error": float((write(0) - write(0, reference=True)).abs().max()),
        }


def _write(inputs: tuple[Any, ...], step: Step, slots: Tensor, layer: int, *, reference: bool = False) -> Tensor:
    return paged.rotate_and_write(*inputs, step.cache[:, layer], slots, reference=reference)


def sweep_figures(copy: float, budget: float, dtypes: Sequence[torch.dtype]) -> Iterator[dict[str, Any]]:
    """Decode at the target shapes, then chunks, with other launch parameters, until the budget in seconds is used."""
    begin = time.monotonic()
    for dtype, block, (sequences, tokens) in itertools.product(dtypes, (16, 64), TARGETS):
        step = Step(sequences, tokens, 1, block, dtype)
        for tile, warps, stages, splits in itertools.product((64, 32, 128), (4, 2, 8), (2, 3, 4), (1, 2, 4, 8)):
            programs = sequences * KV_HEADS * splits
            if time.monotonic() - begin > 0.6 * budget or programs > 4096 or programs < 256:
                continue
            launch = AttentionLaunch(tile, warps, stages)
            step_seconds = _timed(
                lambda layer, step=step, launch=launch, splits=splits: paged_decode(
                    *step.inputs(layer),
                    step.out,
                    queries=1,
                    splits=splits,
                    window=None,
                    scales=step.scales,
                    launch=launch,
                ),
                LAYERS,
            )
            yield {
                "sweep": "decode",
                "cache": str(dtype)[6:],
                "sequences": sequences,
                "tokens": tokens,
                "block": block,
                **launch._asdict(),
                "splits": splits,
                "ms": 1e3 * step_seconds,
                "share_of_copy": step.bytes / step_seconds / copy,
            }
    for queries, prefix in ((2048, 6144), (8192, 0)):
        step = Step(1, prefix + queries, queries, 64, torch.bfloat16, layers=4)
        flops = 4.0 * HEADS * DIM * queries * (prefix + (queries + 1) / 2)
        for (pairs, warps), tile, stages in itertools.product(((128, 8), (128, 4), (64, 4)), (64, 128, 32), (2, 3, 4)):
            if time.monotonic() - begin > budget:
                return
            launch = AttentionLaunch(tile, warps, stages, pairs)
            step_seconds = _timed(
                lambda layer, step=step, launch=launch, queries=queries: paged_prefill(
                    *step.inputs(layer), step.starts, step.out, queries=queries, window=None, scales=None, launch=launch
                ),
                4,
            )
            yield {
                "sweep": "chunk",
                "queries": queries,
                "prefix": prefix,
                **launch._asdict(),
                "ms": 1e3 * step_seconds,
                "tflops": flops / step_seconds / 1e12,
            }


def _timed(run: Callable[[int], Any], layers: int) -> float:
    """Seconds of a call; infinite when the parameters need more shared memory or registers than there are."""
    try:
        return seconds(run, layers)
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {str(error)[:100]}"}))
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--sweep", action="store_true", help="time other launch parameters")
    parser.add_argument("--fp8", action="store_true", help="sweep decodes with an fp8 cache only")
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
    if options.sweep:
        for line in sweep_figures(copy, options.budget, [E4M3] if options.fp8 else [torch.bfloat16, E4M3]):
            report(line)
    else:
        for figures in (decode_figures(copy), chunk_figures(), write_figures(copy)):
            for line in figures:
                report(line)
    report({"seconds": time.monotonic() - begin})
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
