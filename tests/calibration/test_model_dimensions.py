"""Dimensions by name give the published parameter counts."""

from __future__ import annotations

import pytest

from meshwright.calibration.model_dimensions import dimensions_by_name, shape_from_dimensions


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-8B", 8.03),
        ("LLAMA3-70B", 70.6),
        ("Llama-3.1-405B", 405.0),
        ("Llama-2-13B", 13.0),
        ("LLaMA-65B", 65.2),
        ("GPT-175B", 175.0),
        ("MT-NLG-530B", 530.0),
        ("GPT-1T", 1008.0),
        ("MPT-7b", 6.66),
        ("BLOOM-176B", 176.0),
        ("DeepSeek-V3", 671.0),
        ("Mixtral 8x7B", 46.7),
        ("Mixtral-8x22B", 141.0),
        ("Grok-1-314B", 314.0),
        ("Kimi-K2", 1026.0),
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235.0),
        ("GPT-OSS-120B", 117.0),
        ("Nemotron4-340B", 340.0),
        ("Nemotron4-15B", 15.6),
        ("Qwen3-8B", 8.2),
        ("SmolLM2-135M", 0.135),
        ("Llama-3.2-1B", 1.24),
        ("Qwen3-Next-80B-A3B", 80.0),
    ],
)
def test_parameter_counts(name: str, billions: float) -> None:
    assert shape_from_dimensions(dimensions_by_name(name)).params / 1e9 == pytest.approx(billions, rel=0.04)


def test_an_unknown_name_has_no_sizes() -> None:
    assert dimensions_by_name("Unheard-Of-9B") == {}
    assert dimensions_by_name("") == {}
