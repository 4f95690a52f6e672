"""Completes the question for a deployment if its model is a folder with quantised weights. No weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from meshwright.costs.serve_work import device_work
from meshwright.families.folder import folder_quantization, hf_tensors
from meshwright.spec.deployment import DeploymentSpec
from meshwright.spec.engine import WeightFormat
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.serving_limits import weights_error
from meshwright.spec.weight_scheme import FP8_BLOCK, NUMBERS_OF


def with_stored_formats(question: DeploymentSpec) -> tuple[DeploymentSpec, str | None]:
    """Set `serve.quantisation.weights` to the 8-bit format in which the folder of the model stores its weights.

    Returns the question, and a sentence about the bytes of the weights. The format is set only if the question gives
    none and if the engine can multiply all weights of the folder in the stored form. The sentence is None if
    `model.init` is no folder with quantised weights, and for a reward model, which computes with expanded weights.
    """
    source, _, path = question.model.init.partition(":")
    folder = Path(path)
    if source != "hf" or question.model.head == "score" or (found := folder_quantization(folder)) is None:
        return question, None
    formats = {scheme.native for scheme in found.schemes}
    quantisation = question.serve.quantisation
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    sizes = [f"{_bytes(question, None)} expanded to bf16"]
    sizes += [
        f"{_bytes(question, each)} in {each}"
        for each in get_args(WeightFormat)
        if not weights_error(question.model, each)
    ]
    names = " or ".join(dict.fromkeys(scheme.name for scheme in found.schemes))
    stored_text = f"model.init: weights in {names}, {stored / 1e9:.3g} GB in the folder; on a device {', '.join(sizes)}"
    stored_format = formats.pop() if len(formats) == 1 else None
    if stored_format == "fp8 blocks" and not _multiplies_blocks(question.model):
        stored_format = None
    native = stored_format and NUMBERS_OF[stored_format]
    if native is not None and quantisation.weights is None:
        chosen = replace(question.serve, quantisation=replace(quantisation, weights=native))
        return replace(
            question, serve=chosen
        ), f"{stored_text}; the plan has {native}, in which the engine multiplies them as stored"
    return question, f"{stored_text}; the plan has {quantisation.weights or 'bf16'}"


def _multiplies_blocks(spec: ModelSpec) -> bool:
    """Return whether one device can multiply all weights as stored, in FP8 blocks.

    It cannot if the model has experts, or if a part of a fused weight does not begin at a block boundary.
    """
    firsts = [part.first_row for parts in hf_tensors(spec).values() for part in parts]
    routed = any(parameter.expert for parameter in parameters(spec))
    return not routed and not any(first % FP8_BLOCK for first in firsts)


def _bytes(question: DeploymentSpec, weights: WeightFormat | None) -> str:
    return f"{device_work(question.model, weights=weights).stored_bytes / 1e9:.3g} GB"
