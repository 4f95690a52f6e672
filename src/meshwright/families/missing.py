"""Known model types that are not supported, each with what the decoder lacks for it."""

from __future__ import annotations

from collections.abc import Mapping

_TYPES: Mapping[str, tuple[str, ...]] = {
    "attention in chunks, and experts whose inputs are multiplied by their weights": ("llama4",),
    "sparse attention, in which an indexer chooses the keys of a token": (
        "deepseek_v32",
        "deepseek_v4",
        "glm_moe_dsa",
        "minimax_m3_vl",
    ),
    "layers with a gated delta net": ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid"),
    "layers with Kimi's delta attention": ("kimi_linear", "glm5_next", "bailing_hybrid"),
    "Mamba layers": ("nemotron_h", "granitemoehybrid", "falcon_h1", "jamba", "bamba", "zamba2", "mamba", "mamba2"),
    "layers with short convolutions": ("lfm2", "lfm2_moe", "lfm3"),
    "lightning attention": ("minimax",),
    "layers that use the keys and values of others, or embeddings of their own": (
        "gemma3n",
        "gemma4",
        "gemma4_unified",
    ),
    "attention to images in some layers": ("mllama",),
    "values of another width than keys, and sinks in layers with a window": ("mimo_v2_flash",),
    "latent attention with queries that grow, or whose cache layers share": ("mistral4", "mistral_large4"),
    "LayerNorm without a bias, and attention beside the feed-forward network": ("cohere2",),
    "sparse-mixer routing": ("phimoe",),
    "experts for text and others for images": ("ernie4_5_vl_moe",),
}
LACKS: Mapping[str, str] = {name: what for what, names in _TYPES.items() for name in names}
"""What the decoder lacks, in words, by `model_type`."""


def lacks(model_type: str) -> str | None:
    """Return what the decoder lacks for a model type, or for a text part of this type. None if the type is not listed."""
    return LACKS.get(model_type.removesuffix("_text"))
