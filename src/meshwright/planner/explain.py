"""Explains a plan in sentences with numbers: what limits its step, and why another plan was not chosen.

The numbers come from `plan.predicted`. `limits` also simulates variants of the plan that need more memory than the
devices have. They show how much time the limited memory costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.plan_costs import as_nodes, number
from meshwright.planner.candidate import (
    HEADROOM,
    Candidate,
    offloads,
    peak_bytes,
    pins_of,
    slot_run,
    usable_by_rank,
)
from meshwright.planner.finalists import SAME_TIME_TOLERANCE, complexity
from meshwright.planner.reprice import reprice
from meshwright.simulator.step_simulation import memory_of
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Layout
from meshwright.spec.plan import CONTEXT_AXES, RECOMPUTE_MODES, LayerStrategy, Plan, Predicted, layer_range
from meshwright.spec.run import RunSpec
from meshwright.workload.copy_options import copied_options

MOVES = {
    "pipeline": "activations between stages",
    "replicate": "gradient sums over replicas",
    "shard": "gathers of weights and reductions of gradients",
    "hybrid": "gathers of weights, reductions of gradients, keys and values of divided samples",
    "context_ring": "keys and values round the ring",
    "context_ulysses": "heads exchanged for tokens",
    "context": "a sequence's keys and values",
    "tensor": "tokens gathered and sums scattered in each layer",
    "expert": "tokens to their experts and back",
    "offload": "copies to and from host memory",
}
"""What the ranks of each axis send to each other; "offload" is for copies to host memory."""
SIMPLER = "the simpler plan is taken"
"""Why a plan wins a tie if it is simpler."""
SHORTER = "both are as simple, and the shorter step is taken"
"""Why a plan wins a tie if neither plan is simpler."""
ROOMIER = "the plan that leaves more memory free is taken"
"""Why a plan wins a tie although it is not simpler: the other plan needs more memory."""
STEADIER = "the plan that loses less on a slower network is taken"
"""Why a plan wins a tie although it is not simpler: the other plan uses the network between nodes more."""
SAFER = "the plan with more margin, in memory or for a slower network, is taken"
"""Why a plan wins a tie although it is not simpler, if either or both of these reasons may apply."""
MAX_NAMED_RANGES = 2
"""Maximum number of ranges of layers that a sentence lists. If there are more, it states the number of layers."""
MIN_SHARE = 0.01
"""Smallest share of the step time at which `limits` reports a part of the step."""


@dataclass(frozen=True)
class Limit:
    """A part of a step's time that could be saved."""

    name: str
    """"compute", "bubble", "host", "memory", or the axis whose communication is exposed."""
    seconds: float
    """Seconds of a step that would be saved if this part cost nothing."""
    text: str
    """The sentence that is printed."""


def limits(run: RunSpec, plan: Plan) -> tuple[Limit, ...]:
    """Return the parts that limit the step of `plan`, the largest first; an empty tuple if no step time is predicted."""
    predicted = plan.predicted
    if predicted is None or predicted.step_seconds is None or predicted.breakdown is None:
        return ()
    step = predicted.step_seconds
    parts = predicted.breakdown
    limits_found = [Limit("compute", parts.compute, _compute_text(predicted, parts.compute))]
    for axis, seconds in parts.exposed.items():
        link = border(run, plan, axis)
        data = MOVES.get(axis, "its communication")
        limits_found.append(
            Limit(
                axis, seconds, f"{axis} {link}: {data}, {_seconds_and_share(seconds, step)} not hidden behind compute"
            )
        )
    counts = f"{plan.batch.accumulate} micro-batch{'es' * (plan.batch.accumulate > 1)} on {plan.axis_size('pipeline')} pipeline ranks"
    limits_found.append(
        Limit(
            "bubble",
            parts.bubble,
            f"bubble: {_seconds_and_share(parts.bubble, step)} waiting for other stages, {counts}",
        )
    )
    limits_found.append(
        Limit(
            "host", parts.host, f"host: {_seconds_and_share(parts.host, step)} in which the device waits for launches"
        )
    )
    limits_found += _memory_limits(run, plan, predicted)
    return tuple(
        sorted((limit for limit in limits_found if limit.seconds > MIN_SHARE * step), key=lambda limit: -limit.seconds)
    )


