"""Bytes of one step that cross from node to node, summed over all ranks, each byte once.

NCCL's rings pass through every node in one piece, so a ring over k > 1 nodes crosses k borders. Over each border an all-gather or
reduce-scatter of B bytes among n ranks moves (n-1)/n·B, and an all-reduce twice that (Patarasuk and Yuan 2009). An exchange of B bytes
sends B/n from each rank to each other, whichever node that is on. What the step sends beside parameters, gradients and activations
(counts, norms, headers) is some kilobytes and left out; so is validation.
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
from meshwright.workload.model_shape import shape_of, with_blocks
from meshwright.workload.step_shape import step_shape
from meshwright.workload.unit_parameters import block_unit, end_units

Counts = Mapping[tuple[int, int], tuple[int, int]]
"""(stage, unit) → gathers and reductions in one step, from `schedules.collective_counts`."""


@dataclass(frozen=True, kw_only=True)
class CrossNodeBytes:
    """Bytes across nodes in one step, by what moves them."""

    gather: float
    """Parameters gathered over shard and context ranks."""
    reduce: float
    """Gradients reduced over shard and context ranks."""
    replicas: float
    """Gradients summed over replicas."""
    pipeline: float
    """Activations and their gradients between stages."""
    tied: float
    """The gradient of a weight that the first and the last pipeline rank share."""
    tensor: float
    """Tokens gathered and sums scattered inside of layers."""
    expert: float
    """Tokens on their way to their experts and back, if every expert gets as many."""
    context: float
    """Keys, values and heads of sequences that are spread over ranks, and their gradients."""

    @property
    def total(self) -> float:
        inside = self.tensor + self.expert + self.context
        return self.gather + self.reduce + self.replicas + self.pipeline + self.tied + inside


@dataclass(frozen=True)
class _Unit:
    """A unit that is gathered and reduced together: its elements, and its uses per step.
    Elements are without routed experts, padded to whole shards."""

    elements: int
    experts: int
    """Elements of those routed experts that its expert rank holds, which other ranks share."""
    gathers: int
    reductions: int
    width: int
    """Bytes of one of its elements while it is gathered."""


def cross_node_bytes(
    model: ModelSpec, plan: Plan, layout: Layout, seq_len: int, counts: Counts, *, masked: bool = False
) -> CrossNodeBytes:
    """Bytes that a step of `plan` moves between the nodes of `layout`, at `seq_len` tokens, `masked` to documents or not."""
    shard, precision = shard_size(plan), plan.precision
    rings = {
        "shard": _ring_borders(layout, layout.groups(*SHARD_AXES)),
        "replicate": _ring_borders(layout, layout.groups("replicate")),
        "expert": _ring_borders(layout, layout.expert_shard_groups()),
    }
    copies = shard // layout.expert
    along_shard, along_replicas, along_copies = map(_ring_share, (shard, layout.size("replicate"), copies))
    gather = reduce = replicas = 0.0
    for rank in range(layout.size("pipeline")):
        for unit in _units(model, plan, counts, rank):
            sharded = rings["shard"][rank] * along_shard * unit.elements
            sharded += rings["expert"][rank] * along_copies * unit.experts
            gather += sharded * unit.gathers * unit.width
            reduce += sharded * unit.reductions * bytes_of(precision.reduce)
            kept = unit.elements / shard + unit.experts / copies
            sums = bool(unit.reductions) * kept * bytes_of(precision.reduce_replicas or precision.stored)
            replicas += 2 * rings["replicate"][rank] * along_replicas * sums
    inside = _inside_layers(model, plan, layout, seq_len, masked=masked)
    return CrossNodeBytes(
        gather=gather,
        reduce=reduce,
        replicas=replicas,
        pipeline=_pipeline(model, plan, layout, seq_len),
        tied=_tied(model, plan, layout),
        tensor=inside["tensor"],
        expert=inside.get("expert", 0.0),
        context=inside["context_ulysses"] + inside["context_ring"],
    )


def _ring_share(ranks: Array) -> float:
    return (ranks - 1) / ranks


def _ring_borders(layout: Layout, groups: Iterable[Sequence[int]]) -> dict[int, int]:
    """By pipeline rank, how often the rings of its groups cross from node to node."""
    borders: dict[int, int] = defaultdict(int)
    for group in groups:
        nodes = len({layout.node(rank) for rank in group})
        borders[layout.coordinates(group[0]).get("pipeline", 0)] += nodes if nodes > 1 else 0
    return borders


def _units(model: ModelSpec, plan: Plan, counts: Counts, rank: int) -> Iterator[_Unit]:
    """The units of one pipeline rank: the embedding, a block each, and the final norm with the head.

    A tied weight's two ends are one unit on one rank, reduced once for both, and gathered once where the first keeps it for the step;
    on two ranks each has its own.
    """
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    order = sorted(stage.start for row in table for stage in row)
    tensor, shard = plan.axis_size("tensor"), shard_size(plan)
    block = partial(block_unit, model, tensor=tensor, shards=shard, expert=experts_over(plan))
    first, last = (any(layer in stage for stage in table[rank]) for layer in (0, model.layers - 1))
    embed, head = end_units(model, tensor=tensor, shards=shard).units(tied=model.tied, first=first, last=last)
    shared = model.tied and first and last
    for stage in table[rank]:
        units = [block(routed=model.routed(layer)) for layer in stage]
        units = [head if shared else embed] * (stage.start == 0) + units + [head] * (stage.stop == model.layers)
        blocks = [None] * (stage.start == 0) + [*stage] + [None]
        for unit, parameters in enumerate(units):
            gathers, reductions = counts[order.index(stage.start), unit]
            if shared and stage.stop == model.layers and unit == len(units) - 1:
                gathers, reductions = gathers * plan.strategy(0, model.layers).reshard, 0
            width = gathered_width(plan, blocks[unit], model.layers)
            yield _Unit(parameters.dense_shard * shard, parameters.experts, gathers, reductions, width)


def _pipeline(model: ModelSpec, plan: Plan, layout: Layout, seq_len: int) -> float:
    """Bytes of activations down and gradients up the stages, for all micro-batches, between neighbours on different nodes."""
    message = _stream(model, plan, seq_len) / layout.size("tensor")
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    holders = [rank for _, rank in sorted((stage.start, rank) for rank, row in enumerate(table) for stage in row)]
    crossings = sum(_crossing(layout, a, b) for a, b in pairwise(holders))
    return 2.0 * plan.batch.accumulate * message * crossings


def _crossing(layout: Layout, a: int, b: int) -> int:
    """Pairs of ranks, at the same place of pipeline ranks `a` and `b`, that live on different nodes."""
    return sum(
        layout.crosses_nodes((group[a], group[b])) for group in layout.groups("pipeline") if layout.size("pipeline") > 1
    )


def _tied(model: ModelSpec, plan: Plan, layout: Layout) -> float:
    """Each shard of the shared weight's gradient there and back between the two pipeline ranks that hold it."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    first = next(rank for rank, row in enumerate(table) if any(stage.start == 0 for stage in row))
    last = next(rank for rank, row in enumerate(table) if any(stage.stop == model.layers for stage in row))
    if not model.tied or first == last:
        return 0.0
    stored = bytes_of(plan.precision.stored)
    holders = shard_size(plan) * layout.size("tensor")
    return 2.0 * _crossing(layout, first, last) * model.vocab_size * model.hidden / holders * stored


