"""Shows layouts for samples of unequal lengths in the answer of `meshwright plan`, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.cli.plan_words import seconds_text
from meshwright.planner.sample_choice import PlayedLayout, SampleChoice
from meshwright.planner.sample_reasons import layout_name, sample_reasons
from meshwright.spec.run import RunSpec

QUANTILES = (0.1, 0.5, 0.9, 1.0)
"""The quantiles of the step time that are shown. 0.9 is the time that 90% of the steps do not exceed."""
TITLE = "samples of unequal lengths"
"""Title of the section."""
HEADS = ("layout", "capacity", "mean", *(f"{share:.0%}" for share in QUANTILES), "tokens/s")
"""Heads of the table's columns."""


def sample_lines(choice: SampleChoice) -> Iterator[tuple[str, ...]]:
    """Yield one row of the table with the columns `HEADS` for each layout. The step times are those of the simulated batches."""
    for played in choice.layouts:
        yield (
            layout_name(played.layout),
            f"{played.layout.capacity:,}" + (f" / {played.layout.offload.capacity:,}" if played.layout.offload else ""),
            seconds_text(played.seconds),
            *(seconds_text(played.steps.quantile(share)) for share in QUANTILES),
            f"{played.steps.tokens_per_second:,.0f}",
        )


def samples_as_plain(run: RunSpec, choice: SampleChoice) -> dict[str, Any]:
    """Return the layouts as JSON values."""
    return {
        "longest": choice.longest,
        "tokens": choice.tokens,
        "layouts": [_layout(played) for played in choice.layouts],
        "why": list(sample_reasons(run, choice)),
    }


def _layout(played: PlayedLayout) -> dict[str, Any]:
    """Return one layout with the times of its simulated steps, as JSON values. All times are in seconds."""
    layout = played.layout
    steps = played.steps
    time = played.times.time
    quantiles = {f"p{round(100 * share)}": steps.quantile(share) for share in QUANTILES}
    return {
        "name": layout_name(layout),
        "hybrid": layout.ranks if layout.hybrid else None,
        "context_ring": layout.ring,
        "context_ulysses": layout.ulysses,
        "capacity": layout.capacity,
        "offload": None if layout.offload is None else vars(layout.offload),
        "recompute": played.strategy.recompute,
        "reshard": played.strategy.reshard,
        "memory_bytes": played.memory_bytes,
        "seconds": {"mean": played.seconds, **quantiles},
        "tokens_per_second": steps.tokens_per_second,
        "efficiency": steps.efficiency,
        "padding": float(steps.padding.mean()),
        "sample_time": {"alpha": time.quadratic, "beta": time.linear, "gamma": time.fixed},
    }
