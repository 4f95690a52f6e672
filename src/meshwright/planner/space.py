"""Lists the layouts of a run whose times the search predicts, as columns of numbers: mesh, micro-batch size, schedule.

The list leaves out layouts that are never the best, unless the user pins them:

- more tensor × Ulysses ranks than a fast domain has (the devices that NVLink connects), and more than eight;
- fewer than 512 tokens of a sequence per rank;
- GPipe, because 1F1B takes as long and needs less memory;
- large micro-batches whose size is not a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import get_args

import numpy as np

from meshwright.costs.machine_rates import fast_domain, network_rates
from meshwright.costs.plan_costs import as_nodes
from meshwright.planner.candidate import (
    pins_of,
    why_kernel_gathers,
    why_kernel_token_exchange,
)
from meshwright.planner.conflicts import conflicts
from meshwright.planner.placement import heterogeneity_factors, orders
from meshwright.schedules.registry import refusal
from meshwright.spec.divisors import divisors
from meshwright.spec.layout import STAGES_PER_RANK, Layout, check_tensor, context_split_error, stage_table
from meshwright.spec.optimizers import AdamWSpec
from meshwright.spec.plan import (
    DATA_AXES,
    SHARD_AXES,
    AxisName,
    Offload,
    ScheduleName,
    SchedulePlan,
)
from meshwright.spec.run import RunSpec
from meshwright.workload.copy_options import COPY_OPTIONS, GATHERS, TOKENS

AXES = tuple(axis for axis in get_args(AxisName) if axis != "hybrid")
"""Axes of the search. Hybrid ranks are searched as shard ranks (`sample_plan`)."""
SCHEDULES = get_args(ScheduleName)
"""Names of all schedules; a point has the index of its schedule in this tuple."""
BATCH_COLUMNS = ("micro", "accumulate", "schedule", "virtual")
"""Columns of a point in addition to its mesh."""
GROUPS: dict[str, tuple[AxisName, ...]] = {
    "ring": ("context_ring",),
    "ulysses": ("context_ulysses",),
    "shard": SHARD_AXES,
    "replicate": ("replicate",),
    "pipeline": ("pipeline",),
}
"""Column of strides → the axes that form one communication group.

Context ranks use the same weights, so FSDP also shards the weights over them.
"""
Stages = tuple[tuple[str, ...], ...]
"""Ranges of layers of pinned stages, for each pipeline rank."""
MIN_TOKENS = 512
"""Smallest number of tokens of one sequence on a context rank."""
VIRTUAL_STAGES = (2, 3, 4, 6, 8)
"""Numbers of stages per rank that are tried for the interleaved schedule, unless the stages are pinned."""
WIDE_DOMAIN = 8
"""Largest number of tensor × Ulysses ranks in the two cases below, even if the fast domain has fewer ranks."""
FEW_SEQUENCES = 2
"""First case: a step has fewer sequences per fast domain than this.

Then there is little data parallelism to use instead.
"""
FAST_PORT = 0.5
"""Second case: network ports have at least this share of the links' rate.

Then the links of a node are hardly faster than the network.
"""
MAX_ANY_DIVISOR = 64
"""Up to this number of sequences per data rank, every divisor is tried as micro-batch size.

