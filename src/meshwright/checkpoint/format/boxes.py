"""Arithmetic on boxes: whether a box exceeds its tensor, and whether two boxes of a tensor overlap.

A box is a rectangular part of a tensor: the index of its first element, and its size in each dimension. Example: offsets
(2, 0) and sizes (3, 4) are the rows 2 to 4 and the columns 0 to 3.

This module does not import torch.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasBox(Protocol):
    """A rectangular part of a tensor.

    `offsets` is the index of its first element and `sizes` its shape, both in elements per dimension.
    """

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...


BoxT = TypeVar("BoxT", bound=HasBox)


def count_elements(boxes: Sequence[HasBox]) -> int:
    """Return the total number of elements. An element that lies in two boxes counts twice."""
    return sum(math.prod(box.sizes) for box in boxes)


def exceeds_shape(box: HasBox, shape: tuple[int, ...]) -> bool:
    """Return whether a part of the box lies outside a tensor of this shape."""
    ends = (offset + size for offset, size in zip(box.offsets, box.sizes, strict=True))
    return any(end > size for end, size in zip(ends, shape, strict=True))


def find_overlap(boxes: Sequence[BoxT]) -> tuple[BoxT, BoxT] | None:
    """Return two boxes that share an element, or None.

    Comparing all pairs would take too long. So the boxes are sorted along the dimension with the most distinct offsets.
    Each box is then compared only with the boxes that begin before it along that dimension and do not end before it.
    """
    nonempty = [box for box in boxes if math.prod(box.sizes)]
    if len(nonempty) < 2:
        return None
    distinct_offsets = [len({box.offsets[dim] for box in nonempty}) for dim in range(len(nonempty[0].offsets))]
    if not distinct_offsets:  # scalars: each box is the whole tensor, one element
        return nonempty[0], nonempty[1]
    sweep_dim = distinct_offsets.index(max(distinct_offsets))
    nonempty.sort(key=lambda box: box.offsets[sweep_dim])
    open_boxes: list[tuple[int, int]] = []
    """Boxes that have not ended yet, as (end along `sweep_dim`, index), sorted by end."""
    for index, box in enumerate(nonempty):
        while open_boxes and open_boxes[0][0] <= box.offsets[sweep_dim]:
            open_boxes.pop(0)
        overlap = next((nonempty[other] for _, other in open_boxes if _overlap(box, nonempty[other])), None)
        if overlap is not None:
            return overlap, box
        insort(open_boxes, (box.offsets[sweep_dim] + box.sizes[sweep_dim], index))
    return None


def _overlap(a: HasBox, b: HasBox) -> bool:
    dimensions = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(
        a_offset < b_offset + b_size and b_offset < a_offset + a_size
        for a_offset, a_size, b_offset, b_size in dimensions
    )
