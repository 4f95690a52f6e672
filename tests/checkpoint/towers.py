"""Tiny random folders of models that also read images, made by transformers' own classes, and the released naming of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARED = {"depth": 2, "num_heads": 2, "out_hidden_size": 16, "projection_dim": 16, "image_size": 28, "patch_size": 14}
LISTS = {"deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [0, 1]}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_vl": {"rope_parameters": MROPE},
    "qwen2_5_vl": {"rope_parameters": MROPE},
    "qwen3_vl": {"rope_parameters": MROPE},
    "qwen3_vl_moe": {
        "rope_parameters": MROPE,
        "moe_intermediate_size": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    },
    "internvl/qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "mistral3/ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "glm4v": {
        "hidden_size": 32,
        "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5},
    },
    "glm4v_moe": {
        "head_dim": 8,
        "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5},
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""Keys of the text part that differ from `SMALL`, by type.

A type may be that of the whole model and that of another text part than the class's default.
"""
FAMILIES = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "llava": "llama",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "glm4v_moe": "glm4_moe",
    "glm4v": "glm4",
    "internvl": "qwen2",
    "smolvlm": "llama",
    "ovis2": "qwen2",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "vipllava": "llama",
    "qwen2_vl": "qwen2",
    "idefics3": "llama",
    "got_ocr2": "qwen2",
    "lighton_ocr": "qwen3",
    "janus": "llama",
    "deepseek_vl": "llama",
    "mistral3/ministral3": "ministral3",
    "internvl/qwen3_moe": "qwen3_moe",
}
"""Types of whole models, with the family of the text part."""


def shrunk(keys: dict[Any, Any]) -> dict[Any, Any]:
    """The keys of a released size's class defaults for a tiny model."""
    small: dict[Any, Any] = {}
    for key, value in keys.items():
        if isinstance(value, dict):
            value = shrunk(value)
        elif value is not None and key in (SMALL | SHARED):
            size = (SMALL | SHARED)[key]
            value = [size, size] if isinstance(value, (list, tuple)) else size
        elif isinstance(key, str) and ("token_id" in key or "token_index" in key) and isinstance(value, int):
            value = 299
        small[key] = LISTS.get(key, value) if isinstance(key, str) else value
    return small


def tiny(model_type: str, folder: Path, **text: Any) -> Any:
    """A random model of a type, which is also written to `folder`."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole, _, other = model_type.partition("/")
    keys = shrunk(CONFIG_MAPPING[whole]().to_dict())
    if other:
        keys["text_config"] = {**shrunk(CONFIG_MAPPING[other]().to_dict()), "model_type": other}
    part = keys["text_config"]
    part.pop("layer_types", None)
    part.update({**TEXT.get(model_type, {}), **text})
    torch.manual_seed(0)
    loader: Any = AutoModelForImageTextToText
    model = loader.from_config(CONFIG_MAPPING[whole].from_dict(keys)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1 and name.endswith(("weight", "bias")):
                tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder with one file."""
    return load_file(folder / "model.safetensors")


def renamed(folder: Path, *replacements: tuple[str, str]) -> None:
    """Give tensors of a folder other prefixes: the first of `replacements` (old, new) that fits counts."""
    tensors = {}
    for name, tensor in stored(folder).items():
        old, new = next(((old, new) for old, new in replacements if name.startswith(old)), ("", ""))
        tensors[new + name.removeprefix(old)] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, change: Any) -> None:
    """Write config.json anew after `change` was called with its values."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
