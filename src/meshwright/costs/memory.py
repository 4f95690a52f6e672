"""Memory of one rank under a plan, by kind, in bytes.

Weights and optimizer state are exact, and gradients at the moment counted. Activations count what autograd keeps of a block whose
element-wise work is fused (every matrix product's input, the attention inputs and output, the two residuals), as often as the schedule
holds it; gathered parameters and reduction buffers follow FSDP2's two units in flight. The framework's share is a guess until a profile
replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from meshwright.costs.of_plan import context_size, shard_size
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import held_parameters, shard_rows, stage_table
from meshwright.spec.model import ModelSpec, layer_parameters, parameters
from meshwright.spec.plan import LayerStrategy, Plan

StageTable = tuple[tuple[range, ...], ...]
FRAMEWORK_BYTES = {"cpu": 600 << 20, "cuda": 3 << 30}
"""Interpreter, library images, CUDA context, communicators and allocator slack of one rank (guess)."""
KINDS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "transfers", "framework")
UNITS_IN_FLIGHT = 2
"""FSDP units whose gathered weights or unreduced gradients exist at once: the one computing and the one on the wire."""
RECEIVES_AHEAD = 2
"""Buffers of receives that are posted before their compute: one in each direction."""


def bytes_of(number_format: str) -> int:
    return {"bf16": 2, "fp32": 4, "fp64": 8}[number_format]


def memory_by_kind(
    model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool, alive: Sequence[float] = ()
) -> dict[str, int]:
    """Bytes of the fullest rank: weights, gradients, optimizer, gathered, activations, transfers (under a pipeline), logits, framework.

    `alive` is `memory_by_rank`'s.
    """
    return fullest(memory_by_rank(model, train, plan, cpu=cpu, alive=alive))


def fullest(rows: Sequence[dict[str, int]]) -> dict[str, int]:
    """The row with the most bytes in all."""
    return max(rows, key=lambda kinds: sum(kinds.values()))


def memory_by_rank(
    model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool, alive: Sequence[float] = ()
) -> tuple[dict[str, int], ...]:
    """Bytes by kind of every pipeline rank.

    `alive` says by pipeline rank how many bytes of `activation_bytes` the schedule holds at once (`schedules.memory.peak_in_flight`).
    Left out, a rank holds all micro-batches of all its stages, or one when it runs them one after another.
    """
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    framework = FRAMEWORK_BYTES["cpu" if cpu else "cuda"]
    found = []
    for rank in range(len(table)):
        part = _part(model, plan.axis_size("tensor"), shard_size(plan), table, rank)
        times = 1 if one_by_one(plan) else plan.batch.accumulate
        held = alive[rank] if alive else times * _left_by(model, train, plan, part.layers)
        found.append(_of_rank(model, train, plan, part, held, framework))
    return tuple(found)


def one_by_one(plan: Plan) -> bool:
    """Whether one rank takes each micro-batch forward and back before the next."""
    return plan.axis_size("pipeline") == 1 and plan.schedule.name in ("1f1b", "zb_h1")


def activation_bytes(model: ModelSpec, train: TrainSpec, plan: Plan) -> tuple[float, ...]:
    """By virtual stage, in the order a micro-batch visits them, the bytes that one forward of its blocks leaves until its backward."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    stages = sorted((stage for row in table for stage in row), key=lambda stage: stage.start)
    return tuple(_left_by(model, train, plan, stage) for stage in stages)


def _left_by(model: ModelSpec, train: TrainSpec, plan: Plan, layers: Iterable[int]) -> float:
    kept = sum(_kept_per_token(model, plan.strategy(layer, model.layers)) for layer in layers)
    return _tokens(train, plan) * kept * bytes_of(plan.precision.compute)


def _tokens(train: TrainSpec, plan: Plan) -> float:
    """Tokens of a micro-batch that one rank keeps activations of: context ranks split the sequence, tensor ranks what lies between."""
    return plan.batch.micro_batch * train.seq_len / (context_size(plan) * plan.axis_size("tensor"))


@dataclass(frozen=True)
class _Part:
    """What one pipeline rank holds of the model."""

    layers: tuple[int, ...]
    block: int
    """Parameters of one block on this rank, before sharding."""
    ends: int
    """Those of the embedding and the head that are here."""
    sharded: int
    """Parameters of the whole part that the rank keeps for itself: its shard."""
    sends: int
    """Messages of one micro-batch to other ranks, activations and gradients."""
    has_head: bool


