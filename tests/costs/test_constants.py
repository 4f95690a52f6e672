"""Which constants hold for a stack on a generation, and that this program's own leave published runs alone."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import yaml

from meshwright.calibration.row_predictions import predict_records
from meshwright.costs.collective_costs import MAX_LINE_SHARE, port_rate, rank_group
from meshwright.costs.compute import MAX_PEAK_SHARE, product_rate
from meshwright.costs.constants import FILE, OWN, OWN_FILE, constants, is_measured, table, unmeasured, with_own
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.plan_costs import STACK
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published-runs.csv"


def test_what_was_measured_together_goes_first() -> None:
    rows = table()
    for name, value in rows["measured"][OWN]["hopper"].items():
        assert getattr(constants("hopper", OWN), name) == value
    assert constants("hopper", "torchtitan").gemm == rows["generations"]["hopper"]["gemm"]


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if not is_measured(chip.generation)])
def test_a_chip_it_never_ran_on_is_as_far_from_its_best_product_as_the_one_it_ran_on(name: str) -> None:
    found, own = unmeasured(CHIPS[name]), constants("hopper", OWN)
    home, best = CHIPS["H200"].best_bf16_flops, CHIPS[name].best_bf16_flops
    assert home
    near = own.gemm * CHIPS["H200"].peak_flops["bf16"] / home
    if best:
        assert found["gemm"] <= near * best / CHIPS[name].peak_flops["bf16"] * (1 + 1e-9) < 0.88
    assert found["link"] <= own.link and found["slow"] == 1.0
    reached = table()["best_quartile"].get(CHIPS[name].generation, 1.0)
    assert 0.3 < found["gemm"] <= reached


def test_the_rule_for_other_chips_is_right_within_a_tenth_where_it_can_be_checked() -> None:
    """On Hopper, where both are known: the best quartile of published runs, and this program's own products."""
    assert table()["best_quartile"]["hopper"] == pytest.approx(constants("hopper", OWN).gemm, rel=0.1)


def test_plans_are_priced_with_own_constants_and_a_band_around_one() -> None:
    assert STACK == OWN
    assert 0 < table()["bands"][OWN] < 0.1


def test_own_constants_leave_published_runs_alone() -> None:
    published = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    own = yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))
    other = with_own(published, {**own, "stack": {**own["stack"], "slow": 9.0, "copies": 1.0}})
    with RUNS.open(encoding="utf-8", newline="") as file:
        rows = list(islice(csv.DictReader(file), 0, None, 40))
    assert predict_records(rows, published) == predict_records(rows, other) == predict_records(rows)


@pytest.mark.parametrize("name", CHIPS)
def test_no_chip_exceeds_its_peak_or_its_lines(name: str) -> None:
    """Of a large product 0.88 of the peak, of links and ports 0.95 of the line rate, in every format and for every stack."""
    chip, size = CHIPS[name], 65536.0
    for stack in (*table()["stacks"], OWN):
        for number_format in set(chip.peak_flops) & {"bf16", "fp16", "fp8", "mxfp8", "nvfp4"}:
            k = constants(chip.generation, stack)
            if stack == OWN and not is_measured(chip.generation):
                k = replace(k, **unmeasured(chip))
            machine = machine_of(ClusterSpec(gpu=name, nodes=2, gpus_per_node=chip.per_node), number_format)
            flops = 2 * size**3 / float(product_rate(machine, k).seconds(size, size, size))
            assert flops <= MAX_PEAK_SHARE * chip.peak_flops[number_format] * (1 + 1e-9)
            inside, across = (
                rank_group(machine, k, float(chip.per_node), 1.0),
                rank_group(machine, k, 2.0, float(chip.domain)),
            )
            assert float(inside.bandwidth) <= MAX_LINE_SHARE * chip.link * (1 + 1e-9)
            assert float(across.bandwidth * np.maximum(across.sums, 1.0)) <= MAX_LINE_SHARE * max(
                chip.nic, chip.link
            ) * (1 + 1e-9)
            assert float(port_rate(machine, k)) <= MAX_LINE_SHARE * chip.nic * (1 + 1e-9)


def test_fitted_constants_are_within_their_limits() -> None:
    """No communication that shows twice, none that takes more from compute than all of it."""
    for limits in (*table()["generations"].values(), *table()["stacks"].values()):
        for name in ("hbm", "link", "net", "hide", "tensor_exposed", "expert_exposed", "overlap_tax", "pipe_exposed"):
            assert 0 <= limits.get(name, 0.0) <= 1.0
        assert limits.get("moe_passes", 0.0) <= 100
