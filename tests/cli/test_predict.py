"""`meshwright predict` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import meshwright

TABLE = """source,model,gpu,gpus,tp,pp,dp,micro_batch,global_batch,seq,layers,hidden,iter_time_s,mem_gb
a,Llama-3-8B,H100,8,1,1,8,1,64,4096,32,4096,3.0,50
a,Llama-3-8B,Loom 1,8,1,1,8,1,64,4096,32,4096,3.0,
b,Llama-3-8B,H100,8,1,1,8,,64,4096,,,,
"""


def test_json_answers_every_row(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text(TABLE)
    answer = meshwright("predict", runs, "--json")
    assert answer.code == 0
    first, second, third = answer.json["rows"]
    assert [entry["row"] for entry in answer.json["rows"]] == [0, 1, 2]
    assert first["measured_step_seconds"] == 3.0
    assert first["measured_memory_gib"] == 50  # the column mem_gb is in GiB
    assert first["predicted_memory_gib"] == pytest.approx(sum(first["memory_by_kind_gib"].values()))
    assert not [key for key in first if key.endswith("_gb")]
    assert first["low_seconds"] < first["predicted_step_seconds"] < first["high_seconds"]
    assert second["predicted_step_seconds"] is None
    assert "Loom 1" in second["reason"]
    assert third["predicted_step_seconds"] == first["predicted_step_seconds"]
    assert "micro_batch 1" in third["assumed"]
    summary = answer.json["summary"]
    assert (summary["predicted"], summary["compared"]) == (2, 1)
    error = abs(first["predicted_step_seconds"] / 3.0 - 1)
    assert summary["median_error"] == summary["median_of_sources"] == summary["worst_source"]["worst_error"] == error
    (run_class,) = summary["classes"]
    assert run_class["class"] == first["class"] == "one host, dense, unknown software, measured generation"
    assert (
        run_class["inside_band"]
        == summary["inside_band"]
        == float(first["low_seconds"] <= 3.0 <= first["high_seconds"])
    )


def test_table_names_sources_and_reasons(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text(TABLE)
    answer = meshwright("predict", runs)
    assert answer.code == 0
    assert "2 of 3 rows predicted" in answer.out
    assert "median of the sources' medians" in answer.out and "inside their bands" in answer.out
    assert "Loom 1" in answer.out


def test_a_file_that_is_no_table_is_bad_input(tmp_path: Path) -> None:
    assert meshwright("predict", tmp_path / "none.csv").code == 2
    other_table = tmp_path / "other.csv"
    other_table.write_text("a,b\n1,2\n")
    answer = meshwright("predict", other_table)
    assert answer.code == 2
    assert "gpu" in answer.err