def border(run: RunSpec, plan: Plan, axis: str) -> str:
    """Return a text that names the link over which the ranks of `axis` communicate, with its rate."""
    cluster = as_nodes(run.cluster)
    if axis == "offload":
        return "on the host link"
    inner = {"context": CONTEXT_AXES}.get(axis, (axis,))
    across = any(mesh_axis.axis in inner and mesh_axis.crosses == "node" for mesh_axis in plan.mesh)
    if axis == "expert":
        layout = Layout.of(plan, cluster.ranks_per_node)
        across = any(map(layout.crosses_nodes, layout.expert_groups()))
    rate = ""
    if cluster.gpu in CHIPS:
        machine = machine_of(cluster, plan.precision.compute)
        rate = f" ({number(machine.nic if across else machine.link) / 1e9:.4g} GB/s a GPU)"
    return f"{'between nodes' if across else 'inside a node'}{rate}"


def reason_against(run: RunSpec, best: Candidate, other: Candidate) -> str:
    """Return why the planner chose `best` and not `other`. Both are plans for `run`."""
    if not other.fits:
        return f"does not fit: {shortfall(run, other.plan)}"
    best_prediction = best.plan.predicted
    other_prediction = other.plan.predicted
    if (
        best_prediction is None
        or other_prediction is None
        or best_prediction.step_seconds is None
        or other_prediction.step_seconds is None
    ):
        return _first_extra_cost(best.plan, other.plan)
    behind = other.behind(best)
    if why := why_not_distinguished(best, other):
        reason = reason_for(best.plan, other.plan) if behind < 0 else _first_extra_cost(best.plan, other.plan)
        extra = _extra_features(best.plan, other.plan) if reason == SIMPLER else []
        return f"{why}: {reason}" + (f"; this one has {', '.join(extra)}" if extra else "")
    if other.simulated != best.simulated:
        return f"{_difference_text(behind)} by the quick estimate, slower than similar plans"
    worse = _slower_parts(best_prediction, other_prediction)
    name, most = max(worse.items(), key=lambda item: item[1], default=("", 0.0))
    return f"{_difference_text(behind)}: {name} {_difference_text(most)}" if name else _difference_text(behind)


def reason_for(best: Plan, other: Plan) -> str:
    """Return why `best` wins if the times of the two plans cannot be distinguished (`finalists.simplest`)."""
    if complexity(best) == complexity(other) and _seconds_of(best) <= _seconds_of(other) < math.inf:
        return SHORTER
    if complexity(best) <= complexity(other):
        return SIMPLER
    fuller = peak_bytes(other) > peak_bytes(best) and any(len(stages) > 1 for stages in other.schedule.stages)
    crosses = any(axis.crosses == "node" for axis in other.mesh)
    if fuller == crosses:
        return SAFER
    return ROOMIER if fuller else STEADIER


def _seconds_of(plan: Plan) -> float:
    """Return the predicted seconds of a step; infinite if they are not known."""
    return plan.predicted.step_seconds or math.inf if plan.predicted else math.inf


def _extra_features(best: Plan, other: Plan) -> list[str]:
    """Return what makes `other` more complex than `best` (`finalists.complexity`), as texts."""

    def features(plan: Plan) -> dict[str, None]:
        layers = [f"recompute {layer.recompute}" for layer in plan.layers if layer.recompute != "none"]
        layers += [f"offload {layer.offload}" for layer in plan.layers if layer.offload != "none"]
        layers += ["gradients kept whole" for layer in plan.layers if layer.gradients == "whole"]
        copies = [f"{option.transfer_name} by copy engines" for option in copied_options(plan)]
        return dict.fromkeys([*layers, *copies])

    fewer = features(best)
    axes, more_axes = (sum(axis.size > 1 for axis in plan.mesh) for plan in (best, other))
    extra = [f"{more_axes} axes"] if more_axes > axes else []
    extra += [text for text in features(other) if text not in fewer]
    count = len(other.layers)
    return extra + ([f"{count} ranges of layers that differ"] if count > len(best.layers) else [])


def why_not_distinguished(best: Candidate, other: Candidate) -> str:
    """Return why the prediction does not show that `other` takes longer than `best`; empty if it shows that.

    If the times of two plans differ by at most `SAME_TIME_TOLERANCE`, they cannot be distinguished, and the simplest
    plan is chosen. If `other` is predicted to be faster by more than that, the text says why it was not chosen.
    """
    behind = other.behind(best)
    least = SAME_TIME_TOLERANCE * best.seconds
    if behind > least:
        return ""
    if behind >= -least:
        return f"cannot be told apart (within {SAME_TIME_TOLERANCE:.0%})"
    if offloads(other.plan) and not offloads(best.plan):
        return "gains too little to justify pinned host memory"
    return "cannot be told apart " + (
        "by the quick estimate" if other.simulated != best.simulated else "within the 80% band"
    )