Above it, only powers of two are tried.
"""


@dataclass(frozen=True)
class AxisSizes:
    """The sizes and the order of all axes of a mesh, and its number of expert ranks."""

    sizes: tuple[int, ...]
    """Sizes in the order of `AXES`."""
    expert: int
    """Number of ranks that divide the experts of a tensor rank."""
    order: tuple[AxisName, ...]
    """All axes, the outermost first."""

    def size(self, axis: AxisName) -> int:
        """Return the number of ranks along `axis`."""
        return self.sizes[AXES.index(axis)]

    @property
    def data(self) -> int:
        """Return the number of data ranks: replicate × shard."""
        return self.size("replicate") * self.size("shard")

    @property
    def inner(self) -> tuple[int, ...]:
        """Return the sizes of the axes that divide a model or a sequence."""
        return tuple(size for axis, size in zip(AXES, self.sizes, strict=True) if axis not in DATA_AXES)

    @property
    def context(self) -> int:
        """Return the number of context ranks, ring and Ulysses together."""
        return self.size("context_ring") * self.size("context_ulysses")

    def crosses(self, axis: AxisName, per_node: int) -> bool:
        """Return whether a group along `axis` is on several nodes, of `per_node` ranks each."""
        return _axis_crosses_nodes(self.sizes, self.order, axis, per_node)

    def stride(self, *axes: AxisName) -> float:
        """Return the difference between the global ranks of neighbours in a group along `axes`."""
        return _stride(self.sizes, self.order, axes)


@dataclass(frozen=True)
class Points:
    """Layouts ("points" of the search) as columns of shape (points,), and their meshes."""

    meshes: tuple[AxisSizes, ...]
    """The different meshes of the points."""
    mesh_columns: Mapping[str, np.ndarray]
    """Columns of shape (meshes,), by name.

    - An axis has its size under its own name; `data`, `context` and `expert` are numbers of ranks.
    - `shard stride` and the like are the strides of `GROUPS`.
    - `copied` and `tokens copied` are 1 if copy engines gather weights, or exchange tokens between tensor ranks.
    - `pace` and `port` are factors on compute time and network bandwidth if nodes differ, otherwise 1
      (`placement.heterogeneity_factors`).
    """
    mesh: np.ndarray
    """Index of each point's mesh in `meshes`."""
    micro: np.ndarray
    """Sequences of a micro-batch."""
    accumulate: np.ndarray
    """Number of micro-batches of a rank in a step."""
    schedule: np.ndarray
    """Index of each point's schedule in `SCHEDULES`."""
    virtual: np.ndarray
    """Number of stages on each pipeline rank."""
    offloads: tuple[Offload, ...]
    """Values of `offload` that the search tries, from the least to the most memory saved."""
    trainable: bool = False
    """Whether all points are plans that this release can train."""

    def __len__(self) -> int:
        return len(self.mesh)

    def column(self, name: str) -> np.ndarray:
        """Return a column of `mesh_columns` with shape (points,)."""
        return self.mesh_columns[name][self.mesh]

    def take(self, chosen: np.ndarray) -> Points:
        """Return the points with the indices `chosen`."""
        columns = {name: getattr(self, name)[chosen] for name in ("mesh", *BATCH_COLUMNS)}
        return replace(self, **columns)


def points(run: RunSpec, *, trainable: bool = False) -> Points:
    """Return all layouts (points) of the run that obey its pins.

    If `trainable` is true, only those that this release can train.
    """
    meshes = tuple(_meshes(run, trainable))
    if trainable and GATHERS.pin(pins_of(run)) == "copy_engine":
        meshes = tuple(mesh for mesh in meshes if not _shards_cross_nodes(run, mesh)) or meshes
    batch_options = _batch_options(run, trainable)
    by_mesh = [batch_options(mesh.size("pipeline"), mesh.data) for mesh in meshes]
    batch_columns = np.concatenate([np.zeros((0, len(BATCH_COLUMNS)), np.int64), *by_mesh]).T
    mesh = np.repeat(np.arange(len(meshes)), [len(options) for options in by_mesh])
    return Points(
        meshes=meshes,
        mesh_columns=_mesh_columns(run, meshes),
        mesh=mesh,
        offloads=_offloads(run),
        trainable=trainable,
        **dict(zip(BATCH_COLUMNS, batch_columns.copy(), strict=True)),
    )


def with_kernel_engines(run: RunSpec, space: Points) -> Points:
    """Return the points with NCCL kernels instead of copy engines, except where copy engines are pinned."""
    pins = pins_of(run)
    zeros = np.zeros(len(space.meshes))
    pins_by_column = {option.column: option.pin(pins) for option in COPY_OPTIONS}
    return replace(
        space,
        mesh_columns={
            **space.mesh_columns,
            **{name: zeros for name, pinned in pins_by_column.items() if pinned is None},
        },
    )


