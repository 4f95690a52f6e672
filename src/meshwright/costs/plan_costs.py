"""Step time of a Plan, from the closed-form cost model.

The constants and the uncertainty band belong to this program's own engine (costs/own.yaml). They were fitted to runs on
H200; for other GPU generations they are a guess (docs/design/cost-model.md).

Two things are approximate here. If layers have different strategies, the step time is a mean over layers. The time to
fill a pipeline is the time of 1F1B times a factor of the schedule. `simulator.step_simulation` instead simulates the
schedule operation by operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

import numpy as np

from meshwright.costs.bands import RunClass, band_of
from meshwright.costs.constants import (
    OWN,
    Constants,
    constants,
    is_measured,
    table,
    unmeasured_chip_constants,
)
from meshwright.costs.device_rates import ROWWISE, Machine
from meshwright.costs.machine_rates import (
    FORMATS,
    GUESSED_BAND,
    chip_of,
    hand_set_band,
    machine_of,
    measured_port,
    with_measurements,
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
"""The software stack whose constants predict the time of a plan."""
LOOPBACK_GB_PER_S = 19.8
"""Bandwidth of all ranks of an emulated node together, in GB/s, if neither cluster nor profile states it.

Measured: NCCL's all-reduces over loopback between emulated nodes of one and of two H200s (benchmarks/fit_own.py).
"""
LOOPBACK_PORT_GB_PER_S = 9.9
"""Highest bandwidth of one rank of an emulated node, in GB/s, from the same measurements."""
MEASURED_AXES = ("pipeline", "replicate", "shard")
"""Axes that this program's own runs had. All of these runs were on one host, which may have emulated several nodes."""


@dataclass(frozen=True)
class PlanTime:
    """Predicted time of one step."""

    seconds: float
    """Seconds of one step."""
    low: float
    """Lower end of the 80% band, in seconds."""
    high: float
    """Upper end of the 80% band, in seconds."""
    breakdown: dict[str, float]
    """Seconds by cause: "compute", "optimizer", "host", "bubble", "exposed shard", …"""


@dataclass(frozen=True)
class Pricing:
    """Inputs of the cost model for one plan, with matmuls in the number format that most of the plan's blocks have."""

    shape: Shape
    machine: Machine
    """The slowest devices and links of the cluster."""
    layout: Layouts
    constants: Constants
    other_formats: Mapping[Linear, Pricing] = field(default_factory=dict)
    """Inputs for the blocks with other number formats, by the format of their linear layers."""

    def for_format(self, linear: Linear) -> Pricing:
        """Return the inputs for blocks whose linear layers have this format."""
        return self.other_formats.get(linear, self)


