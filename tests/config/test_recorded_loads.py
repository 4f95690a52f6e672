"""Files of recorded expert loads: a table and a run's own metrics read alike, and what cannot be used is refused."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.distributed.test_equality import LLAMA

from meshwright.config.load import differences, load_run
from meshwright.config.recorded_loads import read_loads
from meshwright.spec.errors import BadConfig, BadInput
from meshwright.spec.model import ModelSpec
from meshwright.training.step_record import loads_interval

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


def test_a_run_names_its_expected_loads_by_file_or_run(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experts = ["model.family=mixtral", "model.experts=4", "model.experts_per_token=2", "model.expert_hidden=64"]
    words = ["model=llama-nano", "model.vocab_size=256", *experts]
    (tmp_path / "runs" / "earlier").mkdir(parents=True)
    line = json.dumps({"step": 1, "expert_loads": [[1, 2, 3, 4]]})
    (tmp_path / "runs" / "earlier" / "metrics.jsonl").write_text(f"{line}\n")
    compressed = tmp_path / "loads.csv.gz"
    compressed.write_bytes(gzip.compress(table.read_bytes()))
    named = {"uniform": "uniform", table.name: str(table), compressed.name: str(compressed)}
    named["earlier"] = str(tmp_path / "runs" / "earlier")
    for word, source in named.items():
        run = load_run(None, [*words, f"train.expert_load={word}"])
        assert run.train.expert_load == source
    assert differences(run, load_run(None, words)) == [], "the loads that a planner expects do not change the training"
    for word, got in (
        ("absent.csv", "absent.csv: .*No such file"),
        (300 * "x", "xxx.*: .*File name too long"),
        ("loads.csv", "loads.csv: has 4 experts, the model 8"),
    ):
        more = ["model.experts=8"] if word == "loads.csv" else []
        with pytest.raises(BadConfig, match=rf"train.expert_load: expected uniform, or a file or run .*got {got}"):
            load_run(None, [*words, *more, f"train.expert_load={word}"])