def shortfall(run: RunSpec, plan: Plan, usable_bytes: float | None = None) -> str:
    """Return a sentence with both parts of `shortfall_parts`."""
    need, largest = shortfall_parts(run, plan, usable_bytes)
    return f"{need} ({largest})"


def shortfall_parts(run: RunSpec, plan: Plan, usable_bytes: float | None = None) -> tuple[str, str]:
    """Return texts about the pipeline rank of `plan` that exceeds its usable memory most: by how much, and its largest
    categories.

    `usable_bytes` is the usable memory of a device, by default the usual share of the cluster's.
    """
    bytes_by_rank = memory_of(run.model, slot_run(run, plan).train, plan, cpu=run.cluster.is_cpu)
    needs = [sum(by_category.values()) for by_category in bytes_by_rank]
    limits = usable_by_rank(run, plan, usable_bytes or HEADROOM * (run.cluster.memory_bytes() or 0))
    rank = max(range(len(bytes_by_rank)), key=lambda index: needs[index] - limits[index])
    need = needs[rank]
    usable = limits[rank]
    by_category = sorted(bytes_by_rank[rank].items(), key=lambda item: -item[1])
    largest = ", ".join(f"{category} {size / 1e9:.1f}" for category, size in by_category[:3]) + " GB"
    rank_name = f"pipeline rank {rank}" if len(bytes_by_rank) > 1 else "a rank"
    if need <= usable:
        return f"{rank_name} needs {need / 1e9:.1f} GB of the usable {usable / 1e9:.1f} GB", largest
    excess = f"{(need - usable) / 1e9:.1f} GB more than the usable {usable / 1e9:.1f} GB"
    return f"{rank_name} needs {need / 1e9:.1f} GB, {excess}", largest


def on_layers(layers: Sequence[LayerStrategy], total: int) -> str:
    """Return a text that names the layers of `layers`, the strategies of some of the model's `total` layers.

    Up to two ranges are named. If there are more, the text states the number of layers:

    >>> on_layers([LayerStrategy(range="0-7"), LayerStrategy(range="31")], total=32)
    'layers 0-7 and 31'
    """
    count = sum(len(layer_range(layer.range, total)) for layer in layers)
    if count == total:
        return "all layers"
    if len(layers) > MAX_NAMED_RANGES:
        return f"{count} of {total} layers"
    return f"layer{'s' * (count > 1)} " + " and ".join(layer.range for layer in layers)


def micro_batches_text(plan: Plan) -> str:
    """Return a text with the size of the plan's micro-batches."""
    count = plan.batch.micro_batch
    return f"micro-batches of {count} sequence{'s' * (count > 1)}"


def parts_of(predicted: Predicted) -> dict[str, float]:
    """Return the seconds of a step by part: "compute", "exposed AXIS", "bubble" and "host".

    Parts of 0 seconds are left out.
    """
    if predicted.breakdown is None:
        return {}
    exposed = {f"exposed {axis}": seconds for axis, seconds in predicted.breakdown.exposed.items()}
    parts = {
        "compute": predicted.breakdown.compute,
        **exposed,
        "bubble": predicted.breakdown.bubble,
        "host": predicted.breakdown.host,
    }
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _slower_parts(best_prediction: Predicted, other_prediction: Predicted) -> Mapping[str, float]:
    """Return the parts that take longer in the other prediction, with the difference in seconds."""
    best_parts = parts_of(best_prediction)
    difference = {name: seconds - best_parts.get(name, 0.0) for name, seconds in parts_of(other_prediction).items()}
    return {name: seconds for name, seconds in difference.items() if seconds > 0}


def _first_extra_cost(best: Plan, other: Plan) -> str:
    """Return the first setting that costs time or memory in `other` and not in `best`.

    It is for plans whose predicted seconds are equal or unknown. If there is none, the result is that of `reason_for`.
    """
    best_layer = best.layers[0]
    other_layer = other.layers[0]
    lower_memory = RECOMPUTE_MODES.index(other_layer.recompute) > RECOMPUTE_MODES.index(best_layer.recompute)
    crossing = [any(axis.axis == "shard" and axis.crosses == "node" for axis in plan.mesh) for plan in (best, other)]
    costs = (
        (lower_memory, f"computes activations twice (recompute {other_layer.recompute})"),
        (
            other_layer.offload not in (best_layer.offload, "none"),
            f"copies to host memory (offload {other_layer.offload})",
        ),
        (other_layer.reshard and not best_layer.reshard, "gathers weights twice"),
        (crossing[1] and not crossing[0], "shards across nodes"),
        (other.batch.micro_batch < best.batch.micro_batch, "its smaller matmuls hide less of the gathers"),
        (
            peak_bytes(other) - peak_bytes(best) > 5e7,
            f"needs {(peak_bytes(other) - peak_bytes(best)) / 1e9:.1f} GB more",
        ),
    )
    return next((text for applies, text in costs if applies), None) or reason_for(best, other)


