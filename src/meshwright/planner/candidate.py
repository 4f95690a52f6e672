"""A candidate plan with its predictions, the memory limits of a plan, and settings that follow from a run's pins.

A pin is a plan field that the run file or command line fixes; the planner chooses the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf
from typing import Any

from meshwright.simulator.step_simulation import host_bytes, memory_of
from meshwright.spec.chips import CHIPS, GiB
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import to_plain
from meshwright.spec.layout import Layout
from meshwright.spec.nodes import memory_limits
from meshwright.spec.plan import (
    RECOMPUTES_MATMULS,
    SHARD_AXES,
    Accumulation,
    AxisName,
    LayerStrategy,
    Linear,
    MeshAxis,
    Offload,
    Plan,
    Precision,
    SlotOffload,
)
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.plan_rules import untrained, untrained_keys
from meshwright.spec.run import RunSpec
from meshwright.workload.dtypes import bytes_of
from meshwright.workload.groups import shard_size
from meshwright.workload.rollout_memory import rollout_bytes

HEADROOM = 0.91
"""Share of a device's memory that a plan may fill.

The remainder is for fragmentation, as an allocator at its limit frees and allocates again. On H200s a run that needed
0.909 went at full speed, and one that needed 0.921 lost a tenth of it (2026-11-21).
"""

HOST_HEADROOM = 0.8
"""Share of a host's memory that a plan may fill; the ranks' processes need the other part."""
SHARES = 1000
"""Parts of an offloaded optimizer's state of which the planner leaves some on the device."""
HOST_GIB_PER_DEVICE = 256.0
"""Host memory per device where the cluster does not state it: a guess (DGX A100 to B200 have 1 to 4 TB for 8 devices)."""
COPY_GENERATIONS = ("hopper",)
"""Device generations on which copy engines were measured; on others a search lets kernels do all transfers.

Copy engines are GPU hardware that copies memory without multiprocessors. They can gather weights and exchange the tokens of
tensor ranks.
"""
COPY_TENSOR_RANKS = 2
"""Most tensor ranks between which copy engines exchange tokens faster than kernels; between four they took a fifth longer."""


OFFLOAD_PENALTY = 1.01
OFFLOAD_PENALTY_UNMEASURED = 1.03
MEASURED_DEVICES = 2
"""Factors on the predicted seconds of a plan with offload, and the devices per host measured.

Of two plans that cannot be told apart, the one without offload has no host memory to pin in its first step. On more
devices or hosts the prediction is less certain, as the network may share the devices' host links; and updates beside the
forward were not measured.
"""


MAX_COMPARED = 3
"""Most other values of an option with which a plan's value is compared."""


@dataclass(frozen=True)
class Candidate:
    """A plan with its predictions."""

    plan: Plan
    fits: bool = True
    simulated: bool = True
    """Whether its step was simulated unit by unit, and not only by whole stages."""
    estimated: float | None = None
    """Seconds of a step simulated by whole stages. All candidates of a search have it, so any two can be compared."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step; infinite where they are not known."""
        known = self.plan.predicted.step_seconds if self.plan.predicted else None
        return float("inf") if known is None else known

    def behind(self, other: Candidate) -> float:
        """Seconds by which this plan's step is longer than that of `other`; negative if it is shorter."""
        if self.simulated == other.simulated or self.estimated is None or other.estimated is None:
            return self.seconds - other.seconds
        return self.estimated - other.estimated


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: Candidate
    others: tuple[Candidate, ...]
    """Runner-ups, fastest first."""
    considered: int
    """Pairs of a layout and a layer strategy that were priced in closed form, and layouts that a lower bound excluded."""
    seconds: float
    """How long the search took."""


@dataclass(frozen=True)
class PlanOption:
    """A choice of a plan that the search makes unless pins decide it."""

    name: str
    """How sentences name the option."""
    keys: tuple[str, ...]
    """Pins that decide the option; the search does so where none is set."""

    def free(self, run: RunSpec) -> bool:
        """Whether no pin of the run decides the option."""
        return all(getattr(pins_of(run), key) is None for key in self.keys)


