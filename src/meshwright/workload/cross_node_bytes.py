"""Bytes of one step that cross from one node to another, summed over all ranks. Each byte counts once, where it is sent.

- Rings: NCCL's rings visit the ranks of a node one after another, so a ring over k > 1 nodes crosses k node borders. Over each border, an
  all-gather or reduce-scatter of B bytes among n ranks moves (n-1)/n·B, and an all-reduce twice as much (Patarasuk and Yuan 2009).
- All-to-alls: if each rank sends B bytes, it sends B/n to each of the n ranks.
- Not counted: row counts, norms and headers, which are a few kilobytes, and validation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations

from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import Layout, stage_table
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import RECOMPUTE_MODES, SHARD_AXES, Plan
from meshwright.workload.arrays import Array
from meshwright.workload.dtypes import bytes_of, gathered_width
from meshwright.workload.groups import context_size, experts_over, shard_size
from meshwright.workload.layer_messages import END_EXCHANGES, layer_messages
from meshwright.workload.layouts import layout_of
from meshwright.workload.model_shape import shape_of
from meshwright.workload.step_shape import step_shape
from meshwright.workload.unit_parameters import block_unit, end_units

CollectiveCounts = Mapping[tuple[int, int], tuple[int, int]]
"""(stage, unit) → gathers and reductions in one step, from `schedules.collective_counts`."""


@dataclass(frozen=True, kw_only=True)
class CrossNodeBytes:
    """Bytes that cross from node to node in one step, by cause."""

    gather: float
    """Parameters gathered over shard and context ranks."""
    reduce: float
    """Gradients reduced over shard and context ranks."""
    replicas: float
    """Gradients summed over replicas."""
    pipeline: float
    """Activations and their gradients between stages."""
    tied: float
    """The gradient of the embedding, if the first and the last pipeline rank have a copy of it."""
    tensor: float
    """Tokens that tensor ranks gather and reduce-scatter inside of layers."""
    expert: float
    """Expert dispatch and combine, with equal token counts for all experts."""
    context: float
    """Keys, values and heads exchanged between context ranks, and their gradients."""

    @property
    def total(self) -> float:
        inside = self.tensor + self.expert + self.context
        return self.gather + self.reduce + self.replicas + self.pipeline + self.tied + inside


@dataclass(frozen=True)
class _Unit:
    """An FSDP unit: parameters that are gathered together, and whose gradients are reduced together."""

    elements: int
    """Elements outside the routed experts, padded to equal shards."""
    experts: int
    """Elements of the routed experts of one expert rank."""
    gathers: int
    """Gathers in a step."""
    reductions: int
    """Reductions in a step."""
    width: int
    """Bytes of a gathered element."""


def cross_node_bytes(
    model: ModelSpec, plan: Plan, layout: Layout, seq_len: int, counts: CollectiveCounts, *, masked: bool = False
) -> CrossNodeBytes:
    """Return the bytes that a step of `plan` sends between the nodes of `layout`.

    `counts` has the gathers and reductions of each unit in a step. `masked`: attention is limited to documents.
    """
    shard = shard_size(plan)
    precision = plan.precision
    rings = {
        "shard": _ring_borders(layout, layout.groups(*SHARD_AXES)),
        "replicate": _ring_borders(layout, layout.groups("replicate")),
        "expert": _ring_borders(layout, layout.expert_shard_groups()),
    }
    expert_copies = shard // layout.expert
    along_shard, along_replicas, along_copies = map(_ring_share, (shard, layout.size("replicate"), expert_copies))
    gather = reduce = replicas = 0.0
    for rank in range(layout.size("pipeline")):
        for unit in _units(model, plan, counts, rank):
            sharded = rings["shard"][rank] * along_shard * unit.elements
            sharded += rings["expert"][rank] * along_copies * unit.experts
            gather += sharded * unit.gathers * unit.width
            reduce += sharded * unit.reductions * bytes_of(precision.reduce)
            elements_per_rank = unit.elements / shard + unit.experts / expert_copies
            summed_bytes = (
                bool(unit.reductions) * elements_per_rank * bytes_of(precision.reduce_replicas or precision.stored)
            )
            replicas += 2 * rings["replicate"][rank] * along_replicas * summed_bytes
    by_axis = _bytes_inside_layers(model, plan, layout, seq_len, masked=masked)
    return CrossNodeBytes(
        gather=gather,
        reduce=reduce,
        replicas=replicas,
        pipeline=_pipeline_bytes(model, plan, layout, seq_len),
        tied=_tied_bytes(model, plan, layout),
        tensor=by_axis["tensor"],
        expert=by_axis.get("expert", 0.0),
        context=by_axis["context_ulysses"] + by_axis["context_ring"],
    )


def _ring_share(ranks: Array) -> float:
    """Return the share of a collective's bytes that a ring of `ranks` ranks moves over each of its links: (n-1)/n.

    In a ring of 4 ranks, each rank passes on 3 of 4 parts:

    >>> _ring_share(4)
    0.75
    """
    return (ranks - 1) / ranks


def _ring_borders(layout: Layout, groups: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return for each pipeline rank how many node borders the rings of its groups cross; a ring within a node crosses none."""
    borders: dict[int, int] = defaultdict(int)
    for group in groups:
        nodes = len({layout.node(rank) for rank in group})
        borders[layout.coordinates(group[0]).get("pipeline", 0)] += nodes if nodes > 1 else 0
    return borders


