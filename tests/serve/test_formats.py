"""Weights in 8 bits and an fp8 cache against the trainer's forward with the same roundings, on a CPU in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.costs.serve_work import device_work
from meshwright.kernels.attention import attention
from meshwright.kernels.fp8_matmuls import quantize
from meshwright.kernels.grouped import ExpertOrder
from meshwright.kernels.int8_matmuls import MOST_INPUTS
from meshwright.kernels.linear import Linear
from meshwright.models.decoder import Decoder
from meshwright.models.moe import Experts
from meshwright.serve.engine import Engine
from meshwright.serve.formats import assign_parameter
from meshwright.serve.kv_cache import KVCache
from meshwright.serve.quantized_layers import QuantizedLinear, QuantizedWeight
from meshwright.spec.engine import WeightFormat
from meshwright.spec.errors import BadInput
from tests.models.tiny import ALL, DEEPSEEK_LITE, LLAMA, MIXTRAL, SLIDING
from tests.serve.helpers import PROMPTS, engine_of, record_logits, texts, tiny
from tests.slow import quick_first

SAME = 0.1
"""How far the engine may be from a model with the same roundings, over how far that is from the exact model.

Both round numbers that differ by the order of additions, so a few are rounded to another number of 8 bits.
"""


def round_weights(model: Decoder) -> Decoder:
    """The model with the trainer's fp8 matmuls by rows, in the layers of the blocks and in routed experts, not in
    routers."""

    def rounded(x: Tensor) -> Tensor:
        values, scale = quantize(x.flatten(0, -2), "rowwise")
        return (values.float() * scale).to(x.dtype).view(x.shape)

    for block in model.layers.values():
        for name, module in block.named_modules():
            if isinstance(module, Linear) and not name.endswith("router"):
                module.scaling = "rowwise"
            if isinstance(module, Experts):
                module.forward = partial(rounded_experts, experts=module, rounded=rounded)
    return model


def rounded_experts(
    x: Tensor, order: ExpertOrder, weights: Tensor, experts: Experts, rounded: Callable[[Tensor], Tensor]
) -> Tensor:
    """The outputs of `experts`, whose rows, activations and weights are rounded; a token's weight multiplies its output."""
    expert = torch.searchsorted(order.offsets, torch.arange(len(x)), right=True)
    first = experts.gate_up if experts.gated else experts.up
    projected = (rounded(first)[expert] @ rounded(x)[..., None])[..., 0]
    if experts.gated:
        gate, up = projected.chunk(2, dim=-1)
        active = F.silu(gate) * up
    else:
        active = F.gelu(projected, approximate="tanh")
    outputs = (rounded(experts.down)[expert] @ rounded(active)[..., None])[..., 0]
    return outputs * weights[:, None].to(x.dtype)


def integers(x: Tensor) -> Tensor:
    """x as int8 has it: each row divided by its largest magnitude over 127, and rounded."""
    scale = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((x.double() / scale).round() * scale).to(x.dtype)


def round_to_integers(model: Decoder) -> Decoder:
    """The model with int8 matmuls in the layers of the blocks and in routed experts, not in routers and `kv_up`."""

    def multiply(x: Tensor, layer: Linear) -> Tensor:
        return F.linear(integers(x), integers(layer.weight), layer.bias)

    for block in model.layers.values():
        for name, module in block.named_modules():
            if isinstance(module, Linear) and not name.endswith(("router", "kv_up")):
                module.forward = partial(multiply, layer=module)
            if isinstance(module, Experts):
                module.forward = partial(rounded_experts, experts=module, rounded=integers)
    return model