def plan_time(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> PlanTime | None:
    """Return the predicted time of one step of `plan` on `cluster`; None for an unknown chip or number format.

    Raises BadInput if the node groups contradict the cluster.
    """
    priced = pricing(model, train, plan, cluster)
    if priced is None:
        return None
    memory_share = plan.predicted.memory_peak_bytes / priced.machine.memory if plan.predicted else 0.0
    cost = mean_cost(model, train, plan, priced, memory_share)
    seconds = number(cost.seconds)
    low, high = band(seconds, cluster, plan)
    parts = {"compute": cost.compute, "optimizer": cost.optimizer, "host": cost.host + cost.constant}
    if plan.axis_size("pipeline") > 1:
        parts["bubble"] = cost.bubble
    parts |= {
        f"exposed {axis}": exposed_seconds
        for axis, exposed_seconds in cost.exposed.items()
        if number(exposed_seconds) > 0
    }
    return PlanTime(seconds, low, high, {name: number(part_seconds) for name, part_seconds in parts.items()})


def pricing(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Pricing | None:
    """Return the cost model's inputs for `plan`; None for an unknown chip or number format.

    If nodes differ, the inputs describe the slowest pipeline rank; `simulator.slow_nodes` computes the inputs of each
    rank. Raises BadInput if the node groups contradict the cluster.
    """
    compute = plan.precision.compute
    cluster = as_nodes(cluster)
    if cluster.groups and cluster.gpu in CHIPS and compute in FORMATS:
        # Called for its check: it raises BadInput if the groups are invalid.
        machine_of(cluster, matmul_dtype(plan.precision, cluster))
        cluster = slowest_rank_cluster(cluster, Layout.of(plan, cluster.gpus_per_node))
    chip = chip_of(cluster)
    if chip is None or compute not in FORMATS or compute not in chip.peak_flops:
        return None
    k = constants(chip.generation, STACK)
    if not is_measured(chip.generation) and cluster.gpu in CHIPS:
        k = replace(k, **unmeasured_chip_constants(chip))
    if cluster.network is None or cluster.network.fabric != "tcp":
        k = replace(k, net=k.net * k.net_sum, net_sum=1.0, net_ring=1.0, net_yield=0.0)
    shape = shape_of(model, train.seq_len)

    def pricing_for(linear: Linear) -> Pricing:
        uniform = replace(plan, precision=replace(plan.precision, linear=linear))
        matmul_format = matmul_dtype(uniform.precision, cluster)
        measured, machine = with_measurements(k, _cached_machine(cluster, matmul_format), cluster, matmul_format)
        if matmul_format == "fp8" and linear == "fp8_rowwise":
            machine = replace(machine, matmul_format=ROWWISE)
        return Pricing(shape, machine, layout_of(model, train, uniform), measured)

    most_frequent, *other_formats = _formats(model, plan)
    return replace(pricing_for(most_frequent), other_formats={linear: pricing_for(linear) for linear in other_formats})


@lru_cache(maxsize=64)  # cached, because its cost grows with the number of nodes
def _cached_machine(cluster: ClusterSpec, matmul_format: str) -> Machine:
    return machine_of(cluster, matmul_format)


def _formats(model: ModelSpec, plan: Plan) -> list[Linear]:
    """Return the number formats of the blocks' linear layers, the most frequent first."""
    default_format = plan.precision.linear
    if all(layer.linear is None for layer in plan.layers):
        return [default_format]
    return [
        linear
        for linear, _ in Counter(
            layer.linear or default_format for layer in plan.strategies(model.layers)
        ).most_common()
    ]


def matmul_dtype(precision: Precision, cluster: ClusterSpec) -> str:
    """Return the number format whose rate applies to the blocks' matmuls.

    A CPU emulates fp8, so it multiplies at the rate of the compute dtype.
    """
    return precision.compute if cluster.is_cpu else precision.matmuls


def as_nodes(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster in which the emulated nodes of a host are nodes of their own, connected by TCP.

    Example: one host with 8 GPUs and `emulate_nodes` 2 becomes 2 nodes of 4 GPUs. A cluster without emulated nodes is
    returned as it is.
    """
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
    """Return the lower and the upper end of the 80% band in seconds, around a predicted step time of `seconds`.

    The band is narrow only if this program's own runs are similar to `plan`.
    """
    (low, high), _ = band_and_source(cluster, plan)
    return seconds * float(np.exp(low)), seconds * float(np.exp(high))


def band_and_source(cluster: ClusterSpec, plan: Plan) -> tuple[tuple[float, float], str]:
    """Return the 80% band of `plan` on `cluster`, and a text that says where the band comes from.

    The band is (ln of low ÷ predicted, ln of high ÷ predicted).

    | case | band |
    | --- | --- |
    | device not in the chip table | set by hand (`hand_set_band`): rates may be wrong by a factor of three |
    | few fitted runs on the generation | set by hand |
    | own runs with the same features, or a profile | from the errors of own runs |
    | otherwise | published runs of the plan's class that were left out of the fit |

    In the last case, the software counts as "measured" if own runs exist on the generation, otherwise as "related".
    """
    if (hand_set := hand_set_band(cluster)) is not None:
        return hand_set, "set by hand: the device is in no table"
    unmeasured_features = ", ".join(missing_features(cluster, plan))
    chips = [CHIPS[name] for name in (cluster.gpu, *(group.gpu for group in cluster.groups)) if name in CHIPS]
    generation = next((chip.generation for chip in chips if not is_measured(chip.generation)), chips[0].generation)
    if generation not in table()["measured_with"]:
        return GUESSED_BAND, f"set by hand: few runs on {generation} devices were fitted, or none"
    if not unmeasured_features and (is_measured(generation) or cluster.profile is not None):
        return symmetric_band(
            table()["own_band"]
        ), f"{table()['own_runs']} runs of {OWN}, of devices, axes and networks like these"
    run_class = RunClass(
        several_hosts=cluster.nodes > 1,
        moe=plan.experts is not None,
        measured_generation=True,
        software="measured" if is_measured(generation) else "related",
    )
    because = unmeasured_features if is_measured(generation) else f"{generation} devices"
    return (
        band_of(run_class, table()["bands"]),
        f"published runs like it ({run_class.name}), excluded from the fit, because {OWN} was not measured with {because}",
    )


def symmetric_band(width: float) -> tuple[float, float]:
    """Return the band (-width, width)."""
    return -width, width


def missing_features(cluster: ClusterSpec, plan: Plan) -> list[str]:
    """Return the features of `plan` and `cluster` that none of this program's own runs has.

    They are phrases such as "tensor ranks".
    """
    features = [f"{axis.axis} ranks" for axis in plan.mesh if axis.size > 1 and axis.axis not in MEASURED_AXES]
    if experts_over(plan) > 1:
        features.append("expert ranks")
    elif plan.experts:
        features.append("MoE models")
    features += ["offload"] if any(layer.offload != "none" for layer in plan.layers) else []
    copied = plan.gather_transport == "copy_engine" and shard_size(plan) > 1
    features += ["gathers by copy engines beside a network"] if copied and cluster.emulate_nodes > 1 else []
    has_fp8 = any((layer.linear or plan.precision.linear) != "compute" for layer in plan.layers)
    features += ["fp8 matmuls"] if has_fp8 else []
    return features + (["several hosts"] if cluster.nodes > 1 else [])


def number(value: object) -> float:
    """Return a cost as a float; `value` is a number or an array with one element."""
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def mean_cost(model: ModelSpec, train: TrainSpec, plan: Plan, priced: Pricing, memory_share: float) -> StepCost:
    """Return the cost of a step. If layer strategies differ, it is a mean over layers.

    For each layer, the cost of a step is computed in which all layers have that layer's strategy. `memory_share` is the
    share of device memory that the plan needs.
    """
    layers_by_strategy = Counter(replace(strategy, range="all") for strategy in plan.strategies(model.layers))
    offloaded = sum(count for layer, count in layers_by_strategy.items() if layer.activations_offloaded) / model.layers
    costs = [
        _uniform_cost(priced.for_format(layer.linear or plan.precision.linear), layer, memory_share, offloaded)
        for layer in layers_by_strategy
    ]
    shares = [count / model.layers for count in layers_by_strategy.values()]

    def mean(values: Sequence[Array]) -> Array:
        return sum(share * value for share, value in zip(shares, values, strict=True))

    means = {
        cost_field.name: mean([getattr(cost, cost_field.name) for cost in costs])
        for cost_field in fields(StepCost)
        if cost_field.name != "exposed"
    }
    return StepCost(**means, exposed={axis: mean([cost.exposed[axis] for cost in costs]) for axis in costs[0].exposed})


def _uniform_cost(priced: Pricing, layer: LayerStrategy, memory_share: float, offloaded: float) -> StepCost:
    """Return the cost of a step if all layers had the strategy `layer`.

    `offloaded` is the share of all layers that offload activations.
    """
    layout = replace(priced.layout, **strategy_columns(layer, offloaded))
    return step_cost(priced.shape, priced.machine, layout, priced.constants, memory_share)
