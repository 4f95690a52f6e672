"""Times linear layers in bf16 and fp8 on a GPU, compiled, at the shapes of an 8B model, and the kernels that round to fp8.

Forward and backward together, in TFLOP/s; the rounding kernels in GB/s. `python benchmarks/fp8_linear.py [--tokens 16384] [--out FILE]`
takes about a minute and writes one JSON line a figure, with the relative error of the layer's output against fp32 beside its speed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.fp8_matmuls import E4M3, E5M2, inverse, matmul, quantize, quantize_both, scale_of
from meshwright.kernels.gated import gated_mlp
from meshwright.kernels.linear import Linear
from meshwright.observe.environment import environment

SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
"""(inputs, outputs) of the linear layers of an 8B model."""
FORMATS = {"bf16": None, "fp8_tensorwise": "tensorwise", "fp8_rowwise": "rowwise"}
WARM_UP, RUNS = 5, 20
"""Calls before the timed ones, and timed calls."""


class NormAndLinear(nn.Module):
    """A norm and a linear layer.

    The norm lets the compiler fuse the search for the largest magnitude, which sets the fp8 scale, into the operation before it.
    """

    def __init__(self, inputs: int, outputs: int, scaling: Any, weight_in_fp8: bool) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=False)
        _set_scaling(self.linear, scaling, weight_in_fp8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.rms_norm(x, (x.shape[-1],)))


class Network(nn.Module):
    """The feed-forward network of a block."""

    def __init__(self, scaling: Any, weight_in_fp8: bool, fused: bool) -> None:
        super().__init__()
        self.gate_up, self.down, self.fused = (
            Linear(*SHAPES["gate_up"], bias=False),
            Linear(*SHAPES["down"], bias=False),
            fused,
        )
        for layer in (self.gate_up, self.down):
            _set_scaling(layer, scaling, weight_in_fp8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.rms_norm(x, (x.shape[-1],))
        if self.fused:
            return gated_mlp(x, self.gate_up, self.down)
        from meshwright.kernels.swiglu import gated_activation

        return self.down(gated_activation(self.gate_up(x)))


def _set_scaling(layer: Linear, scaling: Any, weight_in_fp8: bool) -> None:
    """Sets the fp8 scaling of a layer; with `weight_in_fp8` its weight is already in fp8, as after a gather of sharded fp8 weights."""
    layer.scaling = scaling
    layer.to(device="cuda", dtype=torch.bfloat16)
    if weight_in_fp8:
        layer.fp8_weight = quantize(layer.weight.detach(), "tensorwise")


def seconds(run: Callable[[], Any]) -> float:
    """Median device seconds of a call."""
    for _ in range(WARM_UP):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[RUNS // 2] / 1e3


def layer_figures(tokens: int) -> Iterator[dict[str, Any]]:
    for name, (inputs, outputs) in SHAPES.items():
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        for format_name, scaling in FORMATS.items():
            for weight_in_fp8 in (False, True) if scaling == "tensorwise" else (False,):
                model = NormAndLinear(inputs, outputs, scaling, weight_in_fp8)
                yield {
                    "layer": name,
                    "format": format_name + (", weight gathered in fp8" if weight_in_fp8 else ""),
                    "tokens": tokens,
                    **time_layer(model, x, grad, 6.0 * tokens * inputs * outputs),
                }


def network_figures(tokens: int) -> Iterator[dict[str, Any]]:
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    flops = 6.0 * tokens * sum(inputs * outputs for inputs, outputs in (SHAPES["gate_up"], SHAPES["down"]))
    for format_name, scaling, fused in (
        ("bf16", None, False),
        ("fp8_rowwise", "rowwise", False),
        ("fp8_tensorwise, separate layers", "tensorwise", False),
        ("fp8_tensorwise, fused", "tensorwise", True),
    ):
        model = Network(scaling, scaling == "tensorwise", fused)
        yield {
            "layer": "gated network",
            "format": format_name,
            "tokens": tokens,
            **time_layer(model, x, torch.randn_like(x), flops),
        }


def time_layer(model: nn.Module, x: Tensor, grad: Tensor, flops: float) -> dict[str, Any]:
    torch.compiler.reset()  # otherwise the graphs of earlier layers count against the recompile limit
    compiled = torch.compile(model, fullgraph=True, dynamic=False)

    def step() -> None:
        compiled(x).backward(grad)
        x.grad = None
        model.zero_grad(set_to_none=True)

    median_seconds = seconds(step)
    with torch.no_grad():
        sample = x[:256].detach()
        exact = nn.functional.rms_norm(sample.float(), (sample.shape[-1],))
        for layer in model.children():
            exact = exact @ layer.weight.float().t()
            if isinstance(model, Network) and layer is model.gate_up:
                gate, up = exact.chunk(2, dim=-1)
                exact = nn.functional.silu(gate) * up
        error = float((model(sample).float() - exact).norm() / exact.norm())
    return {"ms": median_seconds * 1e3, "tflops": flops / median_seconds / 1e12, "output_error": error}


def kernel_figures(tokens: int) -> Iterator[dict[str, Any]]:
    """Single kernels: GB/s of those that round, TFLOP/s of the matmuls alone.

    "Both ways": one kernel writes a matrix in fp8 and its transpose in fp8, because fp8 matmuls in forward and backward
    need both.
    """
    from meshwright.kernels.fp8_triton import round_both, round_transposed, transpose
    from meshwright.kernels.gated_triton import round_swiglu, round_swiglu_gradient

    scale = torch.ones((), device="cuda")
    x = torch.randn(tokens, 14336, device="cuda", dtype=torch.bfloat16)
    gate_and_up = torch.randn(tokens, 28672, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(28672, 4096, device="cuda").to(E4M3)
    largest = torch.compile(lambda x: inverse(scale_of(x.abs().amax(dim=1).amax(), E4M3)), fullgraph=True)
    for name, run, size in (
        ("largest magnitude", partial(largest, x), 2 * x.numel()),
        ("round both ways", partial(round_both, x, scale, E4M3), 4 * x.numel()),
        ("round and transpose", partial(round_transposed, x, scale, E4M3), 3 * x.numel()),
        ("transpose a weight", partial(transpose, weight), 2 * weight.numel()),
        ("swiglu, rounded both ways", partial(round_swiglu, gate_and_up, scale, E4M3), 6 * x.numel()),
        (
            "swiglu gradient, rounded both ways",
            partial(round_swiglu_gradient, gate_and_up, x, scale, E5M2),
            10 * x.numel(),
        ),
    ):
        kernel_seconds = seconds(run)
        yield {"kernel": name, "ms": kernel_seconds * 1e3, "gb_per_s": size / kernel_seconds / 1e9}
    for scaling in ("tensorwise", "rowwise"):
        activation, weight_fp8 = (
            quantize_both(x, scaling)[0],
            quantize(torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16), scaling),
        )
        for fast_accumulation in (True, False):
            kernel_seconds = seconds(partial(matmul, activation, weight_fp8, torch.bfloat16, fast=fast_accumulation))
            name = f"matmul {scaling}, {'fast' if fast_accumulation else 'exact'} sums"
            yield {
                "kernel": name,
                "ms": kernel_seconds * 1e3,
                "tflops": 2.0 * tokens * 14336 * 4096 / kernel_seconds / 1e12,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="rows of the layers' inputs (default %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = [{"environment": environment()}]
    print(json.dumps(lines[0]))
    for measurement in (kernel_figures, layer_figures, network_figures):
        for figure in measurement(options.tokens):
            lines.append(figure)
            print(
                json.dumps(
                    {key: round(value, 4) if isinstance(value, float) else value for key, value in figure.items()}
                )
            )
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
