"""Lists the layouts of a run that the search prices, as columns of numbers: mesh, micro-batch, schedule.

The list omits layouts that are never the best, unless the user pins them: more tensor × Ulysses ranks than a fast domain (the devices that
NVLink connects) and than eight, fewer than 512 tokens of a sequence per rank, GPipe (1F1B takes as long with less memory), and large
micro-batches that are not a power of two.
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
"""Axes of the search; hybrid ranks are searched as shard ranks (`sample_plan`)."""
SCHEDULES = get_args(ScheduleName)
BATCH_COLUMNS = ("micro", "accumulate", "schedule", "virtual")
"""Columns of a point in addition to its mesh."""
GROUPS: dict[str, tuple[AxisName, ...]] = {
    "ring": ("context_ring",),
    "ulysses": ("context_ulysses",),
    "shard": SHARD_AXES,
    "replicate": ("replicate",),
    "pipeline": ("pipeline",),
}
"""Axes that form one communication group. Context ranks use the same weights, so FSDP shards weights over them too."""
Stages = tuple[tuple[str, ...], ...]
MIN_TOKENS = 512
"""Fewest tokens of one sequence on a context rank."""
VIRTUAL_STAGES = (2, 3, 4, 6, 8)
"""Stages per rank that the search tries for the interleaved schedule, unless the stages are pinned."""
WIDE_DOMAIN = 8
FEW_SEQUENCES = 2
FAST_PORT = 0.5
"""Most tensor × Ulysses ranks where a step has fewer than `FEW_SEQUENCES` sequences per fast domain, or where ports have at least the
share `FAST_PORT` of the links' rate.

The fast domain may have fewer ranks. With so few sequences there is little data parallelism to use instead, and with such ports a node is
hardly faster than the network.
"""
MAX_ANY_DIVISOR = 64
"""Sequences per data rank up to which the search tries every divisor as micro-batch size; above, only powers of two."""


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of all axes, the number of expert ranks, and the order of the axes, outermost first."""

    sizes: tuple[int, ...]
    """Sizes in the order of `AXES`."""
    expert: int
    order: tuple[AxisName, ...]

    def size(self, axis: AxisName) -> int:
        return self.sizes[AXES.index(axis)]

    @property
    def data(self) -> int:
        return self.size("replicate") * self.size("shard")

    @property
    def inner(self) -> tuple[int, ...]:
        """Sizes of the axes that split a model or a sequence."""
        return tuple(size for axis, size in zip(AXES, self.sizes, strict=True) if axis not in DATA_AXES)

    @property
    def context(self) -> int:
        return self.size("context_ring") * self.size("context_ulysses")

    def crosses(self, axis: AxisName, per_node: int) -> bool:
        """Whether any group along `axis` spans several nodes, of `per_node` ranks each."""
        return _axis_crosses_nodes(self.sizes, self.order, axis, per_node)

    def stride(self, *axes: AxisName) -> float:
        """Difference of the global ranks of neighbours in a group along `axes`."""
        return _stride(self.sizes, self.order, axes)


@dataclass(frozen=True)
class Points:
    """Layouts (points) as columns of equal length, with their meshes."""

    meshes: tuple[AxisSizes, ...]
    mesh_columns: Mapping[str, np.ndarray]
    """Columns by mesh: an axis's size under its name, `data`, `context`, `expert`; strides as `… stride`.

`copied` is 1 where copy engines gather weights. `pace` and `port` are the relative compute speed and network bandwidth on
    heterogeneous nodes (`placement.heterogeneity_factors`).
    """
    mesh: np.ndarray
    """Index into `meshes`."""
    micro: np.ndarray
    accumulate: np.ndarray
    schedule: np.ndarray
    """Index into `SCHEDULES`."""
    virtual: np.ndarray
    offloads: tuple[Offload, ...]
    """Values of `offload` that the search tries, from the least to the most memory saved."""
    trainable: bool = False
    """Whether the space is limited to plans that this release can train."""

    def __len__(self) -> int:
        return len(self.mesh)

    def column(self, name: str) -> np.ndarray:
        """The column `name` of `mesh_columns`, by point."""
        return self.mesh_columns[name][self.mesh]

    def take(self, chosen: np.ndarray) -> Points:
        columns = {name: getattr(self, name)[chosen] for name in ("mesh", *BATCH_COLUMNS)}
        return replace(self, **columns)


def points(run: RunSpec, *, trainable: bool = False) -> Points:
    """All layouts (points) of the run that obey its pins; with `trainable` only those that this release can train."""
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
    """Return the points with NCCL kernels in place of copy engines, except where copy engines are pinned."""
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
    """Whether copy engines gather a mesh's weights: as pinned, else where possible, as they slow compute less than kernels."""
    pinned = GATHERS.pin(pins_of(run))
    possible = why_kernel_gathers(run) is None

    def copies(mesh: AxisSizes) -> bool:
        if mesh.size("shard") * mesh.context == 1 or pinned:
            return pinned == "copy_engine"
        return possible and not _shards_cross_nodes(run, mesh)

    return copies


