"""Sums by which engines recognise equal weights, for any number of tensor ranks that divide the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.spec.inference_layout import ParameterBox, piece_dimension, rank_pieces
from meshwright.spec.layout import AxisPart
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.weight_scheme import FP8_BLOCK

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weight_sums(model: Decoder, spec: ModelSpec, part: AxisPart) -> Tensor:
    """Two sums of each parameter over the elements that no earlier rank has: `(parameters, 2)` int64 on the CPU.

    Elements are read as integers. `spec` has the dimensions of the whole model, `part` says which part of it `model` is.
    Added over all ranks they are those of the whole model. The second sum is that of the scales of rounded weights, else 0.
    """
    device = model.embed.weight.device
    sums = []
    for parameter in parameters(spec):
        owner, _, leaf = parameter.name.rpartition(".")
        module = model.get_submodule(owner)
        rounded = leaf == "weight" and isinstance(scales := getattr(module, "scale", None), Tensor)
        pieces = rank_pieces(spec, parameter, part)
        earlier = [
            piece for rank in range(part.index) for piece in rank_pieces(spec, parameter, AxisPart(rank, part.count))
        ]
        values: Tensor | None = getattr(module, "values" if rounded else leaf)
        total = torch.zeros(2, dtype=torch.int64, device=device)
        for piece, value in _slices(values, pieces, piece_dimension(parameter)):
            if piece not in earlier:
                total[0] += _sum(value)
        if rounded and module.number_format == "fp8 blocks":
            blocks = [
                ParameterBox(piece.offsets, tuple(-(-size // FP8_BLOCK) for size in piece.sizes)) for piece in pieces
            ]
            for piece, (block, scale) in zip(pieces, _slices(scales, blocks, 0), strict=True):
                if piece not in earlier:
                    total[1] += _sum(scale[:, : block.sizes[1]])
        elif rounded:  # a scale for each output, that is for each index of dimension 0
            outputs = {_outputs(piece) for piece in earlier}
            for piece, scale in _slices(scales, pieces, 0):
                if _outputs(piece) not in outputs:
                    total[1] += _sum(scale)
        sums.append(total)
    return torch.stack(sums).cpu()


def _slices(
    tensor: Tensor | None, pieces: Sequence[ParameterBox], dimension: int
) -> Iterator[tuple[ParameterBox, Tensor]]:
    """The part of a rank's tensor for each of its pieces, which follow one another along a dimension."""
    first = 0
    for piece in pieces:
        assert tensor is not None, "a rank with pieces of a parameter has it"
        yield piece, tensor.narrow(dimension, first, piece.sizes[dimension])
        first += piece.sizes[dimension]


def _outputs(piece: ParameterBox) -> tuple[int, int]:
    """The first output of a layer that a piece of its weight computes, and their number."""
    return piece.offsets[0], piece.sizes[0]


def _sum(tensor: Tensor) -> Tensor:
    integers = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    return torch.sum(integers, dtype=torch.int64)
