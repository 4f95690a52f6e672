"""The Plan: how one model runs on one cluster.

The planner writes it, a person may edit it, the run executes it, and every checkpoint stores it. Some plans can be
predicted but not run by this release; `planner.candidate.untrainable` rejects them before the run starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Annotated, Literal, get_args

from meshwright.spec.fields import Bound, NotNegative, Positive

Recompute = Literal["none", "selective", "all_but_attention", "full"]
"""Recomputation mode: see `LayerStrategy.recompute`."""
RECOMPUTE_MODES: tuple[Recompute, ...] = get_args(Recompute)
"""Recomputation modes.

Each saves fewer activations than the mode before it. The cost model uses the index into this tuple.
"""
RECOMPUTES_MATMULS: frozenset[Recompute] = frozenset({"all_but_attention", "full"})
"""Modes that repeat the matmuls of the forward, and also its communication between ranks."""
PARTIAL_RECOMPUTES: frozenset[Recompute] = frozenset({"selective", "all_but_attention"})
"""Modes that save some intermediate results of a block, not only its input."""
Gradients = Literal["shard", "whole"]
Offload = Literal["none", "activations", "optimizer", "both"]
AxisName = Literal["pipeline", "replicate", "shard", "hybrid", "context_ring", "context_ulysses", "tensor"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "breadth_first", "paired"]
SPLITS_BACKWARD: frozenset[ScheduleName] = frozenset({"zb_h1", "zbv"})
"""Schedules that compute the gradients of inputs first, and the gradients of weights later."""
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

Context ranks are among them; otherwise all of them would store the same copies. Experts are divided among these ranks
in another way (`ExpertPlan`).
"""


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """An axis of the device mesh."""

    axis: AxisName
    """pipeline: layers are divided into stages. replicate: whole copies of the model (the outer axis of HSDP). shard:
    parameters, gradients and optimizer state are sharded (FSDP). hybrid: the same, and each long sample is divided over
    some of the ranks. context_ring, context_ulysses: sequences are divided. tensor: every matrix is divided, and
    sequences are divided between matmuls.
    """
    size: Positive
    """Number of ranks along the axis."""
    crosses: Literal["device", "node"] = "device"
    """The slowest border that the axis crosses: between devices of one node, or between nodes.

    It is computed from the sizes and the cluster; the value in a plan file is replaced.
    """


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How the global batch is divided."""

    global_batch: Positive
    """Sequences in one optimizer step, over all ranks."""
    micro_batch: Positive
    """Sequences that one rank computes at a time."""
    accumulate: Positive
    """Micro-batches that each rank computes in one step."""


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """The order in which a rank runs its stages and micro-batches."""

    name: ScheduleName = "1f1b"
    """The schedule."""
    stages: tuple[tuple[str, ...], ...] = ()
    """For each pipeline rank, the ranges of layers of its virtual stages, in the order in which a micro-batch visits
    them; left out, stages are even.
    """


@dataclass(frozen=True, kw_only=True)
class LayerStrategy:
    """How a range of layers saves memory: sharding, recomputation, offload."""

    range: str = "all"
    """`all`, or the first and the last layer as in `0-7`, counted from 0, both included."""
    reshard: bool = True
    """Free gathered parameters after each use and gather them again (ZeRO-3); false keeps them for the step (ZeRO-2)."""
    gradients: Gradients = "shard"
    """Gradients between micro-batches. shard: they are reduce-scattered after each micro-batch, and the shards are
    summed. whole: whole gradients are summed, and reduce-scattered once a step.
    """
    recompute: Recompute = "none"
    """Activations that are computed again in the backward. selective: all but the results of matmuls and attention.
    all_but_attention: also the results of matmuls. full: the whole block.
    """
    offload: Offload = "none"
    """Tensors that are offloaded to host memory. activations: from a block's forward until its backward. optimizer: the
    optimizer and its state. both: all of these.
    """
    linear: Linear | None = None
    """Number format of these layers' matmuls.

    `compute` is the format of the plan's `compute`, without fp8; none is the plan's `linear`.
    """

    @cached_property
    def activations_offloaded(self) -> bool:
        """Return whether activations are offloaded to host memory."""
        return self.offload in ("activations", "both")

    @cached_property
    def optimizer_offloaded(self) -> bool:
        """Return whether the optimizer's state is offloaded to host memory."""
        return self.offload in ("optimizer", "both")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats of the run.

    Master weights, and moments on the device, are fp32 (fp64 if the run computes in fp64).
    """

    compute: Compute = "bf16"
    """Weights and activations of forward and backward. fp16, without loss scaling, can be predicted but not trained."""
    linear: Linear = "compute"
    """Matmuls of the blocks' linear layers: the format of `compute`, or fp8."""
    gather: Literal["compute", "fp8"] = "compute"
    """Weights while they are all-gathered: the format of `compute`, or fp8 for weights that are multiplied in
    fp8_tensorwise.
    """
    reduce: Literal["bf16", "fp32", "fp64"] = "fp32"
    """Gradients while they are summed over ranks."""
    reduce_replicas: Literal["bf16", "fp32", "fp64"] | None = None
    """Gradients while they are summed over replicas, which may be on different nodes; none is the stored format."""
    moments: Moments = "fp32"
    """AdamW's moments in host memory (`offload: optimizer`)."""

    @property
    def matmuls(self) -> Literal["bf16", "fp16", "fp32", "fp64", "fp8"]:
        """Return the format of the blocks' matmuls."""
        return self.compute if self.linear == "compute" else "fp8"

    @property
    def stored(self) -> Literal["fp32", "fp64"]:
        """Return the format of master weights, of gradients after their reduction, and of optimizer state."""
        return "fp64" if self.compute == "fp64" else "fp32"

    @property
    def resident(self) -> Compute:
        """Return the format of the weights that stay on the device while their optimizer state is in host memory.

        Weights that are rounded when they are gathered stay in the rounded format, because that saves device memory.
        Weights that are cast to fp8 when they are gathered are scaled from full precision, so they stay in the stored
        format.
        """
        return self.compute if self.gather == "compute" else self.stored


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """How a layer's experts are divided over the shard and context ranks of one model copy.

    Neighbouring ranks have different experts.

    Tensor ranks also have different experts.
    """

    expert: Positive
    """Number of ranks over which the experts of a layer are divided."""
    expert_shard: Positive = 1
    """Number of ranks over which each expert's parameters are sharded; `expert` × `expert_shard` = shard × context."""
    policy: ExpertPolicy = "none"
    """Which experts of other ranks a rank also has in a step; `plan_keys.PlanKeys.expert_policy` explains the values.
    """
    slots: NotNegative = 0
    """Maximum number of experts of other ranks that a rank has in a step, per layer; 0 with policy none."""
    keep: bool = False
    """Whether the copied experts of a layer stay gathered for the whole step. Only with copies."""
    load_window: Positive = 5
    """Number of recent steps whose loads decide."""
    placement: ExpertPlacement = "even"
    """On which rank each expert is: the rank that stores its master weights and optimizer state."""
    placement_every: Positive = 100
    """Number of steps after which experts may move to other ranks, with placement balanced."""
    exchange: ExpertExchange = "all_to_all"
    """What carries tokens between expert ranks."""
    receive_bound: ReceiveBound | None = None
    """Number of rows for which a rank has memory to receive with `exchange: peer`, relative to the number of rows that
    it sends. More rows are an error. none: memory for all rows of all ranks.
    """


