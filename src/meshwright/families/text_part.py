"""Finds the text part of a folder whose model also reads images or sound: its keys in config.json, and the names of its tensors.

`architectures` of such a folder names a class `…ForConditionalGeneration`. The keys of the text model are in the
section `text_config`, or among the other keys (Qwen2-VL). The other tensors belong to encoders of images or sound and
to projections, which this program does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.families.format import Family
from meshwright.families.keys.experts import STACKED_MODULES
from meshwright.spec.errors import BadInput, shorten

CLASS = "ForConditionalGeneration"
"""Ending of the names of these classes."""
SAME_AS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
"""Types of text parts that equal a family for text, and the family. They differ only in the positions of images."""
ALWAYS: dict[str, dict[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Keys with fixed values for some types.

Their classes do not read these keys and always behave as the family does with these values.
"""
WITHOUT_HEAD_DIM = ("glm4v_text",)
"""Types of text parts whose classes ignore `head_dim` and use hidden / heads."""
FLAT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}
"""Types whose released config.json mixes the keys of the text model with those of images, and the family of the text model."""
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
"""Keys about images in a config.json of a type in `FLAT`."""
TOWERS = "towers"
"""Folder next to a run's tokenizer. It has those parts of the run's initial folder that are not the text model."""
SHARED = ("tie_word_embeddings", "quantization_config")
"""Keys that apply to the text part even if they are outside of `text_config`."""


@dataclass(frozen=True)
class Nesting:
    """Where a folder has the tensors of its text model: the prefixes that replace those of the family."""

    base: str
    """Prefix of all weights except the head's."""
    head: str
    """Prefix of the head's weight."""
    experts: Literal["single", "in_out", "out_in"] = "single"
    """How the folder stores the experts of a layer.

    - `single`: as folders of the text model do.
    - `in_out`: stacked as `(experts, in, out)`, as in released folders of Qwen3-VL-MoE.
    - `out_in`: stacked as `(experts, out, in)`, as transformers 5 writes them.
    """

    def layout(self, family: Family) -> Family:
        """Return the family with the names and shapes that this folder has for the text model, except for the prefixes."""
        if self.experts == "single":
            return family
        transposed = frozenset(STACKED_MODULES if self.experts == "in_out" else ())
        return replace(family, modules={**family.modules, **STACKED_MODULES}, transposed=family.transposed | transposed)

    def name(self, family: Family, name: str) -> str:
        """Return the name in this folder of the tensor that is called `name` in a folder of the text model alone."""
        if name.startswith(family.base):
            return self.base + name.removeprefix(family.base)
        return self.head + name

    def contains(self, family: Family, name: str) -> bool:
        """Return whether the tensor `name` of this folder belongs to the text model."""
        return name.startswith((self.base, f"{self.head}{family.ends['head']}."))


BASES = (
    "language_model.model.",  # In released folders.
    "model.language_model.",  # Written by transformers since 4.52.
    "model.text_model.",  # Idefics3, SmolVLM
    "model.",  # Qwen2-VL
)
HEADS = ("", "language_model.")
"""Prefixes that the head may have."""


def text_config(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str] | None:
    """Return the config.json of the text part alone, and its name in messages. None for a folder of a text model.

    Raises BadInput if `architectures` does not name one class with the ending `CLASS`.
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
    text.pop("architectures", None)  # `model_type` says the same.
    return _without_image_positions(text), f"{where}: {inside}".removesuffix(": ")


def _without_image_positions(text: dict[str, Any]) -> dict[str, Any]:
    """Remove the keys that divide each head's rotated dimensions among time, row and column. For text all three positions are equal."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := text.get(key), Mapping) and "mrope_section" in rope:
            kept = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
            text[key] = {name: "default" if value == "mrope" else value for name, value in kept.items()}
    return text


def nesting(family: Family, names: Collection[str], where: str, shape: Callable[[str], tuple[int, ...]]) -> Nesting:
    """Find where the tensors of the text part are. Raises BadInput if there are none.

    `names` are the names of all tensors in the folder. `shape` returns the shape of one of them. `where` is the folder
    in messages.
    """
    bases = {Nesting(base, "").name(family, f"{family.ends['embed']}.weight"): base for base in BASES}
    base = next((base for name, base in bases.items() if name in names), None)
    if base is None:
        raise BadInput(f"{where}: no text part among the tensors: expected {' or '.join(bases)}")
    head = next((head for head in HEADS if f"{head}{family.ends['head']}.weight" in names), "")
    return Nesting(base, head, _experts(family, base, names, shape))


def _experts(
    family: Family, base: str, names: Collection[str], shape: Callable[[str], tuple[int, ...]]
) -> Literal["single", "in_out", "out_in"]:
    """Return how the experts are stored, found from the shapes of two tensors of one layer."""
    up_name, down_name = (name for names in STACKED_MODULES.values() for name in names)
    found = next((name for name in names if name.startswith(base) and name.endswith(f".{down_name}")), None)
    if found is None or STACKED_MODULES.items() <= family.modules.items():
        return "single"
    # `in_out`: up (experts, hidden, 2 · width), down (experts, width, hidden). `out_in`: up (experts, 2 · width,
    # hidden), down (experts, hidden, width).
    up = shape(found.removesuffix(down_name) + up_name)
    down = shape(found)
    return "in_out" if up[1:2] == down[2:] else "out_in"
