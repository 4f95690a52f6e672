"""Why a plan was chosen, and why none was: sentences for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

from meshwright.costs.machine_rates import is_guessed
from meshwright.planner.candidate import (
    HEADROOM,
    HOST_HEADROOM,
    Candidate,
    gathers_because,
    host_budget,
    host_gib,
    over_by_rank,
    over_host,
    peak_bytes,
    pins_of,
    tokens_because,
    untrainable,
)
from meshwright.planner.explain import alike, reason_for, seconds_text, shortfall
from meshwright.schedules.registry import entry_of, refusal
from meshwright.simulator.step_simulation import host_bytes
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.plan import RECOMPUTE_MODES, LayerStrategy, Plan, PlanPins, layer_range
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import shard_size

CHOICES: tuple[tuple[str, tuple[str, ...], Callable[[Plan], object]], ...] = (
    ("pipeline", ("pipeline",), lambda plan: plan.axis_size("pipeline")),
    ("tensor", ("tensor",), lambda plan: plan.axis_size("tensor")),
    ("context", ("context_ring", "context_ulysses"), lambda plan: _context(plan)),
    ("replicate", ("replicate", "shard"), lambda plan: plan.axis_size("replicate")),
    ("schedule", ("schedule", "stages"), lambda plan: plan.schedule.name),
    ("micro-batch", ("micro_batch",), lambda plan: plan.batch.micro_batch),
    ("gradients", ("gradients", "layers"), lambda plan: plan.layers[-1].gradients),
)
"""What a person asks about: its name, the pins that settle it, and its value in a plan."""
ALONE = {
    "pipeline": "no pipeline", "tensor": "no tensor ranks", "context": "sequences whole on a rank", "replicate": "one copy of the weights",
}  # fmt: skip
"""What an axis of one rank is called."""
GRADIENTS = {"whole": "kept whole between micro-batches", "shard": "reduced after every micro-batch"}
CARRIED: tuple[
    tuple[str, Callable[[Plan | PlanPins], object], Callable[[Plan], int], Callable[[RunSpec, Plan], str | None]], ...
] = (
    ("gathers", lambda plan: plan.gather_engine, shard_size, gathers_because),
    ("tokens", lambda plan: plan.tensor_engine, lambda plan: plan.axis_size("tensor"), tokens_because),
)
"""What travels between devices by kernels or by copy engines: by which in a plan or in its pins, between how many ranks, and why by kernels
where no comparison of seconds says it."""
ENGINES = {"copy": "copy engines", "kernel": "kernels"}
BESIDE = 3
"""Other values of a choice that are named."""
NAMED_RANGES = 2
"""Layer ranges that are named; of more, only the number of layers."""


def reasons(
    best: Candidate, others: Sequence[Candidate], run: RunSpec, fits: Callable[[Plan], bool] = lambda plan: False
) -> tuple[str, ...]:
    """One sentence for each thing that a person might ask about `best`; `fits` says which plans have enough memory."""
    plan, pins = best.plan, pins_of(run)
    guessed = is_guessed(run.cluster)
    said = [_by_guess(run.cluster)] if guessed else []
    said += [_beside(best, others, name, value, guessed) for name, keys, value in CHOICES if _open(pins, keys)]
    said += [*_by_memory(plan, run, fits), *_carried(best, others, run)]
    if refused := untrainable(plan):
        said.append(refused)
    pinned = [key for key, value in vars(pins).items() if value is not None]
    said += ["pinned by the run file: " + ", ".join(pinned)] * bool(pinned)
    return tuple(sentence for sentence in said if sentence)


def on_layers(layers: Sequence[LayerStrategy], total: int) -> str:
    """Which of a model's `total` layers these strategies are for, in words: ranges while they are few, else how many layers."""
    count = sum(len(layer_range(layer.range, total)) for layer in layers)
    if count == total:
        return "all layers"
    if len(layers) > NAMED_RANGES:
        return f"{count} of {total} layers"
    return f"layer{'s' * (count > 1)} " + " and ".join(layer.range for layer in layers)


def _by_guess(cluster: ClusterSpec) -> str:
    device = "a CPU" if cluster.is_cpu else cluster.gpu
    return f"plans are compared by guessed rates of {device}, whose times are not predicted without a profile"


