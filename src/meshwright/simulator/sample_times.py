"""Seconds of a training sample as a quadratic function of its length, from the cost model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.costs.compute import layer_times
from meshwright.costs.constants import OWN, Constants, constants
from meshwright.costs.device_rates import Machine
from meshwright.policies.sample_time import SampleTime
from meshwright.spec.model import ModelSpec
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import shape_of


def sample_time(
    model: ModelSpec, machine: Machine, generation: str, capacity: int, *, stack: str = OWN, recompute: float = 0.0
) -> SampleTime:
    """Return the seconds of forward and backward of a sample on one device, in bf16, with all layers, head and embedding.

    The function is fitted to lengths up to `capacity` tokens. `generation` and `stack` select `costs.constants`; `recompute` is an
    index in `spec.plan.RECOMPUTE_MODES`.
    """
    return time_with_constants(model, machine, constants(generation, stack), capacity, recompute)


def time_with_constants(
    model: ModelSpec, machine: Machine, k: Constants, capacity: int, recompute: float = 0.0
) -> SampleTime:
    """Return the seconds of samples on a machine, with the constants `k` of the cost model.

    The cost model gives the seconds at three lengths: `capacity` tokens, half of it, and a quarter, each without rounding of matmuls to
    whole waves of tiles. The result is the quadratic function through these three points.
    """
    lengths = np.array([capacity / 4, capacity / 2, capacity], dtype=np.float64)
    layout = Layouts(
        tensor=1.0,
        pipeline=1.0,
        virtual=1.0,
        context=1.0,
        expert=1.0,
        data=1.0,
        zero=0.0,
        shards=1.0,
        micro_batch=1.0,
        global_batch=1.0,
        seq=lengths,
        recompute=recompute,
    )
    times = layer_times(shape_of(model, capacity), replace(machine, multiprocessors=0.0), layout, k)
    seconds = times.forward + times.backward + times.head + times.embed
    quarter, half, full = (float(value) for value in np.broadcast_to(seconds, lengths.shape))
    # For f(s) = q s² + l s + c: f(s) - 3 f(s/2) + 2 f(s/4) = 3/8 q s², and f(s/2) - f(s/4) = 3/16 q s² + 1/4 l s.
    quadratic = (8 / 3) * (full - 3 * half + 2 * quarter) / capacity**2
    linear = (4 * (half - quarter) - (3 / 4) * quadratic * capacity**2) / capacity
    return SampleTime(quadratic, linear, max(full - (quadratic * capacity + linear) * capacity, 0.0))
