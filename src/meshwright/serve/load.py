"""Loads a model for the engine. Layers in 8 bits are made before memory is taken, so no weight is in memory in two formats.

Where the engine can, it computes with quantised weights as the folder stores them. Else they are expanded to the model's dtype; if that
does not fit the device, they are rounded to 8 bits. Before weights are read, one sentence says which, with the bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from meshwright.checkpoint.models.single_device import allocate
from meshwright.checkpoint.models.stored_model import StoredModel, check_head, open_model
from meshwright.events.terminal import write_line
from meshwright.models.decoder import Decoder
from meshwright.serve.formats import CAPABILITIES, assign_parameter, rounded_parameters, use_formats, use_stored_formats
from meshwright.spec.engine import EngineSettings, WeightFormat
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.layout import WHOLE, AxisPart
from meshwright.spec.weight_scheme import ROUNDING_LOSS, LayerFormat

CACHE_SHARE = 0.05
"""Share of a device's memory that must stay free beside the weights."""


def load_for_engine(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    options: EngineSettings,
    *,
    predictions: int = 0,
    contents: bool = True,
    adapter: Path | None = None,
) -> Decoder:
    """Return the model in `folder` with the layers that the options ask for.

    The other parameters are those of `single_device.load_model`.
    Raises OutOfResources if the weights of a quantised folder fit the device in no format.
    """
    with open_model(folder, contents=contents, predictions=predictions, adapter=adapter, device=device) as stored:
        check_head(stored.spec, folder)
        model = planned_model(stored, device, dtype, options)
        allocate(model, device)
        fill(model, stored)
    return model


def planned_model(stored: StoredModel, device: torch.device, dtype: torch.dtype, options: EngineSettings) -> Decoder:
    """Return the model on the meta device, with layers in 8 bits if the options ask for them or if only these fit the device.

    Writes to stderr how the weights of a quantised folder are computed.
    """
    model = _empty(stored, device, dtype, options, options.weights)
    if stored.quantised is not None and options.weights is None and not _fits(model, device):
        model = _in_8_bits(stored, device, dtype, options, weight_bytes(model))
    if stored.quantised is not None:
        write_line(loading_sentence(stored, model, device, dtype), sys.stderr)
    return model


def _in_8_bits(
    stored: StoredModel, device: torch.device, dtype: torch.dtype, options: EngineSettings, expanded: int
) -> Decoder:
    """The model rounded to the first 8-bit format in which it fits. Raises OutOfResources if there is none."""
    why = ""
    for number_format in _formats_of(device):
        try:
            model = _empty(stored, device, dtype, options, number_format)
        except BadInput as error:
            why = f" ({error})"
            continue
        if _fits(model, device):
            return model
        why = f", {weight_bytes(model) / 1e9:.3g} GB in 8 bits"
    raise OutOfResources(
        f"weights of {expanded / 1e9:.3g} GB in {_dtype_name(dtype)}{why} do not fit {device}, of which "
        f"{_free(device) / 1e9:.3g} GB are free; divide the model over several devices (tensor)"
    )


def _empty(
    stored: StoredModel, device: torch.device, dtype: torch.dtype, options: EngineSettings, weights: WeightFormat | None
) -> Decoder:
    """The model on the meta device, with layers as the folder stores them, and others in the format `weights`."""
    with torch.device("meta"):
        model = Decoder(stored.spec)
    model.to(dtype)
    use_stored_formats(model, stored.format_of, device, weights=weights, invariant=options.invariant)
    if weights is not None:
        use_formats(model, weights=weights, invariant=options.invariant, device=device)
    return model


@torch.no_grad()
def fill(model: Decoder, stored: StoredModel, part: AxisPart = WHOLE, experts: AxisPart = WHOLE) -> None:
    """Read the weights into the model, or into a rank's part of it. Weights in 8 bits are rounded from values in the model's dtype."""
    dtype = model.embed.weight.dtype
    for name, value in stored.tensors(part, experts, rounded_parameters(model)):
        assign_parameter(model, name, value.to(dtype) if isinstance(value, torch.Tensor) else value)


def loading_sentence(
    stored: StoredModel,
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    later: WeightFormat | None = None,
    ranks: int = 1,
) -> str:
    """How the weights of a quantised folder are stored and computed in a model on the meta device, and their bytes on `device`.

    `later` is the format to which layers that are expanded now are rounded afterwards, if any. So many tensor ranks divide the layers.
    """
    assert stored.quantised is not None
    formats = rounded_parameters(model)
    native = [name for name, number_format in formats.items() if stored.format_of(name, ranks) == number_format]
    rounded = {number_format for name, number_format in formats.items() if name not in native}
    expanded = [name for name in stored.quantised.quantised_parameters() if name not in formats]
    lines = [f"weights: {stored.quantised.stored_words()}"]
    if native:
        lines.append(f"{len(native)} layers multiply them as stored, in 8 bits")
    lines += [f"{len(formats) - len(native)} layers are {_rounding(number_format)}" for number_format in rounded]
    if expanded:
        lines.append(f"{len(expanded)} layers are expanded to {_dtype_name(dtype)}")
        cut = [name for name in expanded if stored.cuts_blocks(name, ranks)]
        if cut:
            lines[-1] += f" (ranks or fused weights cut the blocks of {len(cut)}, such as {cut[0]})"
        lines += [] if later is None else [f"then {_rounding(later)}"]
    lines += stored.quantised.remarks()
    return "; ".join(lines) + f"; {weight_bytes(model) / 1e9:.3g} GB on {device}"


def _rounding(number_format: LayerFormat) -> str:
    return f"rounded to {number_format}, which adds {ROUNDING_LOSS[number_format]:.1%} error of normally distributed weights"


def weight_bytes(model: Decoder) -> int:
    """Bytes of a model's parameters and rounded weights."""
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype, str(dtype).removeprefix("torch."))


def _formats_of(device: torch.device) -> list[WeightFormat]:
    """The 8-bit formats that a device multiplies, int8 first, which loses less."""
    capability = torch.cuda.get_device_capability(device)
    return [each for each in ("int8", "fp8") if capability >= CAPABILITIES[each]]


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


def _fits(model: Decoder, device: torch.device) -> bool:
    """Whether a model that is not allocated yet fits a GPU, with room for a cache; a host's memory is not compared."""
    if device.type != "cuda":
        return True
    return weight_bytes(model) <= _free(device) - CACHE_SHARE * torch.cuda.mem_get_info(device)[1]
