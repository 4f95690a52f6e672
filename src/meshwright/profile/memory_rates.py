"""Measures device memory: the rate of a copy, of an element-wise operation, and of the optimizer's update."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.config.presets import MODEL_PRESETS
from meshwright.optim.optimizer import Optimizer
from meshwright.profile.call_timing import TeamClock
from meshwright.profile.team import Team
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.state.parts import StateParts

ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 24}
"""Number of elements of a tensor, many times more than a cache holds."""
PARAMETERS = {"cuda": (1 << 24, 16), "cpu": (1 << 21, 8)}
"""(elements of a parameter, number of parameters) of the optimizer's update."""


def copy_rate(team: Team, clock: TeamClock, budget: float) -> float:
    """Return the bytes/s that a copy reads and writes on the slowest device."""
    source = _large_tensor(team)
    target = _large_tensor(team)
    return 2 * source.nbytes / clock.seconds(lambda: target.copy_(source), budget)


def pass_rate(team: Team, clock: TeamClock, budget: float) -> float:
    """Return the bytes/s that the addition of two tensors reads and writes on the slowest device."""
    first = _large_tensor(team)
    second = _large_tensor(team)
    total = _large_tensor(team)
    return 3 * first.nbytes / clock.seconds(lambda: torch.add(first, second, out=total), budget)


def adamw_rate(team: Team, clock: TeamClock, budget: float) -> float:
    """Return the fp32 parameters/s that AdamW updates on the slowest device."""
    size, count = PARAMETERS[team.device.type]
    model = nn.ParameterList([nn.Parameter(torch.zeros(size, device=team.device)) for _ in range(count)])
    gradients = [torch.full((size,), 1e-3, device=team.device) for _ in range(count)]
    spec = from_plain(ModelSpec, {**MODEL_PRESETS["llama-nano"], "vocab_size": 256})
    weights = {name: StateParts.of_whole(name, weight) for name, weight in model.named_parameters()}
    optimizer = Optimizer(model, spec, TrainSpec(steps=1, global_batch=1), weights)
    norm = torch.ones((), device=team.device)

    def step() -> None:
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step(1e-4, norm, norm)

    return size * count / clock.seconds(step, budget)


def _large_tensor(team: Team) -> torch.Tensor:
    dtype = torch.bfloat16 if team.cuda else torch.float32
    return torch.ones(ELEMENTS[team.device.type], device=team.device, dtype=dtype)
