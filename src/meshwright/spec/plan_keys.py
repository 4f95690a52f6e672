"""The keys of a plan as a person writes them: in a run file's section `plan`, and in a plan file.

In a run file a key that is left out is the planner's choice. A plan file is used as it is: a key that is left out has the value of
`FILE_DEFAULTS`. `plan_of` makes the plan of the keys of a file, and `keys_of` is its inverse.
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
"""All axes, in the order that a plan file without `order` has them in."""
STRATEGY_KEYS = ("reshard", "gradients", "recompute", "offload")
"""Keys that give one strategy to all layers, in place of `layers`."""


@dataclass(frozen=True, kw_only=True)
class SampleTimes:
    """Times of samples of any length: one of s tokens takes alpha · s² + beta · s seconds, and a slot gamma."""

    alpha: Seconds
    """Seconds per squared token of a sample."""
    beta: Seconds
    """Seconds per token."""
    gamma: Seconds = 0.0
    """Seconds per slot."""
    ring: Seconds = 0.0
    """Seconds per token of the ring of hybrid ranks that divide a sample; its messages overlap attention."""
    exchange: Seconds | None = None
    """Seconds per token of a part to exchange tokens for heads (Ulysses), where that is faster; none: always a ring."""
    slot_unit: Positive | None = None
    """Without a pipeline a slot ends behind its last sample, at a multiple of this many tokens; none: shapes are equal."""
    offload_layers: Positive | None = None
    """With `offload_capacity`, blocks whose activations such slots offload, the first ones of the model."""
    offload_shortest: Positive | None = None
    """With `offload_capacity`, tokens of the shortest sample that takes such slots: the copies are hidden behind its work."""


@dataclass(frozen=True, kw_only=True)
class PlanKeys:
    """The keys of a plan: a run file's section `plan`, whose missing keys the planner chooses, and a plan file."""

    order: tuple[AxisName, ...] | None = None
    """Axes with more than one rank, outermost first. The last one joins neighbouring ranks, and the first ones cross nodes."""
    replicate: Positive | None = None
    """Whole copies of the model."""
    shard: Positive | None = None
    """Ranks each copy is sharded over."""
    hybrid: Positive | None = None
    """Ranks that samples are spread over, a long one over as many as it needs; in place of shard and context ranks."""
    capacity: Positive | None = None
    """With `hybrid`, tokens of a rank's micro-batch; left out, as few as let all ranks hold the longest sample."""
    offload_capacity: Positive | None = None
    """With `capacity`, tokens of a slot for long samples whose activations are partly offloaded; left out, none."""
    samples: SampleTimes | None = None
    """In a plan file for samples of any length, their times: they decide where samples go."""
    hybrid_attention: Literal["ring", "ulysses"] | None = None
    """With `hybrid`, attention of divided samples: ring, or `ulysses` where ranks divide the kv heads; left out, the faster."""
    pipeline: Positive | None = None
    """Pipeline ranks the layers are split over."""
    context_ring: Positive | None = None
    """Ranks a sequence is split over; keys and values are passed round the ring."""
    context_ulysses: Positive | None = None
    """Ranks a sequence is split over; an all-to-all exchanges sequence for heads in attention."""
    tensor: Positive | None = None
    """Ranks every matrix is split over."""
    expert: Positive | None = None
    """Ranks that a layer's experts are spread over."""
    expert_policy: ExpertPolicy | None = None
    """Experts of other ranks that are present on a rank in a step (docs/design/expert.md). none: no others; tokens
    are sent to the owners. hecate: copies of loaded experts, decided from recent loads. fixed: the same copies in every
    step."""
    expert_slots: NotNegative | None = None
    """Experts of other ranks that are present on a rank, per layer, at most."""
    expert_keep: bool | None = None
    """Keep present experts gathered for the step; false frees them after each use and gathers them again for the backward."""
    expert_load_window: Positive | None = None
    """Steps whose loads decide which experts are present."""
    expert_placement: ExpertPlacement | None = None
    """Assignment of experts to owner ranks, which hold their master weights and optimizer state.
    even: consecutive experts. balanced: those that balance recent loads, the same number on each rank and layer;
    experts move between ranks where that pays (docs/design/expert.md)."""
    expert_placement_every: Positive | None = None
    """Steps after which balanced experts may move to other ranks."""
    expert_exchange: ExpertExchange | None = None
    """Transport of tokens between expert ranks.
    all_to_all: messages of NCCL or Gloo, after the host has read the counts. peer: kernels that write into the other
    ranks' memory, without the host; for GPUs inside a node. peer_fp8: the same, rounded to e4m3 on the way out."""
    expert_receive_bound: ReceiveBound | None = None
    """Rows that a rank has room to receive, as a multiple of those that it sends; left out, all rows of all ranks."""
    schedule: ScheduleName | None = None
    """Order of stages and micro-batches (docs/design/schedules.md).
    On one pipeline rank, 1f1b runs one micro-batch after another, breadth_first runs all of them through a layer before
    the next layer (layered accumulation), paired runs two of them through a layer together, so that one's exchange of
    tokens with expert ranks overlaps the other's compute, and the others have no advantage over 1f1b."""
    stages: tuple[tuple[str, ...], ...] | None = None
    """By pipeline rank, the layer ranges of its virtual stages."""
    global_batch: Positive | None = None
    """In a plan file, the sequences of a step that the plan is made for: train.global_batch."""
    micro_batch: Positive | None = None
    """Sequences one rank runs at a time. A step has global_batch / (data ranks × micro_batch) micro-batches on each rank."""
    reshard: bool | None = None
    """Free gathered parameters after each use."""
    gradients: Gradients | None = None
    """How gradients are kept between micro-batches, for all layers."""
    recompute: Recompute | None = None
    """Activations computed again in backward, for all layers."""
    offload: Offload | None = None
    """Tensors offloaded to host memory, for all layers."""
    layers: tuple[LayerStrategy, ...] | None = None
    """Strategies by layer range, in place of `reshard`, `gradients`, `recompute` and `offload`."""
    compute: Compute | None = None
    """Number format of forward and backward; left out, bf16 where GPUs have it, else fp32. fp16 can only be planned."""
    linear: Linear | None = None
    """Number format of the linear layers' matmuls: that of `compute`, or fp8 with one scale per tensor or row
    (docs/design/fp8.md). Embedding, norms, attention and head are never in fp8."""
    gather: Literal["compute", "fp8"] | None = None
    """Number format of weights while they are gathered; left out, fp8 where `linear` here is fp8_tensorwise."""
    reduce: Literal["bf16", "fp32", "fp64"] | None = None
    """Number format of the gradient sum."""
    reduce_replicas: Literal["bf16", "fp32", "fp64"] | None = None
    """Number format of the gradient sum over replicas."""
    moments: Moments | None = None
    """Number format of AdamW's moments in host memory; left out, fp32, which is exact.
    bf16 and int8 (blocks of 256 with a common exponent, 3 bits of mantissa) round stochastically after each update."""
    offload_fraction: OffloadShare | None = None
    """Share of the offloaded optimizer state in host memory, the rest on the device; left out, the least that fits."""
    offload_staging: Gigabytes | None = None
    """Gigabytes of device memory for optimizer state that is fetched ahead of its update; left out, what helps and fits."""
    accumulation: Accumulation | None = None
    """Sums of a rank's gradient shards between micro-batches, of layers with gradients `shard`.
    device: on the device, in the stored format. bf16: on the device, rounded to bf16 after each micro-batch. host: in host
    memory in the stored format, on the device from a unit's backward until its reduction and after the last one; the same
    bits as device. Left out, device, or host where that is faster or nothing fits otherwise."""
    gather_transport: Transport | None = None
    """What carries the all-gathers of weights over shard and context ranks.
    nccl: the communication library, on some of a device's multiprocessors. copy_engine: the devices' copy engines, which
    leaves all multiprocessors to compute; for shard and context ranks inside a node."""
    tensor_transport: Transport | None = None
    """What carries tokens along the tensor axis.
    nccl: the communication library, before and after each matmul. copy_engine: the devices' copy engines, overlapped
    with the matmul, which is computed in pieces (asynchronous tensor parallelism); for a tensor axis inside a node."""
    mlp_tile: NotNegative | None = None
    """Tokens of a tile of the feed-forward networks, with recompute all_but_attention or full; 0: no tiles.
    Left out, tiles are used where nothing fits without."""
    compile: bool | None = None
    """`torch.compile` for each block."""
    predicted: Predicted | None = None
    """In a plan file, the planner's prediction. It has no effect."""
    why: tuple[str, ...] | None = None
    """In a plan file, the reasons for the plan, one sentence each. They have no effect."""


