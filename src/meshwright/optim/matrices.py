"""The logical matrices of parameters, and the pieces of them that ranks have.

A fused parameter has several matrices (q, k and v; gate and up), and each routed expert has its own matrices. Muon and LAMB update a matrix
as a whole, so their result does not depend on how weights are fused or divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from meshwright.spec.layout import Box
from meshwright.spec.model import ParameterSpec


@dataclass(frozen=True)
class MatrixPiece:
    """The part of a matrix that a rank has.

    `matrix` is the index of the matrix. `local` are the slices of the part in the rank's local tensor, `whole` its slices in the whole
    matrix. `primary` tells whether this rank counts the part in sums over ranks.
    """

    matrix: int
    local: tuple[slice, ...]
    whole: tuple[slice, ...]
    primary: bool

    def of(self, local: Tensor) -> Tensor:
        """Return the elements of the part as a view of the rank's local tensor."""
        return local[self.local]

    @property
    def count(self) -> int:
        """Number of elements of the part."""
        product = 1
        for part in self.whole:
            product *= part.stop - part.start
        return product


def matrices_of(parameter: ParameterSpec) -> tuple[Box, ...]:
    """Return the matrices of a parameter, as boxes of the parameter. A vector is one box.

    A fused weight consists of several matrices, one after the other in its rows. Weights of experts are `(experts, rows, columns)`, and
    each expert has matrices of its own; other weights are `(rows, columns)`, and vectors `(rows,)`.
    """
    if parameter.expert:
        experts, rows, *columns = parameter.shape
        fused = "gate_up" in parameter.name
        sizes: Sequence[int] = (rows // 2, rows // 2) if fused else (rows,)
        expert_indices: list[tuple[int, ...]] = [(expert,) for expert in range(experts)]
    else:
        rows, *columns = parameter.shape
        sizes = [size for _, size in parameter.blocks] or (rows,)
        expert_indices = [()]
    row_bounds = list(pairwise(accumulate(sizes, initial=0)))
    matrices = []
    for index in expert_indices:
        for start, stop in row_bounds:
            offsets = (*index, start, *(0 for _ in columns))
            matrices.append(Box(offsets, (*(1 for _ in index), stop - start, *columns)))
    return tuple(matrices)


def pieces_of(matrices: Sequence[Box], boxes: Sequence[Box]) -> Iterator[MatrixPiece]:
    """Yield the pieces of `matrices` that a rank with these boxes of the parameter has, ordered by matrix and then by box."""
    for index, matrix in enumerate(matrices):
        for box in boxes:
            ranges = [
                (max(first, other), min(first + size, other + other_size))
                for first, size, other, other_size in zip(
                    matrix.offsets, matrix.sizes, box.offsets, box.sizes, strict=True
                )
            ]
            if all(start < stop for start, stop in ranges):
                shifts = [box.first_row if dim == 0 else 0 for dim in range(len(ranges))]
                local = tuple(
                    slice(start - offset + shift, stop - offset + shift)
                    for (start, stop), offset, shift in zip(ranges, box.offsets, shifts, strict=True)
                )
                whole = tuple(
                    slice(start - offset, stop - offset)
                    for (start, stop), offset in zip(ranges, matrix.offsets, strict=True)
                )
                yield MatrixPiece(index, local, whole, box.primary)
