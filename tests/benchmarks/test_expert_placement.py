"""The simulated placement of experts beside published speeds, and its stored result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.expert_placement import MODELS, PUBLISHED, compare, recorded, recorded_counts
from benchmarks.flexmoe_baseline import improved_slots, rank_loads
from benchmarks.flexmoe_policy import SingleCopies

from meshwright.policies.expert_costs import ExpertCosts
from meshwright.policies.expert_owners import even_owners
from meshwright.policies.expert_placement import PlacementProblem

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-26-expert-placement-simulated.json"
RECORDED_MEDIANS = {"mixtral-8x7b-e16k4": 1.67, "mixtral-8x7b-e8k2": 1.64}
"""Median over layers and iterations of the busiest rank's rows over the mean, of the artifact's own file."""


def test_speeds_are_within_a_tenth_of_the_published_ones_and_as_stored() -> None:
    comparison = compare(None)
    stored = json.loads(RESULT.read_text(encoding="utf-8"))
    assert comparison == stored["equal_within_groups"]
    assert stored["published"] == PUBLISHED and stored["recorded"] == recorded()
    for name, published in PUBLISHED.items():
        assert comparison["speed"][name] == pytest.approx(published, rel=0.1)
    for model, median in RECORDED_MEDIANS.items():
        assert comparison["models"][model]["fsdp_ep"]["median_imbalance"] == pytest.approx(median, abs=0.02)


def test_the_baseline_exchanges_experts_on_every_node_while_that_helps() -> None:
    """Two nodes of 8 ranks with two slots and four experts, then four nodes with four slots and 16 experts."""
    fixed = np.zeros((16, 4), dtype=np.int64)
    fixed[np.arange(16), np.arange(16) % 2], fixed[np.arange(16), 2 + np.arange(16) % 2] = 1, 1
    loads = np.array([[480, 160, 160, 160]] * 2)
    assert rank_loads(fixed, loads).tolist() == [160, 80] * 8, "four ranks share an expert: 480 / 4 + 160 / 4"
    assert (improved_slots(fixed, loads, 2) == fixed).all(), "a rank with two slots of five would get 192 rows"
    fixed = (np.arange(32)[:, None] % 4 == np.arange(16) % 4).astype(np.int64)
    loads = np.random.default_rng(0).multinomial(100_000, np.arange(1, 17) / 136, 4)
    improved = improved_slots(fixed, loads, 4)
    assert (improved.sum(1) == 4).all() and (improved.reshape(4, 8, 16).sum(1) >= 1).all()
    before, after = rank_loads(fixed, loads), rank_loads(improved, loads)
    assert after.max() < before.max() and after.sum() == pytest.approx(400_000)


@pytest.mark.parametrize("seed", [None, 0])
def test_counts_have_the_rows_of_the_micro_batches(seed: int | None) -> None:
    for model in MODELS:
        counts = recorded_counts(model, seed)[0]
        rows = counts.sum((1, 2))
        assert rows == pytest.approx([32 * 16_384 * model.per_token] * len(rows), rel=1e-3)


def test_single_copies_are_replaced_when_another_expert_becomes_popular() -> None:
    """The owner of expert 1 needs no slot for it, so it keeps its copy of expert 0."""
    counts = np.zeros((1, 4, 4), dtype=np.int64)
    counts[:, :, 0] = 100
    place, owners = SingleCopies(), even_owners(1, 4, 4)
    free = ExpertCosts(2, 1e-6, 0.0, 0.0, 0.0, 0.0, 0.0)
    first = place(PlacementProblem(counts, owners, 1, free)).copy()
    second = place(PlacementProblem(np.roll(counts, 1, 2), owners, 1, free))
    assert first[0].sum(0).tolist() == [4, 1, 1, 1] and second[0].sum(0).tolist() == [2, 4, 1, 1]