def plan_of(keys: PlanKeys) -> Plan:
    """The plan of the keys of a plan file, which has `global_batch` and `micro_batch`.

    Raises ValueError where these do not give whole numbers of micro-batches, or of ranks for each expert.
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
    """The keys of the plan file of `plan`; None where it needs none."""
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
    """The keys of the plan file of `plan` as plain data, without those that it does not need."""
    return {key: value for key, value in to_plain(keys_of(plan)).items() if value is not None}


_PRECISION = ("compute", "linear", "gather", "reduce", "reduce_replicas", "moments")
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
"""Fields of an ExpertPlan whose keys begin with `expert_`."""


def _given(keys: PlanKeys, *same: str, **renamed: str) -> dict[str, Any]:
    """The keys that have a value, by the names that their fields have in a Plan."""
    names = {key: key for key in same} | renamed
    return {name: value for key, name in names.items() if (value := getattr(keys, key)) is not None}


def _experts_of(keys: PlanKeys, ranks: int) -> ExpertPlan | None:
    """How experts are spread over the `ranks` of one model copy."""
    if keys.expert is None:
        return None
    if ranks % keys.expert:
        raise ValueError("expert does not divide the shard and context ranks")
    fields = _given(keys, **{f"expert_{field}": field for field in _EXPERTS})
    return ExpertPlan(expert=keys.expert, expert_shard=ranks // keys.expert, **fields)


def _expert_keys(experts: ExpertPlan | None) -> dict[str, Any]:
    """The keys of `experts` that have an effect."""
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
"""Values of the keys that a plan file leaves out; None for those whose absence means something."""
for _key in ("order", "global_batch", "micro_batch"):
    FILE_DEFAULTS[_key] = None
