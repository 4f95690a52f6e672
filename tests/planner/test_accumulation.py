"""Sums of gradients over micro-batches: their bytes, when the planner moves them to host memory, and what has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.costs.offload_costs import exposed_sum_copies
from meshwright.planner.candidate import fits, idle_fields, memory_budget
from meshwright.planner.search import search
from meshwright.simulator.step_simulation import host_bytes, memory_of
from meshwright.spec.errors import OutOfResources
from meshwright.spec.model import parameter_count
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.plan_bytes import fullest


def run_of(*words: str) -> RunSpec:
    return load_run(
        None,
        [
            "model=llama3-3b",
            "model.max_seq_len=65536",
            "train.seq_len=65536",
            "train.global_batch=2",
            "cluster.gpu=H200",
            "cluster.gpus_per_node=1",
            "cluster.memory_gib=34",
            "cluster.host_memory_gib=120",
            "plan.offload=optimizer",
            "plan.schedule=1f1b",
            "plan.micro_batch=1",
            *words,
        ],
    )


@pytest.fixture(scope="module")
def best() -> Plan:
    return search(run_of()).best.plan


def test_sums_are_moved_where_the_device_lacks_their_memory(best: Plan) -> None:
    run = run_of()
    on_device = replace(best, accumulation="device")
    budget, parameters = memory_budget(run), parameter_count(run.model)
    assert best.accumulation == "host" and fits(run, best, budget) and not fits(run, on_device, budget)
    assert any(sentence.startswith("sums of gradients in host memory between micro-batches:") for sentence in best.why)
    assert host_bytes(run.model, run.train, best, 1)[2] == 4 * parameters
    # At the peak of activations: all sums, half as many bytes, and those of the tied unit and of two blocks.
    moved, whole, rounded = (
        fullest(memory_of(run.model, run.train, plan, cpu=False))
        for plan in (best, on_device, replace(best, accumulation="bf16"))
    )
    model = run.model
    table = model.vocab_size * model.hidden + model.hidden
    block = (parameters - table) / model.layers
    assert whole["gradients"] == 4 * parameters and rounded["gradients"] == 2 * parameters
    assert moved["gradients"] == pytest.approx(4 * (table + 2 * block), rel=1e-3)


@pytest.mark.slow
def test_without_host_memory_for_sums_nothing_fits() -> None:
    with pytest.raises(OutOfResources):
        search(run_of("plan.accumulation=device"))


def test_copies_are_exposed_where_they_take_longer_than_a_backward() -> None:
    """Of four backwards the first has no copies to the device and the last none to the host: three of each."""
    assert exposed_sum_copies(3.0, 1.0, 4) == 2.0 * 3 / 4 and exposed_sum_copies(1.0, 3.0, 4) == 0
    assert exposed_sum_copies(3.0, 1.0, 1) == 0


def test_plans_that_reduce_once_a_step_have_no_sums_of_shards(best: Plan) -> None:
    assert not [sentence for sentence in idle_fields(best) if "accumulation" in sentence]
    for once in (
        replace(best, schedule=replace(best.schedule, name="breadth_first")),
        replace(best, layers=tuple(replace(layer, gradients="whole") for layer in best.layers)),
        replace(best, batch=replace(best.batch, accumulate=1)),
    ):
        assert any(sentence.startswith("plan.accumulation = host has no effect") for sentence in idle_fields(once))
