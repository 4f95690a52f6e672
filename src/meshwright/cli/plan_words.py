"""Describes plans in words for `plan`, `simulate`, `train` and the HTML page: in one line, by field, and by mesh axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.costs.machine_rates import is_guessed, unpredicted_message
from meshwright.costs.plan_costs import STACK, as_nodes
from meshwright.observe.number_text import short
from meshwright.planner.candidate import fixed_keys, pins_of, slot_run, without_bf16
from meshwright.planner.explain import MOVES, border
from meshwright.planner.reasons import on_layers
from meshwright.planner.reprice import reprice
from meshwright.simulator.step_simulation import memory_of
from meshwright.spec.chips import CHIPS
from meshwright.spec.layout import Layout, stage_table
from meshwright.spec.model import (
    ModelSpec,
    flops_per_token,
    parameter_count,
    prediction_parameter_count,
    trained_parameter_count,
    without_adapter,
)
from meshwright.spec.nodes import node_type_runs
from meshwright.spec.plan import LayerStrategy, Plan, layer_range
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.plan_name import (
    axis_with_term,
    divides_weights,
    has_schedule,
    layer_numbers,
    layout_name,
    plan_name,
)
from meshwright.workload.copy_options import GATHERS, TOKENS, copied_options

if TYPE_CHECKING:
    from meshwright.planner.devices import Idle
    from meshwright.planner.money import Expense, Rate
    from meshwright.spec.cluster import ClusterSpec
    from meshwright.spec.run import RunSpec

STAGES_SHOWN = 8
"""Maximum number of stages of a rank whose layer ranges are printed."""


def caution(run: RunSpec) -> str:
    """Return a warning about the accuracy of the predicted seconds. Empty if measured runs confirm the prediction."""
    if is_guessed(run.cluster):
        return unpredicted_message(run.cluster)
    if STACK != "meshwright":
        return f"predicted with constants of {STACK}: compare plans and networks with it, but expect other step times"
    if run.data.document_mask:
        return "the prediction ignores data.document_mask: three runs with it were 6% to 28% faster than predicted"
    return ""


def remarks(run: RunSpec) -> Iterator[str]:
    """Yield the assumptions that the planner makes about unusual clusters.

    These are chips without bf16, and nodes with more chips than vendors build.
    """
    chip = CHIPS.get(run.cluster.gpu)
    per_node = run.cluster.ranks_per_node
    network = run.cluster.network
    chosen = run.plan == "auto" or isinstance(run.plan, PlanKeys)
    if chosen and pins_of(run).compute is None and (old := without_bf16(run.cluster)):
        yield (
            f"{' and '.join(old)} has no bf16, so plans compute in fp32; plan.compute=fp16 plans fp16 matmuls, "
            "which this release cannot train"
        )
    if chip and chip.per_node > 1 and per_node > chip.domain and not (network and network.domain):
        yield (
            f"{per_node} {chip.name} per node: vendors build hosts with {chip.per_node}; the prediction assumes that all {per_node} are "
            "connected at link speed; cluster.network.domain sets how many are"
        )


def plan_line(run: RunSpec, plan: Plan) -> str:
    """Return a plan in one line: mesh, schedule, batch and strategies of the layers."""
    batch_text = f"{plan.batch.accumulate} micro-batches of {plan.batch.micro_batch} × {run.train.seq_len} tokens"
    return f"{axes_line(plan)}, {batch_text}, {layers_line(plan)}"


def axes_line(plan: Plan) -> str:
    """Return the name of the layout of a plan, and how its experts are spread if that is not the default."""
    text = layout_name(plan)
    experts = plan.experts
    if experts is None:
        return text
    text += f", experts sharded over {experts.expert_shard}" if min(experts.expert, experts.expert_shard) > 1 else ""
    text += "" if experts.policy == "none" else f", {experts.slots} expert copies by {experts.policy}"
    return text if experts.exchange == "all_to_all" else f"{text}, tokens exchanged by {experts.exchange}"


def short_line(plan: Plan) -> str:
    """Return a short description of a plan: its name, what its copy engines transfer, and the strategies of its layers."""
    engines = "".join(f", {option.transfer_name} by copy engines" for option in copied_options(plan))
    return f"{plan_name(plan)}{engines}, {layers_line(plan)}"


def layers_line(plan: Plan) -> str:
    """Return the strategies of the layers. If there are several, each one is followed by its layers or their number."""
    grouped = _by_strategy(plan)
    if len(grouped) == 1:
        return next(iter(grouped))
    total = 1 + max(int(strategy.range.split("-")[-1]) for strategy in plan.layers)
    return "; ".join(f"{text} ({on_layers(strategies, total)})" for text, strategies in grouped.items())


def _layer_facts(run: RunSpec, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield one fact for each different strategy, with the numbers of its layers."""
    for text, strategies in _by_strategy(plan).items():
        layers = {layer for strategy in strategies for layer in layer_range(strategy.range, run.model.layers)}
        yield "layers", text if len(layers) == run.model.layers else f"{layer_numbers(layers)}: {text}"


