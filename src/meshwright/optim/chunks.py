"""Chunks of an optimizer's state. The elements of a chunk are copied and updated together; chunks are in the order of the next forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.optim.packing import BLOCK

ALIGNED = BLOCK
"""Alignment of segments, in elements. Kernels load vectors from a segment's start, and no block of 8-bit moments is in two segments."""


@dataclass(frozen=True)
class ChunkSegment:
    """A range of a parameter inside a chunk: elements [first, first + count) of the parameter `name`, at index `offset` of the chunk."""

    name: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class OptimizerChunk:
    """The elements at positions [start, start + size). All of them have the same weight decay."""

    start: int
    size: int
    weight_decay: float
    segments: tuple[ChunkSegment, ...]


def plan_chunks(groups: Sequence[tuple[float, Mapping[str, int]]], max_elements: int) -> list[OptimizerChunk]:
    """Divide parameters into chunks of at most `max_elements` elements and one weight decay each.

    `groups` has pairs of a weight decay and the sizes of its parameters. The elements of a parameter are at consecutive positions.
    """
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
    """Group parameters for `plan_chunks`: by unit of the model, in the order of `sizes`, and inside a unit by weight decay."""
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
