"""Files of recorded expert loads: a table and a run's own metrics read alike, and what cannot be used is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec
from meshwright.training.recorded_loads import read_loads
from meshwright.training.step_record import loads_interval
from tests.distributed.test_equality import LLAMA

SPEC = replace(LLAMA, family="mixtral", layers=3, experts=4, experts_per_token=2, expert_hidden=6)
TABLE = "layer,step,expert_0,expert_1,expert_2,expert_3\n4,9,1,2,3,4\n2,9,4,3,2,1\n2,5,1,1,1,1\n4,5,0,8,0,0\n"
LOADS = [[[1, 1, 1, 1], [0, 8, 0, 0]], [[4, 3, 2, 1], [1, 2, 3, 4]]]
"""Steps 5 and 9, layers 2 and 4."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "loads.csv"
    path.write_text(TABLE)
    return path


def test_a_table_and_metrics_give_the_same_loads_and_layers_repeat(table: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"kind": "step", "step": step, "expert_loads": loads} for step, loads in zip((5, 9), LOADS, strict=True)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in [{"kind": "event", "step": 1}, *lines]))
    for path in (table, metrics):
        loads = read_loads(path, SPEC)
        assert loads[:, :2].tolist() == LOADS
        assert (loads[:, 2] == loads[:, 0]).all(), "the third mixture has the loads of the first"
    assert read_loads(table, replace(SPEC, first_dense_layers=2)).tolist() == [[step[0]] for step in LOADS]


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        (TABLE, LLAMA, "the model has no experts"),
        (TABLE, replace(SPEC, experts=5), "has 4 experts, the model 5"),
        (TABLE.replace("0,8,0,0", "0,0,0,0"), SPEC, "above 0 for some expert"),
        (TABLE.replace("0,8,0,0", "9,8,-1,0"), SPEC, "at least 0"),
        (TABLE.replace("0,8,0,0", "0,8.5,0,0"), SPEC, "expected columns layer, step, expert_0"),
        (TABLE.replace("layer,", "stage,"), SPEC, "expected columns layer, step, expert_0"),
        (TABLE.replace("4,5,0,8,0,0\n", ""), SPEC, "expected columns layer, step, expert_0|all layers in each step"),
        ("", SPEC, "all layers in each step"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, spec: ModelSpec, message: str) -> None:
    path = tmp_path / "loads.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_loads(path, spec)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_loads(tmp_path / "absent.csv", SPEC)


def test_many_loads_are_recorded_every_tenth_step() -> None:
    assert [loads_interval(torch.zeros(layers, experts).numel()) for layers, experts in ((4, 8), (60, 256))] == [1, 10]
