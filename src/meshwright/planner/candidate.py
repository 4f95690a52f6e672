"""A candidate plan with its predictions, the memory limits of a plan, and settings that follow from a run's pins.

A pin is a key of the plan that the run file or the command line fixes. The planner chooses the other keys.
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

The rest is for fragmentation: an allocator at its limit frees blocks and allocates them again. On H200s, a run that
needed a share of 0.909 ran at full speed, and one that needed 0.921 lost a tenth of its speed (2026-11-21).
"""

HOST_HEADROOM = 0.8
"""Share of a host's memory that a plan may fill. The processes of the ranks need the rest."""
SHARES = 1000
"""An offloaded optimizer's state is divided between host and device in steps of one part in this number."""
HOST_GIB_PER_DEVICE = 256.0
"""GiB of host memory per device if the cluster does not state it: a guess (DGX A100 to B200 have 1 to 4 TB for 8
devices).
"""
COPY_GENERATIONS = ("hopper",)
"""Device generations on which copy engines were measured. On others, a search lets kernels do all transfers.

Copy engines are hardware of a GPU that copies memory without multiprocessors. They can gather weights, and exchange the
tokens of tensor ranks.
"""
COPY_TENSOR_RANKS = 2
"""Maximum number of tensor ranks between which copy engines exchange tokens faster than kernels.

Between four ranks they took a fifth longer.
"""


OFFLOAD_PENALTY = 1.01
"""Factor on the predicted seconds of a plan with offload, when plans are compared.

Two plans may have predicted times that cannot be distinguished. The one without offload is then better, because it need
not pin host memory in its first step.
"""
OFFLOAD_PENALTY_UNMEASURED = 1.03
"""This factor in cases that were not measured: more devices per host than `MEASURED_DEVICES`, several hosts, or an
offloaded optimizer.

With more devices or hosts the prediction is less certain, because the network may share the devices' links to the host.
Updates during the forward were not measured.
"""
MEASURED_DEVICES = 2
"""Number of devices per host up to which offload was measured."""


MAX_COMPARED = 3
"""Maximum number of other values of an option with which the value of a plan is compared."""


@dataclass(frozen=True)
class Candidate:
    """A plan with its predictions."""

    plan: Plan
    fits: bool = True
    """Whether it fits into memory."""
    simulated: bool = True
    """Whether its step was simulated unit by unit, not only by whole stages."""
    estimated: float | None = None
    """Seconds of a step that was simulated by whole stages.

    All candidates of a search have it, so any two can be compared.
    """

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step; infinite if they are not known."""
        known = self.plan.predicted.step_seconds if self.plan.predicted else None
        return float("inf") if known is None else known

    def behind(self, other: Candidate) -> float:
        """Return by how many seconds this plan's step is longer than the step of `other`; negative if it is shorter."""
        if self.simulated == other.simulated or self.estimated is None or other.estimated is None:
            return self.seconds - other.seconds
        return self.estimated - other.estimated


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: Candidate
    others: tuple[Candidate, ...]
    """The other candidates, the fastest first."""
    considered: int
    """Number of pairs of a layout and a layer strategy whose times were predicted in closed form, and of layouts that a
    lower bound excluded.
    """
    seconds: float
    """Seconds that the search took."""


@dataclass(frozen=True)
class PlanOption:
    """A choice in a plan that the search makes unless pins decide it."""

    name: str
    """The name of the option in sentences."""
    keys: tuple[str, ...]
    """Keys that decide the option if they are pinned. If none is pinned, the search decides."""

    def free(self, run: RunSpec) -> bool:
        """Return whether no pin of the run decides the option."""
        return all(getattr(pins_of(run), key) is None for key in self.keys)


def nearest_values(
    best: Candidate, others: Sequence[Candidate], value: Callable[[Plan], object], tolerance: float = 0.0
) -> list[Candidate]:
    """Return the fastest plan for each of at most `MAX_COMPARED` other values of an option, the fastest first.

    `value` returns the value of the option in a plan. A plan that was only estimated must be faster than a simulated one by more than
    the share `tolerance` of the best step.
    """
    fastest: dict[object, Candidate] = {value(best.plan): best}

    def order(other: Candidate) -> float:
        return other.behind(best) + (0.0 if other.simulated or not tolerance else tolerance * best.seconds)

    for other in sorted(others, key=order):
        fastest.setdefault(value(other.plan), other)
    return sorted(list(fastest.values())[1:], key=lambda other: other.behind(best))[:MAX_COMPARED]


def offloads(plan: Plan) -> bool:
    """Return whether the plan offloads activations, optimizer state or gradient sums of some layer."""
    return plan.accumulation == "host" or any(layer.offload != "none" for layer in plan.layers)


def offload_penalty(run: RunSpec, plan: Plan) -> float:
    """Return the factor on the predicted seconds of `plan` when it is compared with other plans; 1 without offload."""
    if not offloads(plan):
        return 1.0
    measured = plan.ranks <= run.cluster.ranks_per_node <= MEASURED_DEVICES
    if not measured or any(layer.optimizer_offloaded for layer in plan.layers):
        return OFFLOAD_PENALTY_UNMEASURED
    return OFFLOAD_PENALTY


