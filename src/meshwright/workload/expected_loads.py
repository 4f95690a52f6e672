"""Rows of the busiest expert rank relative to the mean, as `train.expert_load` says: equal, recorded, or a usual excess."""

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
"""Excess of the busiest of many expert ranks over the mean by default: 1.2 times the mean.

Balanced by a weak loss alone, 32 ranks with one expert each got 1.35 to 2.1 times the mean in real training (LAER-MoE's
traces, ASPLOS 2026).
"""


@dataclass(frozen=True)
class BusiestRank:
    """Rows of the busiest of the ranks that share a layer's experts, relative to their mean."""

    imbalance: Array
    """Rows of each layer's own busiest rank, as the mean over layers and steps: a step waits for all of these."""
    stored_rows: Array
    """Rows of one rank over all layers, in the step with the most: the rank has to store them."""


def usual_imbalance(expert_ranks: Array) -> Array:
    """Tokens of the busiest expert rank over the mean: 1 for one rank, and towards 1 + `IMBALANCE_EXCESS` for many."""
    return 1 + IMBALANCE_EXCESS * (1 - 1 / np.maximum(expert_ranks, 1.0))


def expected_busiest(model: ModelSpec, train: TrainSpec, expert_ranks: Array) -> BusiestRank:
    """The busiest of `expert_ranks`, tensor ranks included; without `train.expert_load` only its time is unequal.

    Raises BadInput where the file of loads cannot be read.
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
    """Rows that each of `expert_ranks` has room to receive, relative to those it sends; 0 if the host sizes each exchange."""
    ranks = np.asarray(expert_ranks, float)
    peers = exchange in ("peer", "peer_fp8")
    return np.where((ranks > 1) & peers, np.minimum(ranks if bound is None else bound, ranks), 0.0)


def busiest_of(loads: np.ndarray, ranks: int) -> BusiestRank:
    """The busiest of `ranks` ranks that own consecutive experts, for `loads` `(steps, layers, experts)`.

    Ranks that do not divide the experts get equal loads: no plan has them.

    Of 12 tokens the first rank's two experts get 8, the mean rank gets 6:

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
    """Loads `(steps, routed layers, experts)` of the file or run folder `source`; raises BadInput."""
    path = Path(source)
    try:
        stamp = os.stat(path / "metrics.jsonl" if path.is_dir() else path).st_mtime_ns
    except OSError as error:
        raise BadInput(f"train.expert_load {source}: {error.strerror}") from None
    return _read(source, stamp, model)


@lru_cache(maxsize=4)
def _read(source: str, stamp: int, model: ModelSpec) -> np.ndarray:
    """Cached, as a search asks for the same loads thousands of times; `stamp` is the file's modification time."""
    return read_loads(Path(source), model, "train.expert_load")
