"""The kernels of MoE layers with few tokens against the plain modules in fp64, in Triton's interpreter or on the GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.kernels.expert_decode import Choices, Routing, expert_outputs, rounded_expert_outputs, route
from meshwright.kernels.row_quantize import quantize_rows
from meshwright.models.hooks import BlockHooks
from meshwright.models.moe import MoELayer
from meshwright.spec.engine import WeightFormat
from meshwright.spec.model import ModelSpec
from meshwright.spec.model import moe_of as described_moe
from tests.models.tiny import DEEPSEEK_V2, DEEPSEEK_V3, MIXTRAL

triton, tl = (pytest.importorskip(name) for name in ("triton", "triton.language"))
expert_decode_triton = pytest.importorskip("meshwright.kernels.expert_decode_triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32 if "TRITON_INTERPRET" in os.environ else torch.bfloat16
"""Triton's interpreter multiplies in the dtype of numpy, which has no bf16."""
TOLERANCE = 1e-5 if DTYPE.itemsize == 4 else 1e-2
SIZES = {"hidden": 72, "expert_hidden": 40, "shared_expert_hidden": 0}
SPECS = {
    "weights sum to 1": replace(MIXTRAL, experts=5, experts_per_token=3, **SIZES),
    "weights are probabilities": replace(MIXTRAL, experts=32, experts_per_token=2, normalised_routing=False, **SIZES),
    "best groups": replace(DEEPSEEK_V2, experts=12, experts_per_token=3, expert_groups=3, groups_per_token=2, **SIZES),
    "a softmax with a bias": replace(MIXTRAL, experts=24, experts_per_token=4, router="biased_softmax", **SIZES),
    "sigmoid": replace(DEEPSEEK_V3, experts=24, experts_per_token=4, expert_groups=4, groups_per_token=2, **SIZES),
}


def moe_of(spec: ModelSpec) -> MoELayer:
    draw = torch.Generator().manual_seed(0)
    moe = MoELayer(described_moe(spec), spec.hidden, reference=True, hooks=BlockHooks())
    for parameter in moe.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw).to(DEVICE, DTYPE) / 4
        parameter.requires_grad_(False)
    return moe


def routing_of(spec: ModelSpec) -> Routing:
    groups = spec.expert_groups, spec.groups_per_token
    sigmoid = spec.router == "sigmoid"
    return Routing(spec.experts_per_token, sigmoid, spec.normalised_routing, spec.routing_scale, *groups)


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(DEVICE, DTYPE)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("case", SPECS)
def test_choices_are_those_of_the_plain_router(case: str, tokens: int) -> None:
    spec = SPECS[case]
    moe, x = moe_of(spec), rows(tokens, spec.hidden)
    bias = moe.choice_bias
    choices = route(x, moe.router.weight, bias, routing_of(spec))
    logits = (x.double() @ moe.router.weight.double().t()).to(DTYPE)
    expected = moe.choose_experts(logits[None].double())
    assert torch.equal(choices.chosen.long(), expected.chosen[0])
    torch.testing.assert_close(choices.weights.double(), expected.weights[0], rtol=1e-5, atol=1e-6)
    places = torch.full((tokens, spec.experts), -1, dtype=torch.int8, device=DEVICE)
    copies = torch.arange(spec.experts_per_token, dtype=torch.int8, device=DEVICE).expand(tokens, -1)
    assert torch.equal(choices.places, places.scatter(1, expected.chosen[0], copies).t())


@triton.jit
def _pick_each(
    keys, values, numbers, places, WIDE: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row, expert, copy = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, COPIES)[None, :]
    x = tl.load(keys + row * BLOCK + expert)
    value, number, place = expert_decode_triton._pick(x, x, expert >= 0, WIDE, False, COPIES, COPIES, ROWS, BLOCK)
    tl.store(values + row * COPIES + copy, value)
    tl.store(numbers + row * COPIES + copy, number)
    tl.store(places + row * BLOCK + expert, place)


@pytest.mark.parametrize("wide", [True, False])
def test_codes_have_the_order_of_keys(wide: bool) -> None:
    """Also of negative, equal and infinite keys, and both zeros; of equal keys the first expert's comes first."""
    keys = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    keys[0], keys[1, :16], keys[1, 3], keys[2] = -keys[0].abs(), 0.0, -0.0, 1.5
    keys[3, :4] = keys[4] = float("-inf")
    keys = keys.to(DEVICE)
    values, numbers = torch.empty(8, 4, device=DEVICE), torch.empty(8, 4, dtype=torch.int32, device=DEVICE)
    places = torch.empty(8, 32, dtype=torch.int32, device=DEVICE)
    _pick_each[(1,)](keys, values, numbers, places, wide, 4, 8, 32)
    order = (-keys).argsort(dim=1, stable=True)[:, :4]
    assert torch.equal(numbers.long(), order) and torch.equal(values, keys.gather(1, order))
    assert torch.equal(places.gather(1, order), torch.arange(4, device=DEVICE, dtype=torch.int32).expand(8, -1))
    assert (places >= 0).sum() == 32


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
@pytest.mark.parametrize("number_format", ["int8", "fp8"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_in_8_bits(tokens: int, number_format: WeightFormat) -> None:
    """Against the same roundings in fp64; the interpreter cannot round to fp8, so there torch does."""
    draw, width, hidden, copies, experts = torch.Generator().manual_seed(1), 48, 80, 2, 5
    x = rows(tokens, hidden)
    weights = [torch.randn(experts, *size, generator=draw) / 8 for size in ((2 * width, hidden), (hidden, width))]
    matrices = [quantize_rows(weight.to(DEVICE), number_format, reference=True) for weight in weights]
    chosen = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :copies]
    choices = choices_of(chosen, experts)
    rounded = quantize_rows(x, number_format, reference=True)
    active = expert_decode_triton.gate_up(rounded, matrices[0], choices, DTYPE)
    rounded_active = quantize_rows(active, number_format, reference=True)
    outputs = expert_decode_triton.down(rounded_active, matrices[1], choices, DTYPE).view(tokens, copies, hidden)
    if DEVICE == "cuda":
        assert torch.equal(rounded_expert_outputs(x, *matrices, choices), outputs)
    first, second, inputs, inner = (
        values.double() * scale.double() for values, scale in (*matrices, rounded, rounded_active)
    )
    gate, up = torch.einsum("th,tcwh->tcw", inputs, first[choices.chosen]).chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    assert (active.view(exact.shape).double() - exact).norm() <= TOLERANCE * exact.norm()
    exact = torch.einsum("tcw,tchw->tch", inner.view(exact.shape), second[choices.chosen])
    exact *= choices.weights[..., None]
    assert (outputs.double() - exact).norm() <= TOLERANCE * exact.norm()


@torch.no_grad()
def test_a_tokens_bits_do_not_depend_on_the_batch() -> None:
    spec = SPECS["weights sum to 1"]
    moe, x = moe_of(spec), rows(40, spec.hidden)
    results = []
    for part in (x, x[:1], x[:20]):
        choices = route(part, moe.router.weight, None, routing_of(spec))
        results.append(expert_outputs(part, moe.experts.gate_up, moe.experts.down, choices)[0])
    if DEVICE == "cpu":  # numpy's matmuls have other bits for other shapes
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
