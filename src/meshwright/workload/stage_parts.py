"""Parameters of one pipeline rank, by unit (a block, the embedding, the head)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from meshwright.spec.model import ModelSpec
from meshwright.workload.rank_layers import StageTable
from meshwright.workload.unit_parameters import block_unit, end_units, trained_share


@dataclass(frozen=True)
class StagePart:
    """Layers, parameters and messages of one pipeline rank. Parameters are counted on one tensor rank."""

    layers: tuple[int, ...]
    """Numbers of the layers on this rank, counted from 0."""
    stages: int
    """Number of stages of this rank."""
    blocks: tuple[int, ...]
    """Parameters of each block before sharding, with the experts that are on this rank."""
    shards: tuple[float, ...]
    """Parameters of each block's shard on this rank."""
    embed_head: int
    """Parameters of embedding and head on this rank before sharding."""
    head: int
    """Parameters of the unit with the loss, before sharding."""
    last: int
    """Parameters of the unit that a forward gathers last, before sharding."""
    sharded: float
    """Parameters of all shards on this rank."""
    trained: tuple[float, ...]
    """Share of each block's parameters that is trained, not frozen."""
    embed_head_trained: float
    """Share of the parameters of embedding and head that is trained."""
    sends: int
    """Messages that this rank sends to other pipeline ranks per micro-batch: activations and gradients."""


@lru_cache(maxsize=4096)  # cached, because the planner asks for the same parts with every batch and strategy
def stage_part(model: ModelSpec, width: int, shards: int, expert: int, table: StageTable, rank: int) -> StagePart:
    """Return the part of pipeline rank `rank`.

    `table` says which layers are on which rank. `width`, `shards` and `expert` are the numbers of tensor ranks, shard
    ranks and expert ranks.
    """
    layers = tuple(layer for stage in table[rank] for layer in stage)
    has_first_block = 0 in layers
    has_last_block = model.layers - 1 in layers
    units = [block_unit(model, kind=model.kind(layer), tensor=width, shards=shards, expert=expert) for layer in layers]
    embed, head = end_units(model, tensor=width, shards=shards, expert=expert).units(
        used_by_both=model.embedding_at_both_ends, first=has_first_block, last=has_last_block
    )
    blocks = tuple(unit.count for unit in units)
    return StagePart(
        layers=layers,
        stages=len(table[rank]),
        blocks=blocks,
        shards=tuple(unit.shard for unit in units),
        embed_head=embed.count + head.count,
        head=head.count,
        last=head.count if has_last_block and not (model.embedding_at_both_ends and has_first_block) else max(blocks),
        sharded=sum(unit.shard for unit in (*units, embed, head)),
        trained=tuple(trained_share(model, model.kind(layer)) for layer in layers),
        embed_head_trained=trained_share(model, None),
        sends=_sends(table, rank),
    )


def _sends(table: StageTable, rank: int) -> int:
    """Return the number of messages that `rank` sends to other ranks per micro-batch.

    It counts the stages of `rank` whose next stage is on another rank, because they send activations there. It adds the
    stages whose previous stage is on another rank, because they send gradients there. Two ranks have two stages of two
    layers each, and all three borders between stages are between ranks:

    >>> _sends(((range(0, 2), range(4, 6)), (range(2, 4), range(6, 8))), rank=0)
    3
    """
    stages = sorted((stage.start, holder) for holder, stages in enumerate(table) for stage in stages)
    return sum(
        rank_before != rank_after and rank in (rank_before, rank_after)
        for (_, rank_before), (_, rank_after) in pairwise(stages)
    )
