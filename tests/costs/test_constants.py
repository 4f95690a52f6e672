"""Constants of the cost model by software stack and device generation; own constants do not affect published runs.

`OWN` names this program's stack; its constants were fitted on its own training runs.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import yaml

from meshwright.calibration.record_predictions import predict_records
from meshwright.costs.collective_costs import MAX_LINE_SHARE, port_rate, rank_group
from meshwright.costs.compute import matmul_rate
from meshwright.costs.constants import (
    FILE,
    OWN,
    OWN_FILE,
    constants,
    is_measured,
    table,
    unmeasured_chip_constants,
    with_own,
)
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.plan_costs import STACK
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published-runs.csv.gz"


def test_own_measured_constants_replace_the_published_fit() -> None:
    constants_table = table()
    for name, value in constants_table["measured"][OWN]["hopper"].items():
        assert getattr(constants("hopper", OWN), name) == value
    assert constants("hopper", "torchtitan").gemm == constants_table["generations"]["hopper"]["gemm"]


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if not is_measured(chip.generation)])
def test_matmul_rate_of_an_unmeasured_chip_is_scaled_from_the_measured_chip(name: str) -> None:
    predicted, measured = unmeasured_chip_constants(CHIPS[name]), constants("hopper", OWN)
    h200_best, chip_best = CHIPS["H200"].best_bf16_flops, CHIPS[name].best_bf16_flops
    assert h200_best
    relative_to_best = measured.gemm * CHIPS["H200"].peak_flops["bf16"] / h200_best
    if chip_best:
        assert predicted["gemm"] <= relative_to_best * chip_best / CHIPS[name].peak_flops["bf16"] * (1 + 1e-9) < 0.88
    assert predicted["link"] <= measured.link and predicted["slow"] == 1.0
    highest_published = table()["best_quartile"].get(CHIPS[name].generation, 1.0)
    assert 0.3 < predicted["gemm"] <= highest_published


def test_best_quartile_of_published_hopper_runs_is_near_own_matmuls() -> None:
    """Other generations use the best quartile; on Hopper it can be compared with own measurements."""
    assert table()["best_quartile"]["hopper"] == pytest.approx(constants("hopper", OWN).gemm, rel=0.12)


def test_plans_are_priced_with_own_constants_and_a_narrow_band() -> None:
    assert STACK == OWN
    assert 0 < table()["own_band"] < 0.1


def test_own_constants_do_not_change_predictions_of_published_runs() -> None:
    published = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    own_values = yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))
    changed = with_own(published, {**own_values, "stack": {**own_values["stack"], "slow": 9.0, "own_engine": 1.0}})
    with gzip.open(RUNS, "rt", encoding="utf-8", newline="") as file:
        records = list(islice(csv.DictReader(file), 0, None, 40))
    assert predict_records(records, published) == predict_records(records, changed) == predict_records(records)


@pytest.mark.parametrize("name", CHIPS)
def test_no_chip_exceeds_its_peak_or_its_line_rates(name: str) -> None:
    """Limits for every stack and format: 0.88 of the peak for a large matmul, 0.95 of the line rate for links and
    ports."""
    chip, size = CHIPS[name], 65536.0
    for stack in (*table()["stacks"], OWN):
        for number_format in set(chip.peak_flops) & {"bf16", "fp16", "fp8", "mxfp8", "nvfp4"}:
            k = constants(chip.generation, stack)
            if stack == OWN and not is_measured(chip.generation):
                k = replace(k, **unmeasured_chip_constants(chip))
            machine = machine_of(ClusterSpec(gpu=name, nodes=2, gpus_per_node=chip.per_node), number_format)
            flops = 2 * size**3 / float(matmul_rate(machine, k).seconds(size, size, size))
            assert flops <= chip.sustained * chip.peak_flops[number_format] * (1 + 1e-9)
            node_group, network_group = (
                rank_group(machine, k, float(chip.per_node), 1.0),
                rank_group(machine, k, 2.0, float(chip.domain)),
            )
            assert float(node_group.bandwidth) <= MAX_LINE_SHARE * chip.link * (1 + 1e-9)
            assert float(network_group.bandwidth * np.maximum(network_group.sums, 1.0)) <= MAX_LINE_SHARE * max(
                chip.nic, chip.link
            ) * (1 + 1e-9)
            assert float(port_rate(machine, k)) <= MAX_LINE_SHARE * chip.nic * (1 + 1e-9)


def test_fitted_constants_are_within_their_limits() -> None:
    """Shares lie between 0 and 1: exposed time is at most the whole collective, the overlap tax at most all of compute."""
    for limits in (*table()["generations"].values(), *table()["stacks"].values()):
        for name in ("hbm", "link", "net", "hide", "tensor_exposed", "expert_exposed", "overlap_tax", "pipe_exposed"):
            assert 0 <= limits.get(name, 0.0) <= 1.0
        assert limits.get("moe_passes", 0.0) <= 100
