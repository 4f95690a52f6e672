"""Layers of pipeline ranks: of the rank that holds the head, and the most of any other rank."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.spec.layout import balanced_stages
from meshwright.workload.arrays import Array

StageTable = tuple[tuple[range, ...], ...]
"""Layers by pipeline rank and stage of the rank."""
MOST_STAGES = 1 << 16
"""An upper limit of the virtual stages of one pipeline rank."""


def table_layers(table: StageTable) -> tuple[int, int]:
    """(layers of the fullest rank without the head, layers of the rank that holds it); the same number twice with one rank.

    Layers 9 to 15 and the head are on the second rank:

    >>> table_layers(((range(0, 9),), (range(9, 16),)))
    (9, 7)
    """
    layers_by_rank = [sum(map(len, stages)) for stages in table]
    head_rank = max(range(len(table)), key=lambda rank: max(stage.stop for stage in table[rank]))
    head = layers_by_rank.pop(head_rank)
    return max(layers_by_rank, default=head), head


def balanced_layers(layers: int, head: float, pipeline: Array, virtual: Array, vee: Array) -> tuple[Array, Array]:
    """`table_layers` of `spec.layout.balanced_stages` for arrays of pipelines; the head takes as long as `head` layers."""
    ranks, stages, vees = np.broadcast_arrays(
        *(np.asarray(column, dtype=np.int64) for column in (pipeline, virtual, vee))
    )
    codes, index = np.unique((ranks * MOST_STAGES + np.maximum(1, stages)) * 2 + (vees > 0), return_inverse=True)
    layers_by_code = [_balanced(layers, head, *divmod(int(code) // 2, MOST_STAGES), bool(code % 2)) for code in codes]
    fullest, with_head = np.array(layers_by_code, float).reshape(-1, 2)[index.reshape(-1)].T
    return fullest.reshape(ranks.shape), with_head.reshape(ranks.shape)


@lru_cache(maxsize=4096)
def _balanced(layers: int, head: float, pipeline: int, virtual: int, vee: bool) -> tuple[int, int]:
    if layers < pipeline * virtual:
        rounded_up = -(-layers // pipeline)  # there is no such plan; callers with many layouts drop it
        return rounded_up, rounded_up
    return table_layers(balanced_stages("zbv" if vee else "interleaved", pipeline, layers, head, virtual))