def round_cache(model: Decoder) -> Decoder:
    """The model with keys and values rounded to e4m3."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *masks: Any, **options: Any) -> Tensor:
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return attention(q, k, v, *masks, **options)

    for block in model.layers.values():
        block.hooks.attend = attend
    return model


@torch.no_grad()
def errors(engine: Engine, rounded: Decoder, exact: Decoder) -> tuple[float, float]:
    """Mean differences of logits: of the engine from the rounded model, and of this from the exact one."""
    seen = record_logits(engine)
    ours, spread = [], []
    for number, (prompt, new) in enumerate(zip(PROMPTS, texts(engine), strict=True)):
        whole = torch.tensor([[*prompt, *new]])
        expected = rounded(whole)[0, len(prompt) - 1 : -1]
        ours.append((torch.stack(seen[number]) - expected).abs().mean())
        spread.append((expected - exact(whole)[0, len(prompt) - 1 : -1]).abs().mean())
    return float(sum(ours)), float(sum(spread))


WEIGHTS = [
    ("llama", "fp8"),
    ("shared expert", "int8"),
    ("gpt2", "fp8"),
    ("parallel", "int8"),
    ("shared expert", "fp8"),
    ("mixtral", "int8"),
    ("parallel", "fp8"),
    ("mixtral", "fp8"),
    ("llama", "int8"),
    ("gpt2", "int8"),
]


@pytest.mark.parametrize(("name", "weights"), quick_first(4, WEIGHTS, unpack=True))
def test_weights_in_8_bits(name: str, weights: str) -> None:
    exact = tiny(ALL[name])
    rounded = (round_weights if weights == "fp8" else round_to_integers)(copy.deepcopy(exact))
    ours, spread = errors(engine_of(exact, weights=weights), rounded, exact)
    assert spread > 1e-3 and ours < SAME * spread


@pytest.mark.parametrize("spec", [LLAMA, SLIDING], ids=["llama", "sliding"])
def test_fp8_cache(spec: Any) -> None:
    exact = tiny(spec)
    ours, spread = errors(engine_of(exact, kv_cache="fp8"), round_cache(copy.deepcopy(exact)), exact)
    assert spread > 1e-4 and ours < SAME * spread


def test_an_fp8_cache_has_a_quarter_of_the_bytes_of_fp32_and_limits_large_numbers() -> None:
    caches = [
        KVCache(LLAMA, [3], tokens_per_block=4, device=torch.device("cpu"), dtype=dtype)
        for dtype in (torch.float32, torch.float8_e4m3fn)
    ]
    assert caches[0].tensors[0].nbytes == 4 * caches[1].tensors[0].nbytes
    assert caches[0].scales is None and caches[1].scales is not None and (caches[1].scales == 1).all()
    model = tiny(LLAMA)
    with torch.no_grad():
        model.layers["0"].attention.qkv.weight.mul_(1e4)
    assert all(torch.stack(rows).isfinite().all() for rows in logits_of(engine_of(model, kv_cache="fp8")).values())


def logits_of(engine: Engine) -> dict[int, list[Tensor]]:
    seen = record_logits(engine)
    texts(engine)
    return seen


def test_weights_of_linear_layers_and_experts_are_in_fp8_and_others_are_not() -> None:
    model = copy.deepcopy(tiny(MIXTRAL))
    before = dict(model.named_parameters())
    Engine(model, options=engine_of(model, weights="fp8").options)
    block = model.layers["1"]
    assert isinstance(block.attention.qkv, QuantizedLinear) and isinstance(block.attention.out, QuantizedLinear)
    assert block.attention.qkv.values.dtype == torch.float8_e4m3fn
    kept = dict(model.named_parameters())
    rounded = ("attention.qkv.weight", "attention.out.weight", "moe.experts.gate_up", "moe.experts.down")
    assert set(before) - set(kept) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in rounded}
    assert all(parameter is before[name] for name, parameter in kept.items())


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@pytest.mark.parametrize("spec", [MIXTRAL, DEEPSEEK_LITE], ids=["mixtral", "deepseek"])
def test_bytes_of_a_model_with_8_bit_weights_are_those_of_the_cost_model(spec: Any, weights: WeightFormat) -> None:
    """Of the weights; scales come on top."""
    model = engine_of(tiny(spec), weights=weights)._model
    scales = sum(module.scale.nbytes for module in model.modules() if isinstance(module, QuantizedWeight))
    stored = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert stored - scales == device_work(spec, weights=weights, item=4).stored_bytes
    assert {name.rpartition(".")[2] for name, _ in model.named_parameters() if "experts" in name} == set()


def test_int8_sums_fit_32_bits() -> None:
    with pytest.raises(BadInput, match="at most 133,144 inputs, got 133,145"):
        QuantizedWeight(torch.zeros(1, MOST_INPUTS + 1), "int8")


@pytest.mark.parametrize("formats", [{"weights": "fp8"}, {"invariant": True}], ids=str)
def test_a_part_of_a_model_is_refused(formats: dict[str, Any]) -> None:
    model = tiny(LLAMA)
    model.layers["0"].attention.heads //= 2  # as on one of two tensor ranks
    with pytest.raises(BadInput, match="whole model on one device"):
        engine_of(model, **formats)


@pytest.mark.parametrize(("spec", "weights"), [(LLAMA, "fp8"), (MIXTRAL, "int8")], ids=["fp8", "int8"])
def test_parameters_are_assigned_in_their_format(spec: Any, weights: str) -> None:
    """An engine that gets another model's parameters gives the logits of an engine for that model, in the same memory."""
    first, second = tiny(spec), tiny(spec)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.25)
    changed, expected = engine_of(first, weights=weights), engine_of(second, weights=weights)
    model = changed._runner._model
    places = [buffer.data_ptr() for buffer in model.buffers()]
    for name, parameter in second.named_parameters():
        assign_parameter(model, name, parameter)
    assert places and [buffer.data_ptr() for buffer in model.buffers()] == places
    for ours, theirs in zip(logits_of(changed).values(), logits_of(expected).values(), strict=True):
        assert torch.equal(torch.stack(ours), torch.stack(theirs))
