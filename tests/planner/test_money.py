"""Money, energy and days follow from step time, price, power and the share of time that trains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cli.plan_words import expense_sentences
from meshwright.config.load import load_run
from meshwright.planner.chip_comparison import chips_named, cluster_with, compare_chips
from meshwright.planner.money import expense, expense_of, price_of, watts_of
from meshwright.planner.objectives import point_of
from meshwright.planner.search import search
from meshwright.spec.chip_prices import PRICES, SYSTEM_POWER, WATTS
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.run import RunSpec

WORDS = [
    "model=llama3-1b",
    "cluster.gpu=H100",
    "cluster.gpus_per_node=8",
    "train.seq_len=2048",
    "train.global_batch=64",
    "data.mix=stdlib",
    "train.steps=1000",
    "train.validate_every=0",
]


def _run(*words: str) -> RunSpec:
    return load_run(None, [*WORDS, *words])


def test_every_chip_has_a_power_and_every_price_a_chip() -> None:
    assert set(WATTS) == set(CHIPS)
    assert set(PRICES) <= set(CHIPS)
    assert all(price.date >= "2025" and price.source for price in PRICES.values())


def test_a_million_tokens_by_hand() -> None:
    spent = expense_of(ClusterSpec(gpu="H100", price_per_gpu_hour=2.0, watts_per_gpu=1000.0), 4, 1e5, tokens=3.6e9)
    assert spent.gpu_hours == pytest.approx(40.0) and spent.days == pytest.approx(10 / 24)
    assert spent.money == pytest.approx(80.0) and spent.kwh == pytest.approx(40.0)
    assert spent.money_per_million_tokens == pytest.approx(80 / 3600)
    assert spent.kwh_per_million_tokens == pytest.approx(40 / 3600)


def test_days_and_money_have_the_band_of_the_step() -> None:
    run = _run()
    plan = search(run).best.plan
    spent, predicted = expense(run, plan, tokens=1e12), plan.predicted
    assert spent is not None and predicted is not None
    assert (
        predicted.step_seconds
        and predicted.low_seconds
        and predicted.high_seconds
        and spent.days
        and spent.low
        and spent.high
    )
    for end, step in ((spent.low, predicted.low_seconds), (spent.high, predicted.high_seconds)):
        slower = replace(plan, predicted=replace(predicted, step_seconds=step))
        alone = expense(run, slower, tokens=1e12)
        assert alone is not None and alone.days == pytest.approx(spent.days * end, rel=0.01)
    lines = " ".join(expense_sentences(spent, None))
    assert "80% band of the step" in lines and "days" in lines


def test_price_and_power_of_the_table_the_cluster_and_the_question() -> None:
    cluster = ClusterSpec(gpu="H100")
    assert price_of(cluster).value == PRICES["H100"].dollars and price_of(cluster).unit == "US$"
    assert price_of(replace(cluster, price_per_gpu_hour=1.5)).value == 1.5
    assert price_of(replace(cluster, price_per_gpu_hour=1.5), 9.0).value == 9.0
    assert watts_of(cluster).value == SYSTEM_POWER * 700
    assert watts_of(replace(cluster, watts_per_gpu=900)).value == 900
    assert (
        price_of(ClusterSpec(gpu="L4")).value is None
        and "cluster.price_per_gpu_hour" in price_of(ClusterSpec(gpu="L4")).source
    )


def test_interruptions_and_validations_are_inside_money_and_days() -> None:
    point = point_of(_run())
    assert point.answer is not None
    plan = point.answer.best.plan
    whole = expense(_run(), plan, tokens=1e9)
    validated = expense(_run("train.validate_every=10", "data.validation_tokens=131072"), plan, tokens=1e9)
    often = expense(_run("cluster.host_mtbf_hours=5", "checkpoint.every=100"), plan, tokens=1e9)
    assert whole and validated and often and whole.money and validated.money and often.money
    # A validation of one step's tokens costs a third of a step, every ten steps.
    assert validated.money / whole.money == pytest.approx(1 + 1 / 30, rel=1e-3)
    assert often.training_share < 0.99 and often.money > 1.01 * whole.money
    assert validated.days and whole.days and validated.days / whole.days == pytest.approx(1 + 1 / 30, rel=1e-3)


def test_chips_are_compared_on_as_many_devices_the_cheapest_first() -> None:
    points = compare_chips(_run(), chips_named("h100,B200,L4"), tokens=1e12)
    assert {point.chip for point in points} == {"H100", "B200", "L4"}
    assert all(point.point.gpus == 8 for point in points)
    costs = [point.expense.money_per_million_tokens for point in points if point.expense]
    assert points[-1].chip == "L4", "it has no price"
    assert costs[:2] == sorted(cost for cost in costs if cost is not None)


def test_a_cluster_of_another_chip_has_hosts_of_its_size() -> None:
    cluster = ClusterSpec(gpu="H100", nodes=2, gpus_per_node=8, price_per_gpu_hour=2.0)
    racks = cluster_with(cluster, "GB200")
    assert (racks.nodes, racks.gpus_per_node, racks.price_per_gpu_hour) == (4, 4, None)
    assert cluster_with(cluster, "H100") is cluster
    with pytest.raises(BadInput, match="does not divide"):
        cluster_with(ClusterSpec(gpu="H100", nodes=3, gpus_per_node=3), "GB200")
    with pytest.raises(BadInput, match="nearest: H100"):
        chips_named("H10O")
