"""Parameters of one pipeline rank, by unit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from meshwright.spec.model import ModelSpec
from meshwright.workload.rank_layers import StageTable
from meshwright.workload.unit_parameters import block_unit, end_units, trained_share


@dataclass(frozen=True)
class StagePart:
    """Layers, parameters and messages of one pipeline rank."""

    layers: tuple[int, ...]
    stages: int
    """Stages of this rank that these layers form."""
    blocks: tuple[int, ...]
    """Parameters of each block on this rank, its experts among them, before sharding."""
    shards: tuple[float, ...]
    """Parameters of each block's shard."""
    embed_head: int
    """Parameters of the embedding and the head on this rank, before sharding."""
    head: int
    """Parameters of the unit with the loss."""
    last: int
    """Parameters of the unit that a forward gathers last."""
    sharded: float
    """Parameters of the rank's shard."""
    trained: tuple[float, ...]
    """Share of each block's parameters that is trained."""
    embed_head_trained: float
    """Share of the parameters of embedding and head that is trained."""
    sends: int
    """Messages of one micro-batch to other ranks, activations and gradients."""


@lru_cache(maxsize=4096)  # the planner asks for the same parts under every batch and strategy
def stage_part(model: ModelSpec, width: int, shards: int, expert: int, table: StageTable, rank: int) -> StagePart:
    """The part of pipeline rank `rank`, on one of `width` tensor ranks, `shards` shard ranks and `expert` expert ranks."""
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
    """Stages of `rank` whose next stage is on another rank, plus those whose previous stage is on another rank.

    With two stages of two layers on each rank all three borders are between ranks:

    >>> _sends(((range(0, 2), range(4, 6)), (range(2, 4), range(6, 8))), rank=0)
    3
    """
    stages = sorted((stage.start, holder) for holder, stages in enumerate(table) for stage in stages)
    return sum(
        rank_before != rank_after and rank in (rank_before, rank_after)
        for (_, rank_before), (_, rank_after) in pairwise(stages)
    )
