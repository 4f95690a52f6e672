"""One plan that the planner weighs, and what the rest of it asks of a run's pins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from meshwright.schedules.registry import entry_of
from meshwright.simulator.step_simulation import host_bytes, memory_of
from meshwright.spec.chips import CHIPS, GiB
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fp8_limits import fp8_conflict
from meshwright.spec.layout import Layout
from meshwright.spec.nodes import memory_limits
from meshwright.spec.plan import (
    PARTIAL_RECOMPUTES,
    SHARD_AXES,
    AxisName,
    LayerStrategy,
    Linear,
    MeshAxis,
    Plan,
    PlanPins,
    Precision,
)
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import shard_size

HEADROOM = 0.91
"""Share of a device's memory a plan may fill; the rest is left to fragments, for an allocator at its limit gives back and asks again. On
H200s a run that needed 0.909 went at full speed, and one that needed 0.921 lost a tenth of it (2026-11-21)."""

HOST_HEADROOM = 0.8
"""The same of a host's memory, which holds the ranks' own processes too."""
HOST_GIB_A_DEVICE = 256.0
"""Memory of a host for each of its devices where the cluster does not say: a guess, from DGX A100 to B200, 1 to 4 TB for 8 devices."""
COPYING = ("hopper",)
"""Generations of devices on which copy engines were measured, for weights and for tokens; on others a search leaves them alone."""
COPYING_RANKS = 2
"""Tensor ranks between which copied tokens were the faster; between four they took a fifth longer than kernels."""


AWAY, AWAY_UNTRIED, TRIED_DEVICES = 1.01, 1.03, 2
"""What the seconds of a plan with activations in host memory count, of few layers or of all: one without them that is as fast, as far as a
prediction tells, has no memory to pin in its first step. Such plans were measured with up to two devices to a host: of more, and of several
hosts, whose network may share the devices' links, a prediction tells less."""


@dataclass(frozen=True)
class Candidate:
    """One plan with what is predicted of it."""

    plan: Plan
    fits: bool = True
    simulated: bool = True
    """Whether its step was played unit by unit, and not only by whole stages."""
    estimated: float | None = None
    """Seconds of a step by whole stages: what all candidates of a search have, so that any two compare like with like."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        known = self.plan.predicted.step_seconds if self.plan.predicted else None
        return float("inf") if known is None else known

    def behind(self, other: Candidate) -> float:
        """Seconds a step that this one takes longer than `other`."""
        if self.simulated == other.simulated or self.estimated is None or other.estimated is None:
            return self.seconds - other.seconds
        return self.estimated - other.estimated


@dataclass(frozen=True)
class Answer:
    """What a search found."""

    best: Candidate
    others: tuple[Candidate, ...]
    """Runner-ups, fastest first."""
    considered: int
    """Layouts that were priced in closed form."""
    seconds: float
    """How long the search took."""


def moves_activations(plan: Plan) -> bool:
    """Whether activations of some layer wait in host memory."""
    return any(layer.activations_offloaded for layer in plan.layers)


def counts(run: RunSpec, plan: Plan) -> float:
    """Times that the predicted seconds of `plan` count where plans are chosen between."""
    if not moves_activations(plan):
        return 1.0
    return AWAY if plan.ranks <= run.cluster.ranks_per_node <= TRIED_DEVICES else AWAY_UNTRIED


def untrainable(plan: Plan, *, mixture: bool = False) -> str | None:
    """What of the plan this release can plan and simulate but not train, or None; of a `mixture` of experts also where the plan does not
    say where they are."""
    beside = fp8_conflict(plan, experts=mixture or plan.experts is not None)
    parts = [f"products in fp8 with {beside}"] if beside else []
    parts += (
        ["computation in fp16 (it does not scale losses; plan.compute=fp32 trains)"]
        if plan.precision.compute == "fp16"
        else []
    )
    parts += dict.fromkeys(part for layer in plan.layers for part in _unoffloadable(plan, layer))
    if not parts:
        return _uncopyable(plan)
    return f"this release cannot train {', '.join(parts)}: it plans and simulates that"


def idle_fields(plan: Plan) -> Iterator[str]:
    """What of the plan gains nothing on the mesh it has, a sentence for each field: no mistakes, as plans are carried from mesh to mesh."""
    shards, own_sums = shard_size(plan), any(layer.gradients == "whole" for layer in plan.layers)
    for key, value, idle, ranks, where in (
        ("schedule", plan.schedule.name, not plan.layered and plan.schedule.name != "1f1b", plan.axis_size("pipeline"), "pipeline rank"),
        ("gradients", "whole", own_sums, shards, "shard"),
        ("gather_engine", "copy", plan.gather_engine == "copy", shards, "shard"),
        ("reduce_replicas", plan.precision.reduce_replicas, plan.precision.reduce_replicas, plan.axis_size("replicate"), "replica"),
        ("tensor_engine", "copy", plan.tensor_engine == "copy", plan.axis_size("tensor"), "tensor rank"),
    ):  # fmt: skip
        if idle and ranks == 1:
            yield f"plan.{key} = {value} gains nothing: one {where}"


def _unoffloadable(plan: Plan, layer: LayerStrategy) -> Iterator[str]:
    """What of a layer's offload cannot be trained: the optimizer waits for the whole step, and goes with everything."""
    if layer.activations_offloaded:
        if entry_of(plan.schedule.name).splits_backward:
            # Inputs of the products stay on the device for the weight gradients, however long those are put off.
            yield f"offload {layer.offload} under {plan.schedule.name}, which puts weight gradients off"
        if layer.recompute in PARTIAL_RECOMPUTES and not plan.compile:
            # Only a compiler says what it keeps in a way that can be moved; torch's own form of these holds it itself.
            yield f"offload {layer.offload} with recompute {layer.recompute} where blocks are not compiled"