def nearest_values(best: Candidate, others: Sequence[Candidate], value: Callable[[Plan], object]) -> list[Candidate]:
    """Of the plans with another value than `best`, the fastest with each of at most `MAX_COMPARED` values, the fastest first."""
    fastest: dict[object, Candidate] = {value(best.plan): best}
    for other in sorted(others, key=lambda other: other.behind(best)):
        fastest.setdefault(value(other.plan), other)
    return list(fastest.values())[1 : 1 + MAX_COMPARED]


def offloads(plan: Plan) -> bool:
    """Whether the plan offloads activations, optimizer state or gradient sums of some layer."""
    return plan.accumulation == "host" or any(layer.offload != "none" for layer in plan.layers)


def offload_penalty(run: RunSpec, plan: Plan) -> float:
    """Factor on the predicted seconds of `plan` when the planner compares it with others; 1 without offload."""
    if not offloads(plan):
        return 1.0
    measured = plan.ranks <= run.cluster.ranks_per_node <= MEASURED_DEVICES
    if not measured or any(layer.optimizer_offloaded for layer in plan.layers):
        return OFFLOAD_PENALTY_UNMEASURED
    return OFFLOAD_PENALTY


def compared_seconds(run: RunSpec, candidate: Candidate) -> float:
    """The seconds of a candidate by which it is compared with others: with its `offload_penalty`."""
    return candidate.seconds * offload_penalty(run, candidate.plan)


def untrainable(plan: Plan) -> str | None:
    """Return why this release cannot train the plan, although it plans and simulates it; None where it can."""
    refused = training_refusal(plan)
    return None if refused is None else refused[1]


def training_refusal(plan: Plan) -> tuple[str, str] | None:
    """The first key of a plan that this release cannot train, and the reason of `untrainable`; None where it can."""
    if refused := untrained_keys(plan):
        parts = ", ".join(untrained(plan))
        return refused[0][0], f"this release cannot train {parts}; it can only plan and simulate that"
    return _copy_refusal(plan)


def idle_fields(plan: Plan) -> Iterator[str]:
    """A sentence for each field of the plan that has no effect on its mesh, or no advantage.

    This is no error, because a plan may be used again on another mesh.
    """
    if plan.schedule.name not in ("1f1b", "breadth_first", "paired") and plan.axis_size("pipeline") == 1:
        yield f"plan.schedule = {plan.schedule.name} has no advantage over 1f1b: the mesh has one pipeline rank"
    precision = plan.precision
    shards = shard_size(plan)
    # One rank adds up whole gradients in the format of `reduce`, and others in that of `accumulation`.
    same_sums = plan.accumulation == "device" and precision.reduce == precision.stored
    whole_gradients = same_sums and any(layer.gradients == "whole" for layer in plan.layers)
    for key, value, given, ranks, rank_name in (
        ("gradients", "whole", whole_gradients, shards, "shard"),
        ("gather_transport", "copy_engine", plan.gather_transport == "copy_engine", shards, "shard"),
        (
            "reduce_replicas",
            precision.reduce_replicas,
            precision.reduce_replicas,
            plan.axis_size("replicate"),
            "replica",
        ),
        (
            "tensor_transport",
            "copy_engine",
            plan.tensor_transport == "copy_engine",
            plan.axis_size("tensor"),
            "tensor rank",
        ),
    ):
        if given and ranks == 1:
            yield f"plan.{key} = {value} has no effect: the mesh has one {rank_name}"
    if plan.accumulation != "device" and not any(map(plan.sums_shards, plan.layers)):
        yield f"plan.accumulation = {plan.accumulation} has no effect: each gradient is reduced once a step"
    if plan.offload_staging and not any(layer.optimizer_offloaded for layer in plan.layers):
        yield f"plan.offload_staging = {plan.offload_staging:g} has no effect: no layer has offload optimizer or both"
    if plan.mlp_tile and not any(layer.recompute in RECOMPUTES_MATMULS for layer in plan.layers):
        yield f"plan.mlp_tile = {plan.mlp_tile} has no effect: no layer has recompute all_but_attention or full"


