"""Trains or judges a Llama by transformers alone, the reference of benchmarks/convergence.py. It imports nothing of this project.

    python benchmarks/peers/transformers_llama.py init FOLDER --config '{"hidden_size": …}'
    python benchmarks/peers/transformers_llama.py train INIT FOLDER --tokens order.npy --settings '{"batch": 16, …}' [--fp8]
    python benchmarks/peers/transformers_llama.py judge FOLDER… --tokens held-out.npy

Tokens are an array `(sequences, length + 1)`: the first `length` of a sequence are its inputs, the last `length` its targets. `train`
prints a JSON line with the loss of each step and writes the weights at its end, or when it is interrupted. Weights are fp32, computed
with under autocast in bf16 on a GPU and in fp32 on a processor; `judge` computes in bf16 on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
INTERRUPTED = 130
"""Exit code of an interrupted training that has written its weights."""
SEQUENCES_AT_A_TIME = 16
"""Sequences that `judge` computes together."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init")
    init.add_argument("folder", type=Path)
    init.add_argument("--config", type=json.loads, required=True, help="keys of LlamaConfig")
    init.add_argument("--seed", type=int, default=0)
    train = commands.add_parser("train")
    train.add_argument("init", type=Path)
    train.add_argument("folder", type=Path)
    train.add_argument("--tokens", type=Path, required=True)
    train.add_argument("--settings", type=json.loads, required=True)
    train.add_argument("--fp8", action="store_true", help="linear layers of the blocks in fp8")
    train.add_argument("--device", default="cuda")
    judge = commands.add_parser("judge")
    judge.add_argument("folders", type=Path, nargs="+")
    judge.add_argument("--tokens", type=Path, required=True)
    judge.add_argument("--device", default="cuda")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if options.command == "init":
        write_initial_weights(options.folder, options.config, options.seed)
    elif options.command == "train":
        return train_model(options)
    else:
        losses = [held_out_loss(folder, options.tokens, options.device) for folder in options.folders]
        print(json.dumps({"losses": losses, "transformers": transformers.__version__}))
    return 0


def write_initial_weights(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Write a Llama with random weights, as transformers draws them, in fp32."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float()
    model.save_pretrained(folder)
    print(json.dumps({"parameters": sum(weight.numel() for weight in model.parameters())}))


def train_model(options: argparse.Namespace) -> int:
    """Train with AdamW and print the mean loss of each step's tokens, computed before its update. Returns the exit code."""
    settings = options.settings
    device = torch.device(options.device)
    model = transformers.LlamaForCausalLM.from_pretrained(options.init, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device).train()
    if options.fp8:
        replace_linears(model.model.layers)
    loss_of = mean_loss
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile()
        loss_of = torch.compile(mean_loss)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=settings["betas"], eps=settings["epsilon"])
    tokens = np.load(options.tokens, mmap_mode="r")
    batch = settings["batch"]
    interrupted = False
    try:
        for step in range(1, settings["steps"] + 1):
            sequences = torch.from_numpy(tokens[(step - 1) * batch : step * batch].astype(np.int64)).to(device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=sequences[:, :-1], use_cache=False).logits
                loss = loss_of(logits, sequences[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
    except KeyboardInterrupt:
        print("interrupted: the weights of the last whole step are written", file=sys.stderr)
        interrupted = True
    model.save_pretrained(options.folder)
    return INTERRUPTED if interrupted else 0


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy in fp32 of logits `(batch, seq, vocab)`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def learning_rate(settings: dict[str, Any], step: int) -> float:
    """Linear warm-up to the peak, then half a cosine down to `floor` times the peak."""
    peak = settings["learning_rate"]
    warm_up = settings["warmup_steps"]
    if step <= warm_up:
        return peak * step / warm_up
    progress = (step - warm_up) / (settings["steps"] - warm_up)
    return peak * (settings["floor"] + (1 - settings["floor"]) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.inference_mode()
def held_out_loss(folder: Path, tokens_file: Path, device: str) -> float:
    """The mean loss of all targets, in bf16 on a GPU."""
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.to(device).eval()
    tokens = np.load(tokens_file)
    total = 0.0
    for first in range(0, len(tokens), SEQUENCES_AT_A_TIME):
        part = torch.from_numpy(tokens[first : first + SEQUENCES_AT_A_TIME].astype(np.int64)).to(device)
        logits = model(input_ids=part[:, :-1], use_cache=False).logits
        total += mean_loss(logits, part[:, 1:]).item() * len(part)
    return total / len(tokens)


def replace_linears(module: nn.Module) -> None:
    """Put an Fp8Linear with the same weight in the place of each linear layer."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Fp8Linear(child.weight))
        else:
            replace_linears(child)


class Fp8Linear(nn.Module):
    """A linear layer without bias whose three matmuls have fp8 operands: torchao's recipe "tensorwise", with dynamic scales.

    Inputs and weights are rounded to e4m3, gradients of outputs to e5m2. Each has one scale, the largest number of its format divided by
    the largest magnitude of the tensor that is rounded. The forward accumulates fast, the backward does not.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        return Fp8Product.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


class Fp8Product(torch.autograd.Function):
    """x `(tokens, in)` times a transposed weight `(out, in)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rounded_x, x_scale = rounded(x, E4M3)
        rounded_weight, weight_scale = rounded(weight, E4M3)
        return scaled_product(rounded_x, rounded_weight.t(), x_scale, weight_scale, x.dtype, fast=True)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rounded_gradient, gradient_scale = rounded(gradient, E5M2)
        rounded_weight, weight_scale = rounded(weight, E4M3)
        columns = rounded_weight.t().contiguous().t()
        x_gradient = scaled_product(rounded_gradient, columns, gradient_scale, weight_scale, x.dtype, fast=False)
        rounded_x, x_scale = rounded(x, E4M3)
        rows = rounded_gradient.t().contiguous()
        columns = rounded_x.t().contiguous().t()
        return x_gradient, scaled_product(rows, columns, gradient_scale, x_scale, weight.dtype, fast=False)


def rounded(x: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in fp8, row-major, and the factor `()` that restores its size, fp32."""
    largest = x.abs().amax().double().clamp(min=1e-12)
    scale = (torch.finfo(fp8_dtype).max / largest).float()
    limit = torch.finfo(fp8_dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(fp8_dtype).contiguous(), scale.reciprocal()


def scaled_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """The product of a row-major and a column-major matrix in fp8, on a processor in fp32 (where `_scaled_mm` takes seconds)."""
    if not a.is_cuda:
        return (a.float() @ b.float() * (a_scale * b_scale)).to(dtype)
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)


if __name__ == "__main__":
    sys.exit(main())
