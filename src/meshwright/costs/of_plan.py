"""Step time of a run's own Plan, from the closed-form cost model.

Meshwright's runs have not been fitted yet: the constants and the band are those of the stack most like it (torchtitan: FSDP2, compiled
blocks), from rows of 2024 and 2025. Ours ran 30% faster than that on 4 H200s (docs/cost-model.md), so this compares plans and networks;
it is no promise, and a Plan's `predicted` does not carry it. A plan's `layers` may differ; the first strategy stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.constants import aged, per_row, table
from meshwright.costs.inputs import Layouts, Shape
from meshwright.costs.machine import FORMATS, machine_of, with_latencies
from meshwright.costs.step import step_cost
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan

STACK = "torchtitan"
RECOMPUTE = {"none": 0.0, "selective": 1.0, "full": 2.0}


@dataclass(frozen=True)
class PlanTime:
    """Seconds of one step with the ends of their 80% band, and where they go."""

    seconds: float
    low: float
    high: float
    breakdown: dict[str, float]


def plan_time(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> PlanTime | None:
    """What one step of `plan` takes on `cluster`; None where the model says nothing (CPU ranks, an unknown chip or format).

    Raises BadInput for a cluster whose groups contradict it.
    """
    compute = plan.precision.compute
    chip = CHIPS.get(cluster.gpu)
    if chip is None or compute not in FORMATS or compute not in chip.peak_flops:
        return None
    constants = aged(per_row([(chip.generation, STACK)]), np.zeros(1))
    machine = machine_of(cluster, compute)
    filled = plan.predicted.memory_peak_bytes / machine.memory if plan.predicted else 0.0
    stated = with_latencies(constants, cluster) if cluster.network else constants
    cost = step_cost(_shape(model), machine, _layout(train, plan), stated, filled)
    seconds = _number(cost.seconds)
    low, high = table()["bands"][STACK]
    parts = {"compute": cost.compute, "optimizer": cost.optimizer, "host": cost.host + cost.constant}
    parts |= {f"exposed {axis}": share for axis, share in cost.exposed.items() if _number(share) > 0}
    breakdown = {name: _number(part) for name, part in parts.items()}
    return PlanTime(seconds, seconds * float(np.exp(low)), seconds * float(np.exp(high)), breakdown)


def _number(value: object) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def _shape(model: ModelSpec) -> Shape:
    heads, kv = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    return Shape(
        layers=model.layers, hidden=model.hidden, vocab=model.vocab_size, heads=model.heads, query_width=heads, value_width=heads,
        kv_width=kv, attention_params=model.hidden * (2 * heads + kv), attention_layers=model.layers,
        full_attention=0.0 if model.sliding_window else 1.0, scores=0.0, mixer_layers=0, mixer_params=0, ffn=model.ffn_hidden,
        dense_layers=model.layers, moe_layers=0, experts=0, top_k=0, expert_ffn=0, shared_ffn=0, expert_in=model.hidden,
        gated=float(model.mlp == "swiglu"), tied=float(model.tied),
    )  # fmt: skip


def _layout(train: TrainSpec, plan: Plan) -> Layouts:
    layer, shards = plan.layers[0], plan.axis_size("shard")
    base = Layouts(
        tensor=1.0, pipeline=1.0, virtual=1.0, context=1.0, expert=1.0, data=float(plan.ranks), zero=3.0 if shards > 1 else 0.0,
        shards=float(shards), micro_batch=float(plan.batch.micro_batch), global_batch=float(plan.batch.global_batch),
        seq=float(train.seq_len), recompute=RECOMPUTE[layer.recompute],
    )  # fmt: skip
    return replace(base, keep_gathered=float(not layer.reshard))