def _copy_refusal(plan: Plan) -> tuple[str, str] | None:
    """The key of a transport that copy engines cannot be in this plan, and why; None where they can."""
    for key, transport, axis in (
        ("gather_transport", plan.gather_transport, _axis_across_nodes(plan, *SHARD_AXES)),
        ("tensor_transport", plan.tensor_transport, _axis_across_nodes(plan, "tensor")),
    ):
        if transport == "copy_engine" and axis is not None:
            return key, (
                f"plan.{key}: copy engines need shared memory, and the {axis.size} ranks of the {axis.axis} axis are on several nodes; "
                f"expected it inside a node (lower plan.{axis.axis}), or plan.{key} = nccl"
            )
    return None


def _axis_across_nodes(plan: Plan, *axes: AxisName) -> MeshAxis | None:
    """The first of `axes` whose ranks are on several nodes, or None."""
    return next((axis for axis in plan.mesh if axis.axis in axes and axis.crosses == "node"), None)


def why_kernel_gathers(run: RunSpec) -> str | None:
    """Return why the search gathers weights by kernels in every plan, or None where copy engines may; a pin overrides it."""
    return _why_kernels(run, "gather_transport")


def why_kernel_token_exchange(run: RunSpec, ranks: int) -> str | None:
    """Return why the search uses kernels for tokens of `ranks` tensor ranks; None where copy engines may. A pin overrides it."""
    if not run.cluster.is_cpu and ranks > COPY_TENSOR_RANKS:
        return (
            f"with more than {COPY_TENSOR_RANKS} tensor ranks copy engines were slower in measurements; "
            "plan.tensor_transport=copy_engine selects them"
        )
    return _why_kernels(run, "tensor_transport")


def _why_kernels(run: RunSpec, key: str) -> str | None:
    """Return why a run uses no copy engines unless the pin `key` asks for them, or None."""
    if run.cluster.is_cpu:
        return "CPUs have no copy engines"
    names = [run.cluster.gpu, *(group.gpu for group in run.cluster.groups if group.gpu)]
    other = next((name for name in names if name not in CHIPS or CHIPS[name].generation not in COPY_GENERATIONS), None)
    return (
        f"copy engines were not measured for them on {other}; plan.{key}=copy_engine selects copy engines"
        if other
        else None
    )


def kernel_gathers_reason(run: RunSpec, plan: Plan) -> str | None:
    """Return why kernels gather the weights of `plan`, where that was not decided by seconds."""
    across_nodes = (
        "the ranks that share weights are on several nodes" if _axis_across_nodes(plan, *SHARD_AXES) else None
    )
    return why_kernel_gathers(run) or across_nodes


def kernel_token_exchange_reason(run: RunSpec, plan: Plan) -> str | None:
    """Return why kernels exchange the tokens of `plan`'s tensor ranks, where that was not decided by seconds."""
    across_nodes = "the tensor ranks are on several nodes" if _axis_across_nodes(plan, "tensor") else None
    return why_kernel_token_exchange(run, plan.axis_size("tensor")) or across_nodes


def peak_bytes(plan: Plan) -> int:
    """Predicted memory of the fullest rank; 0 for a plan without predictions."""
    return plan.predicted.memory_peak_bytes if plan.predicted else 0


def trainer_bytes(plan: Plan) -> int:
    """`peak_bytes` without the engine of `rl`, for which `memory_budget` leaves room."""
    return peak_bytes(plan) - (plan.predicted.memory_bytes.get("rollouts", 0) if plan.predicted else 0)


def memory_budget(run: RunSpec, memory_bytes: int | None = None) -> int | None:
    """Bytes that a plan may use of the smallest device, beside the engine of `rl`; None when its memory is not known."""
    known = run.cluster.memory_bytes() or memory_bytes
    if known is None:
        return None
    return int(HEADROOM * known) - rollout_bytes(run, run.cluster.ranks, bytes_of(precision_of(run).compute))


