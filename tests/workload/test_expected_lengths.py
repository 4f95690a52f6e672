"""Batches drawn from a histogram of lengths."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.config.recorded_lengths import LengthRange
from meshwright.workload.expected_lengths import LengthHistogram, mixed_histogram


def test_draws_have_the_shares_of_the_ranges_and_log_uniform_lengths_within() -> None:
    histogram = LengthHistogram.of([(1, 10, 3), (1000, 1999, 1)])
    lengths = histogram.draw(4_000_000, 1500, np.random.default_rng(0))
    assert lengths.sum() >= 4_000_000 > lengths[:-1].sum()
    assert lengths.min() == 1 and lengths.max() == 1500, "cut after the longest"
    long = lengths >= 1000
    assert long.mean() == pytest.approx(0.25, abs=0.01)
    assert (lengths[long] < 1250).mean() == pytest.approx(np.log(1.25) / np.log(2), abs=0.02)


def test_sources_are_mixed_by_samples() -> None:
    first, second = [LengthRange(1, 4, 10), LengthRange(5, 8, 30)], [LengthRange(5, 8, 7)]
    moe = mixed_histogram([(1.0, first), (3.0, second)])
    assert moe.shares.tolist() == pytest.approx([0.0625, 0.1875, 0.75]) and moe.longest == 8