def _compute_text(predicted: Predicted, seconds: float) -> str:
    assert predicted.step_seconds is not None
    text = f"compute: {_seconds_and_share(seconds, predicted.step_seconds)} is arithmetic"
    return text + (
        f", at {predicted.mfu * predicted.step_seconds / seconds:.0%} of the chip's peak"
        if predicted.mfu and seconds
        else ""
    )


def _memory_limits(run: RunSpec, plan: Plan, predicted: Predicted) -> list[Limit]:
    """Return the settings that cost time and are used only because memory is limited: recompute, reshard, small
    micro-batches.
    """
    budget = run.cluster.memory_bytes()
    limits_found = []
    if budget is None or predicted.step_seconds is None:
        return []
    for (cost_text, without_text), roomy in _plans_with_more_memory(run, plan):
        # If the plan without the setting fits, limited memory is not the reason for the setting.
        bytes_by_rank = memory_of(run.model, slot_run(run, roomy).train, roomy, cpu=run.cluster.is_cpu)
        usable = usable_by_rank(run, plan, HEADROOM * budget)
        if all(sum(rank_bytes.values()) <= limit for rank_bytes, limit in zip(bytes_by_rank, usable, strict=True)):
            continue
        roomy_prediction = reprice(run, roomy).predicted
        assert roomy_prediction is not None and roomy_prediction.step_seconds is not None
        seconds_saved = predicted.step_seconds - roomy_prediction.step_seconds
        if seconds_saved > 0:
            saved_text = _seconds_and_share(seconds_saved, predicted.step_seconds)
            text = f"memory: {cost_text} {saved_text}; {without_text} {shortfall(run, roomy)}"
            limits_found.append(Limit("memory", seconds_saved, text))
    return limits_found


def _plans_with_more_memory(run: RunSpec, plan: Plan) -> Iterator[tuple[tuple[str, str], Plan]]:
    """Yield, for each setting that saves memory and costs time, two texts and the plan without the setting.

    The texts are the beginnings of two clauses, for example ("recompute full takes", "without it").
    """
    pins = pins_of(run)
    batch = plan.batch
    if any(layer.recompute != "none" for layer in plan.layers):
        mode = max((layer.recompute for layer in plan.layers), key=RECOMPUTE_MODES.index)
        layers = tuple(replace(layer, recompute="none") for layer in plan.layers)
        yield (f"recompute {mode} takes", "without it"), replace(plan, layers=layers)
    if pins.reshard is None and pins.layers is None and any(layer.reshard for layer in plan.layers):
        layers = tuple(replace(layer, reshard=False) for layer in plan.layers)
        yield ("gathering weights again takes", "if they stayed gathered"), replace(plan, layers=layers)
    if pins.micro_batch is None and not batch.accumulate % 2 and batch.accumulate // 2 >= plan.axis_size("pipeline"):
        larger = replace(batch, micro_batch=2 * batch.micro_batch, accumulate=batch.accumulate // 2)
        with suppress(BadInput):  # the schedule may not support the smaller number of micro-batches
            yield (
                (f"micro-batches of {batch.micro_batch} cost", f"with {larger.micro_batch}"),
                _checked(run, replace(plan, batch=larger)),
            )


def _checked(run: RunSpec, plan: Plan) -> Plan:
    """Return `plan`. Raises BadInput if its schedule cannot be made."""
    memory_of(run.model, slot_run(run, plan).train, plan, cpu=run.cluster.is_cpu)
    return plan


def _seconds_and_share(seconds: float, step: float) -> str:
    return f"{seconds_text(seconds)} ({seconds / step:.0%})"


def _difference_text(seconds: float) -> str:
    return f"+{seconds_text(seconds)}"


def seconds_text(value: float) -> str:
    """Return seconds with two decimal places, or below 0.1 s milliseconds with three digits."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:#.3g} ms"
