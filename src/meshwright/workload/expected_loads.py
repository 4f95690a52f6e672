"""How many rows (tokens sent to experts) the busiest expert rank has, relative to the mean.

`train.expert_load` says where the answer comes from: equal loads, recorded loads, or a usual imbalance.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from meshwright.config.recorded_loads import read_loads
from meshwright.spec.errors import BadInput
from meshwright.spec.job import EQUAL_LOADS, TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import ExpertExchange
from meshwright.workload.arrays import Array

IMBALANCE_EXCESS = 0.2
"""Default imbalance: with many expert ranks, the busiest one has 20% more rows than the mean.

Balanced by a weak loss alone, 32 ranks with one expert each got 1.35 to 2.1 times the mean in real training (LAER-MoE's
traces, ASPLOS 2026).
"""


@dataclass(frozen=True)
class BusiestRank:
    """Rows of the busiest rank among those that share a layer's experts, relative to the mean of these ranks."""

    imbalance: Array
    """For time: the busiest rank of each layer, as the mean over layers and steps. A step waits for this rank in every layer."""
    stored_rows: Array
    """For memory: the rank with the most rows over all layers together, in the step with the most. The rank must store these rows."""


def usual_imbalance(expert_ranks: Array) -> Array:
    """Return the default imbalance: 1 for one rank, 1.1 for two ranks, and towards 1 + `IMBALANCE_EXCESS` for many."""
    return 1 + IMBALANCE_EXCESS * (1 - 1 / np.maximum(expert_ranks, 1.0))


def expected_busiest(model: ModelSpec, train: TrainSpec, expert_ranks: Array) -> BusiestRank:
    """Return the rows of the busiest of `expert_ranks` ranks, tensor ranks included.

    Without `train.expert_load`, the default imbalance counts for time but not for memory. Raises BadInput if the file of loads cannot be
    read.
    """
    source = train.expert_load
    if not model.experts or source == EQUAL_LOADS:
        return BusiestRank(1.0, 1.0)
    if source is None:
        return BusiestRank(usual_imbalance(expert_ranks), 1.0)
    sizes, index = np.unique(np.asarray(expert_ranks, dtype=np.int64), return_inverse=True)
    by_size = [busiest_of(recorded_loads(model, source), int(size)) for size in sizes]
    index = index.reshape(np.shape(expert_ranks))
    return BusiestRank(
        np.array([busiest.imbalance for busiest in by_size])[index],
        np.array([busiest.stored_rows for busiest in by_size])[index],
    )


def received_room(exchange: ExpertExchange | None, bound: float | None, expert_ranks: Array) -> Array:
    """Return how many rows the receive buffers of a rank hold, as a multiple of the rows that the rank sends.

    Only the exchanges `peer` and `peer_fp8` have fixed buffers. For the others the result is 0, because the host sizes the buffers of each
    exchange. `bound` is the plan's limit for the result (`receive_bound`). Without a limit the buffers hold all rows of all ranks.
    """
    ranks = np.asarray(expert_ranks, float)
    has_fixed_buffers = exchange in ("peer", "peer_fp8")
    limit = ranks if bound is None else bound
    return np.where((ranks > 1) & has_fixed_buffers, np.minimum(limit, ranks), 0.0)


def busiest_of(loads: np.ndarray, ranks: int) -> BusiestRank:
    """Return the busiest of `ranks` ranks that each own consecutive experts, for `loads` `(steps, layers, experts)`.

    If the experts cannot be divided evenly among the ranks, loads count as equal; no plan has such a number of ranks.

    The two experts of the first rank get 8 of 12 rows, and the mean of the two ranks is 6:

    >>> busiest_of(np.array([[[6, 2, 1, 3]]]), ranks=2).imbalance
    1.3333333333333333
    """
    steps, layers, experts = loads.shape
    if experts % ranks:
        return BusiestRank(1.0, 1.0)
    by_rank = loads.reshape(steps, layers, ranks, -1).sum(3)
    relative = by_rank / by_rank.mean(2, keepdims=True)
    return BusiestRank(float(relative.max(2).mean()), float(relative.mean(1).max()))


def recorded_loads(model: ModelSpec, source: str) -> np.ndarray:
    """Return the recorded loads `(steps, routed layers, experts)` of a file or run folder. Raises BadInput if it cannot be read."""
    path = Path(source)
    try:
        stamp = os.stat(path / "metrics.jsonl" if path.is_dir() else path).st_mtime_ns
    except OSError as error:
        raise BadInput(f"train.expert_load {source}: {error.strerror}") from None
    return _read(source, stamp, model)


@lru_cache(maxsize=4)
def _read(source: str, stamp: int, model: ModelSpec) -> np.ndarray:
    """Read the loads. They are cached, because a search needs them thousands of times; `stamp`, the modification time, detects changes."""
    return read_loads(Path(source), model, "train.expert_load")
