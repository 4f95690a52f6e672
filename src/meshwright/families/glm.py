"""GLM-4-9B (GLM Team 2024, arXiv 2406.12793): Llama in which RoPE rotates pairs of neighbours in the first half of each head."""

from __future__ import annotations

from dataclasses import replace

from meshwright.families.format import presets, size
from meshwright.families.glm4 import GLM4

FAMILY = replace(
    GLM4,
    model_type="glm",
    architecture="GlmForCausalLM",
    modules={ours: theirs for ours, theirs in GLM4.modules.items() if not ours.endswith("_output_norm")},
    values={"rope_pairs": "neighbours", "qkv_bias": True},
)
PRESETS = presets(
    {"glm4-9b-chat": size(40, 4096, 32, 2, 13696, 3e-4)},
    seq_len=8192,
    head_dim=128,
    rope_width=64,
    norm_eps=1.5625e-7,
    vocab_size=151552,
    max_seq_len=131072,
)
RELEASES = ("glm-4-9b-chat-hf",)
