"""Seconds of an optimizer update: the bytes that it moves in device memory, and for Muon also its matrix iterations and exchanges."""

from __future__ import annotations

import numpy as np

from meshwright.costs.collective_costs import all_to_all, rank_group
from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts
from meshwright.workload.optimizer_work import ADAMW_BYTES, EXCHANGE_BYTES


def update_seconds(layout: Layouts, machine: Machine, k: Constants, owned: Array) -> Array:
    """Return the seconds to update `owned` parameters on the device, from the measured rate of the AdamW kernel.

    Other optimizers move more or fewer bytes per parameter (`Layouts.update_bytes`), and take longer or shorter in proportion.
    """
    return owned * k.update * (layout.update_bytes / ADAMW_BYTES) / (machine.hbm * k.hbm)


def matrix_seconds(layout: Layouts, machine: Machine, k: Constants, layers: Array) -> Array:
    """Return the seconds of Muon's iterations and exchanges for the `layers` layers of a rank; 0 for other optimizers.

    The matrices of several layers form a bundle, which the ranks of a stage divide among them. All wait for the rank with the most work
    in the bundle, which is at least the bundle's largest matrix.
    """
    ranks = np.maximum(1.0, np.asarray(layout.shards) * layout.tensor)
    filled = ranks * layout.muon_largest_flops / np.maximum(1.0, layout.muon_flops)
    bundle_layers = np.minimum(np.maximum(1.0, filled), np.maximum(1.0, layers))
    flops = np.maximum(layout.muon_flops * bundle_layers / ranks, layout.muon_largest_flops)
    rate = machine.half_peak * np.minimum(k.gemm / k.slow, 1.0)
    group = rank_group(machine, k, ranks, np.ones_like(ranks))
    sent = layout.muon_elements * bundle_layers / ranks * EXCHANGE_BYTES
    exchange = 2 * all_to_all(group, k, machine, sent)
    return np.where(np.asarray(layout.muon_flops) > 0, layers / bundle_layers * (flops / rate + exchange), 0.0)
