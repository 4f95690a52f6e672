"""The keys of a plan as a person writes them: in the section `plan` of a run file, and in a plan file.

In a run file, the planner chooses the keys that are left out. A plan file is used as it is: a key that is left out has
its value in `FILE_DEFAULTS`. `plan_of` makes a plan from the keys of a file, and `keys_of` does the reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

from meshwright.spec.fields import NotNegative, Positive, to_plain
from meshwright.spec.plan import (
    DATA_AXES,
    SHARD_AXES,
    Accumulation,
    AxisName,
    BatchPlan,
    Compute,
    ExpertExchange,
    ExpertPlacement,
    ExpertPlan,
    ExpertPolicy,
    Gigabytes,
    Gradients,
    LayerStrategy,
    Linear,
    MeshAxis,
    Moments,
    Offload,
    OffloadShare,
    Plan,
    Precision,
    Predicted,
    ReceiveBound,
    Recompute,
    SamplePlan,
    ScheduleName,
    SchedulePlan,
    Seconds,
    SlotOffload,
    Transport,
)

AXES: tuple[AxisName, ...] = get_args(AxisName)
"""All axes, in the order that they have in a plan file without `order`."""
STRATEGY_KEYS = ("reshard", "gradients", "recompute", "offload")
"""Keys that give all layers one strategy, instead of `layers`."""


@dataclass(frozen=True, kw_only=True)
class SampleTimes:
    """Times of samples of different lengths.

    A sample of s tokens takes alpha · s² + beta · s seconds, and a slot gamma seconds.
    """

    alpha: Seconds
    """Seconds per squared token of a sample."""
    beta: Seconds
    """Seconds per token of a sample."""
    gamma: Seconds = 0.0
    """Seconds per slot."""
    ring: Seconds = 0.0
    """Seconds per token of the ring of hybrid ranks that divide a sample. Its messages overlap with attention."""
    exchange: Seconds | None = None
    """Seconds per token on a rank to exchange tokens for heads (Ulysses), which is used where it is faster; none:
    always a ring.
    """
    slot_unit: Positive | None = None
    """Without a pipeline, a slot ends after its last sample, at a multiple of this number of tokens; none: all slots
    have the same shape.
    """
    offload_layers: Positive | None = None
    """With `offload_capacity`, the number of blocks whose activations such slots offload: the first blocks of the
    model.
    """
    offload_shortest: Positive | None = None
    """With `offload_capacity`, the tokens of the shortest sample for which such slots are used.

    The compute of such samples hides the copies.
    """


@dataclass(frozen=True, kw_only=True)
class PlanKeys:
    """The keys of a plan: in a run file's section `plan`, where the planner chooses missing keys, and in a plan file."""

    order: tuple[AxisName, ...] | None = None
    """Axes with more than one rank, outermost first.

    Ranks along the last axis are neighbours; the first axes cross nodes.
    """
    replicate: Positive | None = None
    """Number of whole copies of the model."""
    shard: Positive | None = None
    """Number of ranks over which each copy is sharded."""
    hybrid: Positive | None = None
    """Number of ranks that read different samples, and of which as many as needed divide a long sample; instead of
    shard and context ranks.
    """
    capacity: Positive | None = None
    """With `hybrid`, tokens of a rank's micro-batch; left out, the fewest with which all ranks together hold the
    longest sample.
    """
    offload_capacity: Positive | None = None
    """With `capacity`, tokens of a slot for long samples whose activations are partly offloaded; left out, there are no
    such slots.
    """
    samples: SampleTimes | None = None
    """In a plan file for samples of different lengths, their times. They decide on which ranks samples are computed."""
    hybrid_attention: Literal["ring", "ulysses"] | None = None
    """With `hybrid`, attention of divided samples: `ring`, or `ulysses` where the ranks divide the key/value heads;
    left out, the faster one.
    """
    pipeline: Positive | None = None
    """Number of pipeline ranks over which the layers are divided."""
    context_ring: Positive | None = None
    """Number of ranks over which a sequence is divided; keys and values are sent around a ring of these ranks."""
    context_ulysses: Positive | None = None
    """Number of ranks over which a sequence is divided; for attention, an all-to-all divides heads instead of the
    sequence.
    """
    tensor: Positive | None = None
    """Number of ranks over which every matrix is divided."""
    expert: Positive | None = None
    """Number of ranks over which a layer's experts are divided."""
    expert_policy: ExpertPolicy | None = None
    """Which experts of other ranks a rank also has in a step (docs/design/expert.md). none: no others; tokens are sent
    to the ranks of their experts. hecate: copies of busy experts, chosen by recent loads. fixed: the same copies in
    every step.
    """
    expert_slots: NotNegative | None = None
    """Maximum number of experts of other ranks that a rank has in a step, per layer."""
    expert_keep: bool | None = None
    """Whether copied experts stay gathered for the whole step; false frees them after each use and gathers them again
    for the backward.
    """
    expert_load_window: Positive | None = None
    """Number of recent steps whose loads decide which experts are copied or moved."""
    expert_placement: ExpertPlacement | None = None
    """On which rank each expert is: the rank that stores its master weights and optimizer state. even: consecutive
    experts on each rank. balanced: experts that balance recent loads, equally many on each rank and layer; experts move
    between ranks where that saves time (docs/design/expert.md).
    """
    expert_placement_every: Positive | None = None
    """Number of steps after which experts may move to other ranks, with expert_placement balanced."""
    expert_exchange: ExpertExchange | None = None
    """What carries tokens between expert ranks. all_to_all: messages of NCCL or Gloo, after the host has read the token
    counts. peer: kernels that write into the memory of other ranks, without the host; for GPUs inside a node. peer_fp8:
    the same, with tokens rounded to e4m3 before they are sent.
    """
    expert_receive_bound: ReceiveBound | None = None
    """Number of rows for which a rank has memory to receive, relative to the number of rows that it sends; left out,
    memory for all rows of all ranks.
    """
    schedule: ScheduleName | None = None
    """Order of stages and micro-batches (docs/design/schedules.md).

    On one pipeline rank, 1f1b runs one micro-batch after another; breadth_first runs all of them through a layer before
    the next layer (layered accumulation); paired runs two of them through a layer together, so that one exchanges
    tokens with expert ranks while the other computes; the other schedules have no advantage over 1f1b there.
    """
    stages: tuple[tuple[str, ...], ...] | None = None
    """For each pipeline rank, the ranges of layers of its virtual stages."""
    global_batch: Positive | None = None
    """In a plan file, the sequences of a step for which the plan is made: train.global_batch."""
    micro_batch: Positive | None = None
    """Sequences that one rank computes at a time.

    In a step, each rank has global_batch / (data ranks × micro_batch) micro-batches.
    """
    reshard: bool | None = None
    """Whether gathered parameters are freed after each use."""
    gradients: Gradients | None = None
    """Gradients between micro-batches, for all layers: shards or whole."""
    recompute: Recompute | None = None
    """Activations that are computed again in the backward, for all layers."""
    offload: Offload | None = None
    """Tensors that are offloaded to host memory, for all layers."""
    layers: tuple[LayerStrategy, ...] | None = None
    """Strategies by range of layers, instead of `reshard`, `gradients`, `recompute` and `offload`."""
    compute: Compute | None = None
    """Number format of forward and backward; left out, bf16 if the GPUs have it, else fp32. fp16 can only be planned.
    """
    linear: Linear | None = None
    """Number format of the linear layers' matmuls: the format of `compute`, or fp8 with one scale per tensor or row
    (docs/design/fp8.md). Embedding, norms, attention and head are never in fp8.
    """
    gather: Literal["compute", "fp8"] | None = None
    """Number format of weights while they are gathered; left out, fp8 if `linear` here is fp8_tensorwise."""
    reduce: Literal["bf16", "fp32", "fp64"] | None = None
    """Number format in which gradients are summed over ranks."""
    reduce_replicas: Literal["bf16", "fp32", "fp64"] | None = None
    """Number format in which gradients are summed over replicas."""
    moments: Moments | None = None
    """Number format of AdamW's moments in host memory; left out, fp32, which is exact. bf16 and int8 (blocks of 256
    with a common exponent, 3 bits of mantissa) round stochastically after each update.
    """
    offload_fraction: OffloadShare | None = None
    """Share of the offloaded optimizer state that is in host memory; the rest is on the device.

    Left out, the smallest share with which the plan fits.
    """
    offload_staging: Gigabytes | None = None
    """Gigabytes of device memory for optimizer state that is fetched before its update; left out, as much as helps and
    fits.
    """
    accumulation: Accumulation | None = None
    """Where gradient shards are summed over micro-batches, for layers with gradients `shard`. device: on the device, in
    the stored format. bf16: on the device, rounded to bf16 after each micro-batch. host: in host memory, in the stored
    format; a unit's sum is on the device only from its backward until its reduction, and after the last reduction; the
    bits are the same as with device. Left out, device, or host if that is faster or nothing fits otherwise.
    """
    gather_transport: Transport | None = None
    """What carries the all-gathers of weights over shard and context ranks. nccl: the communication library, which uses
    some of a device's multiprocessors. copy_engine: the devices' copy engines, which leave all multiprocessors to
    compute; for shard and context ranks inside a node.
    """
    tensor_transport: Transport | None = None
    """What carries tokens between tensor ranks. nccl: the communication library, before and after each matmul.
    copy_engine: the devices' copy engines, while the matmul is computed in parts (asynchronous tensor parallelism); for
    tensor ranks inside a node.
    """
    mlp_tile: NotNegative | None = None
    """Tokens of a tile of the feed-forward networks, with recompute all_but_attention or full; 0: no tiles.

    Left out, tiles are used if nothing fits without them.
    """
    compile: bool | None = None
    """Whether each block is compiled with `torch.compile`."""
    predicted: Predicted | None = None
    """In a plan file, the planner's prediction. It has no effect."""
    why: tuple[str, ...] | None = None
    """In a plan file, the reasons for the plan, one sentence each. They have no effect."""