def _units(model: ModelSpec, plan: Plan, counts: CollectiveCounts, rank: int) -> Iterator[_Unit]:
    """Yield the units of one pipeline rank: the embedding, each block, and the final norm with head and prediction modules.

    If a rank has embedding and head, and both use the same weight, they are one unit, which is yielded twice. The second time it has no
    reductions, and no gathers if the gathered weight is kept for the step.
    """
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    order = sorted(stage.start for stages in table for stage in stages)
    tensor = plan.axis_size("tensor")
    shard = shard_size(plan)
    sizes = {"tensor": tensor, "shards": shard, "expert": experts_over(plan)}
    block = partial(block_unit, model, **sizes)
    first, last = (any(layer in stage for stage in table[rank]) for layer in (0, model.layers - 1))
    used_by_both = model.embedding_at_both_ends
    embed, head = end_units(model, **sizes).units(used_by_both=used_by_both, first=first, last=last)
    shared = used_by_both and first and last
    for stage in table[rank]:
        units = [block(kind=model.kind(layer)) for layer in stage]
        units = [head if shared else embed] * (stage.start == 0) + units + [head] * (stage.stop == model.layers)
        blocks = [None] * (stage.start == 0) + [*stage] + [None]
        for unit, parameters in enumerate(units):
            gathers, reductions = counts[order.index(stage.start), unit]
            if shared and stage.stop == model.layers and unit == len(units) - 1:
                gathers = gathers * plan.strategy(0, model.layers).reshard
                reductions = 0
            width = gathered_width(plan, blocks[unit], model.layers)
            yield _Unit(parameters.dense_shard * shard, parameters.experts, gathers, reductions, width)


def _pipeline_bytes(model: ModelSpec, plan: Plan, layout: Layout, seq_len: int) -> float:
    """Return the bytes of activations and gradients that stages on different nodes send to each other, for all micro-batches."""
    message = _stream_bytes(model, plan, seq_len) / layout.size("tensor")
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    ranks = [rank for _, rank in sorted((stage.start, rank) for rank, stages in enumerate(table) for stage in stages)]
    crossings = sum(_crossing_pairs(layout, rank, next_rank) for rank, next_rank in pairwise(ranks))
    return 2.0 * plan.batch.accumulate * message * crossings


def _crossing_pairs(layout: Layout, first: int, second: int) -> int:
    """Return how many ranks of pipeline rank `first` are on another node than the corresponding rank of pipeline rank `second`."""
    return sum(
        layout.crosses_nodes((group[first], group[second]))
        for group in layout.groups("pipeline")
        if layout.size("pipeline") > 1
    )


