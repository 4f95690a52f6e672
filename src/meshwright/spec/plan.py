"""The Plan: how one model runs on one cluster.

The planner writes it, a person may edit it, the run executes it, and every checkpoint stores it.
`planner.candidate.untrainable` rejects a plan that this release can price but not run, before the run starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Annotated, Literal, get_args

from meshwright.spec.fields import Bound, NotNegative, Positive

Recompute = Literal["none", "selective", "all_but_attention", "full"]
RECOMPUTE_MODES: tuple[Recompute, ...] = get_args(Recompute)
"""Recomputation modes in order of memory: each keeps less than the one before it. The cost model uses the index."""
RECOMPUTES_MATMULS: frozenset[Recompute] = frozenset({"all_but_attention", "full"})
"""Modes that repeat the matmuls of a forward, and its communication between ranks."""
PARTIAL_RECOMPUTES: frozenset[Recompute] = frozenset({"selective", "all_but_attention"})
"""Modes that keep some intermediate results of a block, not only its input."""
Gradients = Literal["shard", "whole"]
Offload = Literal["none", "activations", "optimizer", "both"]
AxisName = Literal["pipeline", "replicate", "shard", "hybrid", "context_ring", "context_ulysses", "tensor"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "breadth_first", "paired"]
SPLITS_BACKWARD: frozenset[ScheduleName] = frozenset({"zb_h1", "zbv"})
"""Schedules that compute gradients of inputs first, and of weights later."""
Compute = Literal["bf16", "fp16", "fp32", "fp64"]
Linear = Literal["compute", "fp8_tensorwise", "fp8_rowwise"]
Moments = Literal["fp32", "bf16", "int8"]
Accumulation = Literal["device", "bf16", "host"]
OffloadShare = Annotated[float, Bound(at_least=0, at_most=1)]
Gigabytes = Annotated[float, Bound(at_least=0, at_most=1e6)]
Transport = Literal["nccl", "copy_engine"]
ExpertPolicy = Literal["none", "hecate", "fixed"]
ExpertPlacement = Literal["even", "balanced"]
ExpertExchange = Literal["all_to_all", "peer", "peer_fp8"]
Seconds = Annotated[float, Bound(at_least=0)]
ReceiveBound = Annotated[float, Bound(at_least=1.0)]

DATA_AXES = ("replicate", "shard", "hybrid")
"""Axes along which ranks read different samples."""
CONTEXT_AXES = ("context_ring", "context_ulysses")
"""Axes along which ranks have different parts of the same sequences."""
SHARD_AXES: tuple[AxisName, ...] = ("shard", "hybrid", *CONTEXT_AXES)
"""Axes along which parameters, gradients and optimizer state are sharded.
Context ranks are among them: they would otherwise hold the same copies. Experts split these ranks otherwise (`ExpertPlan`)."""


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """Axis of the device mesh."""

    axis: AxisName
    """pipeline: layers split into stages. replicate: whole copies of the model (the outer axis of HSDP).
    shard: parameters, gradients and optimizer state sharded (FSDP). hybrid: the same, and each long sample is split over
    some of the ranks. context_ring, context_ulysses: the sequence split.
    tensor: every matrix split, and the sequence between matmuls."""
    size: Positive
    """Ranks along the axis."""
    crosses: Literal["device", "node"] = "device"
    """The slowest border the axis crosses: between devices of one node, or between nodes.
    It is computed from the sizes and the cluster; the value in a plan file is replaced."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How the global batch is cut."""

    global_batch: Positive
    """Sequences in one optimizer step, over all ranks."""
    micro_batch: Positive
    """Sequences one rank runs at a time."""
    accumulate: Positive
    """Micro-batches each rank runs in one step."""


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """The order in which a rank runs its stages and micro-batches."""

    name: ScheduleName = "1f1b"
    """The schedule."""
    stages: tuple[tuple[str, ...], ...] = ()
    """By pipeline rank, the layer ranges of its virtual stages in the order of visits; left out, stages are even."""


