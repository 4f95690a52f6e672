"""The Prometheus endpoint: text format 0.0.4 by a parser of its specification, addresses, and what is served."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from meshwright.config.load import load_run
from meshwright.events.messages import ProgressMessage
from meshwright.launch.metrics_endpoint import Metric, MetricsEndpoint, exposition, metrics_endpoint
from meshwright.launch.outcome import RankState
from meshwright.spec.errors import BadConfig, BadInput
from meshwright.spec.listen_address import listen_address

Labels = frozenset[tuple[str, str]]
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:[a-zA-Z_]\w*=\"(?:[^\"\\\n]|\\[\\\"n])*\",?)*)\}})? (\S+)")


def parse(text: str) -> dict[str, tuple[str, str, dict[Labels, float]]]:
    """By metric: type, help, and value by labels; raises AssertionError where the text breaks the format."""
    found: dict[str, tuple[str, str, dict[Labels, float]]] = {}
    helps: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if match := re.fullmatch(rf"# HELP ({NAME}) (.*)", line):
            assert match[1] not in helps
            helps[match[1]] = match[2].replace(r"\n", "\n").replace("\\\\", "\\")
        elif match := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge)", line):
            assert match[1] not in found, "one group of lines for each metric"
            found[match[1]] = match[2], helps[match[1]], {}
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None and match[1] == list(found)[-1], line
            labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")
            unescaped = {(k, re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], v)) for k, v in labels}
            samples = found[match[1]][2]
            assert frozenset(unescaped) not in samples
            samples[frozenset(unescaped)] = float(match[3])
    return found


def test_the_text_is_the_format_with_every_character_escaped() -> None:
    odd = 'a "quoted" \\ back\nline é'
    text = exposition(
        [
            Metric("a_total", "counter", "First \\ line\nsecond.", [({"run": odd, "rank": "1"}, 3.0), ({}, None)]),
            Metric("b", "gauge", "Without labels.", [({}, float("inf"))]),
            Metric("c", "gauge", "Nothing known.", [({}, None)]),
        ]
    )
    found = parse(text)
    assert found["a_total"] == ("counter", "First \\ line\nsecond.", {frozenset({("run", odd), ("rank", "1")}): 3.0})
    assert found["b"][2] == {frozenset(): float("inf")} and "c" not in found
    assert text.splitlines()[2] == r'a_total{run="a \"quoted\" \\ back\nline é",rank="1"} 3.0'


def test_ranks_have_their_step_and_the_age_of_their_phase(tmp_path: Path) -> None:
    now = [100.0]
    endpoint = MetricsEndpoint(tmp_path / "small", lambda: now[0])
    endpoint.update([RankState(4, progress=ProgressMessage("train", 7, 1)), RankState(5)])
    now[0] = 103.0
    endpoint.update(
        [RankState(4, progress=ProgressMessage("train", 7, 5)), RankState(5, progress=ProgressMessage("train", 7))]
    )
    now[0] = 104.5
    found = parse(endpoint.text())
    step, age = (found[f"meshwright_rank_{name}"][2] for name in ("step", "phase_age_seconds"))
    rank_4, rank_5 = ({("run", "small"), ("rank", rank)} for rank in "45")
    assert step == {frozenset(rank_4): 7.0, frozenset(rank_5): 7.0}
    phase = ("phase", "train")
    assert age == {frozenset(rank_4 | {phase}): 4.5, frozenset(rank_5 | {phase}): 1.5}
    assert found["meshwright_step"][2] == {frozenset({("run", "small")}): 0.0}
    assert "meshwright_loss" not in found, "nothing is served that is not known"


def test_a_scrape_and_other_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with metrics_endpoint(":0", tmp_path) as endpoint:
        url = capsys.readouterr().err.split()[-1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
        endpoint.update([RankState(0)])
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "meshwright_rank_step" in parse(answer.read().decode())
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.replace("metrics", "other"), timeout=10)
        with pytest.raises(BadInput, match=r"observe\.prometheus = .*: cannot listen there: Address already in use"):
            metrics_endpoint(url[7:].removesuffix("/metrics"), tmp_path).__enter__()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=60)


def test_nothing_listens_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: pytest.fail("a socket is bound"))
    with metrics_endpoint(None, tmp_path) as endpoint:
        endpoint.update([RankState(0)])


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("node-7.cluster:80", ("node-7.cluster", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert listen_address(text) == address


@pytest.mark.parametrize(
    "text", ["9400", "host", "host:", ":65536", ":-1", "a b:1", "::1:80", "[x]:80", ":1 ", "http://a:1"]
)
def test_a_bad_address_is_refused_with_file_and_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        listen_address(text)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: llama-nano\ntrain: {{steps: 1, global_batch: 1, seq_len: 8}}\nobserve: {{prometheus: '{text}'}}\n"
    )
    with pytest.raises(BadConfig) as refused:
        load_run(file, ["cluster.gpus_per_node=1", "cluster.gpu=cpu"])
    assert f"{file}:3:" in str(refused.value) and "observe.prometheus: expected HOST:PORT" in str(refused.value)