def _tied_bytes(model: ModelSpec, plan: Plan, layout: Layout) -> float:
    """Return the bytes to all-reduce the gradient shards of a tied embedding between the first and the last pipeline rank."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    first = next(rank for rank, stages in enumerate(table) if any(stage.start == 0 for stage in stages))
    last = next(rank for rank, stages in enumerate(table) if any(stage.stop == model.layers for stage in stages))
    if not model.embedding_at_both_ends or first == last:
        return 0.0
    stored = bytes_of(plan.precision.stored)
    shards = shard_size(plan) * layout.size("tensor")
    return 2.0 * _crossing_pairs(layout, first, last) * model.vocab_size * model.hidden / shards * stored


def _bytes_inside_layers(
    model: ModelSpec, plan: Plan, layout: Layout, seq_len: int, *, masked: bool
) -> dict[str, float]:
    """Return the bytes of all messages inside layers by axis: `tensor`, `context_ring`, `context_ulysses`, `expert`."""
    train = TrainSpec(steps=1, global_batch=plan.batch.global_batch, seq_len=seq_len)
    columns = layout_of(model, train, plan)
    element = bytes_of(plan.precision.compute)
    tensor_borders = _ring_borders(layout, layout.groups("tensor"))
    borders = {"tensor": tensor_borders, "context_ring": _ring_borders(layout, layout.groups("context_ring"))}
    pairs = {
        "context_ulysses": _pairs_across_nodes(layout, layout.groups("context_ulysses")),
        "expert": _pairs_across_nodes(layout, layout.expert_groups()),
    }
    totals: dict[str, float] = defaultdict(float)
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    for rank, stages in enumerate(table):
        layers = [layer for stage in stages for layer in stage]
        modules = model.prediction_depth * (model.layers - 1 in layers)
        layers += [model.layers - 1] * modules  # the block of a module is like the last one
        block_counts = Counter((model.kind(layer), plan.strategy(layer, model.layers).recompute) for layer in layers)
        for (kind, mode), count in block_counts.items():
            blocks = shape_of(model, seq_len, kind=kind)
            mode_columns = replace(columns, recompute=float(RECOMPUTE_MODES.index(mode)))
            step = step_shape(blocks, columns)
            for message in layer_messages(
                blocks,
                mode_columns,
                step,
                element=element,
                masked=masked or model.block_kinds[kind].mixer.window is not None,
                compiled=plan.compile,
            ):
                repeats = message.count / model.layers * count
                if message.op == "all_to_all":
                    crossings = pairs[message.axis][rank] / message.ranks
                else:
                    passes = 2 if message.op == "all_reduce" else 1  # a scattered sum, then a gather
                    share = 1 if message.op == "p2p" else passes * _ring_share(message.ranks)
                    crossings = borders[message.axis][rank] * share
                totals[message.axis] += float(crossings * repeats * message.bytes)
        # A module uses the embedding and the head.
        end_exchanges = END_EXCHANGES * ((0 in layers) + (model.layers - 1 in layers) + 2 * modules)
        totals["tensor"] += (
            end_exchanges
            * tensor_borders[rank]
            * _ring_share(layout.size("tensor"))
            * _stream_bytes(model, plan, seq_len)
        )
    return {axis: plan.batch.accumulate * total for axis, total in totals.items()}


def _pairs_across_nodes(layout: Layout, groups: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return for each pipeline rank how many (sender, receiver) pairs within its groups are on different nodes."""
    pairs: dict[int, int] = defaultdict(int)
    for group in groups:
        pipeline_rank = layout.coordinates(group[0]).get("pipeline", 0)
        pairs[pipeline_rank] += sum(layout.crosses_nodes(pair) for pair in permutations(group, 2))
    return pairs


def _stream_bytes(model: ModelSpec, plan: Plan, seq_len: int) -> int:
    """Bytes of the residual stream of one micro-batch on a context rank."""
    return plan.batch.micro_batch * seq_len // context_size(plan) * model.hidden * bytes_of(plan.precision.compute)