def plan_of(keys: PlanKeys) -> Plan:
    """Return the plan for the keys of a plan file, which must have `global_batch` and `micro_batch`.

    Raises ValueError if they do not give a whole number of micro-batches, or of ranks for each expert.
    """
    sizes: dict[AxisName, int] = {axis: getattr(keys, axis) or 1 for axis in AXES}
    order: tuple[AxisName, ...] | None = keys.order
    if order is None:
        order = tuple(axis for axis in AXES if sizes[axis] > 1 or axis == "shard")
    global_batch = keys.global_batch or 0
    micro_batch = keys.micro_batch or 0
    accumulate, rest = divmod(global_batch, max(1, micro_batch * prod(sizes[axis] for axis in DATA_AXES)))
    if rest or not accumulate:
        raise ValueError("global_batch is no multiple of micro_batch × data ranks")
    strategy = LayerStrategy(**_given(keys, *STRATEGY_KEYS))
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=sizes[axis]) for axis in order),
        batch=BatchPlan(global_batch=global_batch, micro_batch=micro_batch, accumulate=accumulate),
        schedule=SchedulePlan(**_given(keys, schedule="name", stages="stages")),
        experts=_experts_of(keys, prod(sizes[axis] for axis in SHARD_AXES)),
        samples=_samples_of(keys),
        layers=(strategy,) if keys.layers is None else keys.layers,
        precision=Precision(**_given(keys, *_PRECISION)),
        **plan_fields(keys),
        **_given(keys, "predicted", "why"),
    )


