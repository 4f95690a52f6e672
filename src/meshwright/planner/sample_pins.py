"""Chooses hybrid ranks and the size of their slots, for a run with samples of different lengths that are known."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.candidate import pins_of
from meshwright.planner.explain import seconds_text
from meshwright.planner.sample_choice import SampleChoice, choose_sample_layout
from meshwright.planner.sample_lengths import expected_histogram
from meshwright.planner.sample_reasons import slots_text
from meshwright.spec.hybrid import model_error
from meshwright.spec.run import RunSpec

SEARCHED_BATCHES = 8
"""Number of random global batches that are simulated for each layout."""
_DECIDED = ("hybrid", "capacity", "shard", "replicate", "tensor", "layers", "schedule", "reshard", "gradients")
"""If one of these keys is pinned, hybrid ranks are not chosen."""


def with_hybrid_ranks(run: RunSpec, memory_bytes: int | None) -> tuple[RunSpec, str]:
    """Return `run` with pinned hybrid ranks, and the reason as a sentence.

    Return the unchanged `run` and "" in these cases: whole samples on single ranks take less time, the lengths are
    unknown, the model does not support it, or the pins exclude it.
    """
    pins = pins_of(run)
    decided = any(getattr(pins, key) is not None for key in _DECIDED) or run.cluster.ranks == 1
    if run.train.global_batch_tokens is None or decided or model_error(run.model):
        return run, ""
    histogram = expected_histogram(run)
    if histogram is None:
        return run, ""
    choice = choose_sample_layout(run, histogram, memory_bytes, batches=SEARCHED_BATCHES, static=False)
    if not choice.layouts or choice.layouts[0].layout.longest_part >= choice.longest:
        return run, ""
    best = choice.layouts[0]
    pins = replace(
        pins,
        hybrid=best.layout.ranks,
        capacity=best.layout.capacity,
        offload_capacity=best.layout.offload.capacity if best.layout.offload else None,
        recompute=best.strategy.recompute,
        offload=pins.offload or "none",
    )
    return replace(run, plan=pins), _reason(choice)


def _reason(choice: SampleChoice) -> str:
    """Return a sentence that compares the step time with the step times of other slot sizes."""
    best, *others = choice.layouts
    longer = [
        f"{seconds_text(other.seconds - best.seconds)} longer with {slots_text(other.layout)}"
        + " (no sample divided)" * (other.layout.capacity >= choice.longest)
        for other in others
    ]
    return (
        f"hybrid {best.layout.ranks} with slots of {slots_text(best.layout)} tokens: {SEARCHED_BATCHES} drawn batches take "
        f"{seconds_text(best.seconds)} a step" + (f", {', '.join(longer)}" if longer else "")
    )
