"""Runs with the optimizer in host memory against their predictions, and the link's rate against their updates.

The rate of the link is the mean of the updates before packed state. The launches of updates (`offload_costs.CHUNK_LAUNCH_US`) were set on
the runs of 3B and 8B with bf16 moments whose copies are shorter; the other runs were used for neither.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accuracy
import pytest

from meshwright.config.load import load_run
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.offload_costs import rate_both_ways
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.model import parameter_count

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = ("2026-11-27-offload-H200.json", "2026-11-27-offload-peers-H200.json")
FP32_STATE = 12
"""Bytes of a master weight and two moments in fp32, which the code before packed state copied in each direction."""


def results(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / name).read_text(encoding="utf-8"))


def test_the_link_copies_both_ways_at_the_rate_of_updates_after_the_backward() -> None:
    """Updates of four runs did nothing but copy chunks in both directions."""
    layouts = results("2026-11-22-offload-H200.json")["layouts"]
    former = [row["phases"]["optim"] for row in results(FILES[0])["rows"] if "former code" in row["row"]]
    updates = {
        "llama3-3b": [layouts["3b-mb2-optimizer"]["phases"]["optim"]],
        "llama3-8b": [layouts["8b-optimizer"]["phases"]["optim"], *former],
    }
    assert len(former) == 2
    rate = float(rate_both_ways(machine_of(ClusterSpec(gpu="H200", nodes=1, gpus_per_node=1))))
    for model, seconds in updates.items():
        size = FP32_STATE * parameter_count(load_run(None, [f"model={model}", "cluster.gpu=H200"]).model)
        assert [size / each for each in seconds] == pytest.approx([rate] * len(seconds), rel=0.05), model


def test_steps_are_predicted_within_five_percent_and_memory_within_four() -> None:
    runs = [run for name in FILES for run in accuracy._planned_runs(BENCHMARKS / "results" / name)]
    checks = {check.recorded_run.name: check for check in map(accuracy.check, runs)}
    assert len(checks) == 14
    errors = {name: check.error for name, check in checks.items()}
    assert max(map(abs, errors.values())) < 0.05, errors
    memory = {name: check.memory_error for name, check in checks.items() if check.memory_error is not None}
    assert len(memory) == 12 and max(map(abs, memory.values())) < 0.04, memory