@dataclass(frozen=True, kw_only=True)
class SlotOffload:
    """Longer slots for long samples. A part of their activations is offloaded to host memory (selective offload)."""

    capacity: Positive
    """Tokens of such a slot; even. With `layers` offloaded, it needs no more device memory than other slots."""
    layers: Positive
    """Number of blocks whose activations are offloaded: the first blocks of the model."""
    shortest: Positive
    """Tokens of the shortest sample for which such slots are used. The compute of such samples hides the copies."""


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """How samples of different lengths (`data.packing: none`) are placed on ranks and slots.

    A sample of s tokens takes alpha · s² + beta · s seconds, and a slot takes gamma seconds. These times are predicted,
    not measured, so that a resumed run places samples in the same way.
    """

    capacity: Positive
    """Tokens of a slot, which is one micro-batch of a rank; even."""
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
    always_exchange: bool = False
    """Whether Ulysses is used for each sample whose number of ranks divides its heads, even if a ring is faster."""
    offload: SlotOffload | None = None
    """Slots whose activations are partly offloaded to host memory; none: all slots are equal."""
    slot_unit: Positive | None = None
    """Without a pipeline, a slot ends after its last sample, at a multiple of this number of tokens; none: all slots
    have the same shape.
    """


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of a step by cause, as a mean over ranks. The parts add up to the step."""

    compute: float
    """Arithmetic, with recomputation, gradient norm and optimizer."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Exposed communication by axis: time in which the device waits for communication."""
    bubble: float = 0.0
    """Idle time caused by other pipeline ranks."""
    host: float = 0.0
    """Time in which the device waits because the host launches kernels too slowly."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The planner's prediction of the run."""

    memory_peak_bytes: int
    """Memory of the fullest rank."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by use: weights, gradients, optimizer, gathered, activations, logits, framework. predictions: what
    prediction modules add to all of these. snapshot: on CPU ranks, the copy of the state from which a checkpoint is
    written during training. rollouts: the engine of reinforcement learning with its weights and cache, and the
    reference of a KL penalty.
    """
    step_seconds: float | None = None
    """Seconds of a training step. This and the following fields are none if the rates of the device are not known."""
    low_seconds: float | None = None
    """Lower end of the 80% band of the step time."""
    high_seconds: float | None = None
    """Upper end of the 80% band of the step time."""
    tokens_per_second: float | None = None
    """Tokens per second of the whole cluster."""
    tokens_per_second_per_gpu: float | None = None
    """Tokens per second of one device."""
    mfu: float | None = None
    """Model FLOPs utilisation relative to the chip's peak, with causal attention; none for a cluster with several types
    of chips.
    """
    breakdown: Breakdown | None = None
    """The parts of the step time."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole answer of the planner: mesh, batch, layer strategies and number formats, with the prediction and its
    reasons.

    `plan_keys.PlanKeys` has the same values as keys of a file, and explains each value.
    """

    mesh: tuple[MeshAxis, ...]
    """Axes, outermost first; the product of their sizes is the number of ranks."""
    batch: BatchPlan
    """How the global batch is divided."""
    schedule: SchedulePlan = SchedulePlan()
    """Order of stages and micro-batches."""
    experts: ExpertPlan | None = None
    """How the experts of an MoE model are divided; none for a dense model."""
    samples: SamplePlan | None = None
    """How samples of different lengths are placed; none for sequences of equal length."""
    layers: tuple[LayerStrategy, ...] = (LayerStrategy(),)
    """Strategies by range of layers. The ranges have every layer once."""
    precision: Precision = Precision()
    """Number formats."""
    gather_transport: Transport = "nccl"
    """What carries the all-gathers of weights over shard and context ranks."""
    tensor_transport: Transport = "nccl"
    """What carries tokens along the tensor axis."""
    offload_fraction: OffloadShare = 1.0
    """Share of the offloaded optimizer state that is in host memory.

    The rest stays on the device in the same format.
    """
    offload_staging: Gigabytes = 0.0
    """Gigabytes of device memory into which optimizer state is fetched before its update; 0 is the minimum of six
    chunks.
    """
    accumulation: Accumulation = "device"
    """Where gradient shards are summed over micro-batches, for layers with gradients `shard`."""
    mlp_tile: NotNegative = 0
    """Tokens of a tile of the feed-forward networks, in layers with recompute all_but_attention or full; 0: all tokens
    at once. The activations of a tile are computed again in the backward, and freed before the next tile.
    """
    compile: bool = True
    """Whether each block is compiled with `torch.compile`."""
    predicted: Predicted | None = None
    """The planner's prediction. A plan that a person writes may leave it out."""
    why: tuple[str, ...] = ()
    """The reasons for the plan, one sentence each."""

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        total = 1
        for axis in self.mesh:
            total *= axis.size
        return total

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that read different samples."""
        return self.axis_size("replicate") * self.axis_size("shard") * self.axis_size("hybrid")

    @cached_property
    def layered(self) -> bool:
        """Return whether all micro-batches run through a layer before the next layer."""
        return self.schedule.name == "breadth_first"

    @cached_property
    def paired(self) -> bool:
        """Return whether two micro-batches run through each layer together."""
        return self.schedule.name == "paired"

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along the axis `name`; 1 if the mesh does not have it."""
        return self._sizes.get(name, 1)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {axis.axis: axis.size for axis in self.mesh}

    @property
    def without_prediction(self) -> Plan:
        """Return the plan without prediction and reasons.

        Two plans that execute alike are then equal, and so are their hashes.
        """
        return self if self.predicted is None and not self.why else replace(self, predicted=None, why=())

    def strategy(self, layer: int, layers: int) -> LayerStrategy:
        """Return the strategy of block `layer` in a model of `layers` blocks."""
        return self.strategies(layers)[layer]

    def strategies(self, layers: int) -> tuple[LayerStrategy, ...]:
        """Return the strategy of every block of a model of `layers` blocks."""
        if layers not in self._strategies:
            self._strategies[layers] = _by_layer(self.layers, layers)
        return self._strategies[layers]

    @cached_property
    def _strategies(self) -> dict[int, tuple[LayerStrategy, ...]]:
        return {}  # a cache by number of layers; hashing all strategies for every layer would be slow

    def strategy_of(self, parameter: str, layers: int) -> LayerStrategy:
        """Return the strategy of a parameter, by its name: the strategy of the block `layer_of` returns."""
        return self.strategy(layer_of(parameter, layers), layers)

    def tile(self, layer: int, layers: int) -> int:
        """Return the tokens of a tile of the feed-forward network of block `layer`; 0 if it is not computed in tiles."""
        return self.mlp_tile if self.strategy(layer, layers).recompute in RECOMPUTES_MATMULS else 0

    def sums_shards(self, strategy: LayerStrategy) -> bool:
        """Return whether layers with this strategy sum gradient shards over micro-batches (`accumulation`).

        Otherwise the gradients of a unit are reduced once a step.
        """
        reduced_once = self.layered or self.axis_size("hybrid") > 1 or strategy.gradients == "whole"
        return self.batch.accumulate > 1 and not reduced_once

    def linear(self, layer: int, layers: int) -> Linear:
        """Return the number format of the matmuls of block `layer` in a model of `layers` blocks."""
        return self.strategy(layer, layers).linear or self.precision.linear


@lru_cache(maxsize=256)  # cached, because the planner asks layer by layer
def _by_layer(strategies: tuple[LayerStrategy, ...], layers: int) -> tuple[LayerStrategy, ...]:
    """Return the strategy of each layer."""
    ranges = [(layer_range(strategy.range, layers), strategy) for strategy in strategies]
    return tuple(next(strategy for covered, strategy in ranges if layer in covered) for layer in range(layers))


def layer_of(parameter: str, layers: int) -> int:
    """Return the number of the block whose strategy a parameter has, by the name of the parameter.

    A parameter of a block has the strategy of that block. Embedding and positions have the strategy of the first block;
    the final norm, the head and prediction modules have the strategy of the last block.
    """
    module, _, suffix = parameter.partition(".")
    if module == "layers":
        return int(suffix.partition(".")[0])
    return 0 if module in ("embed", "positions") else layers - 1


@cache
def layer_range(text: str, layers: int) -> range:
    """Return the layers that `all`, `N` or `FIRST-LAST` names in a model of `layers` blocks.

    Raises ValueError if the text has another form, or names a layer that the model does not have.
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
