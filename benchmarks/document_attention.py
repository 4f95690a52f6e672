"""Times attention within packed documents, forward and backward, beside one causal document by cuDNN, on a GPU.

    python benchmarks/document_attention.py --tokens 131072 --mix public --out FILE.json

Documents of a length mix of data/document-lengths.csv are packed to `--tokens` tokens; the last is cut. Rates count scores that a token may
attend to, 4 FLOPs for each and channel in the forward and 2.5 times as many in the backward. Heads are those of Llama-3-8B. `ours` is the
attention of training; `flash` is PyTorch's FlashAttention of variable lengths. One line of JSON for each; `--least` documents of that many
tokens and more are also timed one after another by cuDNN, as a bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from length_mixes import length_mix
from torch import Tensor

from meshwright.kernels.attention import attention, make_mask
from meshwright.observe.environment import environment

HEADS, KV_HEADS, DIM = 32, 8, 128
REFERENCE = 32_768
"""Tokens of the document that cuDNN attends to."""
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--mix", choices=("public", "long"), default="public")
    parser.add_argument("--batches", type=int, default=4, help="packings that are timed")
    parser.add_argument(
        "--least", type=int, nargs="*", default=[], help="least tokens of documents that cuDNN gets one by one"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    packings = [packed_lengths(options.mix, options.tokens, random) for _ in range(options.batches)]
    reference = rate([([REFERENCE], causal)])
    results = [{"method": "cudnn, one document", "tflops": reference}]
    methods = {"ours": documents_by_mask, "flash": documents_by_flash}
    methods |= {f"cudnn from {least}": one_by_one(least) for least in options.least}
    for name, method in methods.items():
        measured = rate([(lengths, method(lengths)) for lengths in packings])
        results.append({"method": name, "tflops": measured, "of_reference": measured / reference})
        print(json.dumps(results[-1]), flush=True)
    if options.out:
        record = {
            "benchmark": "document_attention",
            "documents": [len(lengths) for lengths in packings],
            "longest": [max(lengths) for lengths in packings],
            "results": results,
            "environment": environment(),
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def packed_lengths(mix: str, tokens: int, random: np.random.Generator) -> list[int]:
    """Lengths of documents that together have `tokens` tokens."""
    lengths = length_mix(mix).draw(tokens, tokens, random).tolist()
    lengths[-1] -= sum(lengths) - tokens
    return lengths


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q `(1, tokens, heads, dim)` over k and v `(1, tokens, kv_heads, dim)`."""


def rate(cases: Sequence[tuple[Sequence[int], Attend]]) -> float:
    """TFLOP/s of the forward and backward over all cases: (lengths of documents, their attention)."""
    flops, seconds = 0.0, 0.0
    for lengths, attend in cases:
        flops += 3.5 * 4 * HEADS * DIM * sum(length * (length + 1) / 2 for length in lengths)
        seconds += median_seconds(attend, sum(lengths))
    return flops / seconds / 1e12


def median_seconds(attend: Attend, tokens: int) -> float:
    """Median time of a forward and a backward."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_() for s in shapes
    )
    grad = torch.randn_like(q)
    times = []
    for _ in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


def document_numbers(lengths: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), torch.tensor(lengths, device="cuda"))[
        None
    ]


def documents_by_mask(lengths: Sequence[int]) -> Attend:
    mask = make_mask(document_numbers(lengths), None, sum(lengths), torch.device("cuda"))
    return lambda q, k, v: attention(q, k, v, mask)


class Flash(torch.autograd.Function):
    """FlashAttention over documents: the operators behind PyTorch's `varlen_attn`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        out, logsumexp, state, _, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, longest, longest, 0.0, True, False
        )
        ctx.save_for_backward(q, k, v, ends, out, logsumexp, state)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, ends, out, logsumexp, state = ctx.saved_tensors
        unused = torch.empty(0, device=q.device)
        gradients = torch.ops.aten._flash_attention_backward(
            grads[0], q, k, v, out, logsumexp, ends, ends, ctx.longest, ctx.longest, 0.0, True, state, unused
        )
        return *gradients, None, None


def documents_by_flash(lengths: Sequence[int]) -> Attend:
    ends = torch.tensor([0, *np.cumsum(lengths)], device="cuda", dtype=torch.int32)
    return lambda q, k, v: Flash.apply(q[0], k[0], v[0], ends, max(lengths))[None]


def one_by_one(least: int) -> Callable[[Sequence[int]], Attend]:
    """Documents of at least `least` tokens by cuDNN, the others together by FlashAttention of variable lengths."""

    def method(lengths: Sequence[int]) -> Attend:
        short = [length for length in lengths if length < least]
        together = documents_by_flash(short) if short else None
        starts = np.cumsum([0, *lengths])
        long = [(int(start), length) for start, length in zip(starts, lengths, strict=False) if length >= least]
        places = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=False) if n < least] or [np.empty(0, int)]
        )
        index = torch.tensor(places, device="cuda", dtype=torch.int64)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            if together is not None:
                out = out.index_copy(1, index, together(q[:, index], k[:, index], v[:, index]))
            for start, length in long:
                part = slice(start, start + length)
                out[:, part] = attention(q[:, part], k[:, part], v[:, part])
            return out

        return attend

    return method


if __name__ == "__main__":
    main()
