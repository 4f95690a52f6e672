"""Every way to lay a run out that is worth pricing, as columns of numbers: mesh, micro-batch, schedule.

What is never worth it is not in the space, and a pin puts it there: tensor and Ulysses ranks beyond a fast domain and beyond eight, fewer
than 512 tokens of a sequence on a rank, GPipe (1F1B takes as long and holds less), micro-batches that are neither a power of two nor few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import get_args

import numpy as np

from meshwright.costs.machine_rates import fast_domain
from meshwright.costs.plan_costs import as_nodes
from meshwright.planner.candidate import formats_of, gathers_by_kernels, pins_of, tokens_by_kernels
from meshwright.planner.placement import ground_of, orders
from meshwright.schedules.registry import refusal
from meshwright.spec.fp8_limits import fp8_format_conflict
from meshwright.spec.layout import STAGES_PER_RANK, Layout, check_tensor, context_split_error, stage_table
from meshwright.spec.plan import (
    DATA_AXES,
    REFUSED_SCHEDULES,
    SHARD_AXES,
    AxisName,
    Offload,
    ScheduleName,
    SchedulePlan,
)
from meshwright.spec.run import RunSpec

AXES = get_args(AxisName)
SCHEDULES = get_args(ScheduleName)
STEP = ("micro", "accumulate", "schedule", "virtual")
"""Columns of a point beside its mesh."""
GROUPS: dict[str, tuple[AxisName, ...]] = {
    "ring": ("context_ring",),
    "ulysses": ("context_ulysses",),
    "shard": SHARD_AXES,
    "replicate": ("replicate",),
    "pipeline": ("pipeline",),
}
"""Axes whose ranks talk together; context ranks hold the same weights, so they share in what is sharded."""
Stages = tuple[tuple[str, ...], ...]
LEAST_TOKENS = 512
"""Of one sequence on one rank."""
VIRTUAL_STAGES = (2, 3, 4, 6, 8)
"""Stages a rank holds under the interleaved schedule, where the plan does not list them."""
WIDE, FEW_SEQUENCES = 8, 2
"""Tensor times Ulysses ranks that are tried where a fast domain has fewer devices, when there are fewer sequences than the second for each
domain: then there is little else to split."""
FEW = 64
"""Sequences of a rank up to which every divisor is a micro-batch size, and not only powers of two."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of all axes, the fold of experts, and the axes outermost first."""

    sizes: tuple[int, ...]
    """In the order of `AXES`."""
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
        """Whether any group along `axis` leaves a node of so many ranks (`Layout.axis_crosses_nodes`)."""
        return _leaves(self.sizes, self.order, axis, per_node)

    def stride(self, *axes: AxisName) -> float:
        """Ranks from one member of a group along `axes` to the next (`Layout.stride`)."""
        return _stride(self.sizes, self.order, axes)


@dataclass(frozen=True)
class Points:
    """One row a point: its mesh, and columns of equal length."""

    meshes: tuple[Mesh, ...]
    facts: Mapping[str, np.ndarray]
    """Sizes and strides by mesh: an axis's size under its name, `data`, `context`, `expert`, strides as `… stride`; `copied` where copy
    engines gather weights; `pace` and `port` of unlike nodes."""
    mesh: np.ndarray
    """Index into `meshes`."""
    micro: np.ndarray
    accumulate: np.ndarray
    schedule: np.ndarray
    """Index into `SCHEDULES`."""
    virtual: np.ndarray
    offloads: tuple[Offload, ...]
    """What may wait in host memory, the least first."""
    trainable: bool = False
    """Whether only what this release can train is wanted."""

    def __len__(self) -> int:
        return len(self.mesh)

    def column(self, name: str) -> np.ndarray:
        """One of `facts`, by point."""
        return self.facts[name][self.mesh]

    def take(self, chosen: np.ndarray) -> Points:
        columns = {name: getattr(self, name)[chosen] for name in ("mesh", *STEP)}
        return replace(self, **columns)


def points(run: RunSpec, *, trainable: bool = False) -> Points:
    """The run's space around its pins; `trainable` leaves out what this release only plans."""
    meshes = tuple(_meshes(run, trainable))
    if trainable and pins_of(run).gather_engine == "copy":
        meshes = tuple(mesh for mesh in meshes if not _shards_leave(run, mesh)) or meshes
    rows = []
    for index, mesh in enumerate(meshes):
        for micro, accumulate, schedule, virtual in _steps(run, mesh.size("pipeline"), mesh.data):
            rows.append((index, micro, accumulate, schedule, virtual))
    mesh, *steps = np.array(rows, dtype=np.int64).reshape(-1, 1 + len(STEP)).T
    columns = dict(zip(STEP, steps, strict=True))
    return Points(
        meshes=meshes, facts=_facts(run, meshes), mesh=mesh, offloads=_offloads(run), trainable=trainable,
        **columns,
    )  # fmt: skip