@dataclass(frozen=True, kw_only=True)
class LayerStrategy:
    """Memory strategy of a range of layers: sharding, recomputation, offload."""

    range: str = "all"
    """`all`, or first and last layer as in `0-7`, counted from 0, both ends included."""
    reshard: bool = True
    """Free gathered parameters after each use and gather them again (ZeRO-3); false keeps them for the step (ZeRO-2)."""
    gradients: Gradients = "shard"
    """Gradients between micro-batches.
    shard: reduce-scatter after each micro-batch and sum the shards. whole: sum first, reduce-scatter once a step."""
    recompute: Recompute = "none"
    """Activations computed again in backward.
    selective: all but matmuls and attention. all_but_attention: also the matmuls. full: the whole block."""
    offload: Offload = "none"
    """Tensors offloaded to host memory.
    activations: from a block's forward until its backward. optimizer: the optimizer and its state. both: all of these."""
    linear: Linear | None = None
    """Number format of these layers' matmuls; `compute` keeps them out of fp8, none takes the plan's."""

    @cached_property
    def activations_offloaded(self) -> bool:
        """Whether activations are offloaded to host memory."""
        return self.offload in ("activations", "both")

    @cached_property
    def optimizer_offloaded(self) -> bool:
        """Whether the optimizer's state is offloaded to host memory."""
        return self.offload in ("optimizer", "both")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats of the run; master weights and moments on the device are fp32 (fp64 when computing in fp64)."""

    compute: Compute = "bf16"
    """Weights and activations of forward and backward; fp16, without loss scaling, can be planned but not trained."""
    linear: Linear = "compute"
    """Matmuls of the blocks' linear layers: the format of `compute`, or fp8."""
    gather: Literal["compute", "fp8"] = "compute"
    """Weights during their all-gather: the format of `compute`, or fp8 for weights that are multiplied in fp8_tensorwise."""
    reduce: Literal["bf16", "fp32", "fp64"] = "fp32"
    """Gradients during their sum over ranks."""
    reduce_replicas: Literal["bf16", "fp32", "fp64"] | None = None
    """Gradients during their sum over replicas, which crosses nodes; none uses the stored format."""
    moments: Moments = "fp32"
    """AdamW's moments in host memory (`offload: optimizer`)."""

    @property
    def matmuls(self) -> Literal["bf16", "fp16", "fp32", "fp64", "fp8"]:
        """Format of the blocks' matmuls."""
        return self.compute if self.linear == "compute" else "fp8"

    @property
    def stored(self) -> Literal["fp32", "fp64"]:
        """Format of master weights, of gradients after their reduction, and of optimizer state."""
        return "fp64" if self.compute == "fp64" else "fp32"

    @property
    def resident(self) -> Compute:
        """Format of weights that stay on the device while their optimizer state is in host memory.
        Weights rounded at their all-gather keep the rounded format, so a narrower one saves device memory. Weights cast
        to fp8 for the all-gather are scaled from full precision, so they stay in the stored format."""
        return self.compute if self.gather == "compute" else self.stored


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """How a layer's experts are distributed over the shard and context ranks of one model copy, `expert` innermost.
    Tensor ranks hold different experts besides."""

    expert: Positive
    """Ranks that the experts of a layer are spread over."""
    expert_shard: Positive = 1
    """Ranks that each expert's parameters are split over; `expert` × `expert_shard` = shard × context."""
    policy: ExpertPolicy = "none"
    """Experts of other ranks that are present on a rank in a step."""
    slots: NotNegative = 0
    """Experts of other ranks that are present on a rank, per layer, at most; 0 with policy none."""
    keep: bool = False
    """Keep the experts of a layer gathered for the step. Only with copies."""
    load_window: Positive = 5
    """Steps whose loads a decision is made from."""
    placement: ExpertPlacement = "even"
    """Assignment of experts to owner ranks, which hold their master weights and optimizer state."""
    placement_every: Positive = 100
    """Steps after which balanced experts may move to other ranks."""
    exchange: ExpertExchange = "all_to_all"
    """Transport of tokens between expert ranks."""
    receive_bound: ReceiveBound | None = None
    """Rows that a rank has room to receive with `exchange: peer`, as a multiple of those that it sends.
    More are an error; none: room for all rows of all ranks."""


