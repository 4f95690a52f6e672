"""Times one update of every optimizer on one device, and AdamW's beside its kernel calls on equal tensors.

    python benchmarks/optimizer_step.py                       # llama3-1b's shapes on a GPU
    python benchmarks/optimizer_step.py --model llama-nano --device cpu

`ratio` is the rate of `Optimizer.step` for AdamW relative to the kernel calls without it; at least 0.99 is wanted.
Times alternate between the two in rounds, and medians are compared. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.config.load import load_run
from meshwright.optim.fused import Coefficients, UpdateInputs, count_updates, new_count, update
from meshwright.optim.optimizer import Optimizer
from meshwright.optim.shards import local
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.optimizers import AdamWSpec, LambSpec, MuonSpec, OptimizerSpec, SgdSpec
from meshwright.spec.run import RunSpec
from meshwright.state.parts import StateParts

DECAY = 0.1


class Weights(nn.Module):
    """The parameters of a model by name, with gradients of constant values."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        self.weights = {p.name: nn.Parameter(torch.randn(p.shape, device=device)) for p in parameters(spec)}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By the model's own names, which have dots."""
        return iter(self.weights.items())


def optimizer_step(run: RunSpec, device: torch.device, optimizer: OptimizerSpec) -> Callable[[], None]:
    """A function that runs one step of an optimizer."""
    module = Weights(run.model, device)
    parts = {name: StateParts.of_whole(name, weight) for name, weight in module.weights.items()}
    stepper = Optimizer(module, run.model, replace(run.train, optimizer=optimizer, weight_decay=DECAY), parts)
    gradients = {name: torch.full_like(weight, 1e-3) for name, weight in module.weights.items()}
    norm = torch.ones((), dtype=torch.float64, device=device)

    def step() -> None:
        for name, weight in module.weights.items():
            weight.grad = gradients[name]
        stepper.step(1e-4, norm, norm)

    return step


def kernel_step(run: RunSpec, device: torch.device) -> Callable[[], None]:
    """A function that collects the gradients and updates the same parameters by AdamW's kernel calls, without rules."""
    module = Weights(run.model, device)
    decays = {p.name: DECAY * p.decay for p in parameters(run.model)}
    weights = {name: weight.detach() for name, weight in module.weights.items()}
    first, second = ({name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    counts = {name: new_count(device) for name in weights}
    constant = {name: torch.full_like(weight, 1e-3) for name, weight in weights.items()}
    coefficients = Coefficients((0.9, 0.95), 1e-8)
    one = torch.ones((), dtype=torch.float64, device=device)

    def step() -> None:
        for name, weight in module.weights.items():
            weight.grad = constant[name]
        inputs = UpdateInputs(1e-4, one, (~one.isfinite()).float())
        gradients = {name: local(weight.grad) for name, weight in module.weights.items() if weight.grad is not None}
        with count_updates([counts[name] for name in gradients], inputs.skip):
            for decay in dict.fromkeys(decays[name] for name in gradients):
                names = [name for name in gradients if decays[name] == decay]
                columns = ([tensors[name] for name in names] for tensors in (weights, gradients, first, second, counts))
                update(*columns, coefficients=coefficients, weight_decay=decay, inputs=inputs)
        for weight in module.weights.values():
            weight.grad = None

    return step


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    run = load_run(None, [f"model={arguments.model}", "model.vocab_size=32768", "train.seq_len=128"])
    kernel, adamw = kernel_step(run, device), optimizer_step(run, device, AdamWSpec())
    for step in (kernel, adamw, kernel, adamw):
        step()
    rounds = [(seconds_of(kernel, device), seconds_of(adamw, device)) for _ in range(arguments.rounds)]
    kernel_seconds, adamw_seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
    record = {"model": arguments.model, "device": arguments.device, "torch": str(torch.__version__)}
    record |= {
        "ratio": kernel_seconds / adamw_seconds,
        "kernel_seconds": kernel_seconds,
        "adamw_seconds": adamw_seconds,
    }
    del kernel, adamw
    for spec in (MuonSpec(), LambSpec(), SgdSpec()):
        step = optimizer_step(run, device, spec)
        step()
        record[f"{spec.name}_seconds"] = statistics.median(
            seconds_of(step, device) for _ in range(arguments.rounds // 3)
        )
    print(json.dumps(record))


if __name__ == "__main__":
    main()
