"""Sizes of staging buffers, and recompute modes that free memory."""

from __future__ import annotations

import random
from dataclasses import replace

from meshwright.config.load import load_run
from meshwright.planner.candidate import least_fitting, memory_budget
from meshwright.planner.finalists import with_layers_eased, with_room_used
from meshwright.planner.memory_moves import staging, state_on_device, with_more_recompute, with_sums_on_host
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan

WORDS = [
    "model=llama-nano",
    "train.seq_len=64",
    "train.global_batch=1",
    "train.steps=10",
    "cluster.gpu=H200",
    "cluster.gpus_per_node=1",
]


def plan_with(*layers: LayerStrategy) -> Plan:
    return Plan(
        mesh=(MeshAxis(axis="shard", size=1),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        layers=layers,
    )


def test_no_size_is_chosen_below_the_buffers_that_exist_in_any_case() -> None:
    """All state of a small model is in the least buffers: 6 chunks of 8 Mi parameters."""
    pinned = load_run(None, [*WORDS, "plan.offload=optimizer", "plan.offload_fraction=1"])
    assert list(staging(pinned, plan_with(LayerStrategy(offload="optimizer")), memory_budget(pinned))) == []


def test_more_recompute_changes_no_other_setting_and_no_layer_that_keeps_less() -> None:
    run = load_run(None, WORDS)
    first = LayerStrategy(range="0-1", recompute="full", offload="both", reshard=False)
    last = LayerStrategy(range="2-3", offload="optimizer", gradients="whole")
    assert with_more_recompute(run, plan_with(first, last)) == [
        (first, last),
        (first, replace(last, recompute="selective")),
        (first, replace(last, recompute="full")),
    ]
    assert with_more_recompute(run, plan_with(first)) == [(first,)]


def test_state_that_stays_on_the_device_may_have_the_memory_of_weights_that_are_freed() -> None:
    kept = LayerStrategy(range="2-3", reshard=False, offload="optimizer")
    plan = plan_with(replace(kept, range="0-1", reshard=True), kept)
    freed = (LayerStrategy(reshard=True, offload="optimizer"),)
    for pins, tried in ([], True), (["plan.reshard=false"], False):
        run = load_run(None, [*WORDS, *pins])
        assert (freed in [moved.layers for moved in state_on_device(run, plan, memory_budget(run))]) is tried


def test_room_that_others_freed_is_used() -> None:
    run = load_run(None, WORDS)
    plan = plan_with(LayerStrategy(range="0-1", recompute="full"), LayerStrategy(range="2-3"))
    assert [moved.layers for moved in with_room_used(run, plan, memory_budget(run))] == [(LayerStrategy(),)]
    assert not list(with_room_used(run, plan_with(LayerStrategy()), memory_budget(run)))


def test_layers_are_eased_where_memory_is_left_and_no_pin_decides() -> None:
    plan = plan_with(LayerStrategy(recompute="full", offload="activations"))
    eased = {
        LayerStrategy(recompute="none", offload="activations"),
        LayerStrategy(recompute="selective", offload="activations"),
        LayerStrategy(recompute="all_but_attention", offload="activations"),
        LayerStrategy(recompute="full"),
        LayerStrategy(recompute="full", offload="activations", reshard=False),
    }
    for pins, left_out in (
        ([], set()),
        (["plan.recompute=full"], {layer for layer in eased if layer.recompute != "full"}),
        (["plan.offload=activations"], {layer for layer in eased if layer.offload == "none"}),
    ):
        run = load_run(None, [*WORDS, *pins])
        found = [moved.layers for moved in with_layers_eased(run, plan, memory_budget(run))]
        assert set(found) == {(layer,) for layer in eased - left_out}


def test_layouts_are_searched_with_sums_in_host_memory_where_these_take_memory() -> None:
    words = ["model=llama3-8b", "train.seq_len=4096", "train.global_batch=64", "cluster.gpus_per_node=8"]
    for cluster, pins, searched in (
        ("cluster.gpu=L4", [], True),
        ("cluster.gpu=H200", [], False),
        ("cluster.gpu=L4", ["plan.gradients=whole"], False),
    ):
        pinned = with_sums_on_host(load_run(None, [*words, cluster, *pins]))
        assert (pinned is not None) is searched
        assert pinned is None or (pinned.plan.accumulation, pinned.plan.gradients) == ("host", "shard")


def test_the_least_number_that_fits_is_found_for_each_rank() -> None:
    draw = random.Random(1)
    for _ in range(200):
        most = [draw.randint(0, 40) for _ in range(draw.randint(1, 4))]
        check_least_fitting([sorted((draw.uniform(-5, 5) for _ in range(number + 1)), reverse=True) for number in most])


def check_least_fitting(excess: list[list[float]]) -> None:
    """Compare with the first number of each rank's table that fits, or the last."""
    expected = [next((n for n, left in enumerate(table) if left <= 0), len(table) - 1) for table in excess]
    most = [len(table) - 1 for table in excess]
    assert least_fitting(most, lambda counts: [table[n] for table, n in zip(excess, counts, strict=True)]) == expected