@dataclass(frozen=True, kw_only=True)
class SlotOffload:
    """Longer slots for long samples: a part of their activations is offloaded to host memory (selective offload)."""

    capacity: Positive
    """Tokens of such a slot; even. With `layers` offloaded it needs no more device memory than other slots."""
    layers: Positive
    """Blocks whose activations are offloaded, the first ones of the model."""
    shortest: Positive
    """Tokens of the shortest sample that takes such slots: the copies are hidden behind its work."""


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """How samples of any length (`data.packing: none`) are placed on ranks and time slots.

    A sample of s tokens takes alpha · s² + beta · s seconds, and a slot gamma; placement and resume depend on no measured times.
    """

    capacity: Positive
    """Tokens of a slot, which is a rank's micro-batch; even."""
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
    always_exchange: bool = False
    """Exchange wherever a sample's ranks divide its heads, even if a ring is faster."""
    offload: SlotOffload | None = None
    """Slots whose activations are partly offloaded to host memory; none: all slots are alike."""
    slot_unit: Positive | None = None
    """Without a pipeline a slot ends behind its last sample, at a multiple of this many tokens; none: shapes are equal."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of a rank's step by cause, mean over ranks; the parts add up to the step."""

    compute: float
    """Arithmetic, with recomputation, gradient norm and optimizer."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Exposed communication by axis: time in which no compute overlaps it."""
    bubble: float = 0.0
    """Idle time caused by other pipeline ranks."""
    host: float = 0.0
    """Device idle time because the host launches kernels too slowly."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The planner's prediction of the run."""

    memory_peak_bytes: int
    """Largest memory of one rank."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by use: weights, gradients, optimizer, gathered, activations, logits, framework;
    predictions: what modules that predict further tokens add to all of these;
    snapshot: on CPU ranks, the copy of the state that a checkpoint is written from during training;
    rollouts: the engine of reinforcement learning, with its weights and cache, and the reference of a KL penalty."""
    step_seconds: float | None = None
    """Seconds of a training step. This and the following fields are none where the rates of the device are not known."""
    low_seconds: float | None = None
    """The fast end of the 80% band."""
    high_seconds: float | None = None
    """The slow end of the 80% band."""
    tokens_per_second: float | None = None
    """Tokens per second of the whole cluster."""
    tokens_per_second_per_gpu: float | None = None
    """Tokens per second of one device."""
    mfu: float | None = None
    """Model FLOPs utilisation of the chip's peak, causal attention counted; none for a cluster with several chip types."""
    breakdown: Breakdown | None = None
    """The parts of the step time."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole answer: mesh, batch, layer strategies and precision, with the prediction and its reasons.

    `plan_keys.PlanKeys` has the same values as keys of a file, and says what each word means."""

    mesh: tuple[MeshAxis, ...]
    """Axes, outermost first; the product of their sizes is the number of ranks."""
    batch: BatchPlan
    """How the global batch is cut."""
    schedule: SchedulePlan = SchedulePlan()
    """Order of stages and micro-batches."""
    experts: ExpertPlan | None = None
    """How the experts of an MoE model are distributed; none for a dense model."""
    samples: SamplePlan | None = None
    """How samples of any length are placed; none for sequences of equal length."""
    layers: tuple[LayerStrategy, ...] = (LayerStrategy(),)
    """Strategy by layer range; the ranges cover every layer once."""
    precision: Precision = Precision()
    """Number formats."""
    gather_transport: Transport = "nccl"
    """What carries the all-gathers of weights over shard and context ranks."""
    tensor_transport: Transport = "nccl"
    """What carries tokens along the tensor axis."""
    offload_fraction: OffloadShare = 1.0
    """Share of the offloaded optimizer state that is in host memory; the rest stays on the device in the same format."""
    offload_staging: Gigabytes = 0.0
    """Gigabytes of device memory into which optimizer state is fetched ahead of its update; 0 is the least, six chunks."""
    accumulation: Accumulation = "device"
    """Sums of a rank's gradient shards between micro-batches, of layers with gradients `shard`."""
    mlp_tile: NotNegative = 0
    """Tokens of a tile of the feed-forward networks of layers with recompute all_but_attention or full; 0: all tokens.
    A tile's activations are computed again in the backward and freed before the next tile's."""
    compile: bool = True
    """`torch.compile` for each block."""
    predicted: Predicted | None = None
    """The planner's prediction; a plan written by a person may leave it out."""
    why: tuple[str, ...] = ()
    """The reasons for the plan, one sentence each."""

    @property
    def ranks(self) -> int:
        total = 1
        for axis in self.mesh:
            total *= axis.size
        return total

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.axis_size("replicate") * self.axis_size("shard") * self.axis_size("hybrid")

    @cached_property
    def layered(self) -> bool:
        """Whether all micro-batches of a layer run before the next layer."""
        return self.schedule.name == "breadth_first"

    @cached_property
    def paired(self) -> bool:
        """Whether two micro-batches run through each layer together."""
        return self.schedule.name == "paired"

    def axis_size(self, name: str) -> int:
        """Ranks along `name`; 1 when the mesh lacks the axis."""
        return self._sizes.get(name, 1)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {axis.axis: axis.size for axis in self.mesh}

    @property
    def without_prediction(self) -> Plan:
        """The plan without prediction and reasons: two plans that execute alike compare and hash equal."""
        return self if self.predicted is None and not self.why else replace(self, predicted=None, why=())

    def strategy(self, layer: int, layers: int) -> LayerStrategy:
        """The strategy of block `layer` in a model of `layers` blocks."""
        return self.strategies(layers)[layer]

    def strategies(self, layers: int) -> tuple[LayerStrategy, ...]:
        """The strategy of every block of a model of `layers` blocks."""
        if layers not in self._strategies:
            self._strategies[layers] = _by_layer(self.layers, layers)
        return self._strategies[layers]

    @cached_property
    def _strategies(self) -> dict[int, tuple[LayerStrategy, ...]]:
        return {}  # hashing all strategies for every layer would be slow

    def strategy_of(self, parameter: str, layers: int) -> LayerStrategy:
        """The strategy of a parameter, by its name: that of `layer_of` it."""
        return self.strategy(layer_of(parameter, layers), layers)

    def tile(self, layer: int, layers: int) -> int:
        """Tokens of a tile of the feed-forward network of block `layer`; 0 if it has none."""
        return self.mlp_tile if self.strategy(layer, layers).recompute in RECOMPUTES_MATMULS else 0

    def sums_shards(self, strategy: LayerStrategy) -> bool:
        """Whether gradient shards of layers with this strategy are summed over micro-batches, see `accumulation`.
        Otherwise a unit's gradients are reduced once a step."""
        reduced_once = self.layered or self.axis_size("hybrid") > 1 or strategy.gradients == "whole"
        return self.batch.accumulate > 1 and not reduced_once

    def linear(self, layer: int, layers: int) -> Linear:
        """Number format of the matmuls of block `layer` in a model of `layers` blocks."""
        return self.strategy(layer, layers).linear or self.precision.linear


