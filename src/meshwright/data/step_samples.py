"""Samples of a step of `train.global_batch_tokens`: a pure function of their order and the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshwright.policies.skipped_samples import SampleRange, skip_forward

FIRST_DRAW = 256
"""Samples whose lengths are looked up at first; then twice as many each time."""


class SampleLengths(Protocol):
    """Samples by index, as those of a `DataSource`."""

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray: ...


def lengths_of_step(source: SampleLengths, sample: int, tokens: int, skipped: Sequence[SampleRange] = ()) -> np.ndarray:
    """Lengths of the samples of the step that begins at `sample`: the next samples, as many as have at most `tokens` tokens.

    The step ends before a skipped sample. It has at least one sample, as `tokens` is at least the longest sample.
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
    """The samples that optimizer step `step`, counted from 1, reads; looks at the lengths of all steps before it."""
    first = skip_forward(0, skipped)
    for _ in range(step - 1):
        first = skip_forward(first + len(lengths_of_step(source, first, tokens, skipped)), skipped)
    return first, first + len(lengths_of_step(source, first, tokens, skipped))
