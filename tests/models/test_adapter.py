"""Adapters of a decoder on one device: their parameters, what the first step does, and merged weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.models.adapters import base_digest, deltas_of, merged
from meshwright.families.adapters import resolved_targets
from meshwright.kernels.adapter import Adapter
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.spec.blocks.table import AdapterPart
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec, flops_per_token, parameters, trained_parameter_count
from tests.adapted import adapter_of
from tests.models.tiny import ALL, GPT2, LLAMA

MODELS = {name: spec for name, spec in ALL.items() if not spec.prediction_depth}


def built(spec: ModelSpec, *, draw: bool = False) -> Decoder:
    """The decoder in float64; `draw`: with random B and magnitudes, so that adapters change its output."""
    model = Decoder(spec, reference=True).double()
    initialise(model, spec, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters(spec) if draw else ():
            if parameter.adapter and parameter.fill != "normal":
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                model.get_parameter(parameter.name).copy_(drawn / 5 + (parameter.fill == "ones"))
    return model


def tokens_of(spec: ModelSpec) -> Tensor:
    return torch.randint(spec.vocab_size, (2, 15), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", MODELS)
def test_only_adapters_are_trained_and_the_table_names_them(name: str) -> None:
    spec = adapter_of(MODELS[name], rank=8, experts=MODELS[name].experts > 0)
    model = built(spec)
    table = [(parameter.name, parameter.shape, parameter.trained) for parameter in parameters(spec)]
    assert [(key, tuple(value.shape), value.requires_grad) for key, value in model.named_parameters()] == table
    assert all(parameter.trained == parameter.adapter != parameter.frozen for parameter in parameters(spec))
    tokens = tokens_of(spec)
    torch.testing.assert_close(model(tokens), built(MODELS[name])(tokens))  # B is zero
    model(tokens, targets=tokens).backward()
    assert {key for key, value in model.named_parameters() if value.grad is not None} == {
        parameter.name for parameter in parameters(spec) if parameter.trained
    }


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "glm4 moe", "gpt-oss"])
def test_the_merged_model_equals_the_adapters(name: str, kind: str) -> None:
    spec = adapter_of(MODELS[name], rank=8, alpha=5.0, kind=kind, experts=MODELS[name].experts > 0 and kind != "dora")
    model, base = built(spec, draw=True), built(MODELS[name])
    deltas = deltas_of(spec, lambda key: model.get_parameter(key).detach())
    read = merged(lambda parameter, start, stop: model.get_parameter(parameter.name).detach()[start:stop], deltas)
    with torch.no_grad():
        for parameter in parameters(MODELS[name]):
            half = parameter.shape[0] // 2  # rows of a part: readers ask for some at a time
            rows = torch.cat([read(parameter, 0, half), read(parameter, half, parameter.shape[0])])
            base.get_parameter(parameter.name).copy_(rows)
    tokens = tokens_of(spec)
    assert (model(tokens) - built(MODELS[name])(tokens)).abs().max() > 1e-3, "the adapters must change the output"
    torch.testing.assert_close(base(tokens), model(tokens), rtol=1e-9, atol=1e-9)


def test_the_first_step_with_a_identity_equals_full_training() -> None:
    """With A the identity, B zero, alpha = rank and plain SGD the first change of W is that of full training."""
    full, rate = built(LLAMA), 0.1
    tokens = tokens_of(LLAMA)
    full(tokens, targets=tokens).backward()
    for target, width in (("o_proj", 64), ("down_proj", 96), ("up_proj", 64)):
        spec = adapter_of(LLAMA, rank=width, alpha=float(width), targets=(target,))
        model = built(spec)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if key.endswith((".a", "_a")):
                    weight.copy_(torch.eye(width))
        model(tokens, targets=tokens).backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None and weight.shape[1] == width and not weight.count_nonzero():
                    weight -= rate * weight.grad
        deltas = deltas_of(spec, lambda key, model=model: model.get_parameter(key).detach())
        for name, (delta,) in deltas.items():
            gradient = full.get_parameter(name).grad
            assert gradient is not None
            rows = slice(delta.rows.start, delta.rows.stop)
            torch.testing.assert_close(delta.scale * delta.b @ delta.a, -rate * gradient[rows], rtol=1e-9, atol=1e-12)


def test_parts_of_different_rank_and_parts_without_an_adapter() -> None:
    """A fused layer of which only the first and the last part have an adapter, of different ranks."""
    parts = (AdapterPart("q", 4, 3), AdapterPart("v", 2, 2))
    adapter = Adapter(parts, [("q", 4), ("k", 2), ("v", 2)], 5, 0.5).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in adapter.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 8, dtype=torch.float64)
    q, v = (x @ getattr(adapter, f"{part}_a").t() @ getattr(adapter, f"{part}_b").t() for part in "qv")
    expected = y + 0.5 * torch.cat([q, torch.zeros(7, 2, dtype=torch.float64), v], dim=1)
    torch.testing.assert_close(adapter(x, y, torch.empty(0)), expected)


def test_targets_are_resolved_and_unknown_ones_name_the_nearest() -> None:
    assert resolved_targets(LLAMA, ["v_proj", "mlp.down_proj", "q_proj"]) == (
        "attention.qkv.q",
        "attention.qkv.v",
        "mlp.down",
    )
    assert resolved_targets(LLAMA, ["attention.qkv"]) == ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v")
    assert resolved_targets(GPT2, ["all-linear"]) == ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ours = resolved_targets(LLAMA, ["all-linear"])
    assert resolved_targets(LLAMA, ours) == ours
    with pytest.raises(BadInput, match="wq_proj matches no linear layer.*nearest: q_proj"):
        resolved_targets(LLAMA, ["wq_proj"])
    with pytest.raises(BadInput, match="no targets"):
        resolved_targets(LLAMA, [])


def test_counts_of_parameters_and_flops() -> None:
    """A frozen weight counts 4 FLOPs a token, a trained one 6, and attention does not change."""
    spec = adapter_of(LLAMA, rank=4)
    added = sum(parameter.count for parameter in parameters(spec) if parameter.adapter)
    assert trained_parameter_count(spec) == added
    matrices = sum(p.count for p in parameters(LLAMA) if len(p.shape) == 2 and p.name != "embed.weight")
    expected = flops_per_token(LLAMA, 32, causal=True) - 2 * matrices + 6 * added
    assert flops_per_token(spec, 32, causal=True) == pytest.approx(expected)


def test_the_digest_tells_weights_apart_and_not_their_dtype() -> None:
    model = built(LLAMA)

    def read(parameter, start, stop):
        return model.get_parameter(parameter.name).detach()[start:stop]

    digest = base_digest(LLAMA, read)
    assert digest == base_digest(adapter_of(LLAMA, rank=2), read)
    assert digest == base_digest(LLAMA, lambda *rows: read(*rows).float())
    with torch.no_grad():
        model.layers["1"].mlp.down.weight *= 1.01
    assert digest != base_digest(LLAMA, read)


def test_wrong_adapters_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="adapter.targets is attention.qvk: expected .*nearest: attention.qkv"):
        Decoder(replace(LLAMA, adapter=replace(adapter_of(LLAMA).adapter, targets=("attention.qvk",))))
