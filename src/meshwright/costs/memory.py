"""Memory of one rank under a plan, by kind, in bytes.

Weights and optimizer state are exact, and gradients at the moment counted. Activations count what autograd keeps of a block whose
element-wise work is fused (every matrix product's input, what attention reads and writes, the two residuals), as often as the schedule
holds it; `account` adds what is gathered, reduced and computed beside them. The framework's share is a guess until a profile replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from meshwright.costs.account import KINDS, LAYERS_STAYING, Formats, Held, account
from meshwright.costs.inputs import Array
from meshwright.costs.plan_costs import context_size, experts_over, shard_size, state_bytes
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import gradients_stay, shard_rows, stage_table
from meshwright.spec.model import ModelSpec, ParameterSpec, block_parameters, end_parameters, parameters
from meshwright.spec.plan import (
    REPEATING,
    Engine,
    LayerStrategy,
    Linear,
    Plan,
    Precision,
    Recompute,
    ReduceEngine,
)

StageTable = tuple[tuple[range, ...], ...]
FRAMEWORK_BYTES = {"cpu": 600 << 20, "cuda": 3 << 30}
"""Interpreter, library images, CUDA context, communicators and allocator slack of one rank (guess)."""


def bytes_of(number_format: str) -> int:
    return {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[number_format]


def gathered_width(plan: Plan, layer: int | None, layers: int) -> int:
    """Bytes of a weight of block `layer`, or with None of one of the model's ends, while it is gathered."""
    low = plan.precision.gather == "fp8" and layer is not None and plan.linear(layer, layers) == "fp8_tensorwise"
    return 1 if low else bytes_of(plan.precision.compute)


def added_up(plan: Plan, strategy: LayerStrategy) -> bool:
    """Whether a rank adds several micro-batches' gradients up, in the format of the sum, before they are summed over shards."""
    return plan.batch.accumulate > 1 and (plan.layered or strategy.gradients == "whole")


def summed_by_products(plan: Plan, layer: int, layers: int) -> bool:
    """Whether the products that make the weight gradients of a block's linear layers add them to those of earlier micro-batches."""
    summed = added_up(plan, plan.strategy(layer, layers)) or (plan.batch.accumulate > 1 and shard_size(plan) == 1)
    return summed and plan.linear(layer, layers) == "compute"


def sent_width(precision: Precision, engine: ReduceEngine, added: Array) -> Array:
    """Bytes of a gradient while it is summed over several shards by the plan's `engine`: in the format of the sum, or exchanged as it was
    computed where that is no wider and nothing was `added` to it."""
    wide = bytes_of(precision.reduce)
    return np.where(added, wide, min(wide, bytes_of(precision.compute))) if engine == "exchange" else wide


def formats(
    train: TrainSpec,
    precision: Precision,
    *,
    cpu: bool,
    replicas: int = 1,
    engine: Engine = "kernel",
    reduce_engine: ReduceEngine = "kernel",
    tensor_engine: Engine = "kernel",
    added: Array = False,
) -> Formats:
    """Bytes of a run's numbers; `replicas` is how many ranks gradients are summed over after sharding. Engines are the plan's; `added` is
    `sent_width`'s."""
    sent = sent_width(precision, reduce_engine, added)
    narrow, compute = precision.reduce_replicas, bytes_of(precision.compute)
    return Formats(
        compute=compute, reduce=bytes_of(precision.reduce), stored=bytes_of(precision.stored), resident=bytes_of(precision.resident),
        travelling=bytes_of(narrow) if narrow and narrow != precision.stored and replicas > 1 else 0,
        logit=compute + 4 if cpu else compute, chunk=train.loss_chunk, workspace=0 if cpu else Formats.workspace,
        framework=FRAMEWORK_BYTES["cpu" if cpu else "cuda"], gathered=1 / compute if precision.gather == "fp8" else 1.0,
        low=low_share(precision, precision.linear), window=engine == "copy", sent=sent, received=sent * (reduce_engine == "exchange"),
        token_window=tensor_engine == "copy" and not cpu,
    )  # fmt: skip


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


