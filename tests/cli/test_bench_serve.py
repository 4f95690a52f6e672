"""`meshwright bench-serve` with a tiny model on this machine's processor: servers, load, report."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from meshwright.cli import bench_serve
from meshwright.cli.bench_serve import read_rates
from meshwright.server import deployment_servers
from meshwright.server.deployment_servers import RunningDeployment, RunningInstance
from meshwright.server.load_client import LoadTest, MeasuredRequest
from meshwright.spec.deployment import TimedRequest
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_INTERRUPTED, BadInput, CommunicationFailure
from tests.cli.command import meshwright
from tests.server.helpers import write_folder

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


NAMES: list[str] = []
"""Names of the tests that were run."""


class Instant(LoadTest):
    """A load test whose requests take 10 ms to the first token and 1 ms for each other one, of two busy servers."""

    async def run(self, requests: Sequence[TimedRequest], watched: Sequence[str] = (), every: float = 0.25) -> None:
        assert self.urls == ["http://router"] and watched == ["http://0", "http://1"]
        NAMES.append(self.name)
        for each in requests:
            first = each.arrival_seconds + 0.01
            self.measured.append(MeasuredRequest(each, 0, 0.0, first, first + 1e-3 * (each.output_tokens - 1)))
        self.occupancy += [(time, server, {"running": 1.0, "cache": 0.5}) for time in (0.0, 0.05) for server in (0, 1)]


class Dying(Instant):
    """As `Instant`, but at the second rate the server at http://1 ends, and no request does."""

    ended = False

    async def run(self, requests: Sequence[TimedRequest], watched: Sequence[str] = (), every: float = 0.25) -> None:
        await super().run(requests, watched, every)
        if self.name == "rate 2":
            Dying.ended = True
            await asyncio.Event().wait()

    @classmethod
    def check(cls) -> None:
        if cls.ended:
            raise CommunicationFailure("the server of role decode ended during the test, with code -9:\nlast line")


class Stopped(Instant):
    """As `Instant`, but SIGTERM comes at the second rate."""

    async def run(self, requests: Sequence[TimedRequest], watched: Sequence[str] = (), every: float = 0.25) -> None:
        await super().run(requests, watched, every)
        if self.name == "rate 2":
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def servers(folder: Path, deployment: Any, *, gpu: bool, file: Path) -> Iterator[RunningDeployment]:
    yield RunningDeployment(
        "http://router",
        [RunningInstance("prefill", 0, "http://0"), RunningInstance("decode", 0, "http://1")],
        Dying.check,
    )