def _by_strategy(plan: Plan) -> dict[str, list[LayerStrategy]]:
    """Return the layer strategies of a plan, grouped by their description."""
    grouped: dict[str, list[LayerStrategy]] = {}
    for strategy in plan.layers:
        grouped.setdefault(_strategy(strategy, gathered=divides_weights(plan)), []).append(strategy)
    return grouped


def machines_line(cluster: ClusterSpec) -> str:
    """Return the nodes of a cluster and their devices. Groups of equal nodes are listed separately."""
    if cluster.emulate_nodes > 1:
        return f"{cluster.nodes:,} × {cluster.gpus_per_node} {cluster.gpu}, emulating {cluster.emulate_nodes} nodes"
    runs = node_type_runs(cluster)
    chips_alike = len({node_type.gpu for node_type, _ in runs}) < len(runs)
    parts = []
    for node_type, count in runs:
        port = f"{node_type.port / 1e9:.3g} GB/s a port"
        fabric = " on " + ", ".join(text for text in (node_type.fabric, port) if text) if chips_alike else ""
        parts.append(f"{count:,} × {cluster.gpus_per_node} {node_type.gpu}{fabric}")
    return " and ".join(parts) if len(parts) > 1 else f"{cluster.nodes:,} × {cluster.gpus_per_node} {cluster.gpu}"


def facts(run: RunSpec, plan: Plan) -> list[tuple[str, str]]:
    """Return facts about the plan other than its mesh, as pairs (label, text)."""
    batch = plan.batch
    precision = plan.precision
    ranks = "ranks" if plan.data_ranks == plan.ranks else "data ranks"
    ranks = "rank" if plan.data_ranks == 1 else ranks
    times = "once" if batch.accumulate == 1 else f"{batch.accumulate} times"
    split_text = f"{batch.micro_batch} at a time, {times} on each of {plan.data_ranks:,} {ranks}"
    sequences = f"{batch.global_batch:,} sequence{'s' * (batch.global_batch > 1)}"
    ramp = "".join(f"{stage.batch:,} until step {stage.until:,}, " for stage in run.train.batch_ramp)
    then = f"; {ramp}then all" if ramp else ""
    entries = [("batch", f"{sequences} of {run.train.seq_len:,} tokens: {split_text}{then}")]
    if plan.samples is not None:
        longer = plan.samples.offload
        offloaded = f" (or {longer.capacity:,}, activations of {longer.layers} blocks offloaded)" if longer else ""
        slots = f"in slots of {plan.samples.capacity:,}{offloaded} on each of {plan.data_ranks:,} {ranks}"
        entries = [
            ("batch", f"{run.train.tokens_per_step:,} tokens in samples of up to {run.train.seq_len:,}, {slots}")
        ]
    if has_schedule(plan):
        entries.append(("schedule", plan.schedule.name))
    entries += _layer_facts(run, plan)
    replicas = f", over replicas in {precision.reduce_replicas}" if precision.reduce_replicas else ""
    low = "" if precision.linear == "compute" else f", linear layers in {precision.linear}"
    low += "" if precision.gather == "compute" else f", gathered in {precision.gather}"
    sums = {"device": "", "bf16": ", over micro-batches in bf16", "host": ", over micro-batches in host memory"}
    summed = f"sum gradients in {precision.reduce}{replicas}{sums[plan.accumulation]}"
    entries.append(("precision", f"compute {precision.compute}{low}, {summed}"))
    copied = {GATHERS: "by copy engines", TOKENS: "between tensor ranks by copy engines, beside the matmuls"}
    entries += [(option.transfer_name, copied[option]) for option in copied_options(plan)]
    entries.append(("compile", "each block" if plan.compile else "no"))
    if fixed := fixed_keys(run):
        shown = (
            key if isinstance(value, list | dict) else f"{key} {str(value).lower()}" for key, value in fixed.items()
        )
        entries.append(("fixed by you", ", ".join(shown)))
    entries += [("prediction", _prediction_text(run, plan))] if run.model.prediction_depth else []
    return entries + ([("adapters", adapter_text(run.model, run.train.seq_len))] if run.model.adapter else [])


