"""The simulated placement of experts beside published speeds, and its stored result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.expert_placement import MODELS, PUBLISHED, compare, recorded_counts

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-26-expert-placement-simulated.json"
RECORDED_MEDIANS = {"mixtral-8x7b-e16k4": 1.67, "mixtral-8x7b-e8k2": 1.64}
"""Median over layers and iterations of the busiest rank's rows over the mean, of the artifact's own file."""


def test_speeds_are_within_a_tenth_of_the_published_ones_and_as_stored() -> None:
    comparison = compare(None)
    stored = json.loads(RESULT.read_text(encoding="utf-8"))
    assert comparison == stored["equal_within_groups"]
    assert stored["published"] == PUBLISHED
    for name, published in PUBLISHED.items():
        assert comparison["speed"][name] == pytest.approx(published, rel=0.1)
    for model, median in RECORDED_MEDIANS.items():
        assert comparison["models"][model]["fsdp_ep"]["median_imbalance"] == pytest.approx(median, abs=0.02)


@pytest.mark.parametrize("seed", [None, 0])
def test_counts_have_the_rows_of_the_micro_batches(seed: int | None) -> None:
    for model in MODELS:
        counts = recorded_counts(model, seed)[0]
        rows = counts.sum((1, 2))
        assert rows == pytest.approx([32 * 16_384 * model.per_token] * len(rows), rel=1e-3)