def _mesh_columns(run: RunSpec, meshes: Sequence[AxisSizes]) -> dict[str, np.ndarray]:
    """Return `Points.mesh_columns`."""
    sizes = np.array([mesh.sizes for mesh in meshes], dtype=np.float64).reshape(-1, len(AXES))
    mesh_columns = dict(zip(AXES, sizes.T, strict=True))
    mesh_columns["data"] = mesh_columns["replicate"] * mesh_columns["shard"]
    mesh_columns["context"] = mesh_columns["context_ring"] * mesh_columns["context_ulysses"]
    mesh_columns["expert"] = np.array([mesh.expert for mesh in meshes], dtype=np.float64)
    for column, copies in (("copied", _weight_copies(run)), ("tokens copied", _token_copies(run))):
        mesh_columns[column] = np.array([copies(mesh) for mesh in meshes], dtype=np.float64)
    mesh_columns["pace"] = mesh_columns["port"] = np.ones(len(meshes))
    if factors_of := heterogeneity_factors(run):
        layouts_by_mesh = [_layout(mesh.sizes, mesh.order, run.cluster.ranks_per_node) for mesh in meshes]
        factors = [factors_of(layout) for layout in layouts_by_mesh]
        mesh_columns["pace"] = np.array([factor.pace for factor in factors])
        mesh_columns["port"] = np.array([factor.port for factor in factors]) / max(factor.port for factor in factors)
    for name, axes in GROUPS.items():
        mesh_columns[f"{name} stride"] = np.array([mesh.stride(*axes) for mesh in meshes])
    return mesh_columns


def _weight_copies(run: RunSpec) -> Callable[[AxisSizes], bool]:
    """Return a function that says whether copy engines gather the weights of a mesh.

    A pin decides. Without a pin, copy engines are used where possible, because they slow compute down less than
    kernels.
    """
    pinned = GATHERS.pin(pins_of(run))
    possible = why_kernel_gathers(run) is None

    def copies(mesh: AxisSizes) -> bool:
        if mesh.size("shard") * mesh.context == 1 or pinned:
            return pinned == "copy_engine"
        return possible and not _shards_cross_nodes(run, mesh)

    return copies


def _token_copies(run: RunSpec) -> Callable[[AxisSizes], bool]:
    """Return a function that says whether copy engines exchange tokens between the tensor ranks of a mesh.

    A pin decides. Without a pin, copy engines are used where measurements have shown that they work.
    """
    pinned = TOKENS.pin(pins_of(run))
    possible = cache(lambda ranks: ranks > 1 and why_kernel_token_exchange(run, ranks) is None)

    def copies(mesh: AxisSizes) -> bool:
        if pinned:
            return pinned == "copy_engine"
        return possible(mesh.size("tensor")) and not mesh.crosses("tensor", run.cluster.ranks_per_node)

    return copies


def _shards_cross_nodes(run: RunSpec, mesh: AxisSizes) -> bool:
    """Return whether a group of shard or context ranks is on several nodes."""
    return any(mesh.crosses(axis, run.cluster.ranks_per_node) for axis in SHARD_AXES)