def allocated(kinds: dict[str, int]) -> int:
    """The part of a row that tensors take: what an allocator's peak is compared with."""
    return sum(kinds.values()) - kinds["framework"]


def memory_by_rank(
    model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool, alive: Sequence[float] = ()
) -> tuple[dict[str, int], ...]:
    """Bytes by kind of every pipeline rank.

    `alive` says by pipeline rank how many bytes of `activation_bytes` the schedule holds at once (`peak_in_flight`).
    Left out, a rank holds all micro-batches of all its stages, or one when it runs them one after another.

    A layer with `offload: activations` (or `both`) leaves nothing on the device between its forward and its backward but two layers of one
    micro-batch (three under a pipeline). Where the optimizer is in host memory, master weights and moments are there too; the rank keeps
    its shard of the weights in the compute format, from which units are gathered, the sum of their gradients, and room for a few chunks.
    """
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    times = 1 if one_by_one(plan) else plan.batch.accumulate
    columns, per_token = [], _per_token(model, plan)
    for rank in range(len(table)):
        part = _part(model, plan.axis_size("tensor"), shard_size(plan), experts_over(plan), table, rank)
        held = alive[rank] if alive else times * _left_by(model, train, plan, part.layers)
        columns.append(_bytes_by_kind(model, train, plan, part, held, per_token))
    joined = Held(**{name: np.array([column[name] for column in columns], float) for name in columns[0]})
    replicas = plan.axis_size("replicate")
    numbers = formats(
        train, plan.precision, cpu=cpu, replicas=replicas, engine=plan.gather_engine, tensor_engine=plan.tensor_engine,
        reduce_engine=plan.reduce_engine, added=any(added_up(plan, layer) for layer in plan.layers),
    )  # fmt: skip
    found = account(joined, numbers)
    kinds = [kind for kind in KINDS if kind != "transfers" or len(table) > 1]
    return tuple({kind: round(float(found[kind][rank])) for kind in kinds} for rank in range(len(table)))


def optimizer_on_host(model: ModelSpec, plan: Plan, nodes: int) -> float:
    """Bytes of each node's memory that hold the state of parameters whose optimizer is in host memory."""
    if not any(layer.optimizer_away for layer in plan.layers):
        return 0.0
    away = sum(
        row.count for row in parameters(model) if plan.strategy_of(row.name, model.layers).optimizer_away
    ) * plan.axis_size("replicate")
    return away * state_bytes(plan.precision) / nodes


def one_by_one(plan: Plan) -> bool:
    """Whether one rank takes each micro-batch forward and back before the next."""
    return plan.axis_size("pipeline") == 1 and plan.schedule.name not in ("gpipe", "breadth_first")


def activation_bytes(model: ModelSpec, train: TrainSpec, plan: Plan, *, away: bool = False) -> tuple[float, ...]:
    """By virtual stage, in the order a micro-batch visits them, the bytes that one forward of its blocks leaves until its backward: on the
    device, or `away` in host memory."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    stages = sorted((stage for row in table for stage in row), key=lambda stage: stage.start)
    elements, strategies = elements_kept(model, plan), plan.strategies(model.layers)
    left = [kept if one.activations_away == away else 0.0 for kept, one in zip(elements, strategies, strict=True)]
    each = _tokens(train, plan) * bytes_of(plan.precision.compute)
    return tuple(each * sum(left[stage.start : stage.stop]) for stage in stages)


def low_share(precision: Precision, linear: Linear) -> float:
    """Bytes of a linear layer's input as it is kept for backward, over those in the compute format."""
    return 1.0 if linear == "compute" else 1 / bytes_of(precision.compute)


