"""Numbers of parameters of the model's units on one rank.

Units are the embedding, each block, and the head with prediction modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod

import numpy as np

from meshwright.spec.layout import AxisPart, Division, local_shape, shard_rows
from meshwright.spec.model import ModelSpec, ParameterSpec, block_parameters, end_parameters
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape


@dataclass(frozen=True)
class UnitParameters:
    """Numbers of parameters of a unit on one tensor rank, before and after sharding."""

    dense: int = 0
    """Parameters outside the routed experts."""
    experts: int = 0
    """Parameters of the routed experts on one expert rank."""
    dense_shard: int = 0
    """The part of `dense` that the first shard rank stores: FSDP2 gives it ceil(rows / shards) rows of each parameter.
    """
    expert_shard: float = 0.0
    """The part of `experts` that each rank of their shard group stores."""

    @property
    def count(self) -> int:
        """Return the number of parameters before sharding."""
        return self.dense + self.experts

    @property
    def shard(self) -> float:
        """Return the number of parameters that the first shard rank stores."""
        return self.dense_shard + self.expert_shard

    def __add__(self, other: UnitParameters) -> UnitParameters:
        return UnitParameters(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class EndParameters:
    """Parameters outside the blocks: of the embedding and of the head."""

    table: UnitParameters
    """The embedding table."""
    embed: UnitParameters
    """The embedding table and the learned positions."""
    final: UnitParameters
    """The final norm, the head unless it is tied to the embedding, and the prediction modules."""

    def units(self, *, used_by_both: bool, first: bool, last: bool) -> tuple[UnitParameters, UnitParameters]:
        """Return the embedding's unit and the head's unit on a rank that has the `first` block, the `last` block or
        both.

        If embedding and head use the same table (`used_by_both`, see `ModelSpec.embedding_at_both_ends`), there are
        three cases:

        | blocks of the rank | embedding's unit | head's unit |
        | --- | --- | --- |
        | first and last | empty | everything |
        | first | the embedding | empty |
        | last | empty | the head, and a copy of the table |
        """
        shared = used_by_both and first and last
        embed = self.embed if first and not shared else UnitParameters()
        head = self.final if last else UnitParameters()
        if shared:
            return embed, head + self.embed
        return embed, head + self.table if used_by_both and last else head


@lru_cache(maxsize=4096)  # cached, because the planner asks for the same units with every batch and strategy
def block_unit(model: ModelSpec, *, kind: int, tensor: int = 1, shards: int = 1, expert: int = 1) -> UnitParameters:
    """Return the parameters of a block of kind `kind` (`ModelSpec.kind`) on one of `tensor` tensor ranks.

    `expert` ranks divide the experts of each tensor rank, and `shards` ranks the parameters. Two tensor ranks divide
    the 218,112,000 parameters of a block, except for the two norms of 4,096, which both have:

    >>> from meshwright.config.presets import MODEL_PRESETS
    >>> from meshwright.spec.fields import from_plain
    >>> llama = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
    >>> [block_unit(llama, kind=0, tensor=ranks).dense for ranks in (1, 2)]
    [218112000, 109060096]
    """
    return _unit(model, block_parameters(model, kind), tensor, shards, expert)


@lru_cache(maxsize=4096)
def end_units(model: ModelSpec, *, tensor: int = 1, shards: int = 1, expert: int = 1) -> EndParameters:
    """Return the parameters outside the blocks on one of `tensor` ranks; `shards` and `expert` are as in `block_unit`."""
    ends = end_parameters(model)
    groups = (
        [parameter for parameter in ends if parameter.name == "embed.weight"],
        [parameter for parameter in ends if parameter.before_blocks],
        [parameter for parameter in ends if not parameter.before_blocks],
    )
    return EndParameters(*(_unit(model, group, tensor, shards, expert) for group in groups))


@lru_cache(maxsize=1024)
def trained_share(model: ModelSpec, kind: int | None) -> float:
    """Return the share of parameters that is trained, not frozen: of a block of kind `kind`, or of embedding and head
    if it is None.
    """
    unit = end_parameters(model) if kind is None else block_parameters(model, kind)
    return sum(parameter.count for parameter in unit if not parameter.frozen) / sum(each.count for each in unit)


def _unit(
    model: ModelSpec, parameters: Iterable[ParameterSpec], tensor: int, shards: int, expert: int
) -> UnitParameters:
    """Return the parameters of a unit; the arguments are as in `block_unit`."""
    dense = experts = dense_shard = 0
    for parameter in parameters:
        if parameter.expert:
            experts += parameter.count // (tensor * expert)
            continue
        rows, *other_sizes = local_shape(parameter, Division(AxisPart(0, tensor)))
        dense += rows * prod(other_sizes)
        dense_shard += len(shard_rows(rows, shards, 0)) * prod(other_sizes)
    return UnitParameters(dense, experts, dense_shard, experts * expert / shards)


def stage_parameters(shape: Shape, layout: Layouts, layer_share: Array) -> tuple[Array, Array]:
    """Return a pipeline rank's parameters before sharding: (outside the routed experts, inside them).

    The rank has `layer_share` of all layers and one end of the model (embedding or head). With one pipeline rank, it
    has both ends.
    """
    tables = np.where(np.asarray(layout.pipeline) > 1, shape.table_params, shape.end_params)
    dense = (shape.inner_dense_params * layer_share + tables) / layout.tensor
    return dense, shape.inner_expert_params * layer_share / np.maximum(layout.expert, 1.0)


def shard_parameters(layout: Layouts, dense: Array, experts: Array, sharded: Array) -> Array:
    """Return the parameters that one rank stores.

    `dense` and `experts` are numbers before sharding; they are divided where `sharded` is true.
    """
    return np.where(sharded, dense / layout.shards + experts / layout.expert_shard, dense + experts)
