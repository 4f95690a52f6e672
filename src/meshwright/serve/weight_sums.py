"""Checksums of weights, by which engines find out whether they have equal weights.

The checksums do not depend on the number of tensor ranks that divide the model.
"""

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
    """Return two checksums of each parameter, `(parameters, 2)` int64 on the CPU.

    The first is the sum of the parameter's elements, whose bytes are read as integers. The second is the same sum of the scales of an 8-bit
    weight, and 0 for other parameters.

    A rank only adds elements that no earlier rank has. So the results of all ranks, added up, are the checksums of the whole model. `spec`
    has the dimensions of the whole model; `part` says which part of it `model` is.
    """
    device = model.embed.weight.device
    sums = []
    for parameter in parameters(spec):
        owner, _, leaf = parameter.name.rpartition(".")
        module = model.get_submodule(owner)
        scales = getattr(module, "scale", None)
        is_rounded = leaf == "weight" and isinstance(scales, Tensor)
        pieces = rank_pieces(spec, parameter, part)
        earlier_ranks = (AxisPart(rank, part.count) for rank in range(part.index))
        earlier = [piece for rank_part in earlier_ranks for piece in rank_pieces(spec, parameter, rank_part)]
        values: Tensor | None = getattr(module, "values" if is_rounded else leaf)
        total = torch.zeros(2, dtype=torch.int64, device=device)
        for piece, value in _slices(values, pieces, piece_dimension(parameter)):
            if piece not in earlier:
                total[0] += _sum(value)
        if is_rounded and module.number_format == "fp8 blocks":
            blocks = [
                ParameterBox(piece.offsets, tuple(-(-size // FP8_BLOCK) for size in piece.sizes)) for piece in pieces
            ]
            for piece, (block, scale) in zip(pieces, _slices(scales, blocks, 0), strict=True):
                if piece not in earlier:
                    total[1] += _sum(
                        scale[:, : block.sizes[1]]
                    )  # without the columns that `scale_shape` adds as padding
        elif is_rounded:  # There is one scale for each output, which is an index of dimension 0.
            outputs = {_outputs(piece) for piece in earlier}
            for piece, scale in _slices(scales, pieces, 0):
                if _outputs(piece) not in outputs:
                    total[1] += _sum(scale)
        sums.append(total)
    return torch.stack(sums).cpu()


def _slices(
    tensor: Tensor | None, pieces: Sequence[ParameterBox], dimension: int
) -> Iterator[tuple[ParameterBox, Tensor]]:
    """Yield each of a rank's `pieces` of a parameter, with its part of the rank's tensor.

    In the tensor, the pieces come one after the other along `dimension`.
    """
    first = 0
    for piece in pieces:
        assert tensor is not None, "a rank with pieces of a parameter has it"
        yield piece, tensor.narrow(dimension, first, piece.sizes[dimension])
        first += piece.sizes[dimension]


def _outputs(piece: ParameterBox) -> tuple[int, int]:
    """Return which outputs of a layer a piece of its weight computes: the first output, and the number of outputs."""
    return piece.offsets[0], piece.sizes[0]


def _sum(tensor: Tensor) -> Tensor:
    integers = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    return torch.sum(integers, dtype=torch.int64)
