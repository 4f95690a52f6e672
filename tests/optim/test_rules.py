"""Each optimizer equals its published form on whole float64 tensors, and a skipped step changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.tiny import LLAMA
from tests.optim.published_forms import update
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.optim.optimizer import Optimizer
from meshwright.parallel.apply import local_weights
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import parameters
from meshwright.spec.optimizers import AdamWSpec, DecayGroup, LambSpec, MuonSpec, OptimizerSpec, SgdSpec

RATE, DECAY, STEPS = 0.01, 0.1, 3
TRAIN = TrainSpec(steps=4, global_batch=4, seq_len=8, weight_decay=DECAY)
OPTIMIZERS: list[OptimizerSpec] = [
    AdamWSpec(),
    SgdSpec(),
    SgdSpec(nesterov=True),
    LambSpec(),
    MuonSpec(),
    MuonSpec(nesterov=False),
]


def gradients(model: Decoder, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(weight.shape, generator=draw, dtype=weight.dtype) for name, weight in model.named_parameters()
    }


def model_and_optimizer(optimizer: OptimizerSpec, **other: Any) -> tuple[Decoder, Optimizer]:
    torch.manual_seed(0)
    model = Decoder(LLAMA).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model, Optimizer(model, LLAMA, replace(TRAIN, optimizer=optimizer, **other), local_weights(model))


def step(model: Decoder, optimizer: Optimizer, number: int, norm: float = 1.0) -> None:
    for name, gradient in gradients(model, number).items():
        model.get_parameter(name).grad = gradient
    optimizer.step(RATE, torch.tensor(norm, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))


def reference(model: Decoder, optimizer: OptimizerSpec) -> dict[str, Tensor]:
    """The weights after all steps."""
    specs = {parameter.name: parameter for parameter in parameters(LLAMA)}
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for name, weight in weights.items():
        state: dict[str, Tensor] = {}
        for number in range(STEPS):
            update(specs[name], weight, 0.5 * gradients(model, number)[name], state, optimizer, RATE, DECAY)
    return weights


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=str)
def test_three_steps_equal_the_published_form(spec: OptimizerSpec) -> None:
    model, optimizer = model_and_optimizer(spec)
    expected = reference(model, spec)
    for number in range(STEPS):
        step(model, optimizer, number)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=str)
def test_a_step_whose_norm_is_not_finite_changes_no_state(spec: OptimizerSpec) -> None:
    model, optimizer = model_and_optimizer(spec)
    step(model, optimizer, 0)
    before = {parts.name: parts.local.clone() for parts in optimizer.state()}
    for name, gradient in gradients(model, 1).items():
        model.get_parameter(name).grad = gradient / 0.0 * 0.0
    optimizer.step(RATE, torch.tensor(float("nan"), dtype=torch.float64), torch.ones((), dtype=torch.float64))
    for parts in optimizer.state():
        assert torch.equal(parts.local, before[parts.name]), parts.name


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=str)
def test_updates_by_groups_equal_one_update_of_all(spec: OptimizerSpec) -> None:
    class Copies:
        groups = ()
        waited: list[str] = []

        def wait(self, names, *, host: bool = True) -> None:
            self.waited.extend(names)

    (model, optimizer), (other, grouped) = model_and_optimizer(spec), model_and_optimizer(spec)
    copies = Copies()
    copies.groups = grouped.snapshot_groups(3)
    assert len(copies.groups) == 3
    grouped.protect(copies)
    step(model, optimizer, 0)
    step(other, grouped, 0)
    assert sorted(copies.waited) == sorted(name for name, _ in model.named_parameters())
    for ours, theirs in zip(optimizer.state(), grouped.state(), strict=True):
        assert torch.equal(ours.local, theirs.local), ours.name


def test_the_average_follows_the_weights_and_a_skipped_step_leaves_it() -> None:
    model, optimizer = model_and_optimizer(SgdSpec(), ema_decay=0.9)
    optimizer.start_average()
    averages = {parts.name: parts for parts in optimizer.state() if parts.name.startswith("ema.")}
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    assert {f"ema.{name}" for name in expected} == averages.keys() <= optimizer.parameter_of_state().keys()
    for number, norm in enumerate((1.0, float("nan"), 1.0)):
        step(model, optimizer, number, norm)
        for name, weight in model.named_parameters():
            if norm == 1.0:
                expected[name] = 0.9 * expected[name] + 0.1 * weight.detach()
            torch.testing.assert_close(averages[f"ema.{name}"].local, expected[name], rtol=1e-12, atol=1e-14)


def test_decay_by_name_replaces_the_decay_of_matching_parameters() -> None:
    """With zero gradients SGD only decays."""
    patterns = {"*norm*": 0.5, "layers.*.mlp.*": 0.0, "layers.1.mlp.down.weight": 1.0}
    groups = tuple(DecayGroup(names=names, decay=decay) for names, decay in patterns.items())
    model, optimizer = model_and_optimizer(SgdSpec(), decay_groups=groups)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    one = torch.ones((), dtype=torch.float64)
    optimizer.step(RATE, one, one)
    decays = {
        "norm.weight": 0.5,
        "layers.0.mlp.down.weight": 0.0,
        "layers.1.mlp.down.weight": 1.0,
        "embed.weight": DECAY,
    }
    for name, decay in decays.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] * (1 - RATE * decay))