def compared_seconds(run: RunSpec, candidate: Candidate) -> float:
    """Return the seconds by which a candidate is compared with others: with its `offload_penalty`."""
    return candidate.seconds * offload_penalty(run, candidate.plan)


def untrainable(plan: Plan) -> str | None:
    """Return why this release cannot train the plan, although it can plan and simulate it; None if it can train it."""
    refused = training_refusal(plan)
    return None if refused is None else refused[1]


def training_refusal(plan: Plan) -> tuple[str, str] | None:
    """Return the first key of a plan that this release cannot train, and the text of `untrainable`; None if it can
    train the plan.
    """
    if refused := untrained_keys(plan):
        parts = ", ".join(untrained(plan))
        return refused[0][0], f"this release cannot train {parts}; it can only plan and simulate that"
    return _copy_refusal(plan)


def idle_fields(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each key of the plan that has no effect on its mesh, or no advantage.

    That is no error, because a plan may be used again on another mesh.
    """
    if plan.schedule.name not in ("1f1b", "breadth_first", "paired") and plan.axis_size("pipeline") == 1:
        yield f"plan.schedule = {plan.schedule.name} has no advantage over 1f1b: the mesh has one pipeline rank"
    precision = plan.precision
    shards = shard_size(plan)
    # A single rank sums whole gradients in the format of `reduce`, and shards in the format of `accumulation`.
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
    """Return the key of a transfer that copy engines cannot carry in this plan, and why; None if they can carry all."""
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
    """Return the first of `axes` whose ranks are on several nodes; None if there is none."""
    return next((axis for axis in plan.mesh if axis.axis in axes and axis.crosses == "node"), None)


def why_kernel_gathers(run: RunSpec) -> str | None:
    """Return why the search lets kernels gather the weights of every plan; None if copy engines may.

    A pin overrides it.
    """
    return _why_kernels(run, "gather_transport")


def why_kernel_token_exchange(run: RunSpec, ranks: int) -> str | None:
    """Return why the search lets kernels exchange the tokens of `ranks` tensor ranks; None if copy engines may.

    A pin overrides it.
    """
    if not run.cluster.is_cpu and ranks > COPY_TENSOR_RANKS:
        return (
            f"with more than {COPY_TENSOR_RANKS} tensor ranks copy engines were slower in measurements; "
            "plan.tensor_transport=copy_engine selects them"
        )
    return _why_kernels(run, "tensor_transport")


def _why_kernels(run: RunSpec, key: str) -> str | None:
    """Return why a run uses no copy engines unless the key `key` is pinned to them; None if it may use them."""
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
    """Return why kernels gather the weights of `plan`, if predicted seconds did not decide it."""
    across_nodes = (
        "the ranks that share weights are on several nodes" if _axis_across_nodes(plan, *SHARD_AXES) else None
    )
    return why_kernel_gathers(run) or across_nodes


def kernel_token_exchange_reason(run: RunSpec, plan: Plan) -> str | None:
    """Return why kernels exchange the tokens of the tensor ranks of `plan`, if predicted seconds did not decide it."""
    across_nodes = "the tensor ranks are on several nodes" if _axis_across_nodes(plan, "tensor") else None
    return why_kernel_token_exchange(run, plan.axis_size("tensor")) or across_nodes


def peak_bytes(plan: Plan) -> int:
    """Return the predicted memory of the fullest rank; 0 for a plan without predictions."""
    return plan.predicted.memory_peak_bytes if plan.predicted else 0


def trainer_bytes(plan: Plan) -> int:
    """Return `peak_bytes` without the engine of `rl`, whose memory `memory_budget` subtracts."""
    return peak_bytes(plan) - (plan.predicted.memory_bytes.get("rollouts", 0) if plan.predicted else 0)


def memory_budget(run: RunSpec, memory_bytes: int | None = None) -> int | None:
    """Return how many bytes of the smallest device a plan may use, after the engine of `rl` has its memory; None if its
    memory is not known.
    """
    known = run.cluster.memory_bytes() or memory_bytes
    if known is None:
        return None
    return int(HEADROOM * known) - rollout_bytes(run, run.cluster.ranks, bytes_of(precision_of(run).compute))


def usable_by_rank(run: RunSpec, plan: Plan, usable_bytes: float) -> list[float]:
    """Return the usable bytes of each pipeline rank: `usable_bytes`, or if nodes differ the usable bytes of the rank's
    own devices.

    """
    ranks = plan.axis_size("pipeline")
    own_limits = memory_limits(run.cluster, Layout.of(plan, run.cluster.ranks_per_node)) if run.cluster.groups else None
    return [HEADROOM * limit for limit in own_limits] if own_limits else [usable_bytes] * ranks


def overfull_ranks(run: RunSpec, plan: Plan, budget: int | None) -> list[bool]:
    """Return for each pipeline rank whether it needs more memory than its devices have for it.

    Raises as `excess_by_rank`.
    """
    return [excess > 0 for excess in excess_by_rank(run, plan, budget)]


def excess_by_rank(run: RunSpec, plan: Plan, budget: int | None) -> list[float]:
    """Return for each pipeline rank by how many bytes its exact memory need exceeds what it may use; negative if it
    fits.

    Raises BadInput if the plan's schedule cannot be made for its number of micro-batches.
    """
    bytes_by_rank = memory_of(run.model, slot_run(run, plan).train, plan, cpu=run.cluster.is_cpu)
    limits = usable_by_rank(run, plan, inf if budget is None else budget)
    excess = [sum(rank_bytes.values()) - limit for rank_bytes, limit in zip(bytes_by_rank, limits, strict=True)]
    if plan.samples is None or plan.samples.offload is None:
        return excess
    longer = excess_by_rank(*in_longer_slots(run, plan, plan.samples.offload), budget)
    return [max(either, other) for either, other in zip(excess, longer, strict=True)]


def least_fitting(most: Sequence[int], excess: Callable[[list[int]], list[float]]) -> list[int]:
    """Return for each rank the smallest number with which it fits, or its number in `most` if none does.

    `excess` takes a number for each rank, and returns by how many bytes each rank is too full. With a larger number a
    rank needs less memory, nearly in proportion. So a guess is interpolated between a number that is too small and one
    that is enough. Every third guess is the middle of the two, so that the search ends soon even if memory is not
    proportional.

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
    """Return the bytes of one host's memory that a plan may use."""
    return HOST_HEADROOM * host_gib(run) * GiB


def host_gib(run: RunSpec) -> float:
    """Return the memory of one host in GiB, as the cluster states it or as a guess.

    It is infinite for CPU ranks, whose device memory is the host's memory.
    """
    stated = run.cluster.host_memory_gib
    cluster = run.cluster
    return stated or (inf if cluster.is_cpu else HOST_GIB_PER_DEVICE * cluster.gpus_per_node)


def host_excess_bytes(run: RunSpec, plan: Plan) -> float:
    """Return by how many bytes the offloaded data of a plan exceeds the host memory that it may use; 0 if it fits.

    Raises as `overfull_ranks`.
    """
    return max(0.0, sum(host_bytes(run.model, slot_run(run, plan).train, plan, run.cluster.nodes)) - host_budget(run))


def fits(run: RunSpec, plan: Plan, budget: int | None) -> bool:
    """Return whether every pipeline rank fits into its devices, and the offloaded data into host memory.

    Raises as `overfull_ranks`.
    """
    return not any(overfull_ranks(run, plan, budget)) and not host_excess_bytes(run, plan)


def precision_of(run: RunSpec) -> Precision:
    """Return the pinned number formats. Without pins they are bf16, or fp32 on CPUs and on devices without bf16.

    Only a pin chooses fp8 or fp16 matmuls.
    """
    pins = pins_of(run)
    compute = pins.compute or ("fp32" if run.cluster.is_cpu or without_bf16(run.cluster) else "bf16")
    wide = "fp64" if compute == "fp64" else "fp32"
    linear = pins.linear or "compute"
    # The matmuls round the weights to fp8 in any case, so nothing is lost if they are gathered in fp8.
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
    """Return the chips of the cluster that have no bf16 matmuls according to the chip table."""
    names = dict.fromkeys([cluster.gpu, *(group.gpu for group in cluster.groups if group.gpu)])
    return [name for name in names if name in CHIPS and "bf16" not in CHIPS[name].peak_flops]


def linear_dtypes(run: RunSpec) -> tuple[Linear, ...]:
    """Return the number formats of the linear layers' matmuls, one for each pinned range of layers."""
    pins = pins_of(run)
    return tuple(layer.linear or pins.linear or "compute" for layer in pins.layers or (LayerStrategy(),))


def compiles(run: RunSpec) -> bool:
    """Return whether blocks are compiled: as pinned, else only on GPUs."""
    pinned = pins_of(run).compile
    return not run.cluster.is_cpu if pinned is None else pinned


def slot_run(run: RunSpec, plan: Plan) -> RunSpec:
    """Return the run with full slots as its sequences if `plan` places samples of different lengths; otherwise the run
    itself.
    """
    if plan.samples is None:
        return run
    return replace(run, train=replace(run.train, seq_len=plan.samples.capacity, global_batch=plan.batch.global_batch))


def in_longer_slots(run: RunSpec, plan: Plan, offload: SlotOffload) -> tuple[RunSpec, Plan]:
    """Return a run all of whose slots are the longer ones with offload, and its plan; `plan` is the plan for the other
    slots.
    """
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
    """Return the keys of the plan that the run fixes, as plain data."""
    return {key: value for key, value in to_plain(pins_of(run)).items() if value is not None}


def pins_of(run: RunSpec) -> PlanKeys:
    """Return the pinned keys of the run's plan; all are None if it has no pins."""
    return run.plan if isinstance(run.plan, PlanKeys) else PlanKeys()