@lru_cache(maxsize=256)  # the planner asks for the same parts under every batch and strategy
def _part(model: ModelSpec, width: int, shards: int, table: StageTable, rank: int) -> _Part:
    names = set(held_parameters(model, table, rank))
    rows = [row for row in parameters(model) if row.name in names]
    layers = tuple(layer for stage in table[rank] for layer in stage)
    return _Part(
        layers=layers,
        block=sum(row.count for row in layer_parameters(model, 0)) // width,
        ends=sum(row.count for row in rows if not row.name.startswith("layers.")) // width,
        sharded=sum(len(shard_rows(row.shape[0], shards, 0)) * (row.count // row.shape[0]) for row in rows) // width,
        sends=_sends(table, rank),
        has_head=model.layers - 1 in layers,
    )


def _sends(table: StageTable, rank: int) -> int:
    """Stages of `rank` whose next stage, and those whose stage before, is on another rank."""
    held = sorted((stage.start, other) for other, row in enumerate(table) for stage in row)
    borders = [(before, after) for (_, before), (_, after) in pairwise(held) if before != after]
    return sum(border.count(rank) for border in borders)


def _of_rank(
    model: ModelSpec, train: TrainSpec, plan: Plan, part: _Part, alive: float, framework: int
) -> dict[str, int]:
    """The fuller of two moments: when most activations are alive, and when backward has ended.

    Gradients come as activations go, so a rank never holds all of both, unless earlier micro-batches left their sums.
    """
    stored = 8 if plan.precision.compute == "fp64" else 4
    states = {"weights": part.sharded * stored, "optimizer": 2 * part.sharded * stored, "framework": framework}
    if plan.axis_size("pipeline") > 1:
        messages = RECEIVES_AHEAD + part.sends  # a message sent is let go when the next one goes out
        states["transfers"] = messages * _boundary(model, train, plan)
    full = {
        "gradients": _earlier_gradients(model, plan, part, stored),
        "gathered": _gathered(model, plan, part),
        "activations": round(alive) + _working(model, train, plan, part),
        "logits": _logits(model, train, plan) if part.has_head else 0,
    }
    ended = {
        "gradients": part.sharded * (stored + _travelling(plan)),
        "gathered": _largest(model, plan, part) * _in_flight_bytes(plan),
        "activations": 0,
        "logits": 0,
    }
    kinds = states | max(full, ended, key=lambda kinds: sum(kinds.values()))
    return {kind: kinds[kind] for kind in KINDS if kind in kinds}


def _earlier_gradients(model: ModelSpec, plan: Plan, part: _Part, stored: int) -> int:
    """Sums that earlier micro-batches left: each rank's shard, or its own of the whole; none in layered order or with one micro-batch."""
    if plan.layered or plan.batch.accumulate == 1:
        return 0
    if shard_size(plan) == 1:
        return part.sharded * stored
    kept = {"whole": bytes_of(plan.precision.reduce), "shard": stored / shard_size(plan)}
    each = [kept[plan.strategy(layer, model.layers).gradients] for layer in part.layers]
    return round(sum(each) * part.block + each[-1] * part.ends)


def _travelling(plan: Plan) -> int:
    """Bytes a parameter of the copies in which gradients travel between replicas: they wait together for the end of backward."""
    narrow = plan.precision.reduce_replicas
    return bytes_of(narrow) if narrow and narrow != plan.precision.stored and plan.axis_size("replicate") > 1 else 0


def _gathered(model: ModelSpec, plan: Plan, part: _Part) -> int:
    """Gathered compute-format weights kept or in flight, and unreduced gradients of the units in flight."""
    if shard_size(plan) == 1 and plan.axis_size("replicate") == 1 and plan.precision.compute != "bf16":
        return 0
    compute, reduce = bytes_of(plan.precision.compute), bytes_of(plan.precision.reduce)
    kept = sum(1 for layer in part.layers if not plan.strategy(layer, model.layers).reshard)
    weights = (max(kept, min(UNITS_IN_FLIGHT, len(part.layers))) * part.block + part.ends) * compute
    return weights + UNITS_IN_FLIGHT * _largest(model, plan, part) * reduce


def _largest(model: ModelSpec, plan: Plan, part: _Part) -> int:
    """Parameters of the largest unit."""
    table = model.vocab_size * model.hidden // plan.axis_size("tensor")
    return max(part.block, table if part.ends else 0)


def _in_flight_bytes(plan: Plan) -> int:
    """Bytes a parameter of what is gathered, and of gradients on their way to be reduced."""
    if shard_size(plan) == 1 and plan.axis_size("replicate") == 1 and plan.precision.compute != "bf16":
        return 0
    return bytes_of(plan.precision.compute) + UNITS_IN_FLIGHT * bytes_of(plan.precision.reduce)


def _working(model: ModelSpec, train: TrainSpec, plan: Plan, part: _Part) -> int:
    """What exists beside kept activations: one recomputed block whole, and in layered order every micro-batch's gradient between units."""
    recomputed = any(plan.strategy(layer, model.layers).recompute != "none" for layer in part.layers)
    block = _tokens(train, plan) * _kept_per_token(model, LayerStrategy()) * bytes_of(plan.precision.compute)
    between = plan.batch.accumulate * _boundary(model, train, plan) if plan.layered else 0
    return round(block if recomputed else 0) + between


def _boundary(model: ModelSpec, train: TrainSpec, plan: Plan) -> int:
    """One micro-batch's residual stream."""
    return round(_tokens(train, plan) * model.hidden * bytes_of(plan.precision.compute))


def _kept_per_token(model: ModelSpec, strategy: LayerStrategy) -> int:
    """Elements autograd keeps of one block for one token."""
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    wide = 2 * model.ffn_hidden if model.mlp == "swiglu" else model.ffn_hidden
    if strategy.recompute == "full":
        return model.hidden
    if strategy.recompute == "selective":
        return 3 * model.hidden + 2 * heads + 2 * kv + wide
    norms = 1 if model.parallel_block else 2
    return (2 + norms) * model.hidden + 2 * heads + 2 * kv + wide + model.ffn_hidden


def _logits(model: ModelSpec, train: TrainSpec, plan: Plan) -> int:
    """The loss: one chunk of logits in compute format and fp32, the head's gradient in fp32, hidden states and their gradient.

    The head's forward makes both gradients, and the head's is added up at once; where all forwards run before the first backward, the
    gradients of every micro-batch's hidden states are alive.
    """
    tokens, width = _tokens(train, plan), plan.axis_size("tensor")
    together = tokens * width  # the head sees the tokens of all tensor ranks, and its own part of the vocabulary
    chunk = min(together, train.loss_chunk)
    compute = bytes_of(plan.precision.compute)
    head = model.vocab_size * model.hidden // width * max(4, compute)
    piled = plan.layered or plan.schedule.name == "gpipe"
    left = head + tokens * model.hidden * compute * (plan.batch.accumulate if piled else 1)
    return round(chunk * model.vocab_size / width * (compute + 4) + left + tokens * model.hidden * compute)
