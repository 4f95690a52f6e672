"""Samples that a run leaves out, and the samples that its steps read instead.

Skipped samples are whole steps: ranges of global sample indexes, ascending, whose ends are positions between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.spec.batch_sizes import BatchSizes

SampleRange = tuple[int, int]
"""First global sample index, and one after the last."""


def samples_of_step(step: int, batches: BatchSizes, skipped: Sequence[SampleRange]) -> SampleRange:
    """The samples that optimizer step `step`, counted from 1, reads: those of the step-th part of the data that is not skipped."""
    part = step - 1
    for range_start, range_end in skipped:
        first_skipped = batches.steps_before(range_start)
        if first_skipped <= part:
            part += batches.steps_before(range_end) - first_skipped
    return batches.samples_before(part), batches.samples_before(part + 1)


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


def skip_step(step: int, batches: BatchSizes, skipped: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """`skipped` with the samples that `step` would read."""
    return tuple(sorted((*skipped, samples_of_step(step, batches, skipped))))