def adapter_text(model: ModelSpec, seq_len: int) -> str:
    """Describe in words the adapters of the model, which parameters are trained, and the FLOPs compared with full training."""
    adapter = model.adapter
    base = without_adapter(model)
    assert adapter is not None
    targets = (*adapter.targets, *(("moe.experts",) if adapter.experts else ()))
    flops, full = (flops_per_token(of, seq_len, causal=True) for of in (model, base))
    return (
        f"{adapter.kind} of rank {adapter.rank} on {', '.join(targets)}: {short(trained_parameter_count(model))} parameters are "
        f"trained; the other {short(parameter_count(base))} are frozen, without gradients and optimizer state; {flops / full:.0%} of "
        "the FLOPs of full training"
    )


def _prediction_text(run: RunSpec, plan: Plan) -> str:
    """Describe in words what the modules that predict further tokens cost: parameters, FLOPs, memory and time."""
    model = run.model
    seq = run.train.seq_len
    without = replace(model, prediction_depth=0)
    flops, others = (flops_per_token(of, seq, causal=True) for of in (model, without))
    bytes_added = max(parts["predictions"] for _, parts in memory_by_rank(run, plan))
    count = prediction_parameter_count(model)
    modules = model.prediction_depth
    text = f"{modules} module{'s' * (modules > 1)} with the head: {short(count)} parameters, {1 - others / flops:.1%} of the FLOPs"
    text += f", {bytes_text(bytes_added)} of its rank"
    predicted = plan.predicted
    base = reprice(replace(run, model=without), plan, by_units=False).predicted
    whole = reprice(run, plan, by_units=False).predicted
    if (
        predicted is None
        or predicted.step_seconds is None
        or not (base and whole and base.step_seconds and whole.step_seconds)
    ):
        return text
    added = whole.step_seconds - base.step_seconds
    if added < 1e-3 * whole.step_seconds:
        return f"{text}; other stages take longer"
    return f"{text}, {seconds_text(added)} of the step"


