"""`meshwright bench-serve` with a tiny model on this machine's processor: servers, load, report."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from meshwright.cli.bench_serve import read_rates
from meshwright.spec.errors import BadInput
from tests.cli.command import meshwright
from tests.server.helpers import write_folder
from tests.slow import quick_first

QUESTION = """\
model: {{init: hf:{folder}}}
cluster: {{gpu: cpu, gpus_per_node: 2}}
serve:
  workload: {{rate: 4, input_tokens: 40, output_tokens: 6}}
  limits: {{ttft_seconds: 500, tpot_seconds: 100}}
"""
COLOCATED = "[{role: both, token_budget: 64}]"
PAIR = "[{role: prefill, token_budget: 64}, {role: decode, token_budget: 64}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.mark.parametrize("instances", quick_first(1, [COLOCATED, PAIR]))
def test_a_deployment_serves_its_workload_and_the_report_shows_it(folder: Path, tmp_path: Path, instances: str) -> None:
    (tmp_path / "serve.yaml").write_text(QUESTION.format(folder=folder))
    (tmp_path / "d.yaml").write_text(f"instances: {instances}\n")
    report = tmp_path / "report.html"
    words = ["--plan", tmp_path / "d.yaml", "--rates", "200,100", "--seconds", "0.1", "--out", report, "--json"]
    answer = meshwright("bench-serve", tmp_path / "serve.yaml", *words, env={"OMP_NUM_THREADS": "1"})
    assert answer.code == 0, answer.err
    rates = answer.json["rates"]
    assert [result["rate"] for result in rates] == [100, 200]
    for result in rates:
        assert (result["requests"], result["failed"]) == (20, 0)
        assert result["measured"]["attainment"] == 1.0 == result["predicted"]["attainment"]
        assert 0 < result["measured"]["ttft_p50"] <= result["measured"]["ttft_p90"] < 500
    HTMLParser().feed(text := report.read_text())
    assert "Predicted beside measured" in text and "Attainment" in text
    assert "Requests in the batch, by instance" in text and "Cache that requests hold, by instance" in text
    roles = ("prefill 0", "decode 0") if "prefill" in instances else ("both 0",)
    assert all(name in text for name in roles)


def test_what_cannot_be_tested_is_refused(folder: Path, tmp_path: Path) -> None:
    assert read_rates("4,1,2.5") == [1, 2.5, 4]
    for text in ("", "0", "1,x", "inf", "nan"):
        with pytest.raises(BadInput, match="--rates"):
            read_rates(text)
    (tmp_path / "serve.yaml").write_text(QUESTION.format(folder=folder))
    (tmp_path / "d.yaml").write_text(f"instances: {COLOCATED}\n")
    refused = meshwright("bench-serve", tmp_path / "serve.yaml", "--plan", tmp_path / "d.yaml")
    assert refused.code == 2 and "--rates" in refused.err
