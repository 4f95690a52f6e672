"""The closed-form memory model against sums computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.calibration.model_dimensions import dimensions_by_name, shape_from_dimensions
from meshwright.costs.stack_footprint import MemoryConstants, footprint
from meshwright.workload.layouts import Layouts

MODEL = shape_from_dimensions(dimensions_by_name("Llama-3-8B"))
CONSTANTS = MemoryConstants(
    held=6.0,
    owned=12.0,
    sharding=0.0,
    wide=3.0,
    hidden=0.0,
    narrow=1.0,
    live=0.0,
    logits=8.0,
    gathered=2.0,
    slack=0.0,
    base=0.0,
    base_rank=0.0,
)
DATA_PARALLEL = Layouts(
    tensor=1.0,
    pipeline=1.0,
    virtual=1.0,
    context=1.0,
    expert=1.0,
    data=8.0,
    zero=0.0,
    shards=8.0,
    micro_batch=1.0,
    global_batch=64.0,
    seq=4096.0,
    recompute=0.0,
)


def total(plan: Layouts) -> float:
    return float(sum(footprint(MODEL, plan, CONSTANTS).values()))


def test_weights_gradients_and_optimizer_state_are_bytes_per_parameter() -> None:
    parts = footprint(MODEL, DATA_PARALLEL, CONSTANTS)
    assert float(parts["weights_and_gradients"]) == pytest.approx(6 * MODEL.params)
    assert float(parts["optimizer"]) == pytest.approx(12 * MODEL.params)
    assert float(footprint(MODEL, replace(DATA_PARALLEL, zero=1.0), CONSTANTS)["optimizer"]) == pytest.approx(
        12 * MODEL.params / 8
    )
    sharded = footprint(MODEL, replace(DATA_PARALLEL, zero=3.0), CONSTANTS)
    assert float(sharded["weights_and_gradients"]) == pytest.approx(6 * MODEL.params / 8)


def test_sharding_recompute_and_shorter_sequences_use_less_memory() -> None:
    for saving in (
        {"zero": 1.0},
        {"zero": 3.0},
        {"recompute": 1.0},
        {"recompute": 2.0},
        {"tensor": 2.0},
        {"seq": 2048.0},
    ):
        assert total(replace(DATA_PARALLEL, **saving)) < total(DATA_PARALLEL)


def test_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    single_stage = float(footprint(MODEL, replace(DATA_PARALLEL, recompute=0.0), CONSTANTS)["activations"])
    four_stages = float(
        footprint(replace(MODEL, vocab=8.0), replace(DATA_PARALLEL, pipeline=4.0), CONSTANTS)["activations"]
    )
    assert four_stages == pytest.approx(single_stage)


def test_sequence_parallelism_divides_the_activations_that_tensor_parallelism_does_not() -> None:
    """The 3 elements per token, layer and hidden element are divided by t: a token saves 3 h (1 − 1/t) L elements."""
    without = replace(DATA_PARALLEL, tensor=4.0)
    activations = [
        float(footprint(MODEL, plan, CONSTANTS)["activations"]) for plan in (without, replace(without, sequence=1.0))
    ]
    assert activations[0] - activations[1] == pytest.approx(4096 * 32 * 2 * 3 * 4096 * (1 - 1 / 4))
