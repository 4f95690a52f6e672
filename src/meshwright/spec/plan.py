"""The Plan: how one model runs on one cluster, explicit and editable.

The planner writes it, a person may edit it, the run obeys it, a checkpoint carries it. What a release can price but not run yet is refused
before a run starts (`planner.candidate.untrainable`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Literal, get_args

from meshwright.spec.fields import Positive

Recompute = Literal["none", "selective", "all_but_attention", "full"]
RECOMPUTE_MODES: tuple[Recompute, ...] = get_args(Recompute)
"""Each keeps less than the one before it; the cost model numbers them so."""
RECOMPUTES_PRODUCTS: frozenset[Recompute] = frozenset({"all_but_attention", "full"})
"""Those that repeat a forward's matrix products, and its exchanges between ranks."""
PARTIAL_RECOMPUTES: frozenset[Recompute] = frozenset({"selective", "all_but_attention"})
"""Those that keep some of a block's results and not its input alone."""
Gradients = Literal["shard", "whole"]
Offload = Literal["none", "activations", "optimizer", "both"]
AxisName = Literal["pipeline", "replicate", "shard", "context_ring", "context_ulysses", "tensor"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v", "breadth_first"]
Compute = Literal["bf16", "fp16", "fp32", "fp64"]
Linear = Literal["compute", "fp8_tensorwise", "fp8_rowwise"]
Engine = Literal["kernel", "copy"]

DATA_AXES = ("replicate", "shard")
"""Axes along which ranks read different samples."""
CONTEXT_AXES = ("context_ring", "context_ulysses")
"""Axes along which ranks have different parts of the same sequences."""
SHARD_AXES: tuple[AxisName, ...] = ("shard", *CONTEXT_AXES)
"""Axes along which parameters, gradients and optimizer are split: context ranks would otherwise hold the same. Experts are folded over
them anew (`ExpertPlan`)."""


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """One axis of the device mesh."""

    axis: AxisName
    """pipeline: layers split into stages. replicate: whole copies of the model (the outer axis of HSDP). shard: parameters, gradients and
    optimizer split (FSDP). context_ring, context_ulysses: the sequence split. tensor: every matrix split, the sequence between them."""
    size: Positive
    """Ranks along the axis."""
    crosses: Literal["device", "node"] = "device"
    """The slowest kind of border the axis runs over: between devices of one node, or between nodes. It follows from the sizes and the
    cluster's nodes; what a plan file says of it is replaced by that."""


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
    """In which order a rank runs its stages and micro-batches."""

    name: ScheduleName = "1f1b"
    """The schedule (docs/design/schedules.md). On one pipeline rank 1f1b runs one micro-batch after another, breadth_first all of them
    through a layer before the next (layered accumulation), and the others gain nothing over 1f1b."""
    stages: tuple[tuple[str, ...], ...] = ()
    """By pipeline rank, the layer ranges of its virtual stages in the order a micro-batch visits them; left out, stages are even."""


@dataclass(frozen=True, kw_only=True)
class LayerStrategy:
    """How a range of layers is kept in memory."""

    range: str = "all"
    """`all`, or first and last layer as in `0-7`, counted from 0, both ends included."""
    reshard: bool = True
    """Free gathered parameters after each use and gather them again for the next (ZeRO-3); false keeps them for the step (ZeRO-2)."""
    gradients: Gradients = "shard"
    """Between micro-batches: shard sums gradients over ranks after each and keeps the sum split; whole keeps a rank's own sum, and sums
    over ranks once a step."""
    recompute: Recompute = "none"
    """Activations computed again in backward. selective: all but matrix products and attention. all_but_attention: products too, for long
    sequences. full: the whole block."""
    offload: Offload = "none"
    """What waits in host memory: activations between a block's forward and its backward, the optimizer with its state, or both."""
    linear: Linear | None = None
    """Number format of these layers' matrix products, where it is not `precision.linear`: `compute` keeps sensitive ones out of fp8."""

    @property
    def activations_offloaded(self) -> bool:
        """Whether activations wait in host memory."""
        return self.offload in ("activations", "both")

    @property
    def optimizer_offloaded(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        return self.offload in ("optimizer", "both")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats of the run; master weights and optimizer state are fp32 (fp64 when computing in fp64)."""

    compute: Compute = "bf16"
    """Weights and activations of forward and backward. fp16 is planned only: its losses would have to be scaled."""
    linear: Linear = "compute"
    """Matrix products of the blocks' linear layers: the format of `compute`, or fp8 with one scale a tensor or a row (docs/design/fp8.md).
    Embedding, norms, attention and head are never in fp8."""
    gather: Literal["compute", "fp8"] = "compute"
    """Weights on their way to the ranks that compute: the format of `compute`, or fp8 for those that are multiplied in fp8, tensorwise."""
    reduce: Literal["bf16", "fp32", "fp64"] = "fp32"
    """Gradients while they are summed over ranks."""
    reduce_replicas: Literal["bf16", "fp32", "fp64"] | None = None
    """Gradients while they are summed over replicas, the sum that crosses nodes; none leaves them as they are stored, like the weights."""

    @property
    def products(self) -> Literal["bf16", "fp16", "fp32", "fp64", "fp8"]:
        """Format of the blocks' matrix products."""
        return self.compute if self.linear == "compute" else "fp8"

    @property
    def stored(self) -> Literal["fp32", "fp64"]:
        """Master weights, gradients after their reduction, optimizer state."""
        return "fp64" if self.compute == "fp64" else "fp32"

    @property
    def resident(self) -> Compute:
        """Weights that stay on the device while their optimizer is in host memory: rounded as they are gathered, so that master weights
        leave where that is narrower. What is rounded to fp8 on its way is measured at full width, and stays so."""
        return self.compute if self.gather == "compute" else self.stored


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """How a layer's experts lie on the ranks that hold one copy of the rest: the shard and context axes together, folded anew, `expert`
    innermost. Tensor ranks hold different experts besides."""

    expert: Positive
    """Ranks that the experts of a layer are spread over."""
    expert_shard: Positive = 1
    """Ranks that each expert's parameters are split over; `expert` × `expert_shard` = shard × context."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where a rank's step goes, in seconds, mean over ranks; the parts add up to the step."""

    compute: float
    """Arithmetic, with recomputation, gradient norm and optimizer."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Communication that no compute hides, by axis."""
    bubble: float = 0.0
    """Waiting for other pipeline ranks."""
    host: float = 0.0
    """Device idle because its host launches too slowly."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the planner expects of the run."""

    memory_peak_bytes: int
    """Largest memory of one rank."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """The same by kind: weights, gradients, optimizer, gathered, activations, logits, framework."""
    step_seconds: float | None = None
    """One training step. It and what follows are none where no figures of the device are known."""
    low_seconds: float | None = None
    """The fast end of the 80% band."""
    high_seconds: float | None = None
    """The slow end of the 80% band."""
    tokens_per_second: float | None = None
    """Of the whole cluster."""
    tokens_per_second_per_gpu: float | None = None
    """Of one device."""
    mfu: float | None = None
    """Model FLOPs utilisation, causal attention counted, of the chip's peak; none for chips of several kinds."""
    breakdown: Breakdown | None = None
    """Where the step goes."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole answer: mesh, batch, layer strategies, precision; with what is predicted and why it was chosen."""

    mesh: tuple[MeshAxis, ...]
    """Axes, outermost first; the product of their sizes is the number of ranks."""
    batch: BatchPlan
    """How the global batch is cut."""
    schedule: SchedulePlan = SchedulePlan()
    """In which order stages and micro-batches run."""
    experts: ExpertPlan | None = None
    """The fold of a mixture-of-experts model's experts; none for a dense model."""
    layers: tuple[LayerStrategy, ...] = (LayerStrategy(),)
    """Strategy by layer range; the ranges cover every layer once."""
    precision: Precision = Precision()
    """Number formats."""
    gather_engine: Engine = "kernel"
    """What gathers weights over shard and context ranks. kernel: the communication library's, on some of a device's multiprocessors. copy:
    the devices' copy engines, which leaves multiprocessors to compute; for shard and context ranks inside a node."""
    tensor_engine: Engine = "kernel"
    """What moves tokens along the tensor axis. kernel: the communication library's, before and behind each product. copy: the devices' copy
    engines, beside the product, which is made in pieces (asynchronous tensor parallelism); for a tensor axis inside a node."""
    compile: bool = True
    """`torch.compile` for each block."""
    predicted: Predicted | None = None
    """What the planner expects; a person's file may leave it out."""
    why: tuple[str, ...] = ()
    """The reasons, one sentence each."""

    @property
    def ranks(self) -> int:
        total = 1
        for axis in self.mesh:
            total *= axis.size
        return total

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.axis_size("replicate") * self.axis_size("shard")

    @property
    def layered(self) -> bool:
        """Whether all micro-batches of a layer run before the next layer."""
        return self.schedule.name == "breadth_first"

    def axis_size(self, name: str) -> int:
        """Ranks along `name`; 1 when the mesh lacks the axis."""
        return self._sizes.get(name, 1)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {axis.axis: axis.size for axis in self.mesh}

    @property
    def without_prediction(self) -> Plan:
        """What runs, without what is said of it: equal and hashed alike for plans that run alike."""
        return self if self.predicted is None and not self.why else replace(self, predicted=None, why=())

    def strategy(self, layer: int, layers: int) -> LayerStrategy:
        """The strategy of block `layer` in a model of `layers` blocks."""
        return self.strategies(layers)[layer]

    def strategies(self, layers: int) -> tuple[LayerStrategy, ...]:
        """Of every block of a model of `layers`."""
        if layers not in self._strategies:
            self._strategies[layers] = _by_layer(self.layers, layers)
        return self._strategies[layers]

    @cached_property
    def _strategies(self) -> dict[int, tuple[LayerStrategy, ...]]:
        return {}  # asked for by layer, and costly to look up by all strategies

    def strategy_of(self, parameter: str, layers: int) -> LayerStrategy:
        """The strategy of a parameter by its name: its block's; the embedding has the first block's, what follows the blocks the last's."""
        first, _, rest = parameter.partition(".")
        if first == "layers":
            return self.strategy(int(rest.partition(".")[0]), layers)
        return self.strategy(0 if first in ("embed", "positions") else layers - 1, layers)

    def linear(self, layer: int, layers: int) -> Linear:
        """Number format of the matrix products of block `layer` in a model of `layers` blocks."""
        return self.strategy(layer, layers).linear or self.precision.linear


@dataclass(frozen=True, kw_only=True)
class PlanPins:
    """Fields a person fixes; the planner chooses the rest."""

    replicate: Positive | None = None
    """Whole copies of the model."""
    shard: Positive | None = None
    """Ranks each copy is sharded over."""
    pipeline: Positive | None = None
    """Pipeline ranks the layers are split over."""
    context_ring: Positive | None = None
    """Ranks a sequence is split over, keys and values passed round."""
    context_ulysses: Positive | None = None
    """Ranks a sequence is split over, heads exchanged for it in attention."""
    tensor: Positive | None = None
    """Ranks every matrix is split over."""
    expert: Positive | None = None
    """Ranks that a layer's experts are spread over."""
    schedule: ScheduleName | None = None
    """Order of stages and micro-batches."""
    stages: tuple[tuple[str, ...], ...] | None = None
    """By pipeline rank, the layer ranges of its virtual stages."""
    micro_batch: Positive | None = None
    """Sequences one rank runs at a time."""
    reshard: bool | None = None
    """Free gathered parameters after each use."""
    gradients: Gradients | None = None
    """How gradients are kept between micro-batches, for all layers."""
    recompute: Recompute | None = None
    """Activations computed again in backward, for all layers."""
    offload: Offload | None = None
    """What waits in host memory, for all layers."""
    layers: tuple[LayerStrategy, ...] | None = None
    """Strategies by layer range, in place of `reshard`, `gradients`, `recompute` and `offload`."""
    compute: Compute | None = None
    """Number format of forward and backward; left out, bf16 on GPUs that have it and fp32 on others. fp16 is planned only."""
    linear: Linear | None = None
    """Number format of the linear layers' matrix products."""
    gather: Literal["compute", "fp8"] | None = None
    """Number format of weights while they are gathered; left out, fp8 where `linear` here is fp8_tensorwise."""
    reduce: Literal["bf16", "fp32", "fp64"] | None = None
    """Number format of the gradient sum."""
    reduce_replicas: Literal["bf16", "fp32", "fp64"] | None = None
    """Number format of the gradient sum over replicas."""
    gather_engine: Engine | None = None
    """What gathers weights over shard and context ranks."""
    tensor_engine: Engine | None = None
    """What moves tokens along the tensor axis."""
    compile: bool | None = None
    """`torch.compile` for each block."""


@lru_cache(maxsize=256)  # the planner asks layer by layer
def _by_layer(kinds: tuple[LayerStrategy, ...], layers: int) -> tuple[LayerStrategy, ...]:
    ranges = [(layer_range(one.range, layers), one) for one in kinds]
    return tuple(next(one for held, one in ranges if layer in held) for layer in range(layers))


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


def layer_numbers(layers: Collection[int]) -> str:
    """The numbers of layers, neighbours joined: `{0, 1, 2, 5}` as "0-2, 5"."""
    starts = sorted(layer for layer in layers if layer - 1 not in layers)
    ends = sorted(layer for layer in layers if layer + 1 not in layers)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