def plan_fields(keys: PlanKeys) -> dict[str, Any]:
    """The keys that have a value, and that a Plan has under the same name, apart from its prediction and reasons."""
    return _given(keys, *_SAME)


def keys_of(plan: Plan) -> PlanKeys:
    """Return the keys of the plan file for `plan`. A key that the file does not need is None."""
    sizes = {axis.axis: axis.size for axis in plan.mesh}
    alike = plan.layers[0] if len(plan.layers) == 1 and plan.layers[0].linear is None else None
    keys: dict[str, Any] = {axis: sizes.get(axis, 1) for axis in AXES if axis != "hybrid" or axis in sizes}
    keys |= _expert_keys(plan.experts) | _sample_keys(plan.samples)
    keys |= {key: getattr(alike, key) for key in STRATEGY_KEYS} if alike else {"layers": plan.layers}
    keys |= {key: getattr(plan.precision, key) for key in _PRECISION} | {key: getattr(plan, key) for key in _SAME}
    keys |= {"schedule": plan.schedule.name, "stages": plan.schedule.stages or None}
    return PlanKeys(
        order=tuple(axis.axis for axis in plan.mesh),
        global_batch=plan.batch.global_batch,
        micro_batch=plan.batch.micro_batch,
        predicted=plan.predicted,
        why=plan.why or None,
        **keys,
    )


