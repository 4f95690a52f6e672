"""Step time of a run's own Plan, from the closed-form cost model.

Meshwright's runs have not been fitted yet: the constants and the band are those of the stack most like it (torchtitan: FSDP2, compiled
blocks), from rows of 2024 and 2025. Ours ran 30% faster than that on 4 H200s (docs/cost-model.md), so this compares plans and networks;
it is no promise, and a Plan's `predicted` does not carry it. A plan's `layers` may differ; here the first strategy stands for all, and
every pipeline schedule fills as 1F1B does. `simulator.of_plan` plays the schedule itself, unit by unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.constants import Constants, aged, per_row, table
from meshwright.costs.inputs import Layouts, Machine, Shape
from meshwright.costs.machine import FORMATS, machine_of, with_latencies
from meshwright.costs.step import step_cost
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import stage_table
from meshwright.spec.model import ModelSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import Plan

STACK = "meshwright" if "meshwright" in table()["bands"] else "torchtitan"
"""Whose constants price a plan: this program's own once constants.yaml has enough of its runs."""
LOOPBACK_GB_PER_S = 13.0
"""What one emulated node sends, in all, when the cluster does not say (measured: NCCL over loopback, two groups of 4 H200s)."""
RECOMPUTE = {"none": 0.0, "selective": 1.0, "full": 2.0}


@dataclass(frozen=True)
class PlanTime:
    """Seconds of one step with the ends of their 80% band, and where they go."""

    seconds: float
    low: float
    high: float
    breakdown: dict[str, float]


@dataclass(frozen=True)
class Pricing:
    """What a plan's costs are asked with."""

    shape: Shape
    machine: Machine
    layout: Layouts
    constants: Constants


def plan_time(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> PlanTime | None:
    """What one step of `plan` takes on `cluster`; None where the model says nothing (CPU ranks, an unknown chip or format).

    Raises BadInput for a cluster whose groups contradict it.
    """
    priced = pricing(model, train, plan, cluster)
    if priced is None:
        return None
    filled = plan.predicted.memory_peak_bytes / priced.machine.memory if plan.predicted else 0.0
    cost = step_cost(priced.shape, priced.machine, priced.layout, priced.constants, filled)
    seconds = number(cost.seconds)
    low, high = band(seconds)
    parts = {"compute": cost.compute, "optimizer": cost.optimizer, "host": cost.host + cost.constant}
    if plan.axis_size("pipeline") > 1:
        parts["bubble"] = cost.bubble
    parts |= {f"exposed {axis}": share for axis, share in cost.exposed.items() if number(share) > 0}
    return PlanTime(seconds, low, high, {name: number(part) for name, part in parts.items()})


def pricing(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Pricing | None:
    """The cost model's inputs for `plan`; None where it says nothing (CPU ranks, an unknown chip or format).

    Raises BadInput for a cluster whose groups contradict it.
    """
    compute, cluster = plan.precision.compute, as_nodes(cluster)
    chip = CHIPS.get(cluster.gpu)
    if chip is None or compute not in FORMATS or compute not in chip.peak_flops:
        return None
    constants = aged(per_row([(chip.generation, STACK)]), np.zeros(1))
    stated = with_latencies(constants, cluster) if cluster.network else constants
    return Pricing(_shape(model), machine_of(cluster, compute), _layout(model, train, plan), stated)


def as_nodes(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with a host that plays several nodes written as those nodes, joined by TCP."""
    if cluster.emulate_nodes == 1:
        return cluster
    network = cluster.network or NetworkSpec()
    port = network.port_gb_per_s or LOOPBACK_GB_PER_S / cluster.ranks_per_node
    network = replace(network, fabric="tcp", port_gb_per_s=port, domain=None)
    return replace(
        cluster, nodes=cluster.emulate_nodes, gpus_per_node=cluster.ranks_per_node, network=network, emulate_nodes=1
    )


def band(seconds: float) -> tuple[float, float]:
    """The ends of the 80% band round a predicted step time, in seconds."""
    low, high = table()["bands"][STACK]
    return seconds * float(np.exp(low)), seconds * float(np.exp(high))


def number(value: object) -> float:
    """The one number in a cost that may be an array of one."""
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def context_size(plan: Plan) -> int:
    """Ranks that one sequence is split over."""
    return plan.axis_size("context_ring") * plan.axis_size("context_ulysses")


def shard_size(plan: Plan) -> int:
    """Ranks that parameters, gradients and optimizer are split over: the shard axis and, as they hold the same weights, context ranks."""
    return plan.axis_size("shard") * context_size(plan)


def _shape(model: ModelSpec) -> Shape:
    heads, kv = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    return Shape(
        layers=model.layers, hidden=model.hidden, vocab=model.vocab_size, heads=model.heads, query_width=heads, value_width=heads,
        kv_width=kv, attention_params=model.hidden * (2 * heads + kv), attention_layers=model.layers,
        full_attention=0.0 if model.sliding_window else 1.0, scores=0.0, mixer_layers=0, mixer_params=0, ffn=model.ffn_hidden,
        dense_layers=model.layers, moe_layers=0, experts=0, top_k=0, expert_ffn=0, shared_ffn=0, expert_in=model.hidden,
        gated=float(model.mlp == "swiglu"), tied=float(model.tied),
    )  # fmt: skip


def _layout(model: ModelSpec, train: TrainSpec, plan: Plan) -> Layouts:
    layer, shards, pipeline = plan.layers[0], shard_size(plan), plan.axis_size("pipeline")
    return Layouts(
        tensor=float(plan.axis_size("tensor")), pipeline=float(pipeline),
        virtual=float(len(stage_table(plan.schedule, pipeline, model.layers)[0]) if pipeline > 1 else 1),
        context=float(context_size(plan)), all_to_all=float(plan.axis_size("context_ulysses") > 1), expert=1.0,
        data=float(plan.data_ranks), zero=3.0 if shards > 1 else 0.0, shards=float(shards),
        micro_batch=float(plan.batch.micro_batch), global_batch=float(plan.batch.global_batch), seq=float(train.seq_len),
        recompute=RECOMPUTE[layer.recompute], sequence=float(plan.axis_size("tensor") > 1),
        keep_gathered=float(not layer.reshard), layered=float(plan.layered),
    )  # fmt: skip
