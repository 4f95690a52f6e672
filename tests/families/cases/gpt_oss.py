"""gpt-oss: small random models, published numbers of parameters, and mistakes that raise no error."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.families.registry import FAMILIES
from meshwright.kernels import swiglu
from meshwright.models import moe
from tests.families.drawn import small

PARAMETERS = {"gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672}


def config(draw: random.Random) -> dict[str, Any]:
    """Windows in some layers or in all; lengths beyond the window and the original context."""
    keys = small(draw)
    layers = draw.choice((3, 4))
    types = draw.choice((None, ["full_attention", "sliding_attention"] * 2, ["sliding_attention"] * 4))
    yarn = {
        "rope_type": "yarn",
        "rope_theta": draw.choice((1e3, 150_000.0)),
        "factor": draw.choice((4.0, 32.0)),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": draw.choice((16, 200)),
        **draw.choice(({}, {"truncate": False}, {"truncate": False})),
    }
    return {
        **keys,
        "num_hidden_layers": layers,
        "initializer_range": 0.5,  # some gates and ups are beyond 7
        "pad_token_id": None,
        "head_dim": draw.choice((8, 12)),
        "sliding_window": draw.choice((5, 16)),
        "layer_types": None if types is None else types[:layers],
        "num_local_experts": draw.choice((4, 6)),
        "num_experts_per_tok": draw.choice((2, 3)),
        "rope_parameters": yarn,
    }


def _released(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }


RELEASED = {"gpt-oss-20b": _released(24, 32), "gpt-oss-120b": _released(36, 128)}


def ramp(spec: Any, truncate: bool) -> list[float]:
    """YaRN's share of each frequency that is not stretched."""
    yarn = spec.yarn

    def dimension(turns: float) -> float:
        return (
            spec.head_dim
            * math.log(yarn.original_max_seq_len / (turns * 2 * math.pi))
            / (2 * math.log(spec.rope_theta))
        )

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    return [min(max((pair - low) / max(high - low, 0.001), 0), 1) for pair in range(spec.head_dim // 2)]


def truncated(spec: Any) -> dict[str, Any]:
    """The other truncation, where it makes a difference: bounds of small heads may be the same."""
    other = {"yarn": replace(spec.yarn, truncate=not spec.yarn.truncate)}
    return other if ramp(spec, True) != ramp(spec, False) else {}


WRONG = {
    "sinks ignored": lambda spec: {"sinks": False},
    "YaRN truncated": truncated,
    "no factor of the rotary tables": lambda spec: {"yarn": replace(spec.yarn, mscale=0.0)},
    "no biases of experts and routers": lambda spec: {"expert_bias": False},
    "no biases of queries, keys and values": lambda spec: {"qkv_bias": False},
    "no bias of the output": lambda spec: {"out_bias": False},
    "gates not clamped": lambda spec: {"mlp": "swiglu"},
    "weights not normalised": lambda spec: {"normalised_routing": False},
    "a window one longer": lambda spec: {"sliding_window": spec.sliding_window + 1},
}


def _halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gpt_oss", replace(FAMILIES["gpt_oss"], interleaved=frozenset()))


def _ups_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def activation(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=swiglu.CLAMP)
        gate = gate * torch.sigmoid(swiglu.SLOPE * gate)
        return gate * up.clamp(-swiglu.CLAMP, swiglu.CLAMP) * weights[:, None]

    monkeypatch.setattr(moe, "clamped_activation", activation)


INJECTED = {
    "gates and ups as halves": _halves,
    "ups without 1": _ups_without_one,
    "the slope of SiLU": lambda monkeypatch: monkeypatch.setattr(swiglu, "SLOPE", 1.0),
}
