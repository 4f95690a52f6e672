"""The largest model of a family, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.slow import quick_first

from meshwright.config.load import load_run
from meshwright.planner.candidate import fits, host_budget, memory_budget
from meshwright.planner.largest import family, largest_models
from meshwright.planner.search import search
from meshwright.spec.errors import BadInput
from meshwright.spec.model import parameter_count
from meshwright.spec.run import ModelSection

ALONE = [
    "cluster.gpu=H200",
    "cluster.gpus_per_node=1",
    "cluster.host_memory_gib=128",
    "train.global_batch=1",
    "train.seq_len=2048",
]
WORK = 4.0
"""Bytes per parameter of bf16 weights and gradients on the device."""


def test_a_family_has_the_proportions_of_its_model() -> None:
    model = load_run(None, ["model=llama3-8b", *ALONE]).model
    models = family(model, 2e10)
    sizes = [parameter_count(other) for other in models]
    assert model in models and sizes == sorted(sizes) and 1.9e10 < sizes[-1] <= 2e10
    for other in models:
        assert other.hidden == 128 * other.heads and other.ffn_hidden == 3.5 * other.hidden and other.kv_heads == 8
        assert other.heads % 8 == 0 and 0.75 <= (other.layers / 32) / (other.hidden / 4096) <= 1.25
    by_hand = 40 * (5120 * (2 * 5120 + 2 * 8 * 128 + 3 * 17920 + 2)) + (2 * 128256 + 1) * 5120
    assert by_hand in sizes
    with pytest.raises(BadInput, match="--largest extends dense models"):
        family(load_run(None, ["model=mixtral-8x7b", *ALONE]).model, 1e12)


@pytest.mark.parametrize(
    ("moments", "record"), quick_first(1, [("fp32", 10.0), ("bf16", 6.0), ("int8", 4 + 1 / 128)], unpack=True)
)
def test_the_largest_model_fills_device_and_host(moments: str, record: float) -> None:
    """The device has 4 bytes per parameter, both together the state; the remainder is activations, logits and framework."""
    words = ["model=llama3-8b", *ALONE, "plan.offload=optimizer", f"plan.moments={moments}"]
    run = load_run(None, words)
    (entry,) = largest_models(run)
    assert entry.model is not None and entry.plan is not None and entry.plan.predicted is not None
    device, host = float(memory_budget(run) or 0), host_budget(run)
    # Sizes of the family are up to 4% apart.
    assert 0.96 * min(host, record * entry.parameters) <= entry.host_bytes <= host
    on_device = WORK * entry.parameters + record * entry.parameters - entry.host_bytes
    other = entry.plan.predicted.memory_peak_bytes - on_device
    assert 0 < other < 0.12 * device and entry.plan.predicted.memory_peak_bytes <= device
    named = search(load_run(None, [*words, *model_arguments(entry.model), "data.mix=stdlib"])).best.plan
    assert fits(replace(run, model=entry.model), named, memory_budget(run)), "the same words train it"
    larger = min(
        parameter_count(model) for model in family(run.model, 1e11) if parameter_count(model) > entry.parameters
    )
    assert (WORK + record) * larger - min(host, record * larger) + other > 0.995 * device


def model_arguments(model: ModelSection) -> list[str]:
    return [f"model.{name}={getattr(model, name)}" for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden")]


def test_memory_must_be_known() -> None:
    with pytest.raises(BadInput, match="--largest needs devices"):
        next(largest_models(load_run(None, ["model=llama3-8b", "cluster.gpu=cpu", "cluster.gpus_per_node=1"])))
