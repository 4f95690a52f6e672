"""Bands by class cover 80% of the weight of left-out errors."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.costs.bands import COVERED, MIN_RUNS, RunClass, band_of, conformal_band, fitted_bands, known
from meshwright.costs.constants import table

CLASS = RunClass(several_hosts=True, moe=False, measured_generation=True, software="measured")
OTHER_CLASS = RunClass(several_hosts=False, moe=True, measured_generation=False, software="unknown")


def test_coverage_of_a_band_is_80_percent() -> None:
    residuals = np.random.default_rng(0).normal(0.1, 0.2, 4000)
    low, high = conformal_band(residuals, np.ones(len(residuals)))
    assert np.mean((residuals >= low) & (residuals <= high)) == pytest.approx(COVERED, abs=0.005)
    assert low == pytest.approx(0.1 - 1.2816 * 0.2, abs=0.02) and high == pytest.approx(0.1 + 1.2816 * 0.2, abs=0.02)


def test_runs_of_a_large_source_weigh_less_each() -> None:
    sources = ["many"] * 1000 + ["a"] * 50 + ["b"] * 50 + ["c"] * 50
    residuals = np.array([3.0] * 1000 + [0.0] * 150)
    assert np.mean(residuals == 0.0) > 0.1
    low, high = fitted_bands([CLASS] * len(sources), sources, residuals)[CLASS.name]
    assert (low, high) == (0.0, 3.0)
    alike = [f"source {number}" for number in range(1000)] + ["one"] * 150
    assert fitted_bands([CLASS] * len(alike), alike, residuals)[CLASS.name] == [3.0, 3.0]


def test_software_is_measured_related_or_unknown() -> None:
    runs = {"many": 40, "few": 3, "one": 1, "default": 30}
    for stack, parent, expected in (
        ("many", "", "measured"),
        ("few", "", "related"),
        ("one", "many", "related"),
        ("one", "default", "unknown"),
        ("one", "", "unknown"),
        ("absent", "", "unknown"),
        ("default", "", "unknown"),
    ):
        assert known(stack, parent, runs, ["many"]) == expected, stack


def test_a_class_with_few_runs_takes_the_band_of_a_wider_class() -> None:
    classes = [CLASS] * MIN_RUNS + [OTHER_CLASS]
    sources = [f"source {number}" for number in range(len(classes))]
    bands = fitted_bands(classes, sources, np.linspace(-0.1, 0.1, len(classes)))
    assert CLASS.name in bands and OTHER_CLASS.name not in bands
    assert band_of(OTHER_CLASS, bands) == tuple(bands["all"])


def test_fitted_bands_are_wider_for_unknown_software() -> None:
    bands = table()["bands"]
    (low, high), (wide_low, wide_high) = bands["measured software"], bands["unknown software"]
    assert low < 0 < high
    assert high - low < wide_high - wide_low
