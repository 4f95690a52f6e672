"""`meshwright plan` of a file with `serve`: JSON, files, text, and what it refuses."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.config.deployment_file import load_deployment
from meshwright.planner import deployment_search
from tests.cli.command import meshwright

QUESTION = """\
model: llama3-8b
cluster: {gpu: H200, gpus_per_node: 2}
serve:
  workload: {rate: 10, input_tokens: 2000, output_tokens: 12}
  limits: {ttft_seconds: 0.5, tpot_seconds: 0.0065}
"""
KEYS = {
    "instances",
    "fewest",
    "goodput_per_gpu",
    "low",
    "high",
    "binding",
    "alternatives",
    "margin_over_colocated",
    "search_seconds",
}


@pytest.fixture
def question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A question whose answer takes a second: few finalists and requests."""
    for name, value in {
        "COARSE_REQUESTS": 100,
        "FINE_REQUESTS": 100,
        "FINALISTS": 3,
        "COLOCATED_FINALISTS": 2,
        "RESAMPLES": 1,
    }.items():
        monkeypatch.setattr(deployment_search, name, value)
    file = tmp_path / "serve.yaml"
    file.write_text(QUESTION)
    return file


def test_a_tight_limit_of_tokens_separates_prefill_and_decode(question: Path) -> None:
    out, page = question.with_name("deployment.yaml"), question.with_name("plan.html")
    answer = meshwright("plan", question, "--json", "--out", out, "--html", page).json
    assert set(answer) == KEYS
    # A step with any part of a prompt takes longer than the limit of a token.
    assert [(i["role"], i["count"], i["tensor"]) for i in answer["instances"]] == [("prefill", 1, 1), ("decode", 1, 1)]
    assert set(answer["instances"][0]) == {"role", "count", "tensor", "expert", "token_budget"}
    assert 0 < answer["low"] <= answer["goodput_per_gpu"] <= answer["high"]
    assert answer["binding"] in ("ttft", "tpot") and answer["margin_over_colocated"] > 0.05
    assert {"role", "count", "tensor", "expert", "token_budget"} == set(answer["fewest"][0])
    rates = [other["goodput_per_gpu"] for other in answer["alternatives"]]
    assert rates == sorted(rates, reverse=True) and all(other["why_not"] for other in answer["alternatives"])
    deployment = load_deployment(out)
    assert [i.role for i in deployment.instances] == ["prefill", "decode"] and deployment.why
    assert deployment.predicted is not None and deployment.predicted.goodput_per_gpu == answer["goodput_per_gpu"]
    HTMLParser().feed(text := page.read_text())
    assert "Goodput by division of the devices" in text and "if both limits are scaled" in text
    assert all(other["runnable"] for other in answer["alternatives"])
    assert "Attainment" in text and "Why this deployment" in text and "://" not in text


