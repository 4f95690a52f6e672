"""The report's picture of samples on ranks and time."""

from __future__ import annotations

import re

import numpy as np
import pytest

from meshwright.observe.report_balance import LEVELS, balance_card
from meshwright.policies.sample_balance import balance_samples, rank_pool
from meshwright.simulator.sample_steps import slot_times
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan, SamplePlan

SAMPLES = SamplePlan(capacity=4096, alpha=1e-9, beta=1e-5, gamma=1e-3)


def plan_of(ranks: int, samples: SamplePlan | None = SAMPLES) -> Plan:
    batch = BatchPlan(global_batch=ranks, micro_batch=1, accumulate=1)
    return Plan(mesh=(MeshAxis(axis="shard", size=ranks),), batch=batch, samples=samples)


def test_every_part_is_drawn_with_its_time_in_the_colour_of_its_sample() -> None:
    lengths = [12_000, 3000, 3000, 400, 400, 400, 9000]
    card = balance_card(
        plan_of(4), [{"step": 1, "sample_lengths": [8]}, {"step": 51, "sample_lengths": lengths}, {"step": 52}]
    )
    balance = balance_samples(np.array(lengths), rank_pool(SAMPLES, 4))
    expected = dict.fromkeys((name for _, name in LEVELS), 0.0)
    for sample, seconds in zip(balance.sample.tolist(), balance.seconds.tolist(), strict=True):
        expected[next(name for most, name in LEVELS if lengths[sample] <= most)] += seconds
    drawn = dict.fromkeys(expected, 0.0)
    for level, path in re.findall(r'<path class="column (h\d)" d="([^"]*)"', card):
        edges = re.findall(r"M([\d.]+),\d+H([\d.]+)", path)
        drawn[level] += sum(float(right) - float(left) for left, right in edges) / 1000 * balance.slowest_seconds
    assert drawn == pytest.approx(expected, abs=1e-3 * balance.slowest_seconds)
    assert "Samples of step 51" in card and f"{balance.imbalance:.3f} times the mean" in card
    assert "2 on several ranks" in card


def test_ranks_of_a_divided_sample_begin_together_and_slots_follow_each_other() -> None:
    lengths = np.random.default_rng(0).integers(1, 12_000, 60)
    balance = balance_samples(lengths, rank_pool(SAMPLES, 6))
    starts, durations = slot_times(balance)
    parts = balance.parts > 1
    for sample in np.unique(balance.sample[parts]):
        of_sample = parts & (balance.sample == sample)
        assert len(np.unique(starts[balance.rank[of_sample], balance.slot[of_sample]])) == 1
    assert (starts[:, 1:] + 1e-12 >= np.where(durations[:, 1:] > 0, (starts + durations)[:, :-1], 0)).all()
    ends = (starts + durations)[np.arange(6), balance.slots - 1]
    assert ends.max() == pytest.approx(balance.slowest_seconds, rel=0.02)


def test_nothing_is_drawn_without_lengths_or_samples() -> None:
    assert (
        balance_card(plan_of(2), [{"step": 1}])
        == balance_card(plan_of(2, None), [{"step": 1, "sample_lengths": [4]}])
        == ""
    )
    assert balance_card(None, [{"step": 1, "sample_lengths": [4]}]) == ""
