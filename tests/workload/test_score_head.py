"""The head of a reward model in the plan: parameters, memory, FLOPs and matmuls of one row, without a vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.serve_work import device_work
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, flops_per_token, parameter_count, trained_parameter_count, with_score
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan
from meshwright.workload.cache_size import activation_bytes
from meshwright.workload.device_work import step_work
from meshwright.workload.layout_bytes import layout_memory
from meshwright.workload.layouts import layout_of
from meshwright.workload.model_shape import shape_of
from meshwright.workload.plan_bytes import formats, fullest_rank_memory
from tests.adapted import adapter_of

LANGUAGE = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
REWARD = with_score(LANGUAGE)
TABLE = LANGUAGE.vocab_size * LANGUAGE.hidden
TRAIN = TrainSpec(steps=1, global_batch=8, seq_len=4096)


def plan(**axes: int) -> Plan:
    mesh = tuple(MeshAxis(axis=axis, size=size) for axis, size in (axes or {"shard": 1}).items())  # type: ignore[arg-type]
    return Plan(mesh=mesh, batch=BatchPlan(global_batch=8, micro_batch=2, accumulate=4 // axes.get("shard", 1)))


def test_parameters_and_flops() -> None:
    assert parameter_count(LANGUAGE) - parameter_count(REWARD) == TABLE - LANGUAGE.hidden
    assert float(shape_of(REWARD, 4096).params) == pytest.approx(
        float(shape_of(LANGUAGE, 4096).params) - TABLE + LANGUAGE.hidden
    )
    for causal in (True, False):
        before, after = (flops_per_token(model, 4096, causal=causal) for model in (LANGUAGE, REWARD))
        assert before - after == 6 * (TABLE - LANGUAGE.hidden)
    adapted = adapter_of(REWARD, rank=8)
    assert trained_parameter_count(adapted) == trained_parameter_count(adapter_of(LANGUAGE, rank=8)) + LANGUAGE.hidden


def test_matmuls_are_the_flops() -> None:
    work, attention = step_work(REWARD, TRAIN, plan()), 12.0 * REWARD.layers * REWARD.heads * REWARD.head_dim * 4096 / 2
    expected = 8 * 4096 * (flops_per_token(REWARD, 4096, causal=True) - attention)
    assert work.matmul_flops == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 2}, {"tensor": 2}])
def test_memory_is_that_without_logits_and_table(axes: dict[str, int]) -> None:
    """The closed form of the search and the account of a plan agree, for all weights and for adapters."""
    for model in (REWARD, adapter_of(REWARD, rank=8)):
        whole = plan(**axes)
        kinds, language = (
            fullest_rank_memory(each, TRAIN, whole, cpu=False) for each in (model, replace(model, head="vocabulary"))
        )
        layout = layout_of(model, TRAIN, whole)
        closed = layout_memory(model, layout, formats(TRAIN, whole.precision, cpu=False))
        assert sum(map(float, closed.values())) == pytest.approx(sum(kinds.values()), rel=0.02)
        assert sum(kinds.values()) < sum(language.values()) and kinds["weights"] < language["weights"]
    if axes == {"shard": 1}:  # with adapters, the peak is in the head: hidden states and their gradient
        assert kinds["logits"] <= 3 * 2 * 4096 * model.hidden * 2 < language["logits"] / 3


def test_a_served_score_reads_one_row_and_gives_one_number() -> None:
    """Bytes and FLOPs of a step of the engine, and its activations: the weights are all of the model's."""
    work, language = device_work(REWARD), device_work(LANGUAGE)
    assert work.stored_bytes == 2 * parameter_count(REWARD)
    assert (work.head_bytes, work.head_flops) == (2 * REWARD.hidden, 2 * REWARD.hidden)
    assert (work.dense_bytes, work.dense_flops) == (language.dense_bytes, language.dense_flops)
    step = activation_bytes(LANGUAGE, 2, 64, 8192) - activation_bytes(REWARD, 2, 64, 8192)
    assert step == 3 * 4 * 64 * (LANGUAGE.vocab_size - 1)
