"""All small sizes that each schedule of the registry supports; a new schedule is tested without further code."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.schedules.registry import SCHEDULES, refusal

RANKS = range(1, 9)
MICRO_BATCHES = range(1, 17)
PIPELINES = [name for name, entry in SCHEDULES.items() if not entry.pairs]
"""Schedules of several pipeline ranks."""


def sizes(name: str, ranks: range = RANKS, micro_batches: range = MICRO_BATCHES) -> Iterator[tuple[int, int, int]]:
    """(ranks, micro-batches, stages per rank), for the two smallest supported numbers of stages."""
    for count in ranks:
        for batches in micro_batches:
            for stages in SCHEDULES[name].stages_per_rank[:2]:
                if refusal(name, count, batches, stages) is None:
                    yield count, batches, stages
