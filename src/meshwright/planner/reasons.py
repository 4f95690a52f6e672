"""Why a plan was chosen, and why none was: sentences for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.planner.candidate import HEADROOM, Candidate, peak_bytes, pins_of, untrainable
from meshwright.planner.explain import shortfall
from meshwright.schedules.registry import entry_of, refusal
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

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


def reasons(best: Candidate, others: Sequence[Candidate], run: RunSpec) -> tuple[str, ...]:
    """One sentence for each thing that a person might ask about `best`."""
    plan, pins = best.plan, pins_of(run)
    said = [_beside(best, others, name, value) for name, keys, value in CHOICES if _open(pins, keys)]
    said += _by_memory(plan, run)
    if refused := untrainable(plan):
        said.append(refused)
    pinned = [key for key, value in vars(pins).items() if value is not None]
    said += ["pinned by the run file: " + ", ".join(pinned)] * bool(pinned)
    return tuple(sentence for sentence in said if sentence)


def _beside(best: Candidate, others: Sequence[Candidate], name: str, value: Callable[[Plan], object]) -> str:
    """The chosen value beside the fastest plans that have another."""
    mine = value(best.plan)
    fastest: dict[object, Candidate] = {}
    for other in others:
        if value(other.plan) != mine:
            fastest.setdefault(value(other.plan), other)
    if not fastest:
        return ""
    gaps = [f"{other} {_gap(best, one)}" for other, one in list(fastest.items())[:3]]
    return (
        f"{name} {mine}: {', '.join(gaps)} at its best"
        if len(gaps) == 1
        else f"{name} {mine}: {', '.join(gaps)} at their best"
    )


def _gap(best: Candidate, other: Candidate) -> str:
    """Seconds that the other takes longer; less than nothing where the simpler plan was taken."""
    return f"{other.behind(best):+.3g} s"


def _by_memory(plan: Plan, run: RunSpec) -> list[str]:
    pins, said = pins_of(run), []
    lean = [layer for layer in plan.layers if layer.recompute != "none"]
    if lean and pins.recompute is None and pins.layers is None:
        where = "" if len(plan.layers) == 1 else f" on layers {', '.join(layer.range for layer in lean)}"
        said.append(
            f"recompute {lean[0].recompute}{where}: less does not fit micro-batches of {plan.batch.micro_batch}"
        )
    again = [layer for layer in plan.layers if layer.reshard]
    if again and plan.axis_size("shard") > 1 and pins.reshard is None and pins.layers is None:
        where = "" if len(plan.layers) == 1 else f" on layers {', '.join(layer.range for layer in again)}"
        said.append(f"reshard{where}: keeping gathered weights does not fit micro-batches of {plan.batch.micro_batch}")
    if plan.layers[0].offload != "none" and pins.offload is None:
        said.append(f"offload {plan.layers[0].offload}: without it memory asks for a slower plan")
    return said


def _context(plan: Plan) -> int:
    return plan.axis_size("context_ring") * plan.axis_size("context_ulysses")


def _open(pins: object, keys: tuple[str, ...]) -> bool:
    return all(getattr(pins, key) is None for key in keys)


def nothing_fits(run: RunSpec, candidates: Sequence[Candidate], budget: int) -> str:
    """What the smallest plan needs, where nothing fits `budget` bytes."""
    smallest = min(candidates, key=lambda one: peak_bytes(one.plan)).plan
    return (
        f"no plan fits: of the smallest, {shortfall(run, smallest, budget)}; {HEADROOM:.0%} of the device may be used"
    )


def no_layout(run: RunSpec) -> str:
    """Why the run's pins and sizes leave no layout at all."""
    pins, cluster, batch = pins_of(run), run.cluster, run.train.global_batch
    others = [value for value in (pins.pipeline, pins.tensor, pins.context_ring, pins.context_ulysses) if value]
    inner = 1
    for value in others:
        inner *= value
    data = cluster.ranks // inner
    if pins.schedule and inner * data == cluster.ranks and data and batch % (data * (pins.micro_batch or 1)) == 0:
        many = batch // (data * (pins.micro_batch or 1))
        per_rank = len(pins.stages[0]) if pins.stages else entry_of(pins.schedule).stages_per_rank.start
        if refused := refusal(pins.schedule, pins.pipeline or 1, many, per_rank):
            return f"no plan: {refused}; they are train.global_batch ÷ data ranks ÷ micro-batch size"
    heads, seq = run.model.heads, run.train.seq_len
    return (
        f"no plan: train.global_batch {batch} must be a multiple of the data ranks (the cluster's {cluster.ranks} ranks ÷ pinned pipeline, "
        "tensor and context; times plan.micro_batch if pinned), plan.replicate × plan.shard that number, and pinned tensor and context "
        f"ranks must divide the model's {heads} heads and the sequence's {seq} tokens"
    )