def by_kernels(run: RunSpec, space: Points) -> Points:
    """The same points with nothing carried by copy engines but what is pinned."""
    pins, none = pins_of(run), np.zeros(len(space.meshes))
    free = {"copied": pins.gather_engine, "tokens copied": pins.tensor_engine}
    return replace(space, facts={**space.facts, **{name: none for name, pinned in free.items() if pinned is None}})


def _facts(run: RunSpec, meshes: Sequence[Mesh]) -> dict[str, np.ndarray]:
    sizes = np.array([mesh.sizes for mesh in meshes], dtype=np.float64).reshape(-1, len(AXES))
    facts = dict(zip(AXES, sizes.T, strict=True))
    facts["data"] = facts["replicate"] * facts["shard"]
    facts["context"] = facts["context_ring"] * facts["context_ulysses"]
    facts["expert"] = np.array([mesh.expert for mesh in meshes], dtype=np.float64)
    facts["copied"] = np.array([_copied(run, mesh) for mesh in meshes], dtype=np.float64)
    facts["tokens copied"] = np.array([_tokens_copied(run, mesh) for mesh in meshes], dtype=np.float64)
    facts["pace"] = facts["port"] = np.ones(len(meshes))
    if ground := ground_of(run):
        laid = [_layout(mesh.sizes, mesh.order, run.cluster.ranks_per_node) for mesh in meshes]
        found = [ground(layout) for layout in laid]
        facts["pace"] = np.array([one.pace for one in found])
        facts["port"] = np.array([one.port for one in found]) / max(one.port for one in found)
    for name, axes in GROUPS.items():
        facts[f"{name} stride"] = np.array([mesh.stride(*axes) for mesh in meshes])
    return facts


def _copied(run: RunSpec, mesh: Mesh) -> bool:
    """Whether copy engines gather its weights: as pinned, else wherever they may, as they take less of compute than kernels do."""
    pinned = pins_of(run).gather_engine
    if mesh.size("shard") * mesh.context == 1 or pinned:
        return pinned == "copy"
    return gathers_by_kernels(run) is None and not _shards_leave(run, mesh)


def _tokens_copied(run: RunSpec, mesh: Mesh) -> bool:
    """Whether copy engines carry tokens between its tensor ranks: as pinned, else where that was measured."""
    pinned, ranks = pins_of(run).tensor_engine, mesh.size("tensor")
    if pinned:
        return pinned == "copy"
    leave = mesh.crosses("tensor", run.cluster.ranks_per_node)
    return ranks > 1 and not leave and tokens_by_kernels(run, ranks) is None


