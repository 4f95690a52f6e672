"""Formats of matmuls: those of the chip, down to a limit, for dense layers and experts; what can be trained is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.planner.objectives import point_of
from meshwright.planner.precision_choice import FormatPrice, format_named, priced_formats
from meshwright.planner.reprice import reprice
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec


def _planned(model: str, gpu: str) -> tuple[RunSpec, Plan]:
    words = [
        f"model={model}",
        f"cluster.gpu={gpu}",
        "cluster.gpus_per_node=8",
        "train.seq_len=4096",
        "train.global_batch=64",
    ]
    run = load_run(None, [*words, "data.mix=stdlib", "train.steps=9"])
    answer = point_of(run).answer
    assert answer is not None
    return run, answer.best.plan


def _by_name(entries: tuple[FormatPrice, ...]) -> dict[tuple[str, str], FormatPrice]:
    return {(entry.dense, entry.experts): entry for entry in entries}


def test_formats_of_the_chip_down_to_the_limit() -> None:
    run, plan = _planned("llama3-8b", "H100")
    entries = _by_name(priced_formats(run, plan, format_named("nvfp4")))
    assert {dense for dense, _ in entries} == {"bf16", "fp8-tensor", "fp8-row", "fp8-block"}, (
        "an H100 has no MXFP8 and no NVFP4"
    )
    assert {dense for dense, _ in _by_name(priced_formats(run, plan, format_named("bf16")))} == {"bf16"}
    assert plan.predicted is not None
    assert entries["bf16", "bf16"].seconds == pytest.approx(plan.predicted.step_seconds or 0.0)
    assert not entries["fp8-tensor", "fp8-tensor"].cannot_train
    assert "no matmuls in fp8-block" in entries["fp8-block", "fp8-block"].cannot_train


def test_fp8_is_priced_as_a_plan_in_fp8() -> None:
    run, plan = _planned("llama3-8b", "H200")
    entry = _by_name(priced_formats(run, plan, format_named("fp8-tensor")))["fp8-tensor", "fp8-tensor"]
    narrow = replace(plan, precision=replace(plan.precision, linear="fp8_tensorwise"))
    predicted = reprice(run, narrow).predicted
    assert predicted is not None and predicted.step_seconds is not None
    assert entry.seconds == pytest.approx(predicted.step_seconds, rel=0.05)


def test_experts_have_a_format_of_their_own() -> None:
    run, plan = _planned("qwen3-30b-a3b", "B200")
    entries = _by_name(priced_formats(run, plan, format_named("nvfp4")))
    both, dense, experts = (entries[key].seconds for key in (("bf16", "bf16"), ("nvfp4", "bf16"), ("bf16", "nvfp4")))
    assert experts < both and dense != experts
    assert "one format" in entries["bf16", "fp8-row"].cannot_train


def test_unknown_formats_name_the_nearest() -> None:
    with pytest.raises(BadInput, match="nearest: mxfp8"):
        format_named("mxfp")
