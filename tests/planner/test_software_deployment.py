"""Deployments for other servers and in formats that this release does not serve: planned, and refused where they would be started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.spread import check_deployment
from meshwright.config.deployment_file import (
    deployment_yaml,
    load_deployment,
    load_deployment_spec,
    read_deployment,
    server_settings,
)
from meshwright.config.presets import MODEL_PRESETS
from meshwright.planner import deployment_search
from meshwright.planner.deployment_search import DeploymentAnswer, plan_deployment
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import Deployment, InstanceSpec, Quantisation, ServeLimits, TimedRequest
from meshwright.spec.errors import BadConfig, BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

LLAMA_8B = from_plain(ModelSpec, {**MODEL_PRESETS["llama3-8b"], "vocab_size": 128256})
QUESTION = """
model: qwen3-30b-a3b
cluster: {gpu: B200, gpus_per_node: 2}
serve:
  workload: {rate: 5, input_tokens: 512, output_tokens: 64}
  limits: {ttft_seconds: 1, tpot_seconds: 0.05}
"""


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COARSE_REQUESTS", "FINE_REQUESTS", "BAND_REQUESTS", "LOW_REQUESTS"):
        monkeypatch.setattr(deployment_search, name, 120)


def planned(formats: Quantisation, software: Any = None) -> DeploymentAnswer:
    requests = [TimedRequest(index / 5, 512, 32) for index in range(200)]
    limits = ServeLimits(ttft_seconds=1.0, tpot_seconds=0.05)
    cluster = ClusterSpec(gpu="B200")
    return plan_deployment(LLAMA_8B, cluster, requests, limits, formats, software=software)


def test_a_deployment_is_planned_for_another_server() -> None:
    own, other = planned(Quantisation()), planned(Quantisation(), "vllm")
    assert other.deployment.software == "vllm" and own.deployment.software is None
    assert other.why[0] == "this release does not serve it: its prices are those of vllm"
    assert "points" in other.sources["step times"] and "not measured" in own.sources["step times"]
    assert not any("this release" in reason for reason in own.why)


def test_a_format_that_this_release_does_not_serve_is_planned_with_one_line_about_it() -> None:
    answer = planned(Quantisation(weights="nvfp4"))
    assert [reason for reason in answer.why if "this release" in reason] == [
        "this release does not serve it: weights: expected fp8, int8 or none, got nvfp4"
    ]
    assert answer.chosen.goodput_per_gpu > planned(Quantisation()).chosen.goodput_per_gpu


def test_attainment_is_shown_from_low_load_on() -> None:
    answer = planned(Quantisation())
    rates = [rate for rate, _ in answer.curve]
    assert rates == sorted(rates) and rates[0] == pytest.approx(0.1 * answer.chosen.goodput_per_gpu)
    assert answer.curve[0][1] == 1.0
    assert all(share for _, share in answer.curve[:-1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"software": "sglang"}, "software: expected none, as this program is no sglang"),
        ({"quantisation": Quantisation(weights="nvfp4")}, "weights: expected fp8, int8 or none, got nvfp4"),
        ({"quantisation": Quantisation(experts="fp8")}, "experts: expected none, the format of weights, got fp8"),
    ],
)
def test_a_server_refuses_what_only_the_planner_can_price(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    deployment = Deployment(instances=(InstanceSpec(),), **keys)
    assert not deployment.runnable
    file = tmp_path / "deployment.yaml"
    file.write_text(deployment_yaml(deployment), encoding="utf-8")
    assert load_deployment(file) == deployment
    for refuse in (lambda: server_settings(deployment, None), lambda: check_deployment(deployment, LLAMA_8B)):
        with pytest.raises(BadInput, match=message):
            refuse()
    with pytest.raises(BadConfig, match=message), read_deployment(file).at_keys():
        check_deployment(deployment, LLAMA_8B)


def test_formats_of_weights_and_experts_alike_are_served() -> None:
    for formats, settings in (
        (Quantisation(weights="fp8", experts="fp8", kv_cache="fp8"), {"weights": "fp8", "kv_cache": "fp8"}),
        (Quantisation(weights="bf16", experts="bf16"), {}),
    ):
        deployment = Deployment(instances=(InstanceSpec(),), quantisation=formats)
        found = server_settings(deployment, None)
        assert {key: found[key] for key in found.keys() & {"weights", "experts", "kv_cache"}} == settings


def test_keys_of_a_question(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(QUESTION + "  software: trtllm\n  quantisation: {experts: nvfp4}\n", encoding="utf-8")
    serve = load_deployment_spec(file).serve
    assert (serve.software, serve.quantisation) == ("trtllm", Quantisation(experts="nvfp4"))
    file.write_text(QUESTION + "  software: sglan\n", encoding="utf-8")
    with pytest.raises(BadConfig, match="sglang"):
        load_deployment_spec(file)
