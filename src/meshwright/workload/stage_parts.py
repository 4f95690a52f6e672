"""Parameters that one pipeline rank holds, by unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from meshwright.spec.layout import shard_rows
from meshwright.spec.model import ModelSpec, ParameterSpec, block_parameters, end_parameters

StageTable = tuple[tuple[range, ...], ...]


@dataclass(frozen=True)
class StagePart:
    """What one pipeline rank holds of the model."""

    layers: tuple[int, ...]
    blocks: tuple[int, ...]
    """Parameters of each block on this rank, its experts among them, before sharding."""
    shards: tuple[float, ...]
    """Those of each block that the rank keeps for itself."""
    ends: int
    """Those of the embedding and the head that are here."""
    head: int
    """Those of the unit that ends with the loss."""
    last: int
    """Those of the unit that a forward gathers last."""
    sharded: float
    """Parameters of the whole part that the rank keeps for itself: its shard."""
    sends: int
    """Messages of one micro-batch to other ranks, activations and gradients."""


@lru_cache(maxsize=4096)  # the planner asks for the same parts under every batch and strategy
def stage_part(model: ModelSpec, width: int, shards: int, expert: int, table: StageTable, rank: int) -> StagePart:
    layers = tuple(layer for stage in table[rank] for layer in stage)
    kinds = {routed: _block(model, routed, width, shards, expert) for routed in {model.routed(one) for one in layers}}
    held = [kinds[model.routed(layer)] for layer in layers]
    blocks = tuple(block.count for block in held)
    has_head = model.layers - 1 in layers
    held_ends = [
        parameter
        for parameter in end_parameters(model)
        if (0 in layers and parameter.before_blocks)
        or (has_head and (not parameter.before_blocks or (model.tied and parameter.name == "embed.weight")))
    ]
    together = model.tied and 0 in layers  # one unit for both ends
    names_of_head = ("embed", "positions", "norm", "head") if together else ("norm", "head", *["embed"][: model.tied])
    head = _sum_of(held_ends, names_of_head) // width if has_head else 0
    whole = sum(block.shard for block in held) + sum(_shard(parameter.shape, shards) for parameter in held_ends)
    return StagePart(
        layers=layers,
        blocks=blocks,
        shards=tuple(block.owned for block in held),
        ends=sum(parameter.count for parameter in held_ends) // width,
        head=head,
        last=head if has_head and not together else max(blocks),
        sharded=whole / width,
        sends=_sends(table, rank),
    )


@dataclass(frozen=True)
class _Block:
    """Parameters of one block."""

    count: int
    """On this rank, its experts among them, before sharding."""
    owned: float
    """Those that the rank keeps for itself, were they cut evenly."""
    shard: float
    """Those of all tensor ranks that the first shard keeps: rows are never cut."""


@lru_cache(maxsize=4096)
def _block(model: ModelSpec, routed: bool, width: int, shards: int, expert: int) -> _Block:
    block = block_parameters(model, routed=routed)
    # Experts are cut evenly: over `expert` ranks, and each over the other ranks of the shard and context axes.
    return _Block(
        count=sum(part.count // (expert if part.expert else 1) for part in block) // width,
        owned=sum(part.count for part in block) // width / shards,
        shard=sum(part.count / shards if part.expert else _shard(part.shape, shards) for part in block),
    )


def _sends(table: StageTable, rank: int) -> int:
    """Stages of `rank` whose next stage, and those whose stage before, is on another rank."""
    held = sorted((stage.start, other) for other, row in enumerate(table) for stage in row)
    borders = [(before, after) for (_, before), (_, after) in pairwise(held) if before != after]
    return sum(border.count(rank) for border in borders)


def _sum_of(parameters: Sequence[ParameterSpec], parts: Sequence[str]) -> int:
    return sum(one.count for one in parameters if one.name.partition(".")[0] in parts)


def _shard(shape: tuple[int, ...], shards: int) -> int:
    """Elements of the first rank's rows."""
    return len(shard_rows(shape[0], shards, 0)) * (math.prod(shape) // shape[0])
