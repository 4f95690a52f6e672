"""The comparison of copies of experts: its runs, its speeds and its chart."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.draw_expert_ranks import chart_svg
from benchmarks.expert_ranks import EXPERTS, runs_for, runs_over, with_speeds


def test_runs_have_both_ends_of_the_curve_and_expert_parallelism_with_the_same_loads() -> None:
    runs = runs_for(8)
    assert {run.balance_loss for run in runs} == {run.balance_loss for run in runs if run.policy == "none"}
    assert [run.slots for run in runs if run.policy == "fixed"] == [EXPERTS - EXPERTS // 8], (
        "all experts of other ranks"
    )
    assert all(run.slots == 0 for run in runs if run.policy == "none")


def test_the_curve_over_lambda_has_expert_parallelism_and_all_experts_at_its_ends() -> None:
    runs = runs_over([0, 0.01, 0.02, 0.5, 1], 8)
    assert [(run.policy, run.slots) for run in runs] == [("none", 0), ("hecate", 1), ("hecate", 28), ("fixed", 56)]


def test_a_speed_is_over_expert_parallelism_with_the_same_loads() -> None:
    results = [
        {"balance_loss": "0", "policy": "none", "step_seconds": 3.0},
        {"balance_loss": "0", "policy": "hecate", "step_seconds": 2.0},
        {"balance_loss": "1e-2", "policy": "hecate", "step_seconds": 2.0},
        {"balance_loss": "0", "policy": "fixed", "exit_code": 1},
    ]
    assert [result.get("speed") for result in with_speeds(results)] == [1.0, 1.5, None, None]


def test_the_chart_has_a_point_for_each_run_of_a_panel() -> None:
    runs = [
        {
            "policy": policy,
            "slots": slots,
            "share": slots / 56,
            "max_over_mean": load,
            "step_seconds": 1 + load,
            "ranks": 8,
        }
        for load in (1.1, 2.8)
        for policy, slots in (("none", 0), ("hecate", 24))
    ]
    runs.append({**runs[-1], "policy": "fixed", "slots": 56, "share": 1.0})
    circles = [item for item in ElementTree.fromstring(chart_svg(runs)).iter() if item.tag.endswith("circle")]
    # Three runs with the most uneven loads, and two kinds of run for two loads.
    assert len(circles) == 3 + 4
    assert all(0 <= float(circle.attrib["cy"]) <= 300 for circle in circles)