def _uncopyable(plan: Plan) -> str | None:
    """Why weights or tokens cannot be copied as the plan has it, or None."""
    for key, engine, over in (
        ("gather_engine", plan.gather_engine, _leaving(plan, *SHARD_AXES)),
        ("tensor_engine", plan.tensor_engine, _leaving(plan, "tensor")),
    ):
        if engine == "copy" and over is not None:
            return (
                f"plan.{key} = copy: the {over.size} ranks of the {over.axis} axis are on several nodes, which share no memory; "
                f"expected it inside a node (lower plan.{over.axis}), or plan.{key} = kernel"
            )
    return None


def _leaving(plan: Plan, *axes: AxisName) -> MeshAxis | None:
    """The first of `axes` whose ranks are on several nodes."""
    return next((axis for axis in plan.mesh if axis.axis in axes and axis.crosses == "node"), None)


def gathers_by_kernels(run: RunSpec) -> str | None:
    """Why a search leaves every plan's gathers to kernels, or None; a pin has them copied all the same."""
    return _by_kernels(run, "gather_engine")


def tokens_by_kernels(run: RunSpec, ranks: int) -> str | None:
    """Why a search leaves tokens between so many tensor ranks to kernels, or None; a pin has them copied all the same."""
    if not run.cluster.is_cpu and ranks > COPYING_RANKS:
        return f"copies between more than {COPYING_RANKS} tensor ranks took longer where measured; plan.tensor_engine=copy asks for them"
    return _by_kernels(run, "tensor_engine")


def _by_kernels(run: RunSpec, key: str) -> str | None:
    """Why the devices of a run do not copy unless the pin `key` asks for it, or None."""
    if run.cluster.is_cpu:
        return "processors have no copy engines"
    names = [run.cluster.gpu, *(group.gpu for group in run.cluster.groups if group.gpu)]
    other = next((name for name in names if name not in CHIPS or CHIPS[name].generation not in COPYING), None)
    return f"by copy engines they were not measured on {other}; plan.{key}=copy asks for it" if other else None


def gathers_because(run: RunSpec, plan: Plan) -> str | None:
    """Why the weights of `plan` are not gathered by copy engines, where no comparison of seconds says it."""
    away = "the ranks that share weights are on several nodes" if _leaving(plan, *SHARD_AXES) else None
    return gathers_by_kernels(run) or away


def tokens_because(run: RunSpec, plan: Plan) -> str | None:
    """Why copy engines do not carry the tokens of `plan`'s tensor ranks, where no comparison of seconds says it."""
    away = "the tensor ranks are on several nodes" if _leaving(plan, "tensor") else None
    return tokens_by_kernels(run, plan.axis_size("tensor")) or away