def _beside(
    best: Candidate, others: Sequence[Candidate], name: str, value: Callable[[Plan], object], guessed: bool = False
) -> str:
    """The chosen value beside the fastest plans that have another: what they take longer, or that a prediction does not tell."""
    mine = value(best.plan)
    fastest: dict[object, Candidate] = {}
    for other in others:
        if value(other.plan) != mine:
            fastest.setdefault(value(other.plan), other)
    shown = list(fastest.items())[:BESIDE]
    if not shown:
        return ""
    longer = [(_with(name, theirs), _gap(best, other, guessed)) for theirs, other in shown if not alike(best, other)]
    texts = (
        [", ".join(f"{way} {'' if at else 'takes '}{gap} longer" for at, (way, gap) in enumerate(longer))]
        if longer
        else []
    )
    apart: dict[str, list[str]] = {}
    for theirs, other in shown:
        if why := alike(best, other):
            apart.setdefault(f"{why}: {reason_for(best.plan, other.plan)}", []).append(_with(name, theirs))
    texts += [f"{' and '.join(ways)} {why}" for why, ways in apart.items()]
    return f"{_chosen(name, mine)}: the best plan {'; '.join(texts)}"


def _carried(best: Candidate, others: Sequence[Candidate], run: RunSpec) -> Iterator[str]:
    """What gathers weights and what carries tokens between tensor ranks, where the search had a choice, and why."""
    for name, engine, ranks, because in CARRIED:
        if ranks(best.plan) == 1 or engine(pins_of(run)) is not None or run.cluster.is_cpu:
            continue
        why = because(run, best.plan) if engine(best.plan) == "kernel" else None
        beside = [one for one in others if ranks(one.plan) == ranks(best.plan)]
        yield f"{name} by kernels: {why}" if why else _beside(best, beside, name, engine)


def _chosen(name: str, value: object) -> str:
    if name == "gradients":
        return f"gradients {GRADIENTS[str(value)]}"
    if name in {one[0] for one in CARRIED}:
        return f"{name} by {ENGINES[str(value)]}"
    return ALONE[name] if name in ALONE and value == 1 else f"{name} {value}"


def _with(name: str, value: object) -> str:
    if name == "gradients":
        return f"with them {GRADIENTS[str(value)]}"
    if name in {one[0] for one in CARRIED}:
        return f"with {ENGINES[str(value)]}"
    return "without" if name in ALONE and value == 1 else f"with {value}"


def _gap(best: Candidate, other: Candidate, guessed: bool) -> str:
    """How much longer the other takes: seconds, or the share of a step where the rates are a guess."""
    behind = other.behind(best)
    return f"{behind / best.seconds:.0%}" if guessed else seconds_text(behind)


def _by_memory(plan: Plan, run: RunSpec, fits: Callable[[Plan], bool]) -> list[str]:
    pins, said = pins_of(run), []
    lean = [layer for layer in plan.layers if layer.recompute != "none"]
    if lean and pins.recompute is None and pins.layers is None:
        free = replace(plan, layers=tuple(replace(layer, recompute="none") for layer in plan.layers))
        why = (
            "keeping all activations is no faster"
            if fits(free)
            else f"with less, {_micro_batches(plan)} do not fit into memory"
        )
        kinds = {mode: [layer for layer in lean if layer.recompute == mode] for mode in RECOMPUTE_MODES}
        where = [f"{mode} on {on_layers(those, run.model.layers)}" for mode, those in kinds.items() if those]
        said.append(f"recompute {' and '.join(where)}: {why}")
    again = [layer for layer in plan.layers if layer.reshard]
    if again and shard_size(plan) > 1 and pins.reshard is None and pins.layers is None:
        free = replace(plan, layers=tuple(replace(layer, reshard=False) for layer in plan.layers))
        why = (
            "keeping them is no faster"
            if fits(free)
            else f"kept gathered, {_micro_batches(plan)} do not fit into memory"
        )
        said.append(f"weights gathered again for the backward pass on {on_layers(again, run.model.layers)}: {why}")
    for kind in sorted({layer.offload for layer in plan.layers} - {"none"}) if pins.offload is None else ():
        on = on_layers([layer for layer in plan.layers if layer.offload == kind], run.model.layers)
        said.append(f"offload {kind} on {on}: without it memory asks for a slower plan")
    sizes = host_bytes(run.model, run.train, plan, run.cluster.nodes)
    named = zip(("activations take", "the optimizer takes"), sizes, strict=True)
    return [
        *said,
        *(f"{what} {size / 1e9:.1f} GB of each host's memory{_guessed(run)}" for what, size in named if size),
    ]


