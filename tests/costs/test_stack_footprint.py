"""Memory in closed form against accounts that can be made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.calibration.model_dimensions import by_name, shape
from meshwright.costs.stack_footprint import MemoryConstants, footprint
from meshwright.workload.layouts import Layouts

MODEL = shape(by_name("Llama-3-8B"))
PLAIN = MemoryConstants(held=6.0, owned=12.0, sharding=0.0, wide=3.0, hidden=0.0, narrow=1.0, live=0.0, logits=8.0,
                gathered=2.0, slack=0.0, base=0.0, base_rank=0.0)  # fmt: skip
ONE = Layouts(tensor=1.0, pipeline=1.0, virtual=1.0, context=1.0, expert=1.0, data=8.0, zero=0.0, shards=8.0, micro_batch=1.0,
              global_batch=64.0, seq=4096.0, recompute=0.0)  # fmt: skip


def total(plan: Layouts) -> float:
    return float(sum(footprint(MODEL, plan, PLAIN).values()))


def test_states_are_bytes_per_parameter() -> None:
    kinds = footprint(MODEL, ONE, PLAIN)
    assert float(kinds["weights_and_gradients"]) == pytest.approx(6 * MODEL.params)
    assert float(kinds["optimizer"]) == pytest.approx(12 * MODEL.params)
    assert float(footprint(MODEL, replace(ONE, zero=1.0), PLAIN)["optimizer"]) == pytest.approx(12 * MODEL.params / 8)
    sharded = footprint(MODEL, replace(ONE, zero=3.0), PLAIN)
    assert float(sharded["weights_and_gradients"]) == pytest.approx(6 * MODEL.params / 8)


def test_what_saves_memory_saves_it() -> None:
    for saving in (
        {"zero": 1.0},
        {"zero": 3.0},
        {"recompute": 1.0},
        {"recompute": 2.0},
        {"tensor": 2.0},
        {"seq": 2048.0},
    ):
        assert total(replace(ONE, **saving)) < total(ONE)


def test_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    one = float(footprint(MODEL, replace(ONE, recompute=0.0), PLAIN)["activations"])
    deep = float(footprint(replace(MODEL, vocab=8.0), replace(ONE, pipeline=4.0), PLAIN)["activations"])
    assert deep == pytest.approx(one)


def test_splitting_the_sequence_splits_what_tensor_parallelism_leaves_whole() -> None:
    """Of 3 hidden elements a token and layer whole and the split widths, only the first change: by 3 h (1 − 1/t) L."""
    whole = replace(ONE, tensor=4.0)
    saved = [float(footprint(MODEL, plan, PLAIN)["activations"]) for plan in (whole, replace(whole, sequence=1.0))]
    assert saved[0] - saved[1] == pytest.approx(4096 * 32 * 2 * 3 * 4096 * (1 - 1 / 4))
