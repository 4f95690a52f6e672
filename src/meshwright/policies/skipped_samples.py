"""The samples that a run leaves out, and the samples that its steps read instead.

Only whole steps are skipped. They are given as ascending ranges of global sample indices, which begin and end between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.spec.batch_sizes import BatchSizes

SampleRange = tuple[int, int]
"""(first global sample index, one after the last)."""


def samples_of_step(step: int, batches: BatchSizes, skipped: Sequence[SampleRange]) -> SampleRange:
    """The samples that optimizer step `step` (counted from 1) reads, if all skipped samples are taken out of the data."""
    part = step - 1
    for range_start, range_end in skipped:
        first_skipped = batches.steps_before(range_start)
        if first_skipped <= part:
            part += batches.steps_before(range_end) - first_skipped
    return batches.samples_before(part), batches.samples_before(part + 1)


def skip_forward(sample: int, skipped: Sequence[SampleRange]) -> int:
    """The first sample at or after `sample` that is not skipped."""
    for range_start, range_end in sorted(skipped):
        if range_start <= sample < range_end:
            sample = range_end
    return sample


def merge_skips(first: Sequence[SampleRange], second: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """The union of both lists of ranges, ascending."""
    return tuple(sorted({*map(_as_range, first), *map(_as_range, second)}))


def _as_range(pair: Sequence[int]) -> SampleRange:
    range_start, range_end = pair
    return range_start, range_end


def skip_step(step: int, batches: BatchSizes, skipped: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """`skipped`, extended by the samples that `step` would read."""
    return tuple(sorted((*skipped, samples_of_step(step, batches, skipped))))
