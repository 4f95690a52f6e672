"""The kernels of mixtures with few tokens against the plain modules in fp64, in Triton's interpreter or on the GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.kernels.expert_decode import Choices, Routing, expert_outputs, route
from meshwright.models.moe import MixtureOfExperts
from meshwright.spec.model import ModelSpec
from tests.models.tiny import DEEPSEEK_V2, DEEPSEEK_V3, MIXTRAL

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32 if "TRITON_INTERPRET" in os.environ else torch.bfloat16
"""Triton's interpreter multiplies in the dtype of numpy, which has no bf16."""
TOLERANCE = 1e-5 if DTYPE.itemsize == 4 else 1e-2
SIZES = {"hidden": 72, "expert_hidden": 40, "shared_expert_hidden": 0}
SPECS = {
    "weights sum to 1": replace(MIXTRAL, experts=5, experts_per_token=3, **SIZES),
    "weights are probabilities": replace(MIXTRAL, experts=32, experts_per_token=2, normalised_routing=False, **SIZES),
    "best groups": replace(DEEPSEEK_V2, experts=12, experts_per_token=3, expert_groups=3, groups_per_token=2, **SIZES),
    "sigmoid": replace(DEEPSEEK_V3, experts=24, experts_per_token=4, expert_groups=4, groups_per_token=2, **SIZES),
}


def mixture_of(spec: ModelSpec) -> MixtureOfExperts:
    draw, mixture = torch.Generator().manual_seed(0), MixtureOfExperts(spec, plain=True)
    for parameter in mixture.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw).to(DEVICE, DTYPE) / 4
        parameter.requires_grad_(False)
    return mixture


def routing_of(spec: ModelSpec) -> Routing:
    return Routing(
        spec.experts_per_token, spec.normalised_routing, spec.routing_scale, spec.expert_groups, spec.groups_per_token
    )


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(DEVICE, DTYPE)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("case", SPECS)
def test_choices_are_those_of_the_plain_router(case: str, tokens: int) -> None:
    spec = SPECS[case]
    mixture, x = mixture_of(spec), rows(tokens, spec.hidden)
    bias = mixture.choice_bias
    choices = route(x, mixture.router.weight, bias, routing_of(spec))
    logits = (x.double() @ mixture.router.weight.double().t()).to(DTYPE)
    expected = mixture.choose_experts(logits[None].double())
    assert torch.equal(choices.chosen.long(), expected.chosen[0])
    torch.testing.assert_close(choices.weights.double(), expected.weights[0], rtol=1e-5, atol=1e-6)
    places = torch.full((tokens, spec.experts), -1, dtype=torch.int8, device=DEVICE)
    copies = torch.arange(spec.experts_per_token, dtype=torch.int8, device=DEVICE).expand(tokens, -1)
    assert torch.equal(choices.places, places.scatter(1, expected.chosen[0], copies).t())


def choices_of(chosen: Tensor, experts: int) -> Choices:
    """Choices of the experts `chosen` `(tokens, copies)` with random weights."""
    weights = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(2))
    copies = torch.arange(chosen.shape[1], dtype=torch.int8).expand_as(chosen)
    places = torch.full((len(chosen), experts), -1, dtype=torch.int8).scatter(1, chosen, copies)
    return Choices(*(x.to(DEVICE) for x in (chosen.int(), weights, places.t().contiguous())))


def expected_outputs(x: Tensor, gate_up: Tensor, down: Tensor, choices: Choices) -> Tensor:
    gate, up = torch.einsum("th,tcwh->tcw", x.double(), gate_up.double()[choices.chosen]).chunk(2, -1)
    activation = torch.nn.functional.silu(gate) * up * choices.weights.double()[..., None]
    return torch.einsum("tcw,tchw->tch", activation, down.double()[choices.chosen])


@torch.no_grad()
@pytest.mark.parametrize(
    ("tokens", "experts", "same"),
    [
        (1, 8, False),  # a program for each copy
        (3, 32, True),  # which has rows of several tokens
        (20, 5, False),  # rows are tokens
        (40, 5, False),  # rows are gathered, in several tiles of an expert
    ],
)
def test_outputs_are_those_of_the_chosen_experts(tokens: int, experts: int, same: bool) -> None:
    draw, width, hidden, copies = torch.Generator().manual_seed(1), 40, 72, 2
    x = rows(tokens, hidden)
    gate_up = (torch.randn(experts, 2 * width, hidden, generator=draw) / 8).to(DEVICE, DTYPE)
    down = (torch.randn(experts, hidden, width, generator=draw) / 8).to(DEVICE, DTYPE)
    chosen = torch.rand(1 if same else tokens, experts, generator=draw).argsort(1)[:, :copies].expand(tokens, -1)
    choices = choices_of(chosen, experts)
    outputs = expert_outputs(x, gate_up, down, choices)
    exact = expected_outputs(x, gate_up, down, choices)
    assert outputs.shape == (tokens, copies, hidden) and outputs.dtype == DTYPE
    assert (outputs.double() - exact).norm() <= TOLERANCE * exact.norm()


@torch.no_grad()
def test_a_tokens_bits_do_not_depend_on_the_batch() -> None:
    spec = SPECS["weights sum to 1"]
    mixture, x = mixture_of(spec), rows(40, spec.hidden)
    results = []
    for part in (x, x[:1], x[:20]):
        choices = route(part, mixture.router.weight, None, routing_of(spec))
        results.append(expert_outputs(part, mixture.experts.gate_up, mixture.experts.down, choices)[0])
    if DEVICE == "cpu":  # numpy's products have other bits for other shapes
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
