"""Explains in sentences which layout samples of different lengths get, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator

from meshwright.planner.explain import seconds_text
from meshwright.planner.finalists import SAME_TIME_TOLERANCE
from meshwright.planner.sample_choice import BATCHES, PlayedLayout, SampleChoice
from meshwright.simulator.sample_layouts import SampleLayout
from meshwright.spec.plan import RECOMPUTE_MODES
from meshwright.spec.run import RunSpec


def layout_name(layout: SampleLayout) -> str:
    """Return the axis over which samples are divided, with its size: "hybrid 8"."""
    axes = (
        ("context_ring", layout.ring),
        ("context_ulysses", layout.ulysses),
        ("hybrid", layout.ranks * layout.hybrid),
    )
    return next((f"{axis} {size}" for axis, size in axes if size > 1), "no context ranks")


def slots_text(layout: SampleLayout) -> str:
    """Return the number of tokens of the layout's slots as text."""
    return f"{layout.capacity:,}" + (f" and, with offload, {layout.offload.capacity:,}" if layout.offload else "")


def sample_reasons(run: RunSpec, choice: SampleChoice) -> Iterator[str]:
    """Yield sentences about the choice and its assumptions, or about why there is no choice."""
    if choice.obstacle:
        yield choice.obstacle
        return
    best = choice.layouts[0]
    other = choice.leading(hybrid=not best.layout.hybrid)
    if other is None:
        missing = "static context ranks" if best.layout.hybrid else "hybrid ranks"
        yield f"{layout_name(best.layout)}: no layout with {missing} fits into memory and batch"
    else:
        yield f"{layout_name(best.layout)}: {_compared(best, other)}"
    yield from _capacity_reason(choice, best)
    if best.strategy.recompute != "none":
        roomier = RECOMPUTE_MODES[RECOMPUTE_MODES.index(best.strategy.recompute) - 1]
        yield (
            f"recompute {best.strategy.recompute}: with {'less' if roomier != 'none' else 'none'} micro-batches of "
            f"{best.layout.capacity:,} tokens a rank do not fit into memory"
        )
    source = f"lengths of {os.path.relpath(run.data.lengths)}" if run.data.lengths else "the corpus's lengths"
    yield (
        f"{BATCHES} batches of {choice.tokens:,} tokens are drawn from {source} with the seed, samples of at most {choice.longest:,}; "
        "static ranks pack whole samples into sequences of train.seq_len"
    )


def _compared(best: PlayedLayout, other: PlayedLayout) -> str:
    """Return how much longer the best layout of the other kind (static or hybrid) takes."""
    kind = "hybrid" if other.layout.hybrid else "static"
    behind = other.seconds - best.seconds
    text = f"the best {kind} layout, {layout_name(other.layout)} with {other.layout.capacity:,} tokens a rank,"
    if behind <= SAME_TIME_TOLERANCE * best.seconds:
        return f"{text} cannot be told apart (within {SAME_TIME_TOLERANCE:.0%}): the simpler layout is taken"
    return f"{text} takes {seconds_text(behind)} longer, {other.seconds / best.seconds:.2f} times as long"


def _capacity_reason(choice: SampleChoice, best: PlayedLayout) -> Iterator[str]:
    """Yield how much longer hybrid ranks take with other slots."""
    others = [
        f"with {slots_text(played.layout)} {seconds_text(played.seconds - best.seconds)} longer"
        for played in choice.layouts[1:]
        if played.layout.hybrid and best.layout.hybrid
    ]
    if best.layout.offload is not None:
        offload = best.layout.offload
        yield (
            f"slots of {offload.capacity:,} tokens for samples of at least {offload.shortest:,}: activations of {offload.layers} blocks "
            "are in host memory, and the copies are hidden behind these samples' work"
        )
    if others:
        yield f"micro-batches of {best.layout.capacity:,} tokens a rank: a step takes {', '.join(others)}"
