"""Chunks of an optimizer's state: elements that are copied and updated together, in the order of the next forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.optim.packing import BLOCK

ALIGNED = BLOCK
"""Alignment of segments in elements: kernels load vectors from the start of each, and no 8-bit block crosses two."""


@dataclass(frozen=True)
class ChunkSegment:
    """`count` elements of the parameter `name`, from its element `first` on, at `offset` in their chunk."""

    name: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class OptimizerChunk:
    """`size` elements from position `start` on, all with one weight decay."""

    start: int
    size: int
    weight_decay: float
    segments: tuple[ChunkSegment, ...]


def plan_chunks(groups: Sequence[tuple[float, Mapping[str, int]]], max_elements: int) -> list[OptimizerChunk]:
    """Chunks of at most `max_elements` elements, each with one weight decay; a parameter has one contiguous range in them."""
    assert max_elements % ALIGNED == 0
    chunks: list[OptimizerChunk] = []
    for weight_decay, sizes in groups:
        segments: list[ChunkSegment] = []
        used = 0
        for name, size in sizes.items():
            first = 0
            while first < size:
                if used == max_elements:
                    chunks.append(_chunk(chunks, used, weight_decay, segments))
                    segments = []
                    used = 0
                count = min(size - first, max_elements - used)
                segments.append(ChunkSegment(name, first, count, used))
                first = first + count
                used = -(-(used + count) // ALIGNED) * ALIGNED
        if segments:
            chunks.append(_chunk(chunks, used, weight_decay, segments))
    return chunks


def groups_in_order(sizes: Mapping[str, int], decays: Mapping[str, float]) -> list[tuple[float, dict[str, int]]]:
    """The parameters by unit of the model in the order given, and inside a unit by weight decay, for `plan_chunks`."""
    units: dict[str, dict[float, dict[str, int]]] = {}
    for name, size in sizes.items():
        module, _, suffix = name.partition(".")
        unit = f"{module}.{suffix.partition('.')[0]}" if module == "layers" else module
        units.setdefault(unit, {}).setdefault(decays[name], {})[name] = size
    return [(decay, unit[decay]) for unit in units.values() for decay in sorted(unit, reverse=True)]


def _chunk(
    previous: Sequence[OptimizerChunk], size: int, weight_decay: float, segments: Sequence[ChunkSegment]
) -> OptimizerChunk:
    start = previous[-1].start + previous[-1].size if previous else 0
    return OptimizerChunk(start, size, weight_decay, tuple(segments))
