"""Features and sizes that matrix products in fp8 support."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.spec.fields import from_plain
from meshwright.spec.fp8_limits import fp8_conflict, supports_fp8
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BatchPlan, LayerStrategy, Linear, MeshAxis, Plan, Precision

LLAMA = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])


def on(tensor: int, linear: Linear, *layers: Linear | None) -> Plan:
    return Plan(
        mesh=(MeshAxis(axis="tensor", size=tensor),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        layers=tuple(LayerStrategy(range=str(number), linear=kind) for number, kind in enumerate(layers or (None,))),
        precision=Precision(linear=linear),
    )


@pytest.mark.parametrize(
    ("plan", "expected_text"),
    [
        (on(1, "fp8_tensorwise"), None),
        (on(2, "fp8_tensorwise"), "tensor ranks"),
        (on(2, "compute"), None),
        (on(2, "compute", None, "fp8_rowwise"), "tensor ranks"),
        (on(2, "fp8_tensorwise", "compute", "compute"), None),
    ],
)
def test_tensor_ranks_are_not_trained_beside_it(plan: Plan, expected_text: str | None) -> None:
    assert fp8_conflict(plan) == expected_text


def test_every_side_of_a_product_is_a_multiple_of_16() -> None:
    assert supports_fp8(LLAMA, 8192) and supports_fp8(LLAMA, 8192, 8)
    assert not supports_fp8(LLAMA, 8200) and not supports_fp8(LLAMA, 128, 16)


def test_the_products_of_experts_and_of_latent_attention_count() -> None:
    mixture, latent = (from_plain(ModelSpec, MODEL_PRESETS[name]) for name in ("qwen3-30b-a3b", "deepseek-v2-lite"))
    assert supports_fp8(mixture, 4096) and supports_fp8(latent, 4096)
    assert not supports_fp8(replace(mixture, expert_hidden=776), 4096)
    assert not supports_fp8(replace(latent, shared_expert_hidden=8), 4096)
    for odd in (replace(latent, kv_rank=520), replace(latent, rope_head_dim=72), replace(latent, q_rank=24)):
        assert not supports_fp8(odd, 4096)