def _token_copies(run: RunSpec) -> Callable[[AxisSizes], bool]:
    """Whether copy engines exchange tokens between a mesh's tensor ranks: as pinned, else where they were measured to work."""
    pinned = TOKENS.pin(pins_of(run))
    possible = cache(lambda ranks: ranks > 1 and why_kernel_token_exchange(run, ranks) is None)

    def copies(mesh: AxisSizes) -> bool:
        if pinned:
            return pinned == "copy_engine"
        return possible(mesh.size("tensor")) and not mesh.crosses("tensor", run.cluster.ranks_per_node)

    return copies


def _shards_cross_nodes(run: RunSpec, mesh: AxisSizes) -> bool:
    return any(mesh.crosses(axis, run.cluster.ranks_per_node) for axis in SHARD_AXES)


def _meshes(run: RunSpec, trainable: bool) -> Iterator[AxisSizes]:
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
    """Orders of all axes that are tried: the pinned one, where it has every axis with more than one rank, else `placement.orders`."""
    pinned = pins_of(run).order
    if pinned is None:
        return orders(run.cluster, sizes)
    others = tuple(axis for axis in AXES if axis not in pinned)
    return [] if any(sizes[axis] > 1 for axis in others) else [(*(axis for axis in pinned if axis in AXES), *others)]


def _model_axes(run: RunSpec, trainable: bool) -> Iterator[tuple[int, int, int]]:
    """(tensor, Ulysses, ring) sizes: the axes that split the work of one sequence."""
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
    model = run.model
    return model.heads % ranks == 0 and (model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0)


def _ring_sizes(run: RunSpec, model_ranks: int, ulysses: int) -> list[int]:
    longest = run.train.seq_len // (MIN_TOKENS * ulysses)
    return [divisor for divisor in divisors(run.cluster.ranks // model_ranks) if divisor <= max(1, longest)]


def _expert_sizes(run: RunSpec, ranks: int, tensor: int) -> list[int]:
    """Numbers of expert ranks that divide a layer's experts; tensor ranks divide the experts too."""
    if not run.model.experts:
        return [1]
    sizes = _pinned_or(pins_of(run).expert, divisors(ranks))
    return [size for size in sizes if ranks % size == 0 and run.model.experts % (size * tensor) == 0]


def _offloads(run: RunSpec) -> tuple[Offload, ...]:
    pinned = pins_of(run).offload
    if pinned is not None:
        return (pinned,)
    if run.cluster.is_cpu:
        return ("none",)
    # Only AdamW's state is updated in host memory, and averages need the weights on the device.
    is_movable = isinstance(run.train.optimizer, AdamWSpec) and run.train.ema_decay is None
    return get_args(Offload) if is_movable else ("none", "activations")


def _pinned_or(pinned: int | None, otherwise: Iterable[int]) -> list[int]:
    return list(otherwise) if pinned is None else [pinned]


def _batch_options(run: RunSpec, trainable: bool) -> Callable[[int, int], np.ndarray]:
    """A function of pipeline stages and data ranks: rows of (micro-batch, accumulate, schedule index, virtual stages) to try."""
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
    """See `_batch_options`."""
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
    """Whether the pinned stages follow the order of the schedule's stages."""
    if stages is None:
        return True
    try:
        stage_table(SchedulePlan(name=name, stages=stages), pipeline, layers)
    except ValueError:
        return False
    return True


def _worth_trying(name: str, pipeline: int, micro_batches: int) -> bool:
    if pipeline > 1:
        return name != "gpipe"
    # On one rank the others equal 1F1B.
    return name in ("1f1b", "paired") or (name == "breadth_first" and micro_batches > 1)


def _virtual_stage_counts(name: str, pipeline: int, layers: int, stages: Stages | None) -> tuple[int, ...]:
    if stages is not None:
        return (len(stages[0]),)
    if name == "interleaved":
        return VIRTUAL_STAGES
    # A breadth-first pipeline gets one stage per layer (modular pipeline, arXiv 2106.02679): with larger stages the next rank would wait
    # until a rank has run all layers of its stage for all micro-batches.
    if name == "breadth_first":
        return (layers // pipeline if pipeline > 1 else 1,)
    return (STAGES_PER_RANK.get(name, 1),)


def _micro_batches(sequences: int, pinned: int | None) -> list[int]:
    """Micro-batch sizes that divide so many sequences; of many sequences powers of two only.

    The divisors of the 12 sequences of a data rank:

    >>> _micro_batches(sequences=12, pinned=None)
    [1, 2, 3, 4, 6, 12]
    """
    sizes = divisors(sequences)
    if pinned is not None:
        return [size for size in sizes if size == pinned]
    return sizes if sequences <= MAX_ANY_DIVISOR else [size for size in sizes if size & (size - 1) == 0]
