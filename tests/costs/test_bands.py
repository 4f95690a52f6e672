"""Bands by class cover 80% of the weight of left-out errors; sources count alike."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.costs.bands import COVERED, MIN_RUNS, RunClass, band_of, conformal_band, fitted_bands
from meshwright.costs.constants import table

CLASS = RunClass(several_hosts=True, mixture=False, measured_generation=True, measured_software=True)
OTHER_CLASS = RunClass(several_hosts=False, mixture=True, measured_generation=False, measured_software=False)


def test_coverage_of_a_band_is_80_percent() -> None:
    residuals = np.random.default_rng(0).normal(0.1, 0.2, 4000)
    low, high = conformal_band(residuals, np.ones(len(residuals)))
    assert np.mean((residuals >= low) & (residuals <= high)) == pytest.approx(COVERED, abs=0.005)
    assert low == pytest.approx(0.1 - 1.2816 * 0.2, abs=0.02) and high == pytest.approx(0.1 + 1.2816 * 0.2, abs=0.02)


def test_a_source_of_many_runs_weighs_as_much_as_one_of_few() -> None:
    sources = ["many"] * 1000 + ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    residuals = np.array([3.0] * 1000 + [0.0] * 30)
    low, high = fitted_bands([CLASS] * len(sources), sources, residuals)[CLASS.name]
    assert low == 0.0 and high == 3.0
    few = ["many"] * 1000 + [f"source {number}" for number in range(30)]
    assert fitted_bands([CLASS] * len(few), few, residuals)[CLASS.name] == [0.0, 0.0]


def test_a_class_with_few_runs_takes_the_band_of_a_wider_class() -> None:
    classes = [CLASS] * MIN_RUNS + [OTHER_CLASS]
    sources = [f"source {number}" for number in range(len(classes))]
    bands = fitted_bands(classes, sources, np.linspace(-0.1, 0.1, len(classes)))
    assert CLASS.name in bands and OTHER_CLASS.name not in bands
    assert band_of(OTHER_CLASS, bands) == tuple(bands["all"])


def test_fitted_bands_are_wider_for_software_without_many_runs() -> None:
    bands = table()["bands"]
    (low, high), (wide_low, wide_high) = bands["measured software"], bands["unmeasured software"]
    assert low < 0 < high
    assert high - low < wide_high - wide_low
