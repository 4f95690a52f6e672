"""Determines which samples a step reads if `train.global_batch_tokens` limits its tokens. Depends on the order of samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshwright.policies.skipped_samples import SampleRange, skip_forward

FIRST_DRAW = 256
"""Samples whose lengths are looked up at first. Each further look-up takes twice as many."""


class SampleLengths(Protocol):
    """Something that knows how many inputs each sample has, such as a `DataSource`. `indices` `(n,)` are global indices."""

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray: ...


def lengths_of_step(source: SampleLengths, sample: int, tokens: int, skipped: Sequence[SampleRange] = ()) -> np.ndarray:
    """Return the numbers of inputs of the samples in the step that begins with sample `sample`, int64.

    The step has as many of the next samples as have at most `tokens` inputs together. It ends before a skipped sample.
    It is never empty, because `tokens` is at least the length of the longest sample.
    """
    end = min((start for start, _ in skipped if start > sample), default=np.iinfo(np.int64).max)
    lengths = np.zeros(0, dtype=np.int64)
    draw = FIRST_DRAW
    while lengths.sum() <= tokens and sample + len(lengths) < end:
        first = sample + len(lengths)
        lengths = np.concatenate([lengths, source.lengths(np.arange(first, min(first + draw, end)))])
        draw *= 2
    return lengths[: np.searchsorted(np.cumsum(lengths), tokens, side="right")]


def samples_of_token_step(
    source: SampleLengths, step: int, tokens: int, skipped: Sequence[SampleRange] = ()
) -> SampleRange:
    """Return the range [first, stop) of samples that optimizer step `step` reads. Steps count from 1.

    To find it, the lengths of the samples of all earlier steps are looked up.
    """
    first = skip_forward(0, skipped)
    for _ in range(step - 1):
        first = skip_forward(first + len(lengths_of_step(source, first, tokens, skipped)), skipped)
    return first, first + len(lengths_of_step(source, first, tokens, skipped))
