"""The busiest expert rank that a plan is priced with: from recorded loads by hand, equal, and usual."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.planner.expert_reasons import uneven_loads_reason, uneven_loads_seconds
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import ExpertPlan
from meshwright.spec.run import RunSpec
from meshwright.workload.activations import elements_per_token
from meshwright.workload.expected_loads import busiest_of, expected_busiest
from meshwright.workload.layouts import layout_of
from meshwright.workload.plan_bytes import fullest_rank_memory
from tests.workload.test_plan_bytes import MOE, TRAIN, plan

LOADS = np.array([[[4, 4, 0, 0], [1, 1, 3, 3]], [[2, 2, 2, 2], [0, 0, 0, 8]]])
"""Two steps, two layers, four experts. Of two ranks with two experts each the busier has 8 and 6, then 4 and 8 rows of 8."""


def test_the_busiest_rank_by_hand() -> None:
    two, four = busiest_of(LOADS, 2), busiest_of(LOADS, 4)
    # Ratios to the mean of 4 rows: 2 and 1.5 in the first step, 1 and 2 in the second.
    assert two.imbalance == pytest.approx((2 + 1.5 + 1 + 2) / 4)
    # The second rank has 0 + 6, then 4 + 8 of two layers' mean of 8 together.
    assert two.stored_rows == pytest.approx(12 / 8)
    # Four ranks, mean 2: 4 and 3, then 2 and 8. The last expert has 3, then 10 rows of a mean of 4.
    assert four.imbalance == pytest.approx((2 + 1.5 + 1 + 4) / 4) and four.stored_rows == pytest.approx(10 / 4)
    assert busiest_of(LOADS, 1) == busiest_of(np.full((3, 2, 4), 5), 4), "one rank has all rows"


def recorded(tmp_path: Path) -> str:
    """A file whose first half of the experts gets three times the rows of the others."""
    experts, path = MOE.experts, tmp_path / "loads.csv"
    loads = [3] * (experts // 2) + [1] * (experts // 2)
    header = ",".join(f"expert_{index}" for index in range(experts))
    path.write_text(f"layer,step,{header}\n0,1,{','.join(map(str, loads))}\n")
    return str(path)


def test_a_plan_is_priced_with_the_loads_of_the_file(tmp_path: Path) -> None:
    source = recorded(tmp_path)
    experts = ExpertPlan(expert=2, expert_shard=2)
    split, whole = (replace(plan({"shard": 4}), experts=given) for given in (experts, replace(experts, expert=1)))
    trains = {load: replace(TRAIN, expert_load=load) for load in (None, "uniform", source)}
    ratios = {load: layout_of(MOE, train, split).imbalance for load, train in trains.items()}
    assert ratios == {None: pytest.approx(1.1), "uniform": 1.0, source: pytest.approx(1.5)}
    assert layout_of(MOE, trains[source], whole).imbalance == 1.0
    both = expected_busiest(MOE, trains[source], np.array([1.0, 2.0, 1.0]))
    assert np.asarray(both.imbalance).tolist() == [1, 1.5, 1]
    activations = {
        load: fullest_rank_memory(MOE, train, split, cpu=False)["activations"] for load, train in trains.items()
    }
    assert activations[None] == activations["uniform"] < activations[source]
    # Per token and layer half of top_k × (3 widths and one input) is stored once more by the rank with 1.5 times the rows.
    layer = MOE.layers - 1
    more = elements_per_token(MOE, split, 1.5)(layer)[0] - elements_per_token(MOE, split)(layer)[0]
    assert more == pytest.approx(0.5 * MOE.experts_per_token * (3 * MOE.expert_hidden + MOE.hidden))


def test_the_reason_says_what_uneven_loads_cost(tmp_path: Path) -> None:
    train = replace(TRAIN, expert_load=recorded(tmp_path))
    run = RunSpec(name="run", model=MOE, train=train, cluster=ClusterSpec(gpu="H200", gpus_per_node=4))
    split = replace(plan({"shard": 4}), experts=ExpertPlan(expert=2, expert_shard=2))
    assert uneven_loads_seconds(run, split) > 0
    assert "the busiest of 2 ranks computes 1.50 times the mean (loads of" in uneven_loads_reason(run, split)
    whole = replace(split, experts=ExpertPlan(expert=1, expert_shard=4))
    assert uneven_loads_seconds(run, whole) == 0 and "cost nothing" in uneven_loads_reason(run, whole)
    assert uneven_loads_reason(replace(run, train=replace(train, expert_load="uniform")), split) == ""


def test_a_file_that_vanished_is_an_error() -> None:
    with pytest.raises(BadInput, match="train.expert_load /absent: No such file"):
        expected_busiest(MOE, replace(TRAIN, expert_load="/absent"), 2.0)
