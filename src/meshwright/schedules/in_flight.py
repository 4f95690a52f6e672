"""Number of micro-batches in flight on a rank, in closed form, for arrays of schedules."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from meshwright.spec.plan import ScheduleName

NAMES = get_args(ScheduleName)
"""The names of all schedules. The functions here take an index into this tuple."""
Numbers = npt.ArrayLike
"""A number or an array of numbers."""


def in_flight(
    schedule: Numbers, ranks: Numbers, micro_batches: Numbers, virtual: Numbers, rank: Numbers = 0
) -> np.ndarray:
    """Return the most micro-batches in flight on a pipeline rank: their forwards are done, and their backwards are not.

    `schedule`: an index into `NAMES`. `ranks`: pipeline ranks. `virtual`: stages per rank. `rank`: the pipeline rank. The
    arguments broadcast. A forward of one of the rank's stages counts 1 / `virtual`.

    On one rank every schedule but gpipe, breadth_first and paired runs the micro-batches one by one. As in
    `peak_in_flight`, a micro-batch whose backward is split counts until its weight half.
    """
    index, p, m, v, r = np.broadcast_arrays(
        schedule, *(np.asarray(x, float) for x in (ranks, micro_batches, virtual, rank))
    )
    v = np.maximum(v, 1.0)
    # A formula for each schedule; `p` ranks, `m` micro-batches, `v` stages per rank, `r` the rank.
    by_name = {
        "gpipe": m,
        "1f1b": np.minimum(m, p - r),
        "interleaved": np.minimum(m * v, 2 * (p - 1 - r) + (v - 1) * _group(p, m) + 1) / v,
        "zb_h1": np.minimum(m, p),
        "zbv": np.minimum(2 * np.minimum(m, p), np.maximum(2.0, m + 1 + r)) / 2,
        "breadth_first": m,
        "paired": np.minimum(m, 2.0),
    }
    return np.choose(np.asarray(index, dtype=np.int64), [by_name[name] for name in NAMES])


def _group(ranks: np.ndarray, micro_batches: np.ndarray) -> np.ndarray:
    """Return how many micro-batches of an interleaved schedule pass a stage before the rank's next stage (`groups_of`)."""
    return np.ceil(micro_batches / np.maximum(1.0, micro_batches // ranks))