def axes(run: RunSpec, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield (axis with its size, link that it uses, data that it carries) for each axis with more than one rank, outermost first."""
    for axis in plan.mesh:
        if axis.size > 1:
            yield axis_with_term(axis.axis, axis.size), border(run, plan, axis.axis), MOVES[axis.axis]
    if plan.experts is not None and plan.experts.expert > 1:
        yield axis_with_term("expert", plan.experts.expert), border(run, plan, "expert"), MOVES["expert"]


def node_line(run: RunSpec, plan: Plan, node: int) -> tuple[str, int]:
    """Return the mesh coordinates of the ranks on node number `node`, and how many ranks it has."""
    per_node = as_nodes(run.cluster).gpus_per_node
    layout = Layout.of(plan, per_node)
    ranks = range(node * per_node, min((node + 1) * per_node, layout.ranks))
    coordinates = [layout.coordinates(rank) for rank in ranks]
    spans = [_span(axis, [rank[axis] for rank in coordinates]) for axis, size in layout.axes if size > 1]
    return ", ".join(spans) or "the whole model", len(ranks)


def chips_by_node(cluster: ClusterSpec) -> list[str]:
    """Return the chip of each node. Empty if all nodes have the same chip."""
    chips = [node_type.gpu for node_type, count in node_type_runs(cluster) for _ in range(count)]
    return chips if len(set(chips)) > 1 else []


BESIDE_TRAINING = ("snapshot", "rollouts")
"""Parts of the memory that every rank has in addition to its part of the training."""


def memory_by_rank(run: RunSpec, plan: Plan) -> list[tuple[str, dict[str, int]]]:
    """Return the bytes of memory by part, for each pipeline rank: [(rank with its layers, {part: bytes})]."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), run.model.layers)
    beside = {key: plan.predicted.memory_bytes.get(key, 0) for key in BESIDE_TRAINING} if plan.predicted else {}
    others = {key: size for key, size in beside.items() if size}
    by_rank = [
        parts | others for parts in memory_of(run.model, slot_run(run, plan).train, plan, cpu=run.cluster.is_cpu)
    ]
    if len(by_rank) == 1:
        return [("every rank", by_rank[0])]
    return [
        (f"rank {rank}: layers {_stages(stages)}", parts)
        for rank, (stages, parts) in enumerate(zip(table, by_rank, strict=True))
    ]


def expense_sentences(spent: Expense, idle: Idle | None) -> Iterator[str]:
    """Yield sentences about the price, the power, and the costs of a million tokens and of the whole training.

    `idle` tells about devices that do not train; their costs are not counted.
    """
    price = spent.price_per_gpu_hour
    watts = spent.watts_per_gpu
    each = []
    if spent.money_per_million_tokens is not None:
        each.append(f"{price.unit}{three_digits(spent.money_per_million_tokens)}")
    if spent.kwh_per_million_tokens is not None:
        each.append(f"{three_digits(spent.kwh_per_million_tokens)} kWh")
    if each:
        yield f"a million tokens: {', '.join(each)}"
    if spent.days is not None and spent.gpu_hours is not None and spent.tokens is not None:
        whole = [f"{two_digits(spent.days)} days", f"{two_digits(spent.gpu_hours)} GPU-hours"]
        whole += [f"{price.unit}{two_digits(spent.money)}"] if spent.money is not None else []
        whole += [f"{two_digits(spent.kwh)} kWh"] if spent.kwh is not None else []
        yield f"{short(spent.tokens)} tokens: {', '.join(whole)}"
        if spent.low is not None and spent.high is not None:
            factors = (spent.low, spent.high)
            ends = [f"{_from_to(spent.days * factor for factor in factors)} days"]
            if spent.money is not None:
                ends.append(f"{price.unit}{_from_to(spent.money * factor for factor in factors)}")
            yield f"80% band of the step: {', '.join(ends)}"
    if idle is not None:
        yield f"for the {spent.gpus:,} devices that train; the {idle.devices - idle.used:,} idle ones are not counted"
    if spent.training_share < 1:
        yield f"the run trains in {spent.training_share:.2%} of this time: failures, restarts, checkpoints and validations take the rest"
    powered = watts.source if watts.value is None else f"{watts.value:g} W ({watts.source})"
    yield f"price of a GPU-hour: {price_sentence(price)}"
    yield f"power of a GPU: {powered}"


def _from_to(ends: Iterable[float]) -> str:
    """The ends of a range; one text where both have the same digits."""
    return " to ".join(dict.fromkeys(map(two_digits, ends)))


def price_sentence(price: Rate) -> str:
    """A price with its source."""
    return price.source if price.value is None else f"{price.currency}{price.value:g} ({price.source})"


def seconds_text(seconds: float) -> str:
    """Return seconds with three digits and a unit, such as 12.0 s, 0.436 s and 38.2 ms."""
    value, unit = (seconds, "s") if seconds >= 0.1 else (1e3 * seconds, "ms")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:#.3g} {unit}"


def bytes_text(count: float) -> str:
    """Return bytes in GB or MB, such as 93.1 GB, 268 MB and 3.04 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def three_digits(number: float) -> str:
    """Return a number with three significant digits."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def two_digits(number: float) -> str:
    """Return a number with two significant digits, as a prediction is not more precise: 1,200, 35, 0.42."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def _strategy(strategy: LayerStrategy, *, gathered: bool) -> str:
    """A strategy in words. Where no rank holds a part of the weights (not `gathered`), none are kept gathered; copies may be freed."""
    kept = ", keep gathered" if gathered else ""
    reshard = ", reshard" if strategy.reshard else kept
    gradients = ", gradients whole" if strategy.gradients == "whole" else ""
    host = f", offload {strategy.offload}" if strategy.offload != "none" else ""
    linear = f", linear {strategy.linear}" if strategy.linear else ""
    return f"recompute {strategy.recompute}{reshard}{gradients}{host}{linear}"


def _span(axis: str, indices: list[int]) -> str:
    low = min(indices)
    high = max(indices)
    return f"{axis} {low}" if low == high else f"{axis} {low}-{high}"


def _stages(stages: tuple[range, ...]) -> str:
    """Return layer ranges as text. Only the first `STAGES_SHOWN` are listed."""
    shown = [f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"{layers.start}" for layers in stages]
    return ", ".join(shown[:STAGES_SHOWN]) + (f", … ({len(shown)} stages)" if len(shown) > STAGES_SHOWN else "")