@pytest.mark.parametrize("columns", [80, 120])
def test_loose_limits_colocate_and_the_text_says_why(
    question: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    answer = meshwright("plan", question, "serve.limits={ttft_seconds: 5, tpot_seconds: 0.5}")
    assert answer.code == 0, answer.err
    assert max(map(len, answer.out.splitlines())) <= columns
    assert "× TP 1" in answer.out.splitlines()[1] and "prefill" not in answer.out.splitlines()[1]
    assert "simulating the best" in answer.err
    text = " ".join(answer.out.split())
    own = r"the workload's own \S+ requests/s are \d+% of that, and need at least 1 device: 1 × TP 1"
    assert "on all 2" in text and re.search(own, text)
    for heading in ("instances", "attainment by", "why this deployment", "colocated: ", "where the numbers come from"):
        assert heading in answer.out


def test_devices_that_no_instance_uses_are_named(question: Path) -> None:
    arguments = ["model=llama3-70b", "cluster.gpus_per_node=3", "serve.limits={ttft_seconds: 5, tpot_seconds: 0.5}"]
    assert "on all 3, 1 of them idle" in " ".join(meshwright("plan", question, *arguments).out.split())


def test_limits_below_one_step_name_what_a_request_needs(question: Path) -> None:
    answer = meshwright("plan", question, "serve.limits.tpot_seconds=0.0001", "--json")
    assert answer.code == 3
    assert "serve.limits.tpot_seconds: expected at least 0.00" in answer.json["error"]


def test_options_of_trainings_and_questions_without_a_file_are_refused(question: Path) -> None:
    assert "--probe" in meshwright("plan", question, "--probe", "3").err
    refused = meshwright("plan", "model=llama3-8b", "serve.limits.attainment=0.9")
    assert refused.code == 2 and "needs a file with `serve`" in refused.err


def test_a_folder_in_fp8_is_planned_in_the_format_that_it_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshwright.cli.plan_deployment import deployment_question
    from tests.checkpoint.test_quantized import (
        BLOCKS_WIDE,
        DYNAMIC,
        IN_BLOCKS,
        PACKED,
        WIDE,
        exported,
        in_blocks,
        in_fp8,
        packed_in_4_bits,
        rewrite,
    )

    tensors, _ = exported(tmp_path / "fp8")
    in_fp8(tensors, per_output=True)
    rewrite(tmp_path / "fp8", tensors, DYNAMIC)
    tensors, _ = exported(tmp_path / "int4")
    packed_in_4_bits(tensors)
    rewrite(tmp_path / "int4", tensors, PACKED)
    for name, spec in (("blocks", BLOCKS_WIDE), ("cut", WIDE)):
        tensors, _ = exported(tmp_path / name, spec)
        in_blocks(tensors)
        rewrite(tmp_path / name, tensors, IN_BLOCKS)
    file = tmp_path / "serve.yaml"
    as_stored, expanded = ("fp8", "the plan has fp8, in which"), (None, "the plan has bf16")
    for name, (weights, said) in {"fp8": as_stored, "blocks": as_stored, "cut": expanded, "int4": expanded}.items():
        file.write_text(QUESTION.replace("llama3-8b", f"{{init: 'hf:{tmp_path / name}'}}").replace("2000", "200"))
        assert deployment_question([str(file)]).value.serve.quantisation.weights == weights
        told = capsys.readouterr().err
        assert said in told and "GB expanded to bf16" in told and "GB in int8" in told


def test_a_reward_model_is_planned_without_a_vocabulary_and_without_new_tokens(
    question: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device an instance, and the rate of prompts alone: neither new tokens nor a tight limit of them cost anything."""
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["model={preset: llama3-8b, head: score}", "serve.workload.output_tokens=400"]
    answer = meshwright("plan", question, *arguments)
    assert answer.code == 0, answer.err
    assert "llama3-8b, 7.50B parameters" in answer.out and "2 × TP 1" in answer.out
    assert "90% of requests within 0.5 s to their score\n" in answer.out
    assert "new tokens of requests and shared prefixes do not count" in answer.err
    assert "one device an instance, as a reward model is served" in answer.out and "caches" not in answer.out
    rates = [meshwright("plan", question, *more, "--json").json for more in (arguments, [arguments[0]])]
    assert rates[0]["goodput_per_gpu"] == rates[1]["goodput_per_gpu"] and rates[0]["binding"] == "ttft"
    assert [(i["role"], i["count"], i["tensor"]) for i in rates[0]["instances"]] == [("both", 2, 1)]
    # The FLOPs of 2,000 tokens in 7.5 billion weights at the peak of the device bound it.
    assert 0.5 < rates[0]["goodput_per_gpu"] * 2000 * 2 * 6.98e9 / 989e12 < 1
    refused = meshwright("plan", question, *arguments, "serve.quantisation=fp8")
    assert refused.code == 2 and "serve.quantisation: expected none with a reward model" in refused.err
