"""Step time of a run's own Plan, from the closed-form cost model.

Constants and band are this program's own (costs/own.yaml), fitted on its runs on H200; on other generations they are a guess
(docs/design/cost-model.md). A plan's `layers` may differ; `plan_time` takes the mean of their steps, and
a pipeline's fill is 1F1B's times a factor of the schedule. `simulator.step_simulation` plays the schedule itself, unit by unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

import numpy as np

from meshwright.costs.constants import OWN, Constants, at_release, constant_arrays, is_measured, table, unmeasured
from meshwright.costs.device_rates import ROWWISE, Machine
from meshwright.costs.machine_rates import (
    FORMATS,
    GUESSED_SPREAD,
    as_measured,
    chip_of,
    machine_of,
    measured_port,
    spread,
)
from meshwright.costs.step import StepCost, step_cost
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.nodes import slowest_rank_cluster
from meshwright.spec.plan import LayerStrategy, Linear, Plan, Precision
from meshwright.workload.arrays import Array
from meshwright.workload.groups import experts_over, shard_size
from meshwright.workload.layouts import Layouts, layout_of, strategy_columns
from meshwright.workload.model_shape import Shape, shape_of

STACK = OWN
"""Whose constants price a plan."""
LOOPBACK_GB_PER_S, LOOPBACK_PORT_GB_PER_S = 19.8, 9.9
"""Bandwidth of an emulated node if the cluster gives none, in total and per rank.

NCCL's all-reduces over loopback between nodes of one and of two H200s (benchmarks/fit_own.py).
"""
MEASURED_AXES = ("pipeline", "replicate", "shard")
"""Axes of this program's own runs, all of them on one host, which may play several nodes."""


@dataclass(frozen=True)
class PlanTime:
    """Seconds of one step with the ends of their 80% band, and where they go."""

    seconds: float
    low: float
    high: float
    breakdown: dict[str, float]


@dataclass(frozen=True)
class Pricing:
    """What a plan's costs are asked with, products in the format of its blocks: of most of them, where they differ."""

    shape: Shape
    machine: Machine
    layout: Layouts
    constants: Constants
    others: Mapping[Linear, Pricing] = field(default_factory=dict)
    """By the format of their linear layers, what the other blocks are priced with."""

    def of(self, linear: Linear) -> Pricing:
        """What blocks whose linear layers are in this format are priced with."""
        return self.others.get(linear, self)