def kept_per_token(model: ModelSpec, layer: int, recompute: Recompute, low: float = 1.0) -> float:
    """Elements that autograd keeps of block `layer` for one token; inputs of products count `low`."""
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    joined = query + 2 * kv
    if recompute in REPEATING:
        return model.hidden + (query if recompute == "all_but_attention" else 0)
    wide, inner, routed = _feed_forward(model, layer)
    if recompute == "selective":
        # What experts are given is gathered again; what they gave is the result of a product.
        return 2 * model.hidden + query + joined + wide + routed - _copied(model, layer)
    # Each norm with what it reads and makes: a parallel block has one, and nothing keeps the sums of its two branches.
    norms = 1 if model.parallel_block else 2
    # Values are a view into the joined projection, which therefore stays whole beside the turned queries and keys.
    turned = query + kv if model.positions == "rope" else 0
    # Attention keeps its own result as it is: in fp8 the product behind it has a copy.
    again = low * query if low < 1 else 0
    return (1 + low) * norms * model.hidden + query + again + joined + turned + wide + low * inner + routed


def travelled_per_token(model: ModelSpec, layer: int, recompute: Recompute, ranks: int) -> float:
    """Elements of one token that are kept besides where its experts are on `ranks` ranks: selective recompute does not ask for rows twice,
    and keeps what the experts gave as it left and as it arrived."""
    again = recompute == "selective" and ranks > 1
    return 2 * _copied(model, layer) if again else 0.0


def worked_per_token(model: ModelSpec, layer: int, recompute: Recompute, low: float = 1.0) -> float:
    """Elements of one token that a block's backward holds over what its forward kept: gradients of the feed-forward's wide half and of the
    stream beyond what it has let go, and what is computed again. Of an expert's input and output one is there: with the gradient of the
    output the output goes, and then the input is gathered again."""
    wide, _, _ = _feed_forward(model, layer)
    made = wide + model.hidden
    if recompute == "none":
        return made
    again = kept_per_token(model, layer, "none", low) - kept_per_token(model, layer, recompute, low)
    return made + again - _copied(model, layer)


def _feed_forward(model: ModelSpec, layer: int) -> tuple[float, float, float]:
    """Elements of one token before the activation, behind it, and of what routing makes: copies for and of its experts, and choices."""
    width, routed = model.ffn_hidden, 0.0
    if model.routed(layer):
        width = model.experts_per_token * model.expert_hidden + model.shared_expert_hidden
        routed = 2 * _copied(model, layer) + model.experts
    return (2 * width if model.mlp == "swiglu" else width), width, routed


def _copied(model: ModelSpec, layer: int) -> float:
    """Elements of a token's copies, one for each of its experts; 0 in a block without."""
    return float(model.experts_per_token * model.hidden) if model.routed(layer) else 0.0


def exchanged_per_token(model: ModelSpec, tensor: Array, context: Array) -> Array:
    """Elements of the block at work that other ranks sent: its gathered input with the gradient; queries, keys and values."""
    gathered = np.where(np.asarray(tensor) > 1, 2.0 * np.asarray(tensor) * model.hidden, 0.0)
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    return gathered + np.where(np.asarray(context) > 1, heads, 0)


def elements_kept(model: ModelSpec, plan: Plan) -> list[float]:
    """By layer, elements of one token that a forward leaves for its backward, on the device or in host memory."""
    per_token = _per_token(model, plan)
    return [per_token(layer)[0] for layer in range(model.layers)]


def _left_by(model: ModelSpec, train: TrainSpec, plan: Plan, layers: Iterable[int]) -> float:
    strategies, per_token = plan.strategies(model.layers), _per_token(model, plan)
    elements = sum(per_token(layer)[0] for layer in layers if not strategies[layer].activations_away)
    return _tokens(train, plan) * elements * bytes_of(plan.precision.compute)


