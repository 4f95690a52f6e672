"""Numbers of layers on pipeline ranks: on the rank with the head, and on the fullest of the other ranks."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.spec.layout import balanced_stages
from meshwright.workload.arrays import Array

StageTable = tuple[tuple[range, ...], ...]
"""Layers of each stage: the outer tuple has the pipeline ranks, the inner tuple the stages of a rank in order."""
MOST_STAGES = 1 << 16
"""More than the number of virtual stages on one pipeline rank can be."""


def table_layers(table: StageTable) -> tuple[int, int]:
    """Return (layers of the fullest rank without the head, layers of the rank with the head).

    With one rank, both are its layers.

    Layers 9 to 15 and the head are on the second rank:

    >>> table_layers(((range(0, 9),), (range(9, 16),)))
    (9, 7)
    """
    layers_by_rank = [sum(map(len, stages)) for stages in table]
    head_rank = max(range(len(table)), key=lambda rank: max(stage.stop for stage in table[rank]))
    head = layers_by_rank.pop(head_rank)
    return max(layers_by_rank, default=head), head


def balanced_layers(layers: int, head: float, pipeline: Array, virtual: Array, vee: Array) -> tuple[Array, Array]:
    """Return `table_layers` of `spec.layout.balanced_stages`, for arrays of pipelines.

    `pipeline` has the number of ranks, `virtual` the number of stages on each rank, and `vee` 1 for the V-shaped
    schedule ZBV. The head takes as long as `head` layers. The results have the broadcast shape of the three arrays.
    """
    ranks, stages, vees = np.broadcast_arrays(
        *(np.asarray(column, dtype=np.int64) for column in (pipeline, virtual, vee))
    )
    # Many cases have equal numbers. Each different combination gets a code, so that it is computed only once.
    codes, index = np.unique((ranks * MOST_STAGES + np.maximum(1, stages)) * 2 + (vees > 0), return_inverse=True)
    layers_by_code = [_balanced(layers, head, *divmod(int(code) // 2, MOST_STAGES), bool(code % 2)) for code in codes]
    fullest, with_head = np.array(layers_by_code, float).reshape(-1, 2)[index.reshape(-1)].T
    return fullest.reshape(ranks.shape), with_head.reshape(ranks.shape)


@lru_cache(maxsize=4096)
def _balanced(layers: int, head: float, pipeline: int, virtual: int, vee: bool) -> tuple[int, int]:
    """Return `table_layers` of one pipeline."""
    if layers < pipeline * virtual:
        # Each stage needs a layer, so there is no such plan. Callers with many layouts drop it.
        rounded_up = -(-layers // pipeline)
        return rounded_up, rounded_up
    return table_layers(balanced_stages("zbv" if vee else "interleaved", pipeline, layers, head, virtual))