def _shards_leave(run: RunSpec, mesh: Mesh) -> bool:
    return any(mesh.crosses(axis, run.cluster.ranks_per_node) for axis in SHARD_AXES)


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _meshes(run: RunSpec, trainable: bool) -> Iterator[Mesh]:
    pins, ranks, batch = pins_of(run), run.cluster.ranks, run.train.global_batch
    for tensor, ulysses, ring in _inner(run, trainable):
        rest = ranks // (tensor * ulysses * ring)
        for pipeline in _wanted(pins.pipeline, (d for d in divisors(rest) if d <= run.model.layers)):
            data = rest // pipeline
            if rest % pipeline or batch % data:
                continue
            for shard in _wanted(pins.shard, divisors(data)):
                if data % shard or pins.replicate not in (None, data // shard):
                    continue
                sizes = {
                    "pipeline": pipeline, "replicate": data // shard, "shard": shard, "context_ring": ring,
                    "context_ulysses": ulysses, "tensor": tensor,
                }  # fmt: skip
                for expert, order in product(_experts(run, shard * ring * ulysses, tensor), orders(run.cluster, sizes)):
                    yield Mesh(tuple(sizes[axis] for axis in AXES), expert, order)


def _inner(run: RunSpec, trainable: bool) -> Iterator[tuple[int, int, int]]:
    """(tensor, Ulysses, ring): the axes that split one sequence's work."""
    pins, model, domain = pins_of(run), run.model, fast_domain(as_nodes(run.cluster))
    if run.train.global_batch * domain < run.cluster.ranks * FEW_SEQUENCES:
        domain = max(domain, WIDE)
    widths = [d for d in divisors(run.cluster.ranks) if d <= domain and _splits_heads(run, d)]
    if trainable and fp8_format_conflict(formats_of(run), domain, experts=False):
        widths = [1]
    for tensor in _wanted(pins.tensor, widths):
        if run.cluster.ranks % tensor or check_tensor(model, tensor, run.train.seq_len):
            continue
        heads = [d for d in divisors(run.cluster.ranks // tensor) if d == 1 or tensor * d <= domain]
        for ulysses in _wanted(pins.context_ulysses, heads):
            if run.cluster.ranks % (tensor * ulysses) or not _splits_heads(run, tensor * ulysses):
                continue
            for ring in _wanted(pins.context_ring, _rings(run, tensor * ulysses, ulysses)):
                fits = not context_split_error(ring, ulysses, tensor, model.heads, model.kv_heads, run.train.seq_len)
                if fits and run.cluster.ranks % (tensor * ulysses * ring) == 0:
                    yield tensor, ulysses, ring


def _splits_heads(run: RunSpec, ways: int) -> bool:
    model = run.model
    return model.heads % ways == 0 and (model.kv_heads % ways == 0 or ways % model.kv_heads == 0)


def _rings(run: RunSpec, inner: int, ulysses: int) -> list[int]:
    most = run.train.seq_len // (LEAST_TOKENS * ulysses)
    return [d for d in divisors(run.cluster.ranks // inner) if d <= max(1, most)]


def _experts(run: RunSpec, ranks: int, tensor: int) -> list[int]:
    """Over how many of the ranks of one copy a layer's experts are spread; tensor ranks hold different ones too."""
    if not run.model.experts:
        return [1]
    wanted = _wanted(pins_of(run).expert, divisors(ranks))
    return [size for size in wanted if ranks % size == 0 and run.model.experts % (size * tensor) == 0]


def _offloads(run: RunSpec) -> tuple[Offload, ...]:
    pinned = pins_of(run).offload
    if pinned is not None:
        return (pinned,)
    return ("none",) if run.cluster.is_cpu else get_args(Offload)


def _wanted(pinned: int | None, otherwise: Iterable[int]) -> list[int]:
    return list(otherwise) if pinned is None else [pinned]


def _steps(run: RunSpec, pipeline: int, data: int) -> list[tuple[int, int, int, int]]:
    """(micro-batch, accumulate, schedule, virtual stages) of a pipeline of this depth over so many data ranks."""
    pins = pins_of(run)
    return _options(
        pipeline, run.train.global_batch // data, run.model.layers, pins.micro_batch, pins.schedule, pins.stages
    )


@lru_cache(maxsize=1 << 16)
def _stride(sizes: tuple[int, ...], order: tuple[AxisName, ...], axes: tuple[AxisName, ...]) -> float:
    return _layout(sizes, order, 1).stride(*axes)


@lru_cache(maxsize=1 << 16)
def _leaves(sizes: tuple[int, ...], order: tuple[AxisName, ...], axis: AxisName, per_node: int) -> bool:
    return _layout(sizes, order, per_node).axis_crosses_nodes(axis)


def _layout(sizes: tuple[int, ...], order: tuple[AxisName, ...], per_node: int) -> Layout:
    return Layout(tuple((axis, sizes[AXES.index(axis)]) for axis in order), per_node)


@lru_cache(maxsize=4096)
def _options(
    pipeline: int, sequences: int, layers: int, micro: int | None, schedule: ScheduleName | None, stages: Stages | None
) -> list[tuple[int, int, int, int]]:
    candidates = (schedule,) if schedule else (name for name in SCHEDULES if name not in REFUSED_SCHEDULES)
    names = [name for name in candidates if _in_order(name, pipeline, layers, stages)]
    found = []
    for size in _micro_batches(sequences, micro):
        many = sequences // size
        found += [
            (size, many, SCHEDULES.index(name), virtual)
            for name in names
            if schedule or _worth_trying(name, pipeline, many)
            for virtual in _virtual(name, pipeline, layers, stages)
            if pipeline * virtual <= layers and refusal(name, pipeline, many, virtual) is None
        ]
    return found


def _in_order(name: ScheduleName, pipeline: int, layers: int, stages: Stages | None) -> bool:
    """Whether the schedule visits the pinned stages in the order of their layers."""
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
    return name == "1f1b" or (name == "breadth_first" and micro_batches > 1)  # the others do on one rank what 1F1B does


def _virtual(name: str, pipeline: int, layers: int, stages: Stages | None) -> tuple[int, ...]:
    if stages is not None:
        return (len(stages[0]),)
    if name == "interleaved":
        return VIRTUAL_STAGES
    # A breadth-first pipeline gets a stage for every layer (the modular pipeline, arXiv 2106.02679): larger ones would keep all
    # micro-batches to themselves until their last layer, and the ranks behind them idle.
    if name == "breadth_first":
        return (layers // pipeline if pipeline > 1 else 1,)
    return (STAGES_PER_RANK.get(name, 1),)


def _micro_batches(sequences: int, pinned: int | None) -> list[int]:
    sizes = divisors(sequences)
    if pinned is not None:
        return [size for size in sizes if size == pinned]
    return sizes if sequences <= FEW else [size for size in sizes if size & (size - 1) == 0]