def _guessed(run: RunSpec) -> str:
    """What to say of a host's memory where the cluster says nothing."""
    known = run.cluster.host_memory_gib is not None or run.cluster.is_cpu
    return "" if known else f"; a host is guessed to have {host_gib(run):,.0f} GiB, cluster.host_memory_gib can say"


def _micro_batches(plan: Plan) -> str:
    count = plan.batch.micro_batch
    return f"micro-batches of {count} sequence{'s' * (count > 1)}"


def _context(plan: Plan) -> int:
    return plan.axis_size("context_ring") * plan.axis_size("context_ulysses")


def _open(pins: object, keys: tuple[str, ...]) -> bool:
    return all(getattr(pins, key) is None for key in keys)


def nothing_fits(run: RunSpec, candidates: Sequence[Candidate], budget: int) -> str:
    """What the smallest plan needs, where nothing fits `budget` bytes."""
    smallest = min(candidates, key=lambda one: (over_host(run, one.plan), peak_bytes(one.plan))).plan
    if over := over_host(run, smallest):
        waiting = f"what waits in host memory is {over / 1e9:.1f} GB over the {host_budget(run) / 1e9:.1f} of each host that may be used"
        beside = f", and {shortfall(run, smallest, budget)}" if any(over_by_rank(run, smallest, budget)) else ""
        return f"no plan fits: of the smallest, {waiting} ({HOST_HEADROOM:.0%} of cluster.host_memory_gib{_guessed(run)}){beside}"
    return (
        f"no plan fits: of the smallest, {shortfall(run, smallest, budget)}; {HEADROOM:.0%} of the device may be used"
    )


def no_layout(run: RunSpec) -> str:
    """Why the run's pins and sizes leave no layout at all."""
    pins, cluster, batch = pins_of(run), run.cluster, run.train.global_batch
    pipeline = pins.pipeline or len(pins.stages or ()) or 1
    inner = pipeline * prod(size or 1 for size in (pins.tensor, pins.context_ring, pins.context_ulysses))
    data = cluster.ranks // inner
    if pins.schedule and inner * data == cluster.ranks and data and batch % (data * (pins.micro_batch or 1)) == 0:
        many, allowed = batch // (data * (pins.micro_batch or 1)), entry_of(pins.schedule).stages_per_rank
        per_rank = len(pins.stages[0]) if pins.stages else allowed.start
        if refused := refusal(pins.schedule, pipeline, many, per_rank):
            counted = "micro-batches are train.global_batch ÷ data ranks ÷ micro-batch size"
            return f"no plan: {refused}; {counted if per_rank in allowed else 'plan.stages lists them'}"
    if pins.expert and (refused := _unspreadable(run, pins.expert)):
        return f"no plan: {refused}"
    heads, seq = run.model.heads, run.train.seq_len
    return (
        f"no plan: train.global_batch {batch} must be a multiple of the data ranks (the cluster's {cluster.ranks} ranks ÷ pinned pipeline, "
        "tensor and context; times plan.micro_batch if pinned), plan.replicate × plan.shard that number, and pinned tensor and context "
        f"ranks must divide the model's {heads} heads and the sequence's {seq} tokens"
    )


def _unspreadable(run: RunSpec, expert: int) -> str | None:
    """Why experts cannot be spread over so many ranks beside the pinned axes, or None."""
    pins, experts = pins_of(run), run.model.experts
    tensor, inside = pins.tensor or 1, run.cluster.ranks
    for size in (pins.pipeline, pins.replicate, pins.tensor):
        inside //= size or 1
    if experts % (expert * tensor) == 0 and inside % expert == 0:
        return None
    beside = f" × {tensor} tensor ranks" if tensor > 1 else ""
    return (
        f"plan.expert {expert}{beside} must divide the model's {experts} experts, and plan.expert the {inside} ranks that the shard and "
        "context axes have together"
    )