def usable_by_rank(run: RunSpec, plan: Plan, usable_bytes: float) -> list[float]:
    """Usable bytes of each pipeline rank: `usable_bytes`, or on unlike nodes those of the rank's own devices."""
    ranks = plan.axis_size("pipeline")
    own_limits = memory_limits(run.cluster, Layout.of(plan, run.cluster.ranks_per_node)) if run.cluster.groups else None
    return [HEADROOM * limit for limit in own_limits] if own_limits else [usable_bytes] * ranks


def overfull_ranks(run: RunSpec, plan: Plan, budget: int | None) -> list[bool]:
    """For each pipeline rank, whether its exact memory need exceeds what it may use of its devices. Raises as `excess_by_rank`."""
    return [excess > 0 for excess in excess_by_rank(run, plan, budget)]


def excess_by_rank(run: RunSpec, plan: Plan, budget: int | None) -> list[float]:
    """For each pipeline rank, bytes by which its exact memory need exceeds what it may use of its devices; below 0 where it fits.

    Raises BadInput when the plan's schedule cannot be made for its micro-batches.
    """
    bytes_by_rank = memory_of(run.model, slot_run(run, plan).train, plan, cpu=run.cluster.is_cpu)
    limits = usable_by_rank(run, plan, inf if budget is None else budget)
    excess = [sum(rank_bytes.values()) - limit for rank_bytes, limit in zip(bytes_by_rank, limits, strict=True)]
    if plan.samples is None or plan.samples.offload is None:
        return excess
    longer = excess_by_rank(*in_longer_slots(run, plan, plan.samples.offload), budget)
    return [max(either, other) for either, other in zip(excess, longer, strict=True)]


def least_fitting(most: Sequence[int], excess: Callable[[list[int]], list[float]]) -> list[int]:
    """For each rank the least number with which it fits, or its number in `most` if none does.

    `excess` takes a number for each rank and returns by how many bytes each rank is too full. A larger number takes less memory, nearly in
    proportion: guesses are interpolated, and every third is the middle.

    Two ranks are 100 and 0 bytes too full, and each offloaded layer takes 30 bytes less:

    >>> least_fitting([10, 10], lambda layers: [100 - 30 * layers[0], -30 * layers[1]])
    [4, 0]
    """
    too_few = [0] * len(most)
    before = excess([0] * len(most))
    enough = [0 if value <= 0 else number for value, number in zip(before, most, strict=True)]
    if not any(enough):
        return enough
    after = excess(enough)
    too_few = [number if value > 0 else 0 for value, number in zip(after, enough, strict=True)]
    for step in count(1):
        open_ranks = [rank for rank, number in enumerate(enough) if number - too_few[rank] > 1]
        if not open_ranks:
            return enough
        guesses = enough.copy()
        for rank in open_ranks:
            fewer = too_few[rank]
            number = enough[rank]
            share = before[rank] / (before[rank] - after[rank]) if step % 3 else 0.5
            guesses[rank] = min(max(fewer + 1, fewer + ceil(share * (number - fewer))), number - 1)
        found = excess(guesses)
        for rank in open_ranks:
            if found[rank] > 0:
                too_few[rank] = guesses[rank]
                before[rank] = found[rank]
            else:
                enough[rank] = guesses[rank]
                after[rank] = found[rank]
    return enough


def host_budget(run: RunSpec) -> float:
    """Bytes that a plan may use of one host's memory."""
    return HOST_HEADROOM * host_gib(run) * GiB


def host_gib(run: RunSpec) -> float:
    """Memory of one host in GiB as the cluster states it, or a guess; infinite for CPU ranks, whose device memory it is."""
    stated = run.cluster.host_memory_gib
    cluster = run.cluster
    return stated or (inf if cluster.is_cpu else HOST_GIB_PER_DEVICE * cluster.gpus_per_node)


def host_excess_bytes(run: RunSpec, plan: Plan) -> float:
    """Bytes by which the offloaded data of a plan exceeds the host memory it may use; 0 where it fits.

    Raises as `overfull_ranks`.
    """
    return max(0.0, sum(host_bytes(run.model, slot_run(run, plan).train, plan, run.cluster.nodes)) - host_budget(run))


def fits(run: RunSpec, plan: Plan, budget: int | None) -> bool:
    """Whether every pipeline rank fits into its devices and the offloaded data into host memory. Raises as `overfull_ranks`."""
    return not any(overfull_ranks(run, plan, budget)) and not host_excess_bytes(run, plan)


