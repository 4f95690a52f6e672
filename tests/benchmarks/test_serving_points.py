"""Rows of published serving measurements as questions, and how well the cost model answers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.serving_points import Point, Row, points_of, predict, read_points

from meshwright.spec.deployment import InstanceSpec, Quantisation

COLOCATED = {
    "concurrency": "64",
    "backend": "sglang",
    "backend_version": "0.5.9",
    "model_path": "deepseek-ai/DeepSeek-R1",
    "system": "b200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "512",
    "batch_size": "64",
    "tp_size": "8",
    "pp_size": "1",
    "attention_dp_size": "1",
    "moe_tp_size": "8",
    "moe_ep_size": "1",
    "silicon_ttft_ms": "300",
    "silicon_tpot_ms": "20",
}
ROLES = {
    **COLOCATED,
    "mode": "disagg",
    "prefill_num_workers": "2",
    "prefill_tp_size": "8",
    "prefill_attention_dp_size": "1",
    "prefill_moe_tp_size": "8",
    "prefill_moe_ep_size": "1",
    "decode_batch_size": "16",
    "decode_num_workers": "1",
    "decode_tp_size": "1",
    "decode_attention_dp_size": "8",
    "decode_moe_tp_size": "1",
    "decode_moe_ep_size": "8",
}


def point(row: Row, **keys: str) -> Point:
    points, refused = points_of([{**row, **keys}])
    assert points, refused
    return points[0]


def degrees(instances: Sequence[InstanceSpec]) -> list[tuple[str, int, int, int]]:
    return [(entry.role, entry.count, entry.tensor, entry.expert) for entry in instances]


@pytest.mark.parametrize(
    ("keys", "tensor", "expert"),
    [
        ({}, 8, 1),
        ({"moe_tp_size": "1", "moe_ep_size": "8"}, 8, 1),
        # Degrees that name the same devices twice: equal measurements exist with 8 devices.
        ({"tp_size": "64", "moe_ep_size": "8"}, 8, 1),
        ({"tp_size": "1", "attention_dp_size": "64", "moe_ep_size": "8"}, 1, 8),
        ({"tp_size": "8", "attention_dp_size": "8", "moe_tp_size": "1", "moe_ep_size": "64"}, 8, 1),
        # Without a degree of attention data parallelism, each group has its own batch.
        ({"attention_dp_size": "", "batch_size": "8", "moe_tp_size": "1", "moe_ep_size": "8"}, 1, 8),
    ],
)
def test_degrees_of_colocated_rows(keys: Row, tensor: int, expert: int) -> None:
    found = point(COLOCATED, **keys)
    assert degrees(found.deployment.instances) == [("both", 1, tensor, expert)]
    assert (found.devices, found.load.users, found.assumed) == (8, 64, False)


def test_rows_with_roles() -> None:
    stated = point(ROLES)
    assert degrees(stated.deployment.instances) == [("prefill", 2, 8, 1), ("decode", 1, 1, 8)]
    assert not stated.assumed and stated.kind == "latent"
    assert point(ROLES, concurrency="").load.users == 16 * 8, "batch of a group times groups"
    unknown = point(ROLES, prefill_num_workers="", decode_num_workers="")
    assert unknown.assumed and degrees(unknown.deployment.instances)[1] == ("decode", 1, 1, 8)


def test_prefill_instances_that_a_row_does_not_count_keep_up_with_the_decodes() -> None:
    open_row = {**ROLES, "prefill_num_workers": "", "decode_num_workers": "", "isl": "8192"}
    few, many = point(open_row, concurrency="8"), point(open_row, concurrency="2048")
    (one, _), (enough, decodes) = few.deployment.instances, many.deployment.instances
    assert one.count == 1 and enough.count > 3
    # With two fewer users wait for prompts instead of for the steps of full decode instances.
    fewer = replace(
        many, deployment=replace(many.deployment, instances=(replace(enough, count=enough.count - 2), decodes))
    )
    assert predict(fewer).ttft_seconds > 1.5 * predict(many).ttft_seconds


def test_a_degree_that_is_a_sum_over_a_deployment_is_divided() -> None:
    found = point(COLOCATED, tp_size="36", moe_tp_size="36", precision="fp4", system="gb200", concurrency="2000")
    assert found.assumed and degrees(found.deployment.instances) == [("prefill", 1, 1, 4), ("decode", 1, 1, 32)]


@pytest.mark.parametrize(
    ("model", "precision", "formats"),
    [
        ("DeepSeek-R1", "fp4", Quantisation(experts="nvfp4")),
        ("DeepSeek-R1", "fp8", Quantisation(weights="fp8")),
        ("gpt-oss-120b", "fp4", Quantisation(experts="mxfp4")),
        ("Kimi-K2.5", "int4", Quantisation(experts="int4")),
        ("Qwen3-32B-NVFP4", "fp4", Quantisation(weights="nvfp4")),
        ("Llama-3.1-70B", "", Quantisation()),
    ],
)
def test_formats_are_those_of_the_published_folders(model: str, precision: str, formats: Quantisation) -> None:
    assert point(COLOCATED, model_path=f"somebody/{model}", precision=precision).formats == formats


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_path": "Qwen/Qwen3.5-397B-A17B"}, "hybrid attention"),
        ({"tp_size": "1", "moe_tp_size": "1"}, "does not fit"),
        ({"concurrency": "", "batch_size": ""}, "no number of requests"),
        ({"tp_size": "7", "moe_tp_size": "7"}, "degrees that no server has"),
    ],
)
def test_rows_that_cannot_be_priced_are_refused_with_a_reason(keys: Row, reason: str) -> None:
    points, ((row, found),) = points_of([{**COLOCATED, **keys}])
    assert not points and row["backend"] == "sglang" and reason in found


def test_published_points_are_predicted() -> None:
    """The table of docs/design/cost-model.md, with some room: constants are few and the same for all models and chips."""
    points, refused = read_points()
    assert len(points) > 0.85 * (len(points) + len(refused))
    errors: dict[str, list[float]] = {}
    for each in points:
        if not each.assumed:
            predicted = predict(each)
            name = each.kind if each.deployment.colocated else "roles"
            errors.setdefault(name, []).append(abs(predicted.tpot_seconds / each.tpot_seconds - 1))
            errors.setdefault("first", []).append(abs(predicted.ttft_seconds / each.ttft_seconds - 1))
    median = {name: float(np.median(found)) for name, found in errors.items()}
    assert median["dense"] < 0.09 and median["latent"] < 0.14 and median["mixture"] < 0.18 and median["roles"] < 0.14
    assert median["first"] < 0.33
