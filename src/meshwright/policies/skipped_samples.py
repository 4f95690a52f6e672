"""Samples that a run leaves out, and the samples that its steps read instead.

Skipped samples are whole steps: ranges of global sample indexes, ascending, whose ends are positions between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

SampleRange = tuple[int, int]
"""First global sample index, and one after the last."""


def samples_of_step(step: int, global_batch: int, skipped: Sequence[SampleRange]) -> SampleRange:
    """The samples that optimizer step `step`, counted from 1, reads: the next `global_batch` that are not skipped."""
    first = (step - 1) * global_batch
    for range_start, range_end in skipped:
        if range_start <= first:
            first += range_end - range_start
    return first, first + global_batch


def skip_forward(sample: int, skipped: Sequence[SampleRange]) -> int:
    """The first sample from `sample` on that is not skipped."""
    for range_start, range_end in sorted(skipped):
        if range_start <= sample < range_end:
            sample = range_end
    return sample


def merge_skips(first: Sequence[SampleRange], second: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """The ranges of both, each once, ascending."""
    return tuple(sorted({*map(_as_range, first), *map(_as_range, second)}))


def _as_range(pair: Sequence[int]) -> SampleRange:
    range_start, range_end = pair
    return range_start, range_end


def skip_step(step: int, global_batch: int, skipped: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """`skipped` with the samples that `step` would read."""
    return tuple(sorted((*skipped, samples_of_step(step, global_batch, skipped))))
