"""The public traces: the authors' causes and figures, and messages for files that are no traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from meshwright.diagnosis.public_trace import COLUMNS, TraceJob, read_job, read_trace
from meshwright.diagnosis.replay import measure_steps, replay
from meshwright.diagnosis.stragglers import Diagnosis, diagnose_trace
from meshwright.diagnosis.trace_graph import trace_graph
from meshwright.spec.errors import BadInput
from tests.cli.command import meshwright

TRACES = Path(__file__).parent / "traces"
AUTHORS: dict[str, Any] = json.loads((TRACES / "authors.json").read_text())
POINTS = 0.03


@pytest.fixture(scope="module", params=["ST", "AR"])
def job(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def diagnosis(job: str) -> Diagnosis:
    return diagnose_trace(TRACES / f"{job}.parquet", TRACES / f"{job}.yaml")


def test_cause_is_that_of_the_authors(job: str, diagnosis: Diagnosis) -> None:
    expected = {"ST": ("stage_imbalance", None, 3), "AR": ("compute", 0, 0)}[job]
    assert (diagnosis.cause, diagnosis.rank, diagnosis.stage) == expected


def test_slowdowns_and_shares_are_those_of_the_authors(job: str, diagnosis: Diagnosis) -> None:
    plain, authors = diagnosis.as_plain(), AUTHORS[job]
    for name in ("slowdown", "launch_slowdown", "m_s", "m_w"):
        assert plain[name] == pytest.approx(authors[name], abs=POINTS), name
    for name in ("by_type", "by_stage", "by_dp_rank"):
        assert plain[name].keys() == authors[name].keys()
        for key, value in authors[name].items():
            assert plain[name][key] == pytest.approx(value, abs=POINTS), (name, key)


def test_complete_trace_agrees_to_six_digits() -> None:
    diagnosis, authors = diagnose_trace(TRACES / "ST.parquet", TRACES / "ST.yaml"), AUTHORS["ST"]
    assert diagnosis.slowdown == pytest.approx(authors["slowdown"], abs=1e-6)
    assert diagnosis.by_stage[3] == pytest.approx(authors["by_stage"]["3"], abs=1e-6)
    assert diagnosis.m_s == pytest.approx(authors["m_s"], abs=1e-5)


def test_replay_with_launch_delays_gives_the_measured_steps(job: str) -> None:
    table = read_trace(TRACES / f"{job}.parquet", read_job(TRACES / f"{job}.yaml"))
    measured = measure_steps(table, trace_graph(table))
    replayed = replay(measured.graph, measured.work, measured.launch_delay)
    assert np.allclose(replayed, measured.step_seconds, rtol=1e-6)


def test_command_prints_the_result(tmp_path: Path) -> None:
    answer = meshwright("stragglers", TRACES / "ST.parquet", "--meta", TRACES / "ST.yaml", "--json")
    assert answer.code == 0
    assert answer.json["cause"] == "stage_imbalance"
    assert answer.json["stage"] == 3
    assert answer.json["rank"] is None
    text = meshwright("stragglers", TRACES / "AR.parquet", "--meta", TRACES / "AR.yaml").out
    assert "cause: compute of rank 0, stage 0" in text
    assert "stands for the 4 ranks" in text
    missing = meshwright("stragglers", TRACES / "ST.parquet")
    assert missing.code == 2
    assert "--meta" in missing.err


def columns(**replaced: Any) -> dict[str, Any]:
    values: dict[str, Any] = {name: [0, 0] for name in COLUMNS}
    return values | {"optype": ["forward-compute", "backward-compute"], "duration": [0.5, 1.0]} | replaced


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            columns(optype=["forward-compute", "backward-compte"]),
            "'backward-compte'; the nearest is 'backward-compute'",
        ),
        (columns(stage=[0, 3]), "column 'stage' has values up to 3, but the job's pp_size is 1"),
        (columns(duration=[0.5, float("inf")]), "column 'duration' has values that are not finite"),
        (columns(step=[1, None]), "column 'step' has 1 empty values"),
        ({name: values for name, values in columns().items() if name != "dp_rank"}, "column 'dp_rank' is missing"),
        (columns(optype=["forward-compute", "forward-compute"], seq_id=[0, 1]), "no backward-compute of stage 0"),
    ],
)
def test_a_file_that_is_no_trace_names_the_column(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    pyarrow.parquet.write_table(pyarrow.table(values), path)
    with pytest.raises(BadInput, match=message):
        trace_graph(read_trace(path, TraceJob()))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    with pytest.raises(BadInput, match="cannot read"):
        read_trace(path, TraceJob())
    path.write_text("no parquet")
    with pytest.raises(BadInput, match="is not a Parquet file"):
        read_trace(path, TraceJob())
    job = tmp_path / "job.yaml"
    for text, message in (
        ("dp_size: 2", "key 'pp_size' is missing"),
        ("{dp_size: 2, pp_size: 0}", "pp_size: expected a positive integer, got 0"),
        ("{dp_size: 2, pp_size: 2, world_size: 8}", "world_size is 8, but the sizes of its axes multiply to 4"),
        ("- 1", "expected keys such as dp_size"),
    ):
        job.write_text(text)
        with pytest.raises(BadInput, match=message):
            read_job(job)
