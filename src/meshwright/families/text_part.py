"""The text part of a folder whose model also reads images or sound: its config.json, and the names of its tensors.

Such a folder's `architectures` name a `…ForConditionalGeneration` class. Its config.json has the text model's in `text_config`, or
between its own keys (Qwen2-VL). The other tensors belong to towers and projectors, which this program does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.families.format import Family
from meshwright.families.keys.experts import STACKED_MODULES
from meshwright.spec.errors import BadInput, shorten

CLASS = "ForConditionalGeneration"
"""How the names of these classes end."""
SAME_AS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
"""Types of text parts that differ from a family only in the positions of images, and the family."""
ALWAYS: dict[str, dict[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Keys of these types that their classes do not read, as they always do what the family does with these values."""
WITHOUT_HEAD_DIM = ("glm4v_text",)
"""Types of text parts whose classes share the width among the heads, whatever `head_dim` says."""
FLAT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}
"""Types whose released config.json has the keys of the text model beside those of the images, and the text model's family."""
IMAGE_KEYS = frozenset(
    {
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    }
)
"""Keys beside those of the text model in a config.json of `FLAT`."""
TOWERS = "towers"
"""Folder beside a run's tokenizer with what its initial folder has beside the text model."""
SHARED = ("tie_word_embeddings", "quantization_config")
"""Keys that count for the text part when the whole model's part of config.json has them."""


@dataclass(frozen=True)
class Nesting:
    """Where the tensors of a text model are in such a folder: prefixes in place of the family's own."""

    base: str
    """Of all weights but the head."""
    head: str
    """Of the head."""
    experts: Literal["single", "in_out", "out_in"] = "single"
    """How the folder has the weights of a layer's experts: as folders of the text model, or stacked (Qwen3-VL-MoE) as `(experts, in, out)`,
    as released, or `(experts, out, in)`, as transformers 5 writes them."""

    def layout(self, family: Family) -> Family:
        """The family with the names and shapes that the folder has for its text model, but for prefixes."""
        if self.experts == "single":
            return family
        transposed = frozenset(STACKED_MODULES if self.experts == "in_out" else ())
        return replace(family, modules={**family.modules, **STACKED_MODULES}, transposed=family.transposed | transposed)

    def name(self, family: Family, name: str) -> str:
        """The name in the folder of a tensor that has `name` in a folder of the text model alone."""
        if name.startswith(family.base):
            return self.base + name.removeprefix(family.base)
        return self.head + name

    def contains(self, family: Family, name: str) -> bool:
        """Whether a tensor of the folder belongs to the text model."""
        return name.startswith((self.base, f"{self.head}{family.ends['head']}."))


BASES = (
    "language_model.model.",  # of released folders
    "model.language_model.",  # of transformers since 4.52
    "model.text_model.",  # Idefics3, SmolVLM
    "model.",  # Qwen2-VL
)
HEADS = ("", "language_model.")


def text_config(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str] | None:
    """The config.json of the text part alone, and its name in messages; None for a folder of a text model.

    Raises BadInput for a class of such a name without a text model.
    """
    model_type = config.get("model_type")
    part = config.get("text_config")
    if isinstance(part, Mapping):
        text = {**part, **{key: config[key] for key in SHARED if config.get(key) is not None}}
        inside = "text_config: "
        text |= ALWAYS.get(str(part.get("model_type")), {})
        text["model_type"] = SAME_AS.get(str(part.get("model_type")), part.get("model_type"))
        hidden = text.get("hidden_size")
        heads = text.get("num_attention_heads")
        if part.get("model_type") in WITHOUT_HEAD_DIM and isinstance(hidden, int) and isinstance(heads, int) and heads:
            text["head_dim"] = hidden // heads
    elif isinstance(model_type, str) and model_type in FLAT:
        text = {key: value for key, value in config.items() if key not in IMAGE_KEYS}
        inside = ""
        text["model_type"] = FLAT[model_type]
    else:
        return None
    architectures = config.get("architectures")
    if architectures and not (len(architectures) == 1 and str(architectures[0]).endswith(CLASS)):
        expected = f"one class that ends in {CLASS}, which a folder with a text part has"
        raise BadInput(f"{where}: architectures: expected {expected}, got {shorten(repr(architectures))}")
    text.pop("architectures", None)  # `model_type` says the same
    return _without_image_positions(text), f"{where}: {inside}".removesuffix(": ")


def _without_image_positions(text: dict[str, Any]) -> dict[str, Any]:
    """The keys without the shares of a head that turn by time, row and column: these are equal for text."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := text.get(key), Mapping) and "mrope_section" in rope:
            kept = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
            text[key] = {name: "default" if value == "mrope" else value for name, value in kept.items()}
    return text


def nesting(family: Family, names: Collection[str], where: str, shape: Callable[[str], tuple[int, ...]]) -> Nesting:
    """Where the tensors of the text part are, among the names of a folder; `shape` gives one's. Raises BadInput if they are nowhere."""
    bases = {Nesting(base, "").name(family, f"{family.ends['embed']}.weight"): base for base in BASES}
    base = next((base for name, base in bases.items() if name in names), None)
    if base is None:
        raise BadInput(f"{where}: no text part among the tensors: expected {' or '.join(bases)}")
    head = next((head for head in HEADS if f"{head}{family.ends['head']}.weight" in names), "")
    return Nesting(base, head, _experts(family, base, names, shape))


def _experts(
    family: Family, base: str, names: Collection[str], shape: Callable[[str], tuple[int, ...]]
) -> Literal["single", "in_out", "out_in"]:
    """The form of the experts' weights, from the shapes of two tensors of one layer."""
    up_name, down_name = (name for names in STACKED_MODULES.values() for name in names)
    found = next((name for name in names if name.startswith(base) and name.endswith(f".{down_name}")), None)
    if found is None or STACKED_MODULES.items() <= family.modules.items():
        return "single"
    # (experts, hidden, 2 · width) and (experts, width, hidden), or (experts, 2 · width, hidden) and (experts, hidden, width).
    up = shape(found.removesuffix(down_name) + up_name)
    down = shape(found)
    return "in_out" if up[1:2] == down[2:] else "out_in"
