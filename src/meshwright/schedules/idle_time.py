"""Idle time at the start and end of a pipeline's step (bubble), in closed form, for arrays of schedules."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright.schedules.in_flight import NAMES


def relative_idle_time(schedule: npt.ArrayLike, ranks: npt.ArrayLike, micro_batches: npt.ArrayLike) -> np.ndarray:
    """Return the idle time of a step, divided by that of 1F1B with as many virtual stages.

    `schedule` is an index into `NAMES`; the arguments broadcast. Both halves of a backward take equal time.

    Schedules that split the backward idle less (Qi et al. 2024, arXiv 2401.10241 and 2405.15362). ZB-V reaches its minimum
    with at least one and a half micro-batches per rank. With fewer micro-batches than ranks, there are fewer weight halves
    to fill the idle time.
    """
    index, p, m = np.broadcast_arrays(schedule, ranks, micro_batches)
    # Schedules without an entry have the idle time of 1F1B.
    factors = {
        "zb_h1": (2 - np.minimum(1.0, m / p)) / 3,
        "zbv": np.where(m < 1.5 * p, 2 / 3, 1 / 3),
    }
    return np.choose(
        np.asarray(index, dtype=np.int64), [np.broadcast_to(factors.get(name, 1.0), p.shape) for name in NAMES]
    )
