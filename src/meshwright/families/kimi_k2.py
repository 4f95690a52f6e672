"""Kimi K2 (Moonshot AI 2025, arXiv 2507.20534): DeepSeek-V3 with more experts, all in one group, and with fewer heads.

Its folders differ from those of DeepSeek-V3 only in `model_type`.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.families.deepseek_v2 import HEADS
from meshwright.families.deepseek_v3 import DEEPSEEK_V3
from meshwright.families.format import presets, size

FAMILY = replace(DEEPSEEK_V3, model_type="kimi_k2", score_class=None)
PRESETS = presets(
    {"kimi-k2": size(61, 7168, 64, 64, 18432, 2e-4, experts=384, routing_scale=2.827)},
    seq_len=4096,
    train={"balance_loss": 1e-4},
    vocab_size=163840,
    max_seq_len=131072,
    rope_theta=50000.0,
    experts_per_token=8,
    expert_hidden=2048,
    shared_expert_hidden=2048,
    first_dense_layers=1,
    yarn={"factor": 32.0, "beta_fast": 1.0},
    **HEADS,
)
RELEASES = ("Kimi-K2-Instruct",)
