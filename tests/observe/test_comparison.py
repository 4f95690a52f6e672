"""Tests of the comparison of runs: differing keys, figures, and the page with a curve for each run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshwright.cli.compare import compared_runs
from meshwright.observe.comparison import (
    MOST_CURVES,
    comparison_page,
    comparison_sheet,
    differing_keys,
    names_of,
    table_rows,
)
from meshwright.spec.fields import from_plain
from meshwright.spec.model import flops_per_token
from meshwright.spec.run import ModelSection
from tests.cli.command import meshwright
from tests.observe.test_report import HOSTILE, Page, config, plan, write_metrics


def make(folder: Path, steps: int = 40, lr: float = 1e-3, **changes: float) -> Path:
    """A run of `steps` steps with this learning rate."""
    folder.mkdir(parents=True)
    write_metrics(folder, steps, **changes)
    values = config(train={"steps": 40, "learning_rate": lr, "seq_len": 128})
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan()))
    os.utime(folder / "metrics.jsonl", (0, 0))  # nothing writes it
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make(tmp_path / "a"), make(tmp_path / "b", 20, 3e-4, loss=2.0)]


def test_differing_keys_and_figures_of_runs(runs: list[Path]) -> None:
    compared = compared_runs(runs)
    assert differing_keys(compared) == [("train.learning_rate", ["0.001", "0.0003"])]
    rows = dict(table_rows(compared))
    assert rows["state"] == ["finished", "stopped"]
    assert rows["steps"] == ["40", "20"]
    assert rows["training loss, mean of the last 10"][1] == "2.0000"
    assert rows["validation loss, last"] == ["0.2125", "0.4250"] and rows["its step"] == ["40", "20"]
    spec = from_plain(ModelSection, config()["model"])
    assert compared[0].figures["flops"] == 40 * 4096 * flops_per_token(spec, 128, causal=True)


def test_curves_share_axes_and_keep_their_own_positions(runs: list[Path]) -> None:
    charts = comparison_sheet(compared_runs(runs))
    assert [axis.key for axis in charts.axes] == ["step", "tokens", "time", "flops"]
    assert [chart.key for chart in charts.charts] == ["loss", "validation", "tokens_per_second", "grad_norm", "lr"]
    assert charts.axes[0].high == 40 and charts.axes[2].high == 20.0
    assert [len(charts.tables[name]["step"]) for name in ("steps0", "steps1", "validation1")] == [40, 20, 2]


def test_each_source_of_a_moe_has_a_chart(runs: list[Path]) -> None:
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "validation", "step": 40, "loss": 2.0, "by_source": {"code": 1.0, "text": 3.0}}) + "\n"
        )
    titles = [chart.title for chart in comparison_sheet(compared_runs(runs)).charts]
    assert titles[1:4] == ["Validation loss", "Validation loss, code", "Validation loss, text"]


def test_the_page_is_closed_and_loads_nothing(tmp_path: Path, runs: list[Path]) -> None:
    values = yaml.safe_load((runs[0] / "config.yaml").read_text()) | {"note": HOSTILE}
    (runs[0] / "config.yaml").write_text(yaml.safe_dump(values))
    text = comparison_page("demo", compared_runs(runs))
    page = Page(text)
    assert page.tags.count("script") == 2 and page.tags.count("img") == 0
    assert "default-src 'none'" in text and "<script>alert" not in text
    assert {"k0", "k1", "runs"} <= set(page.classes()) and "Keys that differ" in page.text
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert set(figures["axes"]) == {"step", "tokens", "time", "flops"} and "steps" not in figures["tables"]


def test_runs_that_are_written_meanwhile_or_have_no_steps_are_compared(tmp_path: Path, runs: list[Path]) -> None:
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 41, "lo')
    began = tmp_path / "began"
    began.mkdir()
    (began / "lease.json").write_text("{}")
    compared = compared_runs([*runs, began])
    assert dict(table_rows(compared))["steps"] == ["40", "20", "–"]
    assert "began" in Page(comparison_page("demo", compared)).text
    assert comparison_sheet(compared_runs([began])).charts == ()


def test_curves_of_many_runs_are_limited(tmp_path: Path) -> None:
    compared = compared_runs([make(tmp_path / f"run-{number}", 3) for number in range(MOST_CURVES + 2)])
    page = Page(comparison_page("many", compared))
    assert "10 runs · curves of the first 8" in page.text and "run-9" in page.text and "k8" not in page.classes()


def test_names_of_folders_with_equal_names(tmp_path: Path) -> None:
    assert names_of([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    assert names_of([tmp_path / "x" / "a", tmp_path / "y" / "b"]) == ["a", "b"]


def test_the_command_writes_the_page_and_prints_the_table(runs: list[Path]) -> None:
    answer = meshwright("compare", *runs)
    assert answer.code == 0, answer.err
    assert "train.learning_rate" in answer.out and answer.out.splitlines()[-1] == str(runs[0].parent / "compare.html")
    out = runs[0].parent / "page.html"
    found = meshwright("compare", *runs, "--out", out, "--json").json
    assert found["differences"] == {"train.learning_rate": {"a": "0.001", "b": "0.0003"}}
    assert [run["step"] for run in found["runs"]] == [40, 20] and out.is_file()
    assert "expected two runs or more, got 1" in meshwright("compare", runs[0], runs[0]).err
    assert "did you mean" in meshwright("compare", runs[0], runs[1].parent / "bb").err


def test_results_of_benchmarks_are_in_the_comparison_and_the_report(runs: list[Path]) -> None:
    result = {"task": "hellaswag", "step": 40, "metrics": {"acc,none": 0.25, "acc_stderr,none": 0.01}}
    (runs[0] / "benchmarks.json").write_text(json.dumps([result]))
    assert dict(table_rows(compared_runs(runs)))["hellaswag, acc"] == ["0.2500 ± 0.0100", "–"]
    assert meshwright("report", runs[0]).code == 0
    assert "0.2500 ± 0.0100" in Page((runs[0] / "report.html").read_text()).text


def test_comparing_imports_no_torch(runs: list[Path]) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.argv = {['meshwright', 'compare', *map(str, runs)]!r}\n"
    subprocess.run(
        [sys.executable, "-c", f"{code}from meshwright.cli.main import main; main()"], check=True, capture_output=True
    )
