import json

import pytest
import typer
from typer.testing import CliRunner

from meshwright.cli.report import find_run, report
from meshwright.observe.metrics import STEP_KEYS, MetricsWriter
from meshwright.spec.errors import BadInput


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "llama"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        with MetricsWriter(folder / "metrics.jsonl") as writer:
            writer.write_step({**dict.fromkeys(STEP_KEYS, 1.0), "step": 3})
    return tmp_path / "runs"


def invoke(*words):
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(words))


def test_it_prints_the_path_of_the_page(runs):
    result = invoke("runs/quickstart")
    assert result.exit_code == 0 and result.stdout.strip() == "runs/quickstart/report.html"
    assert (runs / "quickstart" / "report.html").is_file()


def test_json_is_one_object(runs):
    result = invoke("quickstart", "--json")
    answer = json.loads(result.stdout)
    assert answer["report"] == "runs/quickstart/report.html" and answer["steps"] == 3
    assert any("plan.yaml" in note for note in answer["missing"])


@pytest.mark.parametrize("typed", ["runs/quikstart", "quikstart"])
def test_a_misspelt_run_gets_the_nearest(runs, typed):
    with pytest.raises(BadInput, match=r"did you mean .*runs/quickstart"):
        find_run(type(runs)(typed))


def test_a_folder_without_metrics_names_what_is_there(runs):
    (runs / "zzz").mkdir()
    with pytest.raises(BadInput, match=r"has no metrics\.jsonl.*runs here: runs/llama, runs/quickstart"):
        find_run(type(runs)("runs/zzz"))