def plain_keys(plan: Plan) -> dict[str, Any]:
    """Return the keys of the plan file for `plan` as plain data, without those that it does not need."""
    return {key: value for key, value in to_plain(keys_of(plan)).items() if value is not None}


_PRECISION = ("compute", "linear", "gather", "reduce", "reduce_replicas", "moments")
"""Keys that a Precision has under the same names."""
_SAME = (
    "gather_transport",
    "tensor_transport",
    "offload_fraction",
    "offload_staging",
    "accumulation",
    "mlp_tile",
    "compile",
)
"""Keys that a Plan has under the same name, apart from its prediction and reasons."""
_EXPERTS = ("policy", "slots", "keep", "load_window", "placement", "placement_every", "exchange", "receive_bound")
"""Fields of an ExpertPlan; their keys begin with `expert_`."""


def _given(keys: PlanKeys, *same: str, **renamed: str) -> dict[str, Any]:
    """Return the keys that have a value, by the names of the fields of a Plan.

    `same` are keys with the same name as the field; `renamed` maps a key to the name of its field.
    """
    names = {key: key for key in same} | renamed
    return {name: value for key, name in names.items() if (value := getattr(keys, key)) is not None}


def _experts_of(keys: PlanKeys, ranks: int) -> ExpertPlan | None:
    """Return how experts are divided over the `ranks` shard and context ranks of one model copy.

    The result is None without the key `expert`.
    """
    if keys.expert is None:
        return None
    if ranks % keys.expert:
        raise ValueError("expert does not divide the shard and context ranks")
    fields = _given(keys, **{f"expert_{field}": field for field in _EXPERTS})
    return ExpertPlan(expert=keys.expert, expert_shard=ranks // keys.expert, **fields)


def _expert_keys(experts: ExpertPlan | None) -> dict[str, Any]:
    """Return the keys of `experts` that have an effect."""
    if experts is None:
        return {}
    keys = {
        f"expert_{field}": getattr(experts, field) for field in ("policy", "placement", "exchange", "receive_bound")
    }
    if experts.policy != "none":
        keys |= {f"expert_{field}": getattr(experts, field) for field in ("slots", "keep")}
    if experts.placement != "even":
        keys["expert_placement_every"] = experts.placement_every
    if experts.policy != "none" or experts.placement != "even":
        keys["expert_load_window"] = experts.load_window
    return {"expert": experts.expert, **keys}


def _samples_of(keys: PlanKeys) -> SamplePlan | None:
    """Return how samples of different lengths are placed; None for sequences of equal length."""
    times = keys.samples
    if times is None or keys.capacity is None:
        return None
    offload = None
    if keys.offload_capacity is not None:
        offload = SlotOffload(
            capacity=keys.offload_capacity,
            layers=times.offload_layers or 1,
            shortest=times.offload_shortest or keys.capacity + 1,
        )
    return SamplePlan(
        capacity=keys.capacity,
        alpha=times.alpha,
        beta=times.beta,
        gamma=times.gamma,
        ring=times.ring,
        exchange=None if keys.hybrid_attention == "ring" else times.exchange,
        always_exchange=keys.hybrid_attention == "ulysses",
        offload=offload,
        slot_unit=times.slot_unit,
    )


def _sample_keys(samples: SamplePlan | None) -> dict[str, Any]:
    """Return the keys of `samples`."""
    if samples is None:
        return {}
    offload = samples.offload
    own = ("alpha", "beta", "gamma", "ring", "exchange", "slot_unit")
    times = SampleTimes(
        **{name: getattr(samples, name) for name in own},
        offload_layers=offload.layers if offload else None,
        offload_shortest=offload.shortest if offload else None,
    )
    return {
        "capacity": samples.capacity,
        "offload_capacity": offload.capacity if offload else None,
        "hybrid_attention": "ulysses" if samples.always_exchange else None,
        "samples": times,
    }


FILE_DEFAULTS: dict[str, Any] = to_plain(keys_of(plan_of(PlanKeys(global_batch=1, micro_batch=1))))
"""Values of the keys that a plan file leaves out; None for the keys whose absence has a meaning."""
for _key in ("order", "global_batch", "micro_batch"):
    FILE_DEFAULTS[_key] = None