def peak_bytes(plan: Plan) -> int:
    """Predicted memory of the fullest rank; 0 when the plan does not say."""
    return plan.predicted.memory_peak_bytes if plan.predicted else 0


def budget_of(run: RunSpec, memory_bytes: int | None = None) -> int | None:
    """Bytes of the smallest device that a plan may fill; None when its memory is not known."""
    known = run.cluster.memory_bytes() or memory_bytes
    return None if known is None else int(HEADROOM * known)


def usable_by_rank(run: RunSpec, plan: Plan, alike: float) -> list[float]:
    """By pipeline rank, the bytes that a plan may fill: `alike`, or on unlike nodes the share of its own devices."""
    ranks = plan.axis_size("pipeline")
    own = memory_limits(run.cluster, Layout.of(plan, run.cluster.ranks_per_node)) if run.cluster.groups else None
    return [HEADROOM * limit for limit in own] if own else [alike] * ranks


def over_by_rank(run: RunSpec, plan: Plan, budget: int | None) -> list[bool]:
    """By pipeline rank, whether it needs more by the exact account than its devices may hold.

    Raises BadInput when the plan's schedule cannot be made for its micro-batches.
    """
    rows = memory_of(run.model, run.train, plan, cpu=run.cluster.is_cpu)
    limits = usable_by_rank(run, plan, inf if budget is None else budget)
    return [sum(kinds.values()) > limit for kinds, limit in zip(rows, limits, strict=True)]


def host_budget(run: RunSpec) -> float:
    """Bytes of one host's memory that a plan may fill."""
    return HOST_HEADROOM * host_gib(run) * GiB


def host_gib(run: RunSpec) -> float:
    """Memory of one host as the cluster states it, or a guess; infinite for ranks on a processor, whose own it is."""
    given, cluster = run.cluster.host_memory_gib, run.cluster
    return given or (inf if cluster.is_cpu else HOST_GIB_A_DEVICE * cluster.gpus_per_node)


def over_host(run: RunSpec, plan: Plan) -> float:
    """Bytes that what a plan lets wait in host memory takes beyond what it may fill of it; 0 where it fits. Raises as `over_by_rank`."""
    return max(0.0, sum(host_bytes(run.model, run.train, plan, run.cluster.nodes)) - host_budget(run))


def fits(run: RunSpec, plan: Plan, budget: int | None) -> bool:
    """Whether every pipeline rank fits, on unlike nodes each into its own devices, and what waits in host memory there. Raises as
    `over_by_rank`."""
    return not any(over_by_rank(run, plan, budget)) and not over_host(run, plan)


def precision_of(run: RunSpec) -> Precision:
    """Number formats: those pinned, else bf16, or fp32 on CPUs and devices without bf16. Products in fp8 and fp16 are a person's choice,
    never a planner's."""
    pins = pins_of(run)
    compute = pins.compute or ("fp32" if run.cluster.is_cpu or without_bf16(run.cluster) else "bf16")
    wide = "fp64" if compute == "fp64" else "fp32"
    linear = pins.linear or "compute"
    # Weights that are rounded to fp8 before they are multiplied lose nothing by being rounded before they travel.
    gather = pins.gather or ("fp8" if linear == "fp8_tensorwise" else "compute")
    return Precision(
        compute=compute, linear=linear, gather=gather, reduce=pins.reduce or wide, reduce_replicas=pins.reduce_replicas
    )


def without_bf16(cluster: ClusterSpec) -> list[str]:
    """Chips of the cluster that have no products in bf16, where the chip table says so."""
    names = dict.fromkeys([cluster.gpu, *(group.gpu for group in cluster.groups if group.gpu)])
    return [name for name in names if name in CHIPS and "bf16" not in CHIPS[name].peak_flops]


def formats_of(run: RunSpec) -> tuple[Linear, ...]:
    """Number formats of the linear layers' products, by layer range where those are pinned."""
    pins = pins_of(run)
    return tuple(layer.linear or pins.linear or "compute" for layer in pins.layers or (LayerStrategy(),))


def compiles(run: RunSpec) -> bool:
    """Whether blocks are compiled: as pinned, else on GPUs."""
    pinned = pins_of(run).compile
    return not run.cluster.is_cpu if pinned is None else pinned


def pins_of(run: RunSpec) -> PlanPins:
    return run.plan if isinstance(run.plan, PlanPins) else PlanPins()
