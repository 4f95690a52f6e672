"""Numbers of layers on pipeline ranks: on the rank with the head, and on the fullest of the other ranks, in memory and
in time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.spec.layout import balanced_stages
from meshwright.workload.arrays import Array

StageTable = tuple[tuple[range, ...], ...]
"""Layers of each stage: the outer tuple has the pipeline ranks, the inner tuple the stages of a rank in order."""
MOST_STAGES = 1 << 16
"""Larger than the number of virtual stages on one pipeline rank can be."""


class RankLayers(NamedTuple):
    """Numbers of layers on the ranks of a pipeline.

    Each field is a number, or an array with one element per pipeline.
    """

    fullest: Array
    """Layers of the fullest rank without the head. They decide its memory."""
    with_head: Array
    """Layers of the rank with the head; with one rank, the same number as `fullest`."""
    slowest: Array
    """Layers that decide the time of the ranks without the head.

    Ranks with several stages compute them in rounds, one stage of each rank, and a round takes as long as its longest
    stage. This is the sum of the longest stages of all rounds; in the last round, the stage of the rank with the head
    does not count.
    """
    slowest_with_head: Array
    """The same sum, but in the last round only the stage of the rank with the head counts."""


def table_layers(table: StageTable) -> RankLayers:
    """Return the layers of a pipeline's ranks. In a V-shaped placement, ranks do not compute in rounds.

    Layers 9 to 15 and the head are on the second rank:

    >>> table_layers(((range(0, 9),), (range(9, 16),)))
    RankLayers(fullest=9, with_head=7, slowest=9, slowest_with_head=7)

    Each rank has two stages. In the first round, the second rank computes 2 layers and then waits while the first rank
    computes its third. The last round takes 3 layers on the first rank, and 1 layer on the second:

    >>> table_layers(((range(0, 3), range(5, 8)), (range(3, 5), range(8, 9))))
    RankLayers(fullest=6, with_head=3, slowest=6, slowest_with_head=4)
    """
    layers_by_rank = [sum(map(len, stages)) for stages in table]
    head_rank = max(range(len(table)), key=lambda rank: max(stage.stop for stage in table[rank]))
    head = layers_by_rank.pop(head_rank)
    fullest = max(layers_by_rank, default=head)
    if head_rank < len(table) - 1 or len(table) == 1:
        return RankLayers(fullest, head, fullest, head)
    *rounds, last = ([len(stage) for stage in stages] for stages in zip(*table, strict=True))
    before = sum(map(max, rounds))
    return RankLayers(fullest, head, before + max(last[:-1]), before + last[-1])


def balanced_layers(layers: int, head: float, pipeline: Array, virtual: Array, vee: Array) -> RankLayers:
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
    columns = np.array(layers_by_code, float).reshape(-1, len(RankLayers._fields))[index.reshape(-1)].T
    return RankLayers(*(column.reshape(ranks.shape) for column in columns))


@lru_cache(maxsize=4096)
def _balanced(layers: int, head: float, pipeline: int, virtual: int, vee: bool) -> RankLayers:
    """Return `table_layers` of one pipeline."""
    if layers < pipeline * virtual:
        # Each stage needs a layer, so there is no such plan. Callers with many layouts drop it.
        rounded_up = -(-layers // pipeline)
        return RankLayers(rounded_up, rounded_up, rounded_up, rounded_up)
    return table_layers(balanced_stages("zbv" if vee else "interleaved", pipeline, layers, head, virtual))
