"""Checks on boxes of elements of a tensor: whether one exceeds the tensor and whether two overlap. Torch-free."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Box(Protocol):
    """A rectangular part of a tensor; `offsets` and `sizes` count elements per dimension."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...


B = TypeVar("B", bound=Box)


def volume(boxes: Sequence[Box]) -> int:
    """Elements of all boxes together, counted once for each box they are in."""
    return sum(math.prod(box.sizes) for box in boxes)


def exceeds(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether part of the box lies outside a tensor of this shape."""
    ends = (start + size for start, size in zip(box.offsets, box.sizes, strict=True))
    return any(end > size for end, size in zip(ends, shape, strict=True))


def overlapping(boxes: Sequence[B]) -> tuple[B, B] | None:
    """Two boxes that share an element, or None: a sweep along the dimension most of them differ in."""
    full = [box for box in boxes if math.prod(box.sizes)]
    if len(full) < 2:
        return None
    starts = [len({box.offsets[dim] for box in full}) for dim in range(len(full[0].offsets))]
    if not starts:
        return full[0], full[1]
    along = starts.index(max(starts))
    full.sort(key=lambda box: box.offsets[along])
    open_boxes: list[tuple[int, int]] = []
    for index, box in enumerate(full):
        while open_boxes and open_boxes[0][0] <= box.offsets[along]:
            open_boxes.pop(0)
        overlap_index = next((other for _, other in open_boxes if _overlap(box, full[other])), None)
        if overlap_index is not None:
            return full[overlap_index], box
        insort(open_boxes, (box.offsets[along] + box.sizes[along], index))
    return None


def _overlap(first: Box, second: Box) -> bool:
    pairs = zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in pairs)