@lru_cache(maxsize=256)  # the planner calls it layer by layer
def _by_layer(strategies: tuple[LayerStrategy, ...], layers: int) -> tuple[LayerStrategy, ...]:
    ranges = [(layer_range(strategy.range, layers), strategy) for strategy in strategies]
    return tuple(next(strategy for covered, strategy in ranges if layer in covered) for layer in range(layers))


def layer_of(parameter: str, layers: int) -> int:
    """The block whose strategy a parameter has, by its name.

    A block's parameter has that of the block; embedding and positions have the first block's, the final norm and the head the last
    block's.
    """
    module, _, suffix = parameter.partition(".")
    if module == "layers":
        return int(suffix.partition(".")[0])
    return 0 if module in ("embed", "positions") else layers - 1


@cache
def layer_range(text: str, layers: int) -> range:
    """The layers that `all`, `N` or `FIRST-LAST` names in a model of `layers` blocks.

    Raises ValueError when the text is not of that form or leaves the model.
    """
    if text == "all":
        return range(layers)
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ValueError(f"{text!r} is not `all`, `N` or `FIRST-LAST`")
    chosen = range(int(first), int(last or first) + 1)
    if not chosen or chosen.stop > layers:
        raise ValueError(f"{text!r} is not inside layers 0-{layers - 1}")
    return chosen
