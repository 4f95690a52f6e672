"""Files of deployments and traces: what is right loads, and every mistake is reported at its token."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import examples

from meshwright.config.deployment_file import (
    asks_for_deployment,
    deployment_yaml,
    load_deployment,
    load_deployment_spec,
    server_settings,
)
from meshwright.config.schema import all_keys
from meshwright.config.trace_file import SYNTHETIC_REQUESTS, read_trace, workload_requests
from meshwright.config.yaml_positions import dump_yaml
from meshwright.spec.deployment import (
    Deployment,
    DeploymentPrediction,
    DeploymentSpec,
    InstanceSpec,
    Quantisation,
    TimedRequest,
    Workload,
)
from meshwright.spec.errors import BadConfig, BadInput, Mistake

QUESTION = """\
model: llama3-8b
cluster: {gpu: H200, gpus_per_node: 8}
serve:
  workload: {rate: 3, input_tokens: 1200, output_tokens: 200, prefix_sharing: 0.5}
  limits: {ttft_seconds: 0.2, tpot_seconds: 0.01}
"""
HEADER = "arrival_seconds,input_tokens,output_tokens,prefix_blocks_of_512\n"


def mistakes_of(file: Path, text: str, *overrides: str) -> tuple[Mistake, ...]:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadConfig) as caught:
        load_deployment_spec(file, overrides)
    return caught.value.mistakes


def test_a_question_has_its_defaults_and_takes_overrides(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(QUESTION)
    spec = load_deployment_spec(file, ["serve.limits.tpot_seconds=0.02", "serve.quantisation=fp8"])
    assert (spec.name, spec.model.layers, spec.cluster.ranks) == ("chat", 32, 8)
    assert (spec.serve.limits.ttft_seconds, spec.serve.limits.tpot_seconds) == (0.2, 0.02)
    assert spec.serve.limits.attainment == 0.9
    assert spec.serve.quantisation == Quantisation(weights="fp8", kv_cache="fp8")
    spec = load_deployment_spec(file, ["serve.quantisation=int8"])
    assert spec.serve.quantisation == Quantisation(weights="int8")
    assert asks_for_deployment(file, ()) and asks_for_deployment(None, ["serve.limits.attainment=1"])
    assert not asks_for_deployment(None, ["model=llama3-8b"])


def test_a_trace_is_beside_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"{HEADER}5,1024,3,7 8\n5.5,3,1,\n")
    equal = "rate: 3, input_tokens: 1200, output_tokens: 200, prefix_sharing: 0.5"
    (tmp_path / "q.yaml").write_text(QUESTION.replace(equal, "trace: t.csv"))
    workload = load_deployment_spec(tmp_path / "q.yaml").serve.workload
    expected = (TimedRequest(0.0, 1024, 3, (7, 8)), TimedRequest(0.5, 3, 1))
    assert workload_requests(workload) == expected
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    assert read_trace(tmp_path / "t.csv.gz") == expected


def test_equal_requests_arrive_at_their_rate_and_share_whole_blocks() -> None:
    workload = Workload(rate=20.0, input_tokens=2048, output_tokens=9, prefix_sharing=0.5)
    requests = workload_requests(workload, seed=3)
    assert len(requests) == SYNTHETIC_REQUESTS and requests == workload_requests(workload, seed=3)
    assert {request[1:] for request in requests} == {(2048, 9, (0, 1))}
    # The mean of n exponential gaps has a relative deviation of 1/√n: four of them.
    assert requests[-1].arrival_seconds == pytest.approx(SYNTHETIC_REQUESTS / 20, rel=4 / SYNTHETIC_REQUESTS**0.5)


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "expected", "nearest"),
    [
        ("limits:", "limit:", 5, "serve.limit", "a key of serve", "limits"),
        ("tpot_seconds", "tpot", 5, "serve.limits.tpot", "a key of serve.limits", "tpot_seconds"),
        ("0.01}", "0}", 5, "serve.limits.tpot_seconds", "number (> 0", None),
        ("0.01}", "0.01, attainment: 1.5}", 5, "serve.limits.attainment", "≤ 1", None),
        ("rate: 3, ", "", 4, "serve.workload", "a trace, or all of rate, input_tokens, output_tokens", None),
        ("rate: 3", "trace: none", 4, "serve.workload", "a trace, or all of", None),
        ("serve:", "serve:\n  quantisation: fp9", 4, "serve.quantisation", "fp8, int8 or a section", None),
        ("model: llama3-8b", "model: llama3-9b", 1, "model.preset", "a preset", "llama3-8b"),
        ("H200,", "MI300,", 2, "cluster.gpu", "MI300X", "MI300X"),
        ("serve:", "train: {steps: 3}\nserve:", 3, "train", "a top-level key", None),
        (
            "output_tokens: ",
            "output_tokens: 130",
            4,
            "serve.workload.output_tokens",
            "at most 129872, as model.max",
            None,
        ),
        (
            "input_tokens: ",
            "input_tokens: 20",
            4,
            "serve.workload.input_tokens",
            "at most 131071, as model.max_se",
            None,
        ),
        ("sharing: 0.5", "sharing: 0.4", 4, "serve.workload.prefix_sharing", "0, or at least 0.427: prompts of", None),
    ],
)
def test_a_mistake_is_reported_at_its_token(
    tmp_path: Path, old: str, new: str, line: int, key: str, expected: str, nearest: str | None
) -> None:
    assert old in QUESTION
    (mistake,) = mistakes_of(tmp_path / "q.yaml", QUESTION.replace(old, new))
    assert (mistake.file, mistake.line, mistake.key) == (str(tmp_path / "q.yaml"), line, key)
    assert expected in mistake.expected and mistake.nearest == nearest


def test_sizes_beside_a_trace_and_a_missing_trace_are_reported(tmp_path: Path) -> None:
    (tmp_path / "chat.csv").write_text(f"{HEADER}0,1,1,\n")
    text = QUESTION.replace("rate: 3", "trace: chat.csv").replace("prefix_sharing: 0.5", "prefix_sharing: 0")
    found = mistakes_of(tmp_path / "q.yaml", text)
    assert [mistake.key.rpartition(".")[2] for mistake in found] == ["input_tokens", "output_tokens", "prefix_sharing"]
    (mistake,) = mistakes_of(tmp_path / "q.yaml", QUESTION, f"serve.workload.trace={tmp_path}/chatt.csv")
    assert (mistake.file, mistake.key) == ("command line", "serve.workload.trace")
    assert mistake.nearest == "chat.csv" and "no such file" in mistake.got
    (tmp_path / "chat.csv").write_bytes(b"\xff")
    (mistake,) = mistakes_of(tmp_path / "q.yaml", QUESTION, f"serve.workload.trace={tmp_path}/chat.csv")
    assert mistake.nearest is None and "chat.csv" in mistake.got


def test_a_few_prompts_of_a_trace_may_be_longer_than_the_context(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_seconds,input_tokens,output_tokens\n" + "1,10,2\n" * 9 + "1,200000,2\n")
    text = QUESTION.replace("rate: 3, input_tokens: 1200, output_tokens: 200, prefix_sharing: 0.5", "trace: t.csv")
    (tmp_path / "q.yaml").write_text(text)
    assert load_deployment_spec(tmp_path / "q.yaml", ["serve.limits.attainment=0.9"]).serve.workload.trace is not None
    (mistake,) = mistakes_of(tmp_path / "q.yaml", text, "serve.limits.attainment=0.95")
    assert (mistake.line, mistake.key) == (4, "serve.workload.trace")
    assert mistake.got == "1 of 10 longer, the longest 200000" and "at most 131071 tokens" in mistake.expected


@pytest.mark.parametrize(
    ("text", "line", "column", "key", "expected"),
    [
        ("", 1, 1, "trace", "the columns"),
        (HEADER, 2, 1, "trace", "at least one request"),
        ("arrival_seconds,input_token,output_tokens\n", 1, 17, "trace", "the columns"),
        ("arrival_seconds,input_tokens\n", 1, 1, "trace", "the columns"),
        (f"{HEADER}0,1,1,\n0,1\n", 3, 1, "trace", "4 values"),
        (f"{HEADER}0,1,1,\n1,x,1,\n", 3, 3, "input_tokens", "an integer (≥ 1)"),
        (f"{HEADER}0,1,0,\n", 2, 5, "output_tokens", "an integer (≥ 1)"),
        (f"{HEADER}nan,1,1,\n", 2, 1, "arrival_seconds", "a number of seconds"),
        (f"{HEADER}2,1,1,\n1,1,1,\n", 3, 1, "arrival_seconds", "at least 2"),
        (f"{HEADER}2,512,1,1 2\n", 2, 9, "prefix_blocks_of_512", "at most 1 integers"),
    ],
)
def test_a_mistake_in_a_trace_has_its_line_and_column(
    tmp_path: Path, text: str, line: int, column: int, key: str, expected: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        read_trace(file)
    (mistake,) = caught.value.mistakes
    assert (mistake.file, mistake.line, mistake.column, mistake.key) == (str(file), line, column, key)
    assert expected in mistake.expected


@settings(max_examples=examples(60, 1000), deadline=None)
@given(
    st.binary(max_size=40) | st.text('0123456789.,- \n"naief', max_size=60).map(lambda text: (HEADER + text).encode())
)
def test_any_bytes_are_a_trace_or_one_mistake(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.csv"
    file.write_bytes(content)
    try:
        requests = read_trace(file)
    except BadConfig as error:
        assert len(error.mistakes) == 1
    else:
        times = [request.arrival_seconds for request in requests]
        assert times == sorted(times) and times[0] == 0
        assert all(request.input_tokens > 0 and request.output_tokens > 0 for request in requests)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text("a\0/~.:é", max_size=4) | st.just("fp8"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["trace", "role", ""]), inner),
    max_leaves=3,
)
PATHS = [".".join(map(str, path)) for path in all_keys(DeploymentSpec) if path[0] != "model"]


@settings(max_examples=examples(25, 300), deadline=None)
@given(st.dictionaries(st.sampled_from(PATHS), ANY, min_size=1, max_size=3))
def test_whatever_is_written_ends_in_a_question_or_in_mistakes(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(QUESTION)
    try:
        load_deployment_spec(file, [f"{path}={json.dumps(value)}" for path, value in changes.items()])
    except BadConfig as error:
        assert error.mistakes


DEPLOYMENT = Deployment(
    instances=(InstanceSpec(role="prefill", count=5), InstanceSpec(role="decode", count=3, token_budget=512)),
    quantisation=Quantisation(weights="fp8"),
    predicted=DeploymentPrediction(goodput_per_gpu=19.6, low=19.0, high=20.1, binding="tpot"),
    why=("decode instances keep prompts out of their steps",),
)


def test_a_written_deployment_loads_again(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(deployment_yaml(DEPLOYMENT))
    assert load_deployment(tmp_path / "d.yaml") == DEPLOYMENT
    assert (DEPLOYMENT.devices, DEPLOYMENT.colocated) == (8, False)


def test_a_server_takes_the_settings_of_its_role() -> None:
    settings = server_settings(DEPLOYMENT, "decode")
    assert settings == {"role": "decode", "tensor": 1, "step_tokens": 512, "weights": "fp8"}
    with pytest.raises(BadInput, match="--role of an instance; instances: 5 of role prefill and 3 of role decode"):
        server_settings(DEPLOYMENT, None)
    with pytest.raises(BadInput, match="--role of an instance"):
        server_settings(DEPLOYMENT, "both")
    colocated = Deployment(instances=(InstanceSpec(count=4, tensor=2),))
    assert server_settings(colocated, None) == {"role": "both", "tensor": 2, "step_tokens": 2048}
    assert server_settings(Deployment(instances=(InstanceSpec(expert=8),)), None)["expert"] == 8
    with pytest.raises(BadInput, match="expert: expected 1 beside tensor 2 and role both, got 8"):
        server_settings(Deployment(instances=(InstanceSpec(tensor=2, expert=8),)), None)
    prefill = Deployment(instances=(InstanceSpec(role="prefill", tensor=2), InstanceSpec(role="decode")))
    assert server_settings(prefill, "prefill")["tensor"] == 2
    several = Deployment(instances=(InstanceSpec(tensor=2), InstanceSpec(tensor=4)))
    with pytest.raises(BadInput, match="equal instances of role both"):
        server_settings(several, "both")


@pytest.mark.parametrize(
    ("instances", "key", "expected"),
    [
        ("[{role: prefill}]", "instances", "decode or both instances"),
        ("[{role: decode, count: 2}]", "instances", "prefill instances beside the decode"),
        ("[]", "instances", "at least one instance"),
        ("[{role: prefil}]", "instances.0.role", "both | prefill | decode"),
        ("[{tensors: 2}]", "instances.0.tensors", "a key of instances.0"),
        ("[{}], quantisation: fp9", "quantisation", "fp8, int8 or a section (weights, experts, kv_cache)"),
    ],
)
def test_a_deployment_that_cannot_serve_is_refused(tmp_path: Path, instances: str, key: str, expected: str) -> None:
    (tmp_path / "d.yaml").write_text(f"{{instances: {instances}}}\n")
    with pytest.raises(BadConfig) as caught:
        load_deployment(tmp_path / "d.yaml")
    (mistake,) = caught.value.mistakes
    assert (mistake.line, mistake.key) == (1, key) and expected in mistake.expected


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ("expert_dispatch: int8", "none, as no instance has expert above 1"),
        ("expert_micro_batches: 2", "1, as no instance has expert above 1"),
        ("expert_dispatch: fp8", "int8"),
        ("expert_micro_batch: 2", "a key of engine"),
        ("absorb: maybe", "true | false"),
    ],
)
def test_a_wrong_switch_is_refused(tmp_path: Path, switch: str, expected: str) -> None:
    (tmp_path / "d.yaml").write_text(f"instances: [{{}}]\nengine:\n  {switch}\n")
    with pytest.raises(BadConfig) as caught:
        load_deployment(tmp_path / "d.yaml")
    (mistake,) = caught.value.mistakes
    assert (mistake.line, mistake.key) == (3, f"engine.{switch.partition(':')[0]}") and expected in mistake.expected


@settings(max_examples=examples(25, 300), deadline=None)
@given(st.dictionaries(st.sampled_from(["instances", "quantisation", "engine", "predicted", "why"]), ANY, min_size=1))
def test_any_deployment_loads_or_has_placed_mistakes(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(dump_yaml(data))
    try:
        load_deployment(file)
    except BadConfig as error:
        assert all(mistake.file == str(file) for mistake in error.mistakes)
