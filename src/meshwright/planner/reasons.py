"""Why a plan was chosen, and why none was: sentences for people."""

from __future__ import annotations

from meshwright.planner.candidate import HEADROOM, Candidate, peak_bytes, pins_of, untrainable
from meshwright.spec.run import RunSpec


def reasons(best: Candidate, candidates: list[Candidate], run: RunSpec, budget: int | None) -> tuple[str, ...]:
    """One sentence for each thing that a person might ask about `best`."""
    plan, pins = best.plan, pins_of(run)
    layer = plan.layers[0]
    room = f" of {budget / 1e9:.1f} GB" if budget else ""
    said = [f"predicted peak {peak_bytes(plan) / 1e9:.1f} GB a rank{room}"]
    # Ranked by time, a smaller micro-batch may have done without and been slower.
    size = f" micro-batches of {plan.batch.micro_batch}" if best.seconds else ""
    if pins.schedule is None:
        said += _other_schedules(best, candidates)
    if layer.recompute != "none" and pins.recompute is None and pins.layers is None:
        said.append(f"recompute {layer.recompute}: less does not fit{size}")
    if layer.reshard and plan.axis_size("shard") > 1 and pins.reshard is None and pins.layers is None:
        said.append(f"reshard: keeping gathered weights does not fit{size}")
    if plan.axis_size("replicate") > 1 and pins.replicate is None and pins.shard is None:
        said.append(f"replicate {plan.axis_size('replicate')}: only gradient sums cross the replicas")
    if refused := untrainable(plan):
        said.append(refused)
    pinned = [key for key, value in vars(pins).items() if value is not None]
    return (*said, "pinned by the run file: " + ", ".join(pinned)) if pinned else tuple(said)


def _other_schedules(best: Candidate, candidates: list[Candidate]) -> list[str]:
    """The best of each other schedule beside the chosen one, by the cost model."""
    if best.seconds is None:
        return []
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.fits and candidate.seconds:
            first.setdefault(candidate.plan.schedule.name, candidate)
    others = [f"{name} {c.seconds:.2f}" for name, c in first.items() if name != best.plan.schedule.name]
    said = f"schedule {best.plan.schedule.name}: {best.seconds:.2f} s a step by the cost model"
    return [f"{said} ({', '.join(others[:3])} at their best)" if others else said]


def nothing_fits(candidates: list[Candidate], budget: int) -> str:
    """What the smallest plan needs, where nothing fits `budget` bytes."""
    smallest = min(candidates, key=lambda c: peak_bytes(c.plan))
    assert smallest.plan.predicted is not None
    kinds = sorted(smallest.plan.predicted.memory_bytes.items(), key=lambda item: -item[1])
    top = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds[:3])
    return (
        f"no plan fits: the smallest needs {smallest.plan.predicted.memory_peak_bytes / 1e9:.1f} GB a rank and "
        f"{HEADROOM * budget / 1e9:.1f} GB ({HEADROOM:.0%} of {budget / 1e9:.1f}) may be used; most of it: {top} (GB). "
        "More ranks, a shorter train.seq_len or a smaller train.loss_chunk lower it"
    )