def _per_token(model: ModelSpec, plan: Plan) -> Callable[[int], tuple[float, float]]:
    """Says how many elements of one token a block keeps, and how many its backward holds beside them; counted once for blocks alike."""
    spread, strategies = experts_over(plan) * plan.axis_size("tensor"), plan.strategies(model.layers)
    known = dict[tuple[bool, Recompute, Linear | None], tuple[float, float]]()

    def per_token(layer: int) -> tuple[float, float]:
        mode = strategies[layer].recompute
        kind = model.routed(layer), mode, strategies[layer].linear
        if kind not in known:
            low = low_share(plan.precision, plan.linear(layer, model.layers))
            kept = kept_per_token(model, layer, mode, low) + travelled_per_token(model, layer, mode, spread)
            known[kind] = kept, worked_per_token(model, layer, mode, low)
        return known[kind]

    return per_token


def _tokens(train: TrainSpec, plan: Plan) -> float:
    """Tokens of a micro-batch that one rank keeps activations of: context ranks split the sequence, tensor ranks what lies between."""
    return plan.batch.micro_batch * train.seq_len / (context_size(plan) * plan.axis_size("tensor"))


@dataclass(frozen=True)
class _Part:
    """What one pipeline rank holds of the model."""

    layers: tuple[int, ...]
    blocks: tuple[int, ...]
    """Parameters of each block on this rank, its experts among them, before sharding."""
    shards: tuple[float, ...]
    """Those of each block that the rank keeps for itself."""
    ends: int
    """Those of the embedding and the head that are here."""
    head: int
    """Those of the unit that ends with the loss."""
    last: int
    """Those of the unit that a forward gathers last."""
    sharded: float
    """Parameters of the whole part that the rank keeps for itself: its shard."""
    sends: int
    """Messages of one micro-batch to other ranks, activations and gradients."""


@lru_cache(maxsize=4096)  # the planner asks for the same parts under every batch and strategy
def _part(model: ModelSpec, width: int, shards: int, expert: int, table: StageTable, rank: int) -> _Part:
    layers = tuple(layer for stage in table[rank] for layer in stage)
    kinds = {routed: _block(model, routed, width, shards, expert) for routed in {model.routed(one) for one in layers}}
    held = [kinds[model.routed(layer)] for layer in layers]
    blocks = tuple(block.count for block in held)
    has_head = model.layers - 1 in layers
    held_ends = [
        parameter
        for parameter in end_parameters(model)
        if (0 in layers and parameter.at_front)
        or (has_head and (not parameter.at_front or (model.tied and parameter.name == "embed.weight")))
    ]
    together = model.tied and 0 in layers  # one unit for both ends
    names_of_head = ("embed", "positions", "norm", "head") if together else ("norm", "head", *["embed"][: model.tied])
    head = _sum_of(held_ends, names_of_head) // width if has_head else 0
    whole = sum(block.shard for block in held) + sum(_shard(parameter.shape, shards) for parameter in held_ends)
    return _Part(
        layers=layers,
        blocks=blocks,
        shards=tuple(block.owned for block in held),
        ends=sum(parameter.count for parameter in held_ends) // width,
        head=head,
        last=head if has_head and not together else max(blocks),
        sharded=whole / width,
        sends=_sends(table, rank),
    )


@dataclass(frozen=True)
class _Block:
    """Parameters of one block."""

    count: int
    """On this rank, its experts among them, before sharding."""
    owned: float
    """Those that the rank keeps for itself, were they cut evenly."""
    shard: float
    """Those of all tensor ranks that the first shard keeps: rows are never cut."""


