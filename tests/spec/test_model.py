"""Parameter and FLOP counts against published numbers and closed forms."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.config.presets import MODEL_PRESETS, run_preset
from meshwright.spec.fields import from_plain
from meshwright.spec.model import (
    ModelSpec,
    active_parameter_count,
    flops_per_token,
    parameter_count,
    parameters,
)


def preset(name: str) -> ModelSpec:
    return from_plain(ModelSpec, MODEL_PRESETS[name])


# Counts of the released checkpoints (Hugging Face), and of the papers' own formulas for the GPT family.
RELEASED = {
    "gpt2-124m": 124_439_808,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_parameter_counts(name: str) -> None:
    assert parameter_count(preset(name)) == RELEASED[name]


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-13b", 13), ("gpt3-175b", 175), ("gpt-530b", 530), ("gpt-1t", 1008)]
)
def test_gpt_presets_follow_megatrons_formula(name: str, billions: int) -> None:
    spec = preset(name)
    h, layers, vocab, seq = spec.hidden, spec.layers, spec.vocab_size, spec.max_seq_len
    formula = 12 * layers * h * h * (1 + 13 / (12 * h) + (vocab + seq) / (12 * layers * h))
    assert parameter_count(spec) == pytest.approx(formula, rel=1e-6)
    assert parameter_count(spec) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("pangu-alpha-200b", 207, 207),
    ],
)
def test_mixtures_have_their_published_counts_in_billions(name: str, total: float, active: float) -> None:
    """Of all weights, and of those that one token passes."""
    assert parameter_count(preset(name)) / 1e9 == pytest.approx(total, rel=2e-3)
    assert active_parameter_count(preset(name)) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_token_s_flops_are_those_of_the_experts_it_passes() -> None:
    spec = preset("mixtral-8x7b")
    as_dense = dataclasses.replace(spec, experts=0, ffn_hidden=2 * 14336, family="llama")  # two experts side by side
    router = 6 * spec.layers * spec.experts * spec.hidden
    assert flops_per_token(spec, 4096, causal=True) == flops_per_token(as_dense, 4096, causal=True) + router


def test_a_layer_s_experts_are_one_tensor() -> None:
    """Experts along dimension 0; dense layers come first, and the expert of all tokens lies beside the routed ones."""
    spec = dataclasses.replace(preset("mixtral-8x7b"), layers=2, first_dense_layers=1, shared_expert_hidden=512)
    shapes = {parameter.name: parameter.shape for parameter in parameters(spec)}
    assert shapes["layers.0.mlp.gate_up.weight"] == (2 * 14336, 4096)
    assert shapes["layers.1.moe.router.weight"] == (8, 4096)
    assert shapes["layers.1.moe.experts.gate_up"] == (8, 2 * 14336, 4096)
    assert shapes["layers.1.moe.experts.down"] == (8, 4096, 14336)
    assert shapes["layers.1.moe.shared.gate_up.weight"] == (1024, 4096)
    assert [parameter.name for parameter in parameters(spec) if parameter.expert] == [
        "layers.1.moe.experts.gate_up",
        "layers.1.moe.experts.down",
    ]


def test_flops_of_llama3_8b_in_both_conventions() -> None:
    spec, seq_len = preset("llama3-8b"), 8192
    embedding = spec.vocab_size * spec.hidden
    norms = sum(parameter.count for parameter in parameters(spec) if len(parameter.shape) == 1)
    matrices = 6 * (parameter_count(spec) - embedding - norms)
    attention = 12 * spec.layers * spec.hidden * seq_len
    assert flops_per_token(spec, seq_len, causal=False) == matrices + attention
    assert flops_per_token(spec, seq_len, causal=True) == matrices + attention / 2
    assert matrices == pytest.approx(4.503e10, rel=1e-3)
    assert attention == pytest.approx(1.288e10, rel=1e-3)


def test_a_tied_head_counts_in_flops_and_once_in_parameters() -> None:
    tied = preset("llama3-1b")
    loose = dataclasses.replace(tied, tied=False)
    assert parameter_count(loose) - parameter_count(tied) == tied.vocab_size * tied.hidden
    assert flops_per_token(loose, 1024, causal=True) == flops_per_token(tied, 1024, causal=True)


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_attention_flops_count_the_positions_a_window_leaves(window: int) -> None:
    spec = dataclasses.replace(preset("llama-nano"), sliding_window=window, vocab_size=512)
    seq_len = 64
    spans = [min(position + 1, window) for position in range(seq_len)]
    per_span = 12 * spec.layers * spec.heads * spec.head_dim
    dense = flops_per_token(spec, seq_len, causal=False) - per_span * min(window, seq_len)
    counted = (flops_per_token(spec, seq_len, causal=True) - dense) / per_span
    exact = sum(spans) / seq_len
    assert counted == pytest.approx(exact, abs=0.5)  # the convention leaves out half of the diagonal


def test_fused_blocks_add_up_and_names_are_unique() -> None:
    for name in MODEL_PRESETS:
        all_parameters = parameters(preset(name))
        assert len({parameter.name for parameter in all_parameters}) == len(all_parameters)
        for parameter in all_parameters:
            assert not parameter.blocks or sum(size for _, size in parameter.blocks) == parameter.shape[0]
            matrix = len(parameter.shape) > 1 and not parameter.name.endswith("_bias")  # experts' biases are stacked
            assert parameter.decay == matrix


def test_every_preset_starts_within_its_own_length() -> None:
    for name in MODEL_PRESETS:
        layer = run_preset(name)
        assert layer["model"] == {"preset": name}
        assert layer["train"]["seq_len"] <= preset(name).max_seq_len
