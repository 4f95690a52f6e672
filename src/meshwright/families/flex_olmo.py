"""FlexOlmo (Shi et al. 2025, arXiv 2507.07024): OLMo 2 with experts in all layers.

The learning rate of the preset is that of OLMo 2 with the same width.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.families.format import presets, size
from meshwright.families.keys import experts
from meshwright.families.olmo2 import OLMO2
from meshwright.families.olmoe import OLMOE, routed

_EXPERTS = routed(7, 5)
_FIRST = ("attention_norm", "mlp_norm")
FAMILY = replace(
    OLMOE,
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    score_class=None,
    modules={ours: theirs for ours, theirs in {**OLMO2.modules, **OLMOE.modules}.items() if ours not in _FIRST},
    values={**OLMO2.values, "normalised_routing": False},
    from_config=lambda config: {**OLMO2.from_config(config), **experts.read(config, _EXPERTS)},
)
PRESETS = presets(
    {"flex-olmo-7x7b": size(32, 4096, 32, 32, 11008, 3e-4, experts=7, experts_per_token=5, expert_hidden=11008)},
    seq_len=4096,
    head_dim=128,
    vocab_size=100352,
    max_seq_len=4096,
    rope_theta=500000.0,
    norm_eps=1e-6,
)
RELEASES = ("FlexOlmo-7x7B-1T",)
