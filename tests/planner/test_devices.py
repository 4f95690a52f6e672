"""Devices stay idle only where a part of the cluster is faster or alone has a plan."""

from __future__ import annotations

import shlex

import pytest
from tests.slow import quick_first

from meshwright.config.load import load_run
from meshwright.planner.devices import MIN_SPEEDUP, DeviceChoice, choose_devices, describe_nodes, settings
from meshwright.planner.search import search, seconds_bound
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.run import RunSpec

MODEL = "model=llama3-1b cluster.gpu=H100 train.seq_len=4096"
DATA_ONLY = "plan.pipeline=1 plan.tensor=1 plan.context_ring=1 plan.context_ulysses=1"


def ask(words: str) -> RunSpec:
    return load_run(None, shlex.split(f"{MODEL} {words}"))


def idle_of(choice: DeviceChoice) -> tuple[int, int]:
    assert choice.idle is not None
    return choice.idle.used, choice.idle.devices


@pytest.mark.parametrize(
    ("words", "used"),
    quick_first(
        2,
        [
            ("cluster.gpus_per_node=7 train.global_batch=8", None),
            ("cluster.nodes=3 cluster.gpus_per_node=3 train.global_batch=16", None),
            (
                "cluster.nodes=4 cluster.gpus_per_node=2 train.global_batch=16 cluster.groups='[{nodes: 1, gpu: V100, fabric: tcp}]'",
                6,
            ),
        ],
        unpack=True,
    ),
)
def test_a_part_is_faster_than_all_devices(words: str, used: int | None) -> None:
    run = ask(words)
    choice = choose_devices(run)
    part, whole = idle_of(choice)
    assert part < whole == run.cluster.ranks and used in (None, part)
    assert choice.answer.best.plan.ranks == choice.run.cluster.ranks == part == sum(choice.idle.ranks_by_node)
    assert (
        choice.idle.seconds_with_all is None or choice.answer.best.seconds * MIN_SPEEDUP < choice.idle.seconds_with_all
    )
    assert choice.idle.sentence in choice.answer.best.plan.why


def test_a_batch_that_no_layout_divides_over_all_devices_is_planned_on_some() -> None:
    run = ask(f"cluster.nodes=5 cluster.gpus_per_node=2 train.global_batch=8 {DATA_ONLY}")
    with pytest.raises(BadInput, match="must be a multiple"):
        search(run)
    choice = choose_devices(run)
    assert idle_of(choice) == (8, 10) and choice.idle.seconds_with_all is None
    assert "8 sequences do not divide over 10; no layout uses all 10" in choice.idle.sentence


@pytest.mark.parametrize("nodes", [1, 2])
def test_nothing_is_idle_where_all_devices_are_as_fast(nodes: int) -> None:
    run = ask(f"cluster.nodes={nodes} cluster.gpus_per_node=4 train.global_batch=32")
    choice = choose_devices(run)
    assert choice.idle is None and choice.run is run and choice.answer.best.plan.ranks == 4 * nodes


def test_nodes_behind_a_slow_network_stay_idle() -> None:
    run = ask("cluster.nodes=2 cluster.gpus_per_node=4 train.global_batch=8 cluster.network.port_gb_per_s=0.02")
    assert idle_of(choose_devices(run)) == (4, 8)


def test_what_fits_nowhere_is_refused_as_over_all_devices() -> None:
    run = ask(f"cluster.gpus_per_node=3 train.global_batch=8 cluster.memory_gib=2 {DATA_ONLY}")
    with pytest.raises((OutOfResources, BadInput)) as alone:
        search(run)
    with pytest.raises(type(alone.value), match="no plan"):
        choose_devices(run)


@pytest.mark.parametrize(
    "words",
    quick_first(
        1,
        [
            "cluster.nodes=4 cluster.gpus_per_node=2 train.global_batch=12 cluster.groups='[{nodes: 1, gpu: A100}]'",
            "cluster.nodes=3 cluster.gpus_per_node=7 train.global_batch=64",
            "cluster.gpu=A100 cluster.nodes=4 cluster.gpus_per_node=2 train.global_batch=16 "
            "cluster.groups='[{nodes: 3, gpu: H100, fabric: roce, port_gb_per_s: 50}]'",
        ],
    ),
)
def test_the_settings_describe_the_part(words: str) -> None:
    run, choice = ask(words), choose_devices(ask(words))
    assert choice.idle is not None
    again = ask(f"{words} {choice.idle.settings}")
    assert again.cluster == choice.run.cluster
    assert settings(run.cluster, run.cluster) == ""


def test_shares_of_nodes_are_counted_by_node() -> None:
    run = ask("cluster.nodes=3 cluster.gpus_per_node=7 train.global_batch=16 " + DATA_ONLY)
    choice = choose_devices(run)
    assert idle_of(choice) == (16, 21) and choice.idle.ranks_by_node == (6, 6, 4)
    assert (choice.run.cluster.nodes, choice.run.cluster.gpus_per_node) == (8, 2)
    assert describe_nodes((6, 6, 4)) == "6, 6 and 4 on 3 nodes"


def test_the_bound_is_below_the_answer() -> None:
    for words in (
        "cluster.gpus_per_node=2 train.global_batch=4",
        "cluster.nodes=2 cluster.gpus_per_node=3 train.global_batch=12",
    ):
        run = ask(words)
        assert seconds_bound(run) <= search(run).best.seconds
