"""Presets: public models with their published dimensions and training settings, and example clusters.

Sources: GPT-2 and GPT-3 (Brown et al. 2020, table 2.1; 13B at width 5120, which its 40 heads of 128 need),
Megatron-Turing NLG 530B (Smith et al. 2022), Megatron 1T (Narayanan et al. 2021, table 1), Llama 3.x (Grattafiori et
al. 2024 and the released config files), Qwen3, Mixtral and DeepSeek (released config files), PanGu-α 200B (Zeng et al. 2021,
table 1). PanGu-α is planned as 64 plain layers, which make the paper's 207.0 billion parameters; the position-table
queries of its last layer are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CLUSTER_PRESETS = Path(__file__).with_name("clusters")
"""Folder of the example clusters, one file each."""

_LLAMA3 = {
    "family": "llama",
    "kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_seq_len": 131072,
    "rope_theta": 500000.0,
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "mlp": "swiglu",
    "rope_scaling": {"factor": 8.0},
}
_GPT = {
    "family": "gpt2",
    "head_dim": 128,
    "vocab_size": 50257,
    "max_seq_len": 2048,
    "positions": "learned",
    "norm": "layernorm",
    "mlp": "gelu",
    "bias": True,
    "tied": True,
}
_QWEN3 = {
    "family": "qwen3",
    "kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_seq_len": 40960,
    "rope_theta": 1000000.0,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "mlp": "swiglu",
    "qk_norm": True,
}
_DEEPSEEK = {
    "family": "deepseek_v2",
    "head_dim": 192,
    "kv_rank": 512,
    "q_rank": 1536,
    "rope_head_dim": 64,
    "value_head_dim": 128,
    "vocab_size": 102400,
    "max_seq_len": 163840,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "mlp": "swiglu",
    "experts_per_token": 6,
    "first_dense_layers": 1,
    "normalised_routing": False,
    "yarn": {"mscale": 0.707, "mscale_all_dim": 0.707},
}
_QWEN3_MOE = {**_QWEN3, "family": "qwen3_moe", "kv_heads": 4, "experts": 128, "experts_per_token": 8}


def _gpt(layers: int, hidden: int, heads: int, **other: Any) -> dict[str, Any]:
    size = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "ffn_hidden": 4 * hidden}
    return {**_GPT, **size, "head_dim": hidden // heads, **other}


def _sized(base: dict[str, Any], layers: int, hidden: int, heads: int, ffn: int, **other: Any) -> dict[str, Any]:
    return {**base, "layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": ffn, **other}


MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": _gpt(12, 768, 12, max_seq_len=1024),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-175b": _gpt(96, 12288, 96),
    "gpt-530b": _gpt(105, 20480, 128, vocab_size=51200),
    "gpt-1t": _gpt(128, 25600, 160, vocab_size=51200),
    "llama3-1b": _sized(_LLAMA3, 16, 2048, 32, 8192, head_dim=64, tied=True, rope_scaling={"factor": 32.0}),
    "llama3-3b": _sized(_LLAMA3, 28, 3072, 24, 8192, tied=True, rope_scaling={"factor": 32.0}),
    "llama3-8b": _sized(_LLAMA3, 32, 4096, 32, 14336),
    "llama3-70b": _sized(_LLAMA3, 80, 8192, 64, 28672),
    "llama3-405b": _sized(_LLAMA3, 126, 16384, 128, 53248),
    "qwen3-0.6b": _sized(_QWEN3, 28, 1024, 16, 3072, tied=True),
    "qwen3-8b": _sized(_QWEN3, 36, 4096, 32, 12288),
    "pangu-alpha-200b": _gpt(64, 16384, 128, vocab_size=40000, max_seq_len=1024),
    "mixtral-8x7b": {
        "family": "mixtral",
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn_hidden": 14336,
        "vocab_size": 32000,
        "max_seq_len": 32768,
        "rope_theta": 1000000.0,
        "experts": 8,
        "experts_per_token": 2,
        "expert_hidden": 14336,
    },
    "qwen3-30b-a3b": _sized(_QWEN3_MOE, 48, 2048, 32, 6144, expert_hidden=768),
    "qwen3-235b-a22b": _sized(_QWEN3_MOE, 94, 4096, 64, 12288, expert_hidden=1536),
    "deepseek-v2-lite": _sized(
        _DEEPSEEK,
        27,
        2048,
        16,
        10944,
        kv_heads=16,
        q_rank=0,
        experts=64,
        expert_hidden=1408,
        shared_expert_hidden=2816,
    ),
    "deepseek-v2": _sized(
        _DEEPSEEK,
        60,
        5120,
        128,
        12288,
        kv_heads=128,
        experts=160,
        expert_hidden=1536,
        shared_expert_hidden=3072,
        expert_groups=8,
        groups_per_token=3,
        routing_scale=16.0,
    ),
    "deepseek-v3": _sized(
        _DEEPSEEK,
        61,
        7168,
        128,
        18432,
        family="deepseek_v3",
        kv_heads=128,
        vocab_size=129280,
        experts=256,
        experts_per_token=8,
        expert_hidden=2048,
        shared_expert_hidden=2048,
        first_dense_layers=3,
        router="sigmoid",
        expert_groups=8,
        groups_per_token=4,
        routing_scale=2.5,
        normalised_routing=True,
        yarn={"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "llama-nano": {
        "family": "llama",
        "layers": 4,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "ffn_hidden": 640,
        "vocab_size": 0,
        "max_seq_len": 1024,
        "tied": True,
    },
}
"""Model dimensions by preset name (`model: NAME`). `llama-nano` is the laptop-sized model of the quick start."""

_LEARNING_RATES = {
    "gpt2-124m": 6e-4,
    "gpt3-13b": 1e-4,
    "gpt3-175b": 6e-5,
    "gpt-530b": 5e-5,
    "gpt-1t": 5e-5,
    "llama3-1b": 4e-4,
    "llama3-3b": 3e-4,
    "llama3-8b": 3e-4,
    "llama3-70b": 1.5e-4,
    "llama3-405b": 8e-5,
    "qwen3-0.6b": 6e-4,
    "qwen3-8b": 3e-4,
    "llama-nano": 3e-3,
    "pangu-alpha-200b": 2e-5,
    "mixtral-8x7b": 3e-4,
    "qwen3-30b-a3b": 3e-4,
    "qwen3-235b-a22b": 1.5e-4,
    "deepseek-v2-lite": 4.2e-4,
    "deepseek-v2": 2.4e-4,
    "deepseek-v3": 2.2e-4,
}
_SEQUENCE_LENGTHS = {
    "gpt2-124m": 1024,
    "pangu-alpha-200b": 1024,
    "llama-nano": 256,
    **dict.fromkeys(("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"), 4096),
}

_TRAINING = {"deepseek-v3": {"balance_loss": 1e-4}}


def run_preset(name: str) -> dict[str, Any]:
    """The run-file keys for which `extends: NAME` stands: the preset with its training settings."""
    seq_len = _SEQUENCE_LENGTHS.get(name, 2048 if name.startswith("gpt") else 8192)
    train = {"seq_len": seq_len, "learning_rate": _LEARNING_RATES[name], **_TRAINING.get(name, {})}
    return {"model": {"preset": name}, "train": train}


def cluster_names() -> list[str]:
    """The built-in example clusters, for `cluster: NAME`."""
    return sorted(file.stem for file in CLUSTER_PRESETS.glob("*.yaml"))