def _meshes(run: RunSpec, trainable: bool) -> Iterator[AxisSizes]:
    """Yield all meshes that obey the pins."""
    pins = pins_of(run)
    ranks = run.cluster.ranks
    batch = run.train.global_batch
    for tensor, ulysses, ring in _model_axes(run, trainable):
        ranks_left = ranks // (tensor * ulysses * ring)
        for pipeline in _pinned_or(
            pins.pipeline, (divisor for divisor in divisors(ranks_left) if divisor <= run.model.layers)
        ):
            data = ranks_left // pipeline
            if ranks_left % pipeline or batch % data:
                continue
            for shard in _pinned_or(pins.shard, divisors(data)):
                if data % shard or pins.replicate not in (None, data // shard):
                    continue
                sizes = {
                    "pipeline": pipeline,
                    "replicate": data // shard,
                    "shard": shard,
                    "context_ring": ring,
                    "context_ulysses": ulysses,
                    "tensor": tensor,
                }
                for expert, order in product(_expert_sizes(run, shard * ring * ulysses, tensor), _orders(run, sizes)):
                    yield AxisSizes(tuple(sizes[axis] for axis in AXES), expert, order)


def _orders(run: RunSpec, sizes: Mapping[str, int]) -> list[tuple[AxisName, ...]]:
    """Return the orders of all axes that are tried: the orders of `placement.orders`, or the pinned order.

    A pinned order without an axis that has more than one rank gives no order at all.
    """
    pinned = pins_of(run).order
    if pinned is None:
        return orders(run.cluster, sizes)
    others = tuple(axis for axis in AXES if axis not in pinned)
    return [] if any(sizes[axis] > 1 for axis in others) else [(*(axis for axis in pinned if axis in AXES), *others)]


def _model_axes(run: RunSpec, trainable: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the (tensor, Ulysses, ring) sizes: the axes that divide the work of one sequence."""
    pins = pins_of(run)
    model = run.model
    domain = fast_domain(as_nodes(run.cluster))
    link, port = network_rates(as_nodes(run.cluster))
    if run.train.global_batch * domain < run.cluster.ranks * FEW_SEQUENCES or port >= FAST_PORT * link:
        domain = max(domain, WIDE_DOMAIN)
    tensor_sizes = [
        divisor
        for divisor in divisors(run.cluster.ranks)
        if divisor <= domain
        and _divides_heads(run, divisor)
        and not conflicts(run, trainable=trainable, tensor=divisor)
    ]
    for tensor in _pinned_or(pins.tensor, tensor_sizes):
        if run.cluster.ranks % tensor or check_tensor(model, tensor, run.train.seq_len):
            continue
        ulysses_sizes = [
            divisor for divisor in divisors(run.cluster.ranks // tensor) if divisor == 1 or tensor * divisor <= domain
        ]
        for ulysses in _pinned_or(pins.context_ulysses, ulysses_sizes):
            if run.cluster.ranks % (tensor * ulysses) or not _divides_heads(run, tensor * ulysses):
                continue
            for ring in _pinned_or(pins.context_ring, _ring_sizes(run, tensor * ulysses, ulysses)):
                fits = not context_split_error(ring, ulysses, tensor, model.heads, model.kv_heads, run.train.seq_len)
                if fits and run.cluster.ranks % (tensor * ulysses * ring) == 0:
                    yield tensor, ulysses, ring


def _divides_heads(run: RunSpec, ranks: int) -> bool:
    """Return whether heads and key/value heads can be divided over `ranks` ranks.

    A key/value head may be on several ranks.
    """
    model = run.model
    return model.heads % ranks == 0 and (model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0)


def _ring_sizes(run: RunSpec, model_ranks: int, ulysses: int) -> list[int]:
    """Return the numbers of ring ranks that leave at least `MIN_TOKENS` tokens per rank."""
    longest = run.train.seq_len // (MIN_TOKENS * ulysses)
    return [divisor for divisor in divisors(run.cluster.ranks // model_ranks) if divisor <= max(1, longest)]


def _expert_sizes(run: RunSpec, ranks: int, tensor: int) -> list[int]:
    """Return the numbers of expert ranks over which the experts of a layer can be divided.

    Tensor ranks divide the experts too.
    """
    if not run.model.experts:
        return [1]
    sizes = _pinned_or(pins_of(run).expert, divisors(ranks))
    return [size for size in sizes if ranks % size == 0 and run.model.experts % (size * tensor) == 0]


def _offloads(run: RunSpec) -> tuple[Offload, ...]:
    """Return the values of `offload` that are tried."""
    pinned = pins_of(run).offload
    if pinned is not None:
        return (pinned,)
    if run.cluster.is_cpu:
        return ("none",)
    # Only AdamW can update its state in host memory, and weight averages (EMA) need the weights on the device.
    is_movable = isinstance(run.train.optimizer, AdamWSpec) and run.train.ema_decay is None
    return get_args(Offload) if is_movable else ("none", "activations")


def _pinned_or(pinned: int | None, otherwise: Iterable[int]) -> list[int]:
    return list(otherwise) if pinned is None else [pinned]


def _batch_options(run: RunSpec, trainable: bool) -> Callable[[int, int], np.ndarray]:
    """Return a function of (pipeline ranks, data ranks) that lists what to try.

    Its result has shape (options, 4) with the columns of `BATCH_COLUMNS`: micro-batch size, number of micro-batches,
    index of the schedule, stages per rank.
    """
    pins = pins_of(run)
    batch = run.train.global_batch
    layers = run.model.layers
    allowed = tuple(name for name in SCHEDULES if not conflicts(run, trainable=trainable, schedule=name))

    def fits_ramp(pipeline: int, data: int, option: tuple[int, int, int, int]) -> bool:
        """Whether the micro-batches divide the ramp's batches too; a batch that the data ranks do not divide is refused later."""
        micro, _, schedule, virtual = option
        shares = (stage.batch // data for stage in run.train.batch_ramp if stage.batch % data == 0)
        return all(
            share % micro == 0 and refusal(SCHEDULES[schedule], pipeline, share // micro, virtual) is None
            for share in shares
        )

    @cache
    def options(pipeline: int, data: int) -> np.ndarray:
        sizes = pipeline, batch // data, layers
        combinations = _step_options(*sizes, pins.micro_batch, pins.schedule, pins.stages, allowed)
        if run.train.batch_ramp:
            combinations = [option for option in combinations if fits_ramp(pipeline, data, option)] or combinations
        return np.array(combinations, dtype=np.int64).reshape(-1, len(BATCH_COLUMNS))

    return options


@lru_cache(maxsize=1 << 16)
def _stride(sizes: tuple[int, ...], order: tuple[AxisName, ...], axes: tuple[AxisName, ...]) -> float:
    return _layout(sizes, order, 1).stride(*axes)


@lru_cache(maxsize=1 << 16)
def _axis_crosses_nodes(sizes: tuple[int, ...], order: tuple[AxisName, ...], axis: AxisName, per_node: int) -> bool:
    return _layout(sizes, order, per_node).axis_crosses_nodes(axis)


def _layout(sizes: tuple[int, ...], order: tuple[AxisName, ...], per_node: int) -> Layout:
    return Layout(tuple((axis, sizes[AXES.index(axis)]) for axis in order), per_node)


@lru_cache(maxsize=4096)
def _step_options(
    pipeline: int,
    sequences: int,
    layers: int,
    micro: int | None,
    schedule: ScheduleName | None,
    stages: Stages | None,
    allowed: tuple[ScheduleName, ...],
) -> list[tuple[int, int, int, int]]:
    """Return the rows of `_batch_options`; `sequences` is the number of sequences of a data rank."""
    names = [
        name for name in ((schedule,) if schedule else allowed) if _pinned_stages_fit(name, pipeline, layers, stages)
    ]
    options = []
    for size in _micro_batches(sequences, micro):
        micro_batches = sequences // size
        options += [
            (size, micro_batches, SCHEDULES.index(name), virtual)
            for name in names
            if schedule or _worth_trying(name, pipeline, micro_batches)
            for virtual in _virtual_stage_counts(name, pipeline, layers, stages)
            if pipeline * virtual <= layers and refusal(name, pipeline, micro_batches, virtual) is None
        ]
    return options


def _pinned_stages_fit(name: ScheduleName, pipeline: int, layers: int, stages: Stages | None) -> bool:
    """Return whether the pinned stages are in the order that the schedule requires."""
    if stages is None:
        return True
    try:
        stage_table(SchedulePlan(name=name, stages=stages), pipeline, layers)
    except ValueError:
        return False
    return True


def _worth_trying(name: str, pipeline: int, micro_batches: int) -> bool:
    """Return whether a schedule that is not pinned can be the best."""
    if pipeline > 1:
        return name != "gpipe"
    # On one rank, the other schedules are equal to 1F1B.
    return name in ("1f1b", "paired") or (name == "breadth_first" and micro_batches > 1)


def _virtual_stage_counts(name: str, pipeline: int, layers: int, stages: Stages | None) -> tuple[int, ...]:
    """Return the numbers of stages per rank that are tried."""
    if stages is not None:
        return (len(stages[0]),)
    if name == "interleaved":
        return VIRTUAL_STAGES
    # A breadth-first pipeline has one stage per layer (modular pipeline, arXiv 2106.02679). With larger stages, the
    # next rank would wait until a rank has computed all layers of its stage for all micro-batches.
    if name == "breadth_first":
        return (layers // pipeline if pipeline > 1 else 1,)
    return (STAGES_PER_RANK.get(name, 1),)


def _micro_batches(sequences: int, pinned: int | None) -> list[int]:
    """Return the micro-batch sizes that divide `sequences`. For many sequences, only powers of two are returned.

    For the 12 sequences of a data rank:

    >>> _micro_batches(sequences=12, pinned=None)
    [1, 2, 3, 4, 6, 12]
    """
    sizes = divisors(sequences)
    if pinned is not None:
        return [size for size in sizes if size == pinned]
    return sizes if sequences <= MAX_ANY_DIVISOR else [size for size in sizes if size & (size - 1) == 0]