def precision_of(run: RunSpec) -> Precision:
    """The pinned dtypes, else bf16, or fp32 on CPUs and devices without bf16. Only a pin chooses fp8 or fp16 matmuls."""
    pins = pins_of(run)
    compute = pins.compute or ("fp32" if run.cluster.is_cpu or without_bf16(run.cluster) else "bf16")
    wide = "fp64" if compute == "fp64" else "fp32"
    linear = pins.linear or "compute"
    # Matmuls round the weights to fp8 in any case, so gathering them in fp8 loses nothing.
    gather = pins.gather or ("fp8" if linear == "fp8_tensorwise" else "compute")
    return Precision(
        compute=compute,
        linear=linear,
        gather=gather,
        reduce=pins.reduce or wide,
        reduce_replicas=pins.reduce_replicas,
        moments=pins.moments or "fp32",
    )


def mlp_tile_of(run: RunSpec) -> int:
    """The pinned tokens of a tile of the feed-forward networks, else none."""
    return pins_of(run).mlp_tile or 0


def offload_fraction_of(run: RunSpec) -> float:
    """The pinned share of the offloaded optimizer state in host memory, else all of it."""
    return pins_of(run).offload_fraction or 1.0


def offload_staging_of(run: RunSpec) -> float:
    """The pinned gigabytes for optimizer state that is fetched ahead of its update, else the least."""
    return pins_of(run).offload_staging or 0.0


def accumulation_of(run: RunSpec) -> Accumulation:
    """The pinned place of gradient sums between micro-batches, else the device."""
    return pins_of(run).accumulation or "device"


def without_bf16(cluster: ClusterSpec) -> list[str]:
    """Chips of the cluster that have no bf16 matmuls according to the chip table."""
    names = dict.fromkeys([cluster.gpu, *(group.gpu for group in cluster.groups if group.gpu)])
    return [name for name in names if name in CHIPS and "bf16" not in CHIPS[name].peak_flops]


def linear_dtypes(run: RunSpec) -> tuple[Linear, ...]:
    """Dtypes of the linear layers' matmuls, one for each pinned layer range."""
    pins = pins_of(run)
    return tuple(layer.linear or pins.linear or "compute" for layer in pins.layers or (LayerStrategy(),))


def compiles(run: RunSpec) -> bool:
    """Whether blocks are compiled: as pinned, else on GPUs only."""
    pinned = pins_of(run).compile
    return not run.cluster.is_cpu if pinned is None else pinned


def slot_run(run: RunSpec, plan: Plan) -> RunSpec:
    """The run with full slots as its sequences, if `plan` places samples of any length; otherwise unchanged."""
    if plan.samples is None:
        return run
    return replace(run, train=replace(run.train, seq_len=plan.samples.capacity, global_batch=plan.batch.global_batch))


def in_longer_slots(run: RunSpec, plan: Plan, offload: SlotOffload) -> tuple[RunSpec, Plan]:
    """A run all of whose slots are the longer ones with offload, and its plan; `plan` is that of the other slots."""
    strategies = plan.strategies(run.model.layers)
    both: dict[Offload, Offload] = {"none": "activations", "optimizer": "both"}
    layers = tuple(
        replace(
            layer,
            range=str(number),
            offload=both.get(layer.offload, layer.offload) if number < offload.layers else layer.offload,
        )
        for number, layer in enumerate(strategies)
    )
    train = replace(run.train, seq_len=offload.capacity, global_batch=plan.batch.global_batch)
    return replace(run, train=train), replace(plan, layers=layers, samples=None)


def fixed_keys(run: RunSpec) -> dict[str, Any]:
    """The keys of the plan that the run fixes, as plain data."""
    return {key: value for key, value in to_plain(pins_of(run)).items() if value is not None}


def pins_of(run: RunSpec) -> PlanKeys:
    """The pinned fields of the run's plan; all None where it has no pins."""
    return run.plan if isinstance(run.plan, PlanKeys) else PlanKeys()
