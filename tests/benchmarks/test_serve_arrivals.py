"""Times of arriving requests against closed forms with a fake clock; the whole command on a tiny model."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import serve_arrivals
from serve_arrivals import Arrivals, arrivals, percentiles, serve, summary

from meshwright.serve.engine import Engine
from tests.models.tiny import LLAMA
from tests.serve.helpers import engine_of, tiny

STEP = 0.01
"""Seconds of a step by the fake clock."""


class FakeTime:
    """A clock that advances with each step of the engine and each sleep."""

    def __init__(self, engine: Engine) -> None:
        self.now, self.slept = 5.0, 0.0
        step = engine.step

        def timed_step() -> Any:
            self.now += STEP
            return step()

        engine.step = timed_step

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now, self.slept = self.now + seconds, self.slept + seconds


def test_times_count_from_the_time_at_which_a_request_is_due() -> None:
    """The second request comes during the third step of the first; the last finds an idle engine."""
    engine = engine_of(tiny(LLAMA))
    fake = FakeTime(engine)
    requests = Arrivals([[1, 2, 3]] * 3, [0.0, 0.025, 1.0], new_tokens=5)
    times = serve(engine, requests, clock=lambda: fake.now, sleep=fake.sleep)
    assert [each.first for each in times] == pytest.approx([STEP, 1.5 * STEP, STEP])
    assert [each.each for each in times] == pytest.approx([STEP] * 3)
    assert fake.slept == pytest.approx(1.0 - 8 * STEP)
    row = summary(requests, times)
    assert row["seconds"] == pytest.approx(1.0 + 5 * STEP)
    assert row["offered_requests_per_second"] == pytest.approx(2.0)
    assert row["new_tokens_per_second"] == pytest.approx(15 / 1.05)
    assert row["ttft_milliseconds"]["p99"] == pytest.approx(15.0)


def test_arrivals_are_those_of_any_script_with_the_same_seed() -> None:
    draws = random.Random("7" + "31.0")
    prompts = [[draws.randrange(1000 - 300) for _ in range(7)] for _ in range(50)]
    gaps = [draws.expovariate(31.0) for _ in range(50)]
    drawn = arrivals(7, 3, 31.0, 50, 1000)
    assert drawn.prompts == prompts
    assert drawn.dues == pytest.approx([sum(gaps[: index + 1]) for index in range(50)])
    assert arrivals(7, 3, float("inf"), 4, 1000).dues == [0.0] * 4


def test_percentiles_are_values_in_order() -> None:
    values = [float(value) for value in range(1500)]
    random.Random(0).shuffle(values)
    assert percentiles(values) == {"mean": 749.5, "p50": 750.0, "p90": 1350.0, "p99": 1485.0}
    assert percentiles([3.0])["p99"] == 3.0


def call(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict[str, Any]:
    sizes = ("--tiny", "--context", "64", "--sequences", "4", "--step-tokens", "32", "--prompt", "20", "--new", "3")
    monkeypatch.setattr(sys, "argv", ["serve_arrivals.py", *sizes, *arguments, "--out", str(out)])
    serve_arrivals.main()
    return json.loads(out.read_text())


def test_the_command_measures_arrivals_and_lone_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--rates", "500", "inf", "0.001", "--requests", "6", "--alone", "8", "40", "--budget", "100")
    result = call(monkeypatch, tmp_path / "out.json", *arguments)
    assert json.loads(capsys.readouterr().out) == result
    assert result["benchmark"] == "serve_arrivals" and result["model"] == "tiny"
    assert [row["rate"] for row in result["arrivals"]] == ["500.0", "inf"] and result["left_out"] == [0.001]
    assert all(row["requests"] == 6 and row["prompt_tokens"] == 20 for row in result["arrivals"])
    assert [row["prompt_tokens"] for row in result["alone"]] == [8, 40]


@pytest.mark.slow
def test_the_command_measures_the_start_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call(monkeypatch, tmp_path / "out.json", "--start", "2")
    assert len(result["start_to_first_token_seconds"]) == 2
    assert all(1 < seconds < 200 for seconds in result["start_to_first_token_seconds"])
    assert "arrivals" not in result
