"""nanotron's sweep: the runs that split the sequence, and the effect on memory and time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.calibration.model_dimensions import dimensions_by_name, shape_from_dimensions
from meshwright.calibration.nanotron_sweep import splits_sequence
from meshwright.calibration.published_records import read_record
from meshwright.costs.constants import constants
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.stack_footprint import footprint, memory_constants
from meshwright.costs.stage_layers import stage_layers
from meshwright.costs.step import step_cost
from meshwright.spec.cluster import ClusterSpec
from meshwright.workload.layouts import Layouts

UNSTATED = (0.0, 0.0)
"""Layers of the stages where a layout does not state them."""
MODEL = shape_from_dimensions(dimensions_by_name("Llama-like-8.86B"))
MACHINE = machine_of(ClusterSpec(gpu="H100", nodes=8, gpus_per_node=8))
PLAN = Layouts(
    tensor=8.0,
    pipeline=1.0,
    virtual=1.0,
    context=1.0,
    expert=1.0,
    data=2.0,
    zero=1.0,
    shards=2.0,
    micro_batch=4.0,
    global_batch=256.0,
    seq=4096.0,
    recompute=0.0,
    balanced=1.0,
)


@pytest.mark.parametrize(
    ("changed", "splits"),
    [
        ({}, False),
        ({"micro_batch": 16.0}, True),
        ({"tensor": 1.0, "micro_batch": 16.0}, False),
        ({"pipeline": 4.0, "tensor": 4.0}, False),
        ({"pipeline": 4.0, "data": 8.0}, True),
        ({"pipeline": 2.0}, True),
        ({"tensor": 16.0, "data": 32.0}, True),
        ({"tensor": 32.0, "data": 16.0}, False),
    ],
)
def test_the_rule(changed: dict[str, float], splits: bool) -> None:
    assert splits_sequence(MODEL, MACHINE, replace(PLAN, **changed)) is splits


def test_split_runs_take_less_memory_and_more_time() -> None:
    keep, k = memory_constants(["nanotron"]), constants("hopper", "nanotron")
    split = replace(PLAN, sequence=1.0)
    assert sum(footprint(MODEL, split, keep).values()) < sum(footprint(MODEL, PLAN, keep).values())
    assert step_cost(MODEL, MACHINE, split, k).seconds > step_cost(MODEL, MACHINE, PLAN, k).seconds


def test_a_row_says_what_was_assumed() -> None:
    record = {
        "source": "HF playbook",
        "model": "Llama-like-8.86B",
        "gpu": "H100",
        "gpus": "16",
        "tp": "8",
        "pp": "1",
        "dp": "2",
        "micro_batch": "4",
        "global_batch": "256",
        "seq": "4096",
    }
    assert "sequence kept whole" in read_record(record).assumed
    assert "sequence split by tensor parallelism" in read_record({**record, "gpus": "32", "pp": "2"}).assumed


def test_a_stage_fills_until_it_passes_its_share() -> None:
    """32 layers and a head worth 2.2: of four stages, 8.55 each, the first takes 9 and the last 6 beside the head."""
    full, last = stage_layers(MODEL, replace(PLAN, pipeline=4.0), UNSTATED)
    assert (float(full), float(last)) == (9.0, 32.0 - 26.0)
    assert stage_layers(MODEL, replace(PLAN, pipeline=2.0), UNSTATED)[0] == 18.0


def test_the_first_stage_may_be_asked_for() -> None:
    """With one micro-batch and as many layers on each stage, the head and its logits make the last one the fuller."""
    keep = memory_constants(["nanotron"])
    deep = replace(PLAN, pipeline=4.0, balanced=0.0, global_batch=2.0, micro_batch=1.0)
    first, fuller = (sum(footprint(MODEL, deep, keep, which).values()) for which in (1.0, 0.0))
    assert first < fuller
