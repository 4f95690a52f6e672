"""The best layout with other software: it fits, divides the cluster, and is priced as `predict` prices published runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.calibration.record_predictions import predict_records
from meshwright.config.load import load_run
from meshwright.costs.software import SOFTWARE, software_named
from meshwright.planner.precision_choice import MATMUL_FORMATS, format_named
from meshwright.planner.software_plan import best_with, software_listed
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import RunSpec


def _run(model: str, nodes: int = 2, batch: int = 128) -> RunSpec:
    words = [f"model={model}", "cluster.gpu=H100", f"cluster.nodes={nodes}", "cluster.gpus_per_node=8"]
    return load_run(
        None, [*words, "train.seq_len=8192", f"train.global_batch={batch}", "data.mix=stdlib", "train.steps=9"]
    )


@pytest.mark.parametrize(
    ("name", "narrowest", "dtype"),
    [
        ("torchtitan", None, "bf16"),
        ("torchtitan", "fp8-block", "fp8"),
        ("megatron-bridge", None, "bf16"),
        ("nemo", "nvfp4", "fp8"),
        ("kempnerforge", "fp8-tensor", "bf16"),
    ],
)
def test_the_plan_has_the_price_of_a_published_run_with_its_layout(
    name: str, narrowest: str | None, dtype: str
) -> None:
    run = _run("llama3-8b")
    best = best_with(run, software_named(name), narrowest and format_named(narrowest))
    assert best.precision == {"fp8": "fp8-tensor"}.get(dtype, dtype)
    assert best.sizes is not None and best.seconds and best.memory_bytes
    size = best.sizes
    assert size["tensor"] * size["pipeline"] * size["context"] * size["data"] == run.cluster.ranks
    assert best.memory_bytes <= CHIPS["H100"].memory_bytes
    record = {
        "source": "a table",
        "software": name,
        "model": "Llama-3-8B",
        "gpu": "H100",
        "gpus": "16",
        "tp": f"{size['tensor']:g}",
        "pp": f"{size['pipeline']:g}",
        "vpp": f"{size['virtual']:g}",
        "cp": f"{size['context']:g}",
        "dp": f"{size['data']:g}",
        "zero/fsdp": {0: "zero-0", 1: "zero-1", 3: "fsdp"}[int(size["zero"])],
        "micro_batch": f"{size['micro_batch']:g}",
        "global_batch": "128",
        "seq": "8192",
        "dtype": dtype,
        "recompute": {0: "none", 1: "selective", 3: "full"}[int(size["recompute"])],
    }
    (prediction,) = predict_records([record])
    assert prediction.seconds is not None
    assert best.seconds == pytest.approx(prediction.seconds, rel=1e-3)


def test_fp8_matmuls_of_the_run_are_priced_with_software_that_has_them() -> None:
    run = _run("llama3-8b")
    low = replace(run, plan=PlanKeys(linear="fp8_tensorwise"))
    known = {entry.name for entry in MATMUL_FORMATS}
    assert all(known.issuperset(software.formats) for software in SOFTWARE)
    for name, precision in (("torchtitan", "fp8-tensor"), ("nanotron", "bf16")):
        wide, narrow = (best_with(each, software_named(name)) for each in (run, low))
        assert (wide.precision, narrow.precision) == ("bf16", precision)
        assert wide.seconds and narrow.seconds
        assert (narrow.seconds < 0.95 * wide.seconds) is (precision != "bf16")


def test_experts_are_divided_by_software_that_can() -> None:
    best = best_with(_run("qwen3-30b-a3b"), software_named("megatron-bridge"))
    assert best.sizes is not None and best.sizes["expert"] > 1
    alone = best_with(_run("qwen3-30b-a3b"), software_named("deepspeed"))
    assert alone.sizes is None or alone.sizes["expert"] == 1


def test_what_does_not_fit_says_what_it_needs() -> None:
    assert "needs" in best_with(_run("llama3-405b", nodes=1, batch=8), software_named("deepspeed")).refused


def test_names_are_checked() -> None:
    assert [software.name for software in software_listed("torchtitan, nemo,torchtitan")] == ["torchtitan", "nemo"]
    assert len(software_listed("all")) > 10
    with pytest.raises(BadInput, match="nearest: torchtitan"):
        software_listed("torchtitn")
    with pytest.raises(BadInput, match="this program"):
        software_listed("meshwright")