def _inside_layers(model: ModelSpec, plan: Plan, layout: Layout, seq_len: int, *, masked: bool) -> dict[str, float]:
    """Bytes of the messages inside layers, by axis: tensor, context and routed tokens."""
    train = TrainSpec(steps=1, global_batch=plan.batch.global_batch, seq_len=seq_len)
    shape, columns = shape_of(model, seq_len), layout_of(model, train, plan)
    element = bytes_of(plan.precision.compute)
    masked = masked or model.sliding_window is not None
    tensor_borders = _ring_borders(layout, layout.groups("tensor"))
    borders = {"tensor": tensor_borders, "context_ring": _ring_borders(layout, layout.groups("context_ring"))}
    pairs = {
        "context_ulysses": _pairs_apart(layout, layout.groups("context_ulysses")),
        "expert": _pairs_apart(layout, layout.expert_groups()),
    }
    totals: dict[str, float] = defaultdict(float)
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    for rank, stages in enumerate(table):
        layers = [layer for stage in stages for layer in stage]
        kinds = Counter((model.routed(layer), plan.strategy(layer, model.layers).recompute) for layer in layers)
        for (routed, mode), count in kinds.items():
            blocks = with_blocks(shape, routed=routed)
            chosen = replace(columns, recompute=float(RECOMPUTE_MODES.index(mode)))
            step = step_shape(shape, columns)
            for message in layer_messages(blocks, chosen, step, element=element, masked=masked, compiled=plan.compile):
                times = message.count / model.layers * count
                if message.op == "all_to_all":
                    each = pairs[message.axis][rank] / message.ranks
                else:
                    each = borders[message.axis][rank] * (1 if message.op == "p2p" else _ring_share(message.ranks))
                totals[message.axis] += float(each * times * message.bytes)
        ends = END_EXCHANGES * ((0 in layers) + (model.layers - 1 in layers))
        totals["tensor"] += (
            ends * tensor_borders[rank] * _ring_share(layout.size("tensor")) * _stream(model, plan, seq_len)
        )
    return {axis: plan.batch.accumulate * total for axis, total in totals.items()}


def _pairs_apart(layout: Layout, groups: Iterable[Sequence[int]]) -> dict[int, int]:
    """By pipeline rank, how many ordered pairs of ranks of its groups live on different nodes."""
    found: dict[int, int] = defaultdict(int)
    for group in groups:
        place = layout.coordinates(group[0]).get("pipeline", 0)
        found[place] += sum(layout.crosses_nodes(pair) for pair in permutations(group, 2))
    return found


def _stream(model: ModelSpec, plan: Plan, seq_len: int) -> int:
    """Bytes of a context rank's tokens of a micro-batch between two blocks."""
    return plan.batch.micro_batch * seq_len // context_size(plan) * model.hidden * bytes_of(plan.precision.compute)