@pytest.mark.parametrize(
    ("load", "code", "why"),
    [
        (Dying, EXIT_COMMUNICATION, "the server of role decode ended during the test, with code -9"),
        (Stopped, EXIT_INTERRUPTED, "interrupted"),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_test_that_ends_early_reports_the_rates_before(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: type[Instant],
    code: int,
    why: str,
    as_json: bool,
) -> None:
    monkeypatch.setattr(deployment_servers, "deployment_servers", servers)
    monkeypatch.setattr("meshwright.server.load_client.LoadTest", load)
    monkeypatch.setattr(Dying, "ended", False)
    monkeypatch.setattr(bench_serve, "CHECK_SECONDS", 0.01)
    (tmp_path / "serve.yaml").write_text(QUESTION.format(folder=folder))
    (tmp_path / "d.yaml").write_text(f"instances: {PAIR}\n")
    arguments = ["--plan", tmp_path / "d.yaml", "--rates", "100,200,400", "--out", report := tmp_path / "report.html"]
    answer = meshwright("bench-serve", tmp_path / "serve.yaml", *arguments, *["--json"] * as_json)
    line = f"without a result: 200/s, 400/s ({why})"
    assert answer.code == code and f"report of 1 of 3 rates: {report}; {line}" in answer.err
    assert answer.err.count(f"meshwright: {why}") == 1
    HTMLParser().feed(text := report.read_text())
    assert line in text and "100/s" in text
    if as_json:
        assert answer.json["ok"] is False and answer.json["error"].startswith(why) and answer.json["errors"] == []
        assert [result["rate"] for result in answer.json["rates"]] == [100] and answer.json["missing"] == [200, 400]


def test_without_a_tested_rate_there_is_no_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment_servers, "deployment_servers", servers)
    monkeypatch.setattr("meshwright.server.load_client.LoadTest", Instant)
    monkeypatch.setattr(Dying, "ended", True)
    (tmp_path / "serve.yaml").write_text(QUESTION.format(folder=folder))
    (tmp_path / "d.yaml").write_text(f"instances: {PAIR}\n")
    arguments = ["--plan", tmp_path / "d.yaml", "--rates", "100", "--out", tmp_path / "report.html", "--json"]
    answer = meshwright("bench-serve", tmp_path / "serve.yaml", *arguments)
    assert answer.code == EXIT_COMMUNICATION and set(answer.json) == {"ok", "error", "errors"}
    assert not (tmp_path / "report.html").exists()


def test_the_report_has_predicted_beside_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    NAMES.clear()
    monkeypatch.setattr(deployment_servers, "deployment_servers", servers)
    monkeypatch.setattr("meshwright.server.load_client.LoadTest", Instant)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "serve.yaml").write_text(QUESTION.format(folder=folder))
    (tmp_path / "d.yaml").write_text(f"instances: {PAIR}\n")
    report = tmp_path / "report.html"
    bench_serve.bench_serve(
        [str(tmp_path / "serve.yaml")], tmp_path / "d.yaml", None, "100,200", seconds=0.1, out=report, as_json=True
    )
    captured = capsys.readouterr()
    assert "rate 2 of 2: 20 requests at 200/s, 0.1 s\n200 requests/s: 100.0% meet both limits" in captured.err
    answer = json.loads(captured.out)
    rates, missing = answer["rates"], answer["missing"]
    assert missing == []
    assert [(result["rate"], result["requests"], result["failed"]) for result in rates] == [(100, 20, 0), (200, 20, 0)]
    for result in rates:
        assert result["measured"]["ttft_p90"] == pytest.approx(0.01)
        assert result["measured"]["tpot_p50"] == pytest.approx(1e-3)
        assert result["predicted"]["attainment"] == 1.0
    assert NAMES == ["warm-up", "rate 1", "rate 2"]  # no rate finds the prompts of another in the prefix cache
    HTMLParser().feed(text := report.read_text())
    assert "without a result" not in text
    # Embedding and head of 257 × 64, two layers of 30,848, a norm of 64: 94,656.
    assert "<h1>llama, 94.7k parameters</h1>" in text and f"weights {folder}" in text
    assert "asked for 90%" in text and 'data-value="0"></b>' in text
    assert text.index('class="rings c-loss"') < text.index('class="points c-validation"')  # measured is above predicted
    assert text.count('class="dashes ') == 4  # of two gauges and two roles
    for part in ("Predicted beside measured", "Attainment", "prefill 0", "decode 0"):
        assert part in text
    for gauge in ("Requests in the batch", "Cache that requests hold"):
        assert f"{gauge}, by role" in text and f"{gauge}, by instance" in text
    assert all(f"{role}, {kind}" in text for role in ("prefill", "decode") for kind in ("measured", "predicted"))


@pytest.mark.slow
@pytest.mark.parametrize("instances", [COLOCATED, PAIR])
def test_a_deployment_serves_its_workload_and_the_report_shows_it(folder: Path, tmp_path: Path, instances: str) -> None:
    (tmp_path / "serve.yaml").write_text(QUESTION.format(folder=folder))
    (tmp_path / "d.yaml").write_text(f"instances: {instances}\n")
    report = tmp_path / "report.html"
    arguments = ["--plan", tmp_path / "d.yaml", "--rates", "200,100", "--seconds", "0.1", "--out", report, "--json"]
    answer = meshwright("bench-serve", tmp_path / "serve.yaml", *arguments, env={"OMP_NUM_THREADS": "1"})
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
