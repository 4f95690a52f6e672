"""Features and sizes that matmuls in fp8 support."""

from __future__ import annotations

from dataclasses import replace

from meshwright.config.presets import MODEL_PRESETS
from meshwright.spec.fields import from_plain
from meshwright.spec.fp8_limits import supports_fp8
from meshwright.spec.model import ModelSpec

LLAMA = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])


def test_every_side_of_a_matmul_is_a_multiple_of_16() -> None:
    assert supports_fp8(LLAMA, 8192) and supports_fp8(LLAMA, 8192, 8)
    assert not supports_fp8(LLAMA, 8200) and not supports_fp8(LLAMA, 128, 16)


def test_the_matmuls_of_experts_and_of_latent_attention_count() -> None:
    moe, latent = (from_plain(ModelSpec, MODEL_PRESETS[name]) for name in ("qwen3-30b-a3b", "deepseek-v2-lite"))
    assert supports_fp8(moe, 4096) and supports_fp8(latent, 4096)
    assert not supports_fp8(replace(moe, expert_hidden=776), 4096)
    assert not supports_fp8(replace(latent, shared_expert_hidden=8), 4096)
    for odd in (replace(latent, kv_rank=520), replace(latent, rope_head_dim=72), replace(latent, q_rank=24)):
        assert not supports_fp8(odd, 4096)