def plan_time(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> PlanTime | None:
    """What one step of `plan` takes on `cluster`; None where the model says nothing (see `pricing`).

    Raises BadInput for a cluster whose groups contradict it.
    """
    priced = pricing(model, train, plan, cluster)
    if priced is None:
        return None
    filled = plan.predicted.memory_peak_bytes / priced.machine.memory if plan.predicted else 0.0
    cost = _mean_cost(model, train, plan, priced, filled)
    seconds = number(cost.seconds)
    low, high = band(seconds, cluster, plan)
    parts = {"compute": cost.compute, "optimizer": cost.optimizer, "host": cost.host + cost.constant}
    if plan.axis_size("pipeline") > 1:
        parts["bubble"] = cost.bubble
    parts |= {f"exposed {axis}": share for axis, share in cost.exposed.items() if number(share) > 0}
    return PlanTime(seconds, low, high, {name: number(part) for name, part in parts.items()})


def pricing(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Pricing | None:
    """The cost model's inputs for `plan`; None for an unknown chip or format.

    On unlike nodes those of the slowest pipeline rank: `simulator.slow_nodes` has each rank's own. Raises BadInput for a
    cluster whose groups contradict it.
    """
    compute, cluster = plan.precision.compute, as_nodes(cluster)
    if cluster.groups and cluster.gpu in CHIPS and compute in FORMATS:
        machine_of(cluster, products(plan.precision, cluster))  # says what is wrong with the groups
        cluster = slowest_rank_cluster(cluster, Layout.of(plan, cluster.gpus_per_node))
    chip = chip_of(cluster)
    if chip is None or compute not in FORMATS or compute not in chip.peak_flops:
        return None
    constants = at_release(constant_arrays([(chip.generation, STACK)]), np.zeros(1))
    if not is_measured(chip.generation) and cluster.gpu in CHIPS:
        constants = replace(constants, **unmeasured(chip))
    if cluster.network is None or cluster.network.fabric != "tcp":
        constants = replace(constants, net=constants.net * constants.net_sum, net_sum=1.0, net_ring=1.0, net_yield=0.0)
    shape = shape_of(model, train.seq_len)

    def priced(linear: Linear) -> Pricing:
        alike = replace(plan, precision=replace(plan.precision, linear=linear))
        kind = products(alike.precision, cluster)
        k, machine = as_measured(constants, _cached_machine(cluster, kind), cluster, kind)
        if kind == "fp8" and linear == "fp8_rowwise":
            machine = replace(machine, low=ROWWISE)
        return Pricing(shape, machine, layout_of(model, train, alike), k)

    most, *others = _formats(model, plan)
    return replace(priced(most), others={linear: priced(linear) for linear in others})


@lru_cache(maxsize=64)  # as long as the list of its nodes to make
def _cached_machine(cluster: ClusterSpec, product_format: str) -> Machine:
    return machine_of(cluster, product_format)


def _formats(model: ModelSpec, plan: Plan) -> list[Linear]:
    """Formats of the blocks' linear layers, that of most blocks first."""
    own = plan.precision.linear
    if all(layer.linear is None for layer in plan.layers):
        return [own]
    return [
        linear for linear, _ in Counter(layer.linear or own for layer in plan.strategies(model.layers)).most_common()
    ]


def products(precision: Precision, cluster: ClusterSpec) -> str:
    """Format in which the blocks' matrix products take their time: a processor plays fp8 in the format that it computes in."""
    return precision.compute if cluster.is_cpu else precision.products


def as_nodes(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with a host that plays several nodes written as those nodes, joined by TCP."""
    if cluster.emulate_nodes == 1:
        return cluster
    network = cluster.network or NetworkSpec()
    port = (
        network.port_gb_per_s
        or measured_port(cluster)
        or min(LOOPBACK_GB_PER_S / cluster.ranks_per_node, LOOPBACK_PORT_GB_PER_S)
    )
    network = replace(network, fabric="tcp", port_gb_per_s=port, domain=None)
    return replace(
        cluster, nodes=cluster.emulate_nodes, gpus_per_node=cluster.ranks_per_node, network=network, emulate_nodes=1
    )


def band(seconds: float, cluster: ClusterSpec, plan: Plan) -> tuple[float, float]:
    """The 80% band of a predicted step time, in seconds; narrow only if this program measured runs similar to `plan`."""
    (low, high), _ = doubt(cluster, plan)
    return seconds * float(np.exp(low)), seconds * float(np.exp(high))


def doubt(cluster: ClusterSpec, plan: Plan) -> tuple[tuple[float, float], str]:
    """Logarithms of the band's ends, and what they rest on.

    Where this program never ran like that, published runs say how far a prediction strays from a source that was left out of the fit: those
    of well-known stacks on the generation where this program ran on it, and elsewhere those of stacks that few sources know. A device that
    nobody's runs were fitted on may be off by a factor of three.
    """
    bands = table()["bands"]
    if (wide := spread(cluster)) is not None:
        return wide, "set by hand: the device is in no table"
    new = ", ".join(never_measured(cluster, plan))
    chips = [CHIPS[name] for name in (cluster.gpu, *(group.gpu for group in cluster.groups)) if name in CHIPS]
    generation = next((chip.generation for chip in chips if not is_measured(chip.generation)), chips[0].generation)
    if generation not in table()["generations"]:
        return GUESSED_SPREAD, f"set by hand: no run on {generation} devices was fitted"
    if not new and (is_measured(generation) or cluster.profile is not None):
        return _even(bands[OWN]), f"{table()['own_runs']} runs of {OWN}, of devices, axes and networks like these"
    if is_measured(generation):
        width, whose = bands.get(generation, bands["default"]), f"on {generation} devices"
    else:
        width, whose, new = bands["default"], "of stacks that few sources know", f"{generation} devices"
    return _even(width), f"published runs {whose}, left out of the fit: {OWN} was not measured with {new}"


def _even(width: float) -> tuple[float, float]:
    return -width, width


def never_measured(cluster: ClusterSpec, plan: Plan) -> list[str]:
    """What of `plan` is unlike all of this program's own runs."""
    found = [f"{axis.axis} ranks" for axis in plan.mesh if axis.size > 1 and axis.axis not in MEASURED_AXES]
    found += ["expert ranks"] if experts_over(plan) > 1 else ["mixtures of experts"] if plan.experts else []
    found += ["offload"] if any(layer.offload != "none" for layer in plan.layers) else []
    copied = plan.gather_engine == "copy" and shard_size(plan) > 1
    found += ["gathers by copy engines beside a network"] if copied and cluster.emulate_nodes > 1 else []
    low = any((layer.linear or plan.precision.linear) != "compute" for layer in plan.layers)
    found += ["fp8 products"] if low else []
    return found + (["several hosts"] if cluster.nodes > 1 else [])


def number(value: object) -> float:
    """The one number in a cost that may be an array of one."""
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def _mean_cost(model: ModelSpec, train: TrainSpec, plan: Plan, priced: Pricing, filled: float) -> StepCost:
    """The cost of a step; if layer strategies differ, the mean over layers, which are alike."""
    counts = Counter(replace(one, range="all") for one in plan.strategies(model.layers))
    moved = sum(count for layer, count in counts.items() if layer.activations_offloaded) / model.layers
    costs = [_uniform_cost(priced.of(layer.linear or plan.precision.linear), layer, filled, moved) for layer in counts]
    shares = [count / model.layers for count in counts.values()]

    def mean(parts: Sequence[Array]) -> Array:
        return sum(share * part for share, part in zip(shares, parts, strict=True))

    plain = {
        part.name: mean([getattr(cost, part.name) for cost in costs])
        for part in fields(StepCost)
        if part.name != "exposed"
    }
    return StepCost(**plain, exposed={axis: mean([cost.exposed[axis] for cost in costs]) for axis in costs[0].exposed})


def _uniform_cost(priced: Pricing, layer: LayerStrategy, filled: float, moved: float) -> StepCost:
    """The step's cost if all layers were as `layer` is; activations of the share `moved` of them wait in host memory."""
    layout = replace(priced.layout, **strategy_columns(layer, moved))
    return step_cost(priced.shape, priced.machine, layout, priced.constants, filled)