@lru_cache(maxsize=4096)
def _block(model: ModelSpec, routed: bool, width: int, shards: int, expert: int) -> _Block:
    block = block_parameters(model, routed=routed)
    # Experts are cut evenly: over `expert` ranks, and each over the other ranks of the shard and context axes.
    return _Block(
        count=sum(part.count // (expert if part.expert else 1) for part in block) // width,
        owned=sum(part.count for part in block) // width / shards,
        shard=sum(part.count / shards if part.expert else _shard(part.shape, shards) for part in block),
    )


def _sends(table: StageTable, rank: int) -> int:
    """Stages of `rank` whose next stage, and those whose stage before, is on another rank."""
    held = sorted((stage.start, other) for other, row in enumerate(table) for stage in row)
    borders = [(before, after) for (_, before), (_, after) in pairwise(held) if before != after]
    return sum(border.count(rank) for border in borders)


def _sum_of(rows: Sequence[ParameterSpec], parts: Sequence[str]) -> int:
    return sum(row.count for row in rows if row.name.partition(".")[0] in parts)


def _shard(shape: tuple[int, ...], shards: int) -> int:
    """Elements of the first rank's rows."""
    return len(shard_rows(shape[0], shards, 0)) * (math.prod(shape) // shape[0])


def _bytes_by_kind(
    model: ModelSpec,
    train: TrainSpec,
    plan: Plan,
    part: _Part,
    alive: float,
    per_token: Callable[[int], tuple[float, float]],
) -> dict[str, float]:
    every = plan.strategies(model.layers)
    strategies = [every[layer] for layer in part.layers]
    tokens, compute, accumulate = _tokens(train, plan), bytes_of(plan.precision.compute), plan.batch.accumulate
    size = tokens * compute
    waiting = [
        size * per_token(layer)[0]
        for layer, strategy in zip(part.layers, strategies, strict=True)
        if strategy.activations_away
    ]
    working = max(per_token(layer)[1] for layer in part.layers)
    exchanged = exchanged_per_token(model, plan.axis_size("tensor"), context_size(plan))
    whole = (
        shard_size(plan) == 1 and plan.axis_size("replicate") == 1 and plan.precision.compute == plan.precision.stored
    )
    host = sum(n for n, s in zip(part.blocks, strategies, strict=True) if s.optimizer_away)
    host += part.head * every[-1].optimizer_away
    host += (part.ends - part.head) * every[0].optimizer_away
    piled = accumulate if plan.layered else 0
    staying = LAYERS_STAYING + (plan.axis_size("pipeline") > 1)
    once = all(strategy.gradients == "whole" for strategy in strategies) and accumulate > 1
    return {
        "owned": part.sharded, "block": max(part.blocks), "ends": part.ends, "head": part.head, "shards": shard_size(plan),
        "gathers": not whole, "kept": sum(not strategy.reshard for strategy in strategies),
        "ends_kept": not strategies[-1].reshard, "last": part.last, "sums": _sums(plan, part, strategies),
        "reduces": not once or one_by_one(plan) or plan.layered,
        "away": host / (sum(part.blocks) + part.ends),
        "layers": len(part.layers), "alive": alive + sum(sorted(waiting)[-staying:]),
        "working": size * (working + float(exchanged)), "tokens": tokens, "width": plan.axis_size("tensor"),
        "hidden": model.hidden, "vocab": model.vocab_size, "piled": piled, "stays": gradients_stay(model, plan),
        "piled_head": accumulate if plan.layered or plan.schedule.name == "gpipe" else 1,
        "messages": part.sends if plan.axis_size("pipeline") > 1 else -1,
    }  # fmt: skip


def _sums(plan: Plan, part: _Part, strategies: Sequence[LayerStrategy]) -> float:
    """Sums that earlier micro-batches left: each rank's shard, or its own of the whole; none in layered order or with one micro-batch."""
    if plan.layered or plan.batch.accumulate == 1:
        return 0
    stored = bytes_of(plan.precision.stored)
    if shard_size(plan) == 1:
        return part.sharded * stored
    whole = [strategy.gradients == "whole" for strategy in strategies]
    blocks = zip(whole, part.blocks, part.shards, strict=True)
    narrow, ends = bytes_of(plan.precision.reduce), part.ends
    sums = sum(narrow * block if own else stored * shard for own, block, shard in blocks)
    return sums + (narrow * ends if whole[-1] else stored * ends / shard_size(plan))
