"""The search space contains the layouts that are worth pricing, and no invalid ones."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.planner.space import AXES, SCHEDULES, points
from meshwright.schedules.registry import refusal
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import ModelSection, RunSpec


def run(
    preset: str = "llama3-8b", ranks: int = 8, nodes: int = 2, batch: int = 16, seq: int = 8192, **pins: object
) -> RunSpec:
    model = from_plain(ModelSection, {**MODEL_PRESETS[preset], "preset": preset})
    cluster = ClusterSpec(gpu="H200", nodes=nodes, gpus_per_node=ranks // nodes)
    train = TrainSpec(steps=1, global_batch=batch, seq_len=seq)
    return RunSpec(name="x", model=model, train=train, cluster=cluster, plan=from_plain(PlanKeys, pins))


@pytest.mark.parametrize(
    "question", [run(), run(ranks=12, batch=24), run("llama3-1b", seq=65536), run("qwen3-30b-a3b", seq=4096)]
)
def test_every_point_can_be_made(question: RunSpec) -> None:
    space = points(question)
    assert len(space) > 100
    for index in range(len(space)):
        mesh = space.meshes[space.mesh[index]]
        micro, many, name = int(space.micro[index]), int(space.accumulate[index]), SCHEDULES[space.schedule[index]]
        assert prod(mesh.sizes) == question.cluster.ranks
        assert mesh.data * micro * many == question.train.global_batch
        assert refusal(name, mesh.size("pipeline"), many, int(space.virtual[index])) is None
        assert mesh.size("pipeline") * int(space.virtual[index]) <= question.model.layers
        assert question.model.heads % (mesh.size("tensor") * mesh.size("context_ulysses")) == 0
        assert mesh.size("tensor") * mesh.size("context_ulysses") <= question.cluster.gpus_per_node
        assert question.train.seq_len // mesh.context >= 512


def test_all_axes_and_schedules_are_there() -> None:
    space = points(run())
    for axis in AXES:
        assert len({mesh.size(axis) for mesh in space.meshes}) > 1, axis
    assert {SCHEDULES[number] for number in space.schedule} == {*SCHEDULES} - {"gpipe", "paired"}
    assert len({mesh.order for mesh in space.meshes}) > 1
    assert space.offloads == ("none", "activations", "optimizer", "both")
    moe_layers = points(run("qwen3-30b-a3b", seq=4096))
    assert {mesh.expert for mesh in moe_layers.meshes} == {1, 2, 4, 8}
    paired = moe_layers.schedule == SCHEDULES.index("paired")
    assert paired.any() and not (moe_layers.accumulate[paired] % 2).any()
    assert (moe_layers.column("pipeline")[paired] == 1).all()


def test_training_is_offered_its_own_axes() -> None:
    space = points(run(), trainable=True)
    assert {axis for mesh in space.meshes for axis in AXES if mesh.size(axis) > 1} == {*AXES}
    assert space.offloads == points(run()).offloads
    moe = run("qwen3-30b-a3b", seq=4096)
    assert {mesh.expert for mesh in points(moe, trainable=True).meshes} == {1, 2, 4, 8}
    folds = {
        (mesh.expert, mesh.size("tensor")) for mesh in points(run("mixtral-8x7b", seq=4096), trainable=True).meshes
    }
    assert all(8 % (expert * tensor) == 0 for expert, tensor in folds) and (2, 4) in folds


@pytest.mark.parametrize(
    "pins",
    [
        {"tensor": 8, "pipeline": 1},
        {"context_ring": 4},
        {"context_ulysses": 2, "shard": 4},
        {"replicate": 2},
        {"micro_batch": 4},
        {"schedule": "gpipe", "pipeline": 2},
        {"offload": "optimizer"},
    ],
)
def test_pins_are_kept(pins: dict[str, object]) -> None:
    space = points(run(**pins))
    assert len(space)
    for key, value in pins.items():
        if key in AXES:
            assert {mesh.sizes[AXES.index(key)] for mesh in space.meshes} == {value}
    assert "micro_batch" not in pins or {*space.micro} == {4}
    assert "schedule" not in pins or {SCHEDULES[number] for number in space.schedule} == {"gpipe"}
    assert "offload" not in pins or space.offloads == ("optimizer",)


def test_ranks_that_data_axes_leave_are_taken_by_the_others() -> None:
    words = (
        "model=llama3-1b cluster.gpu=H100 cluster.gpus_per_node=8 train.global_batch=16 plan.replicate=2 plan.shard=2"
    )
    meshes = points(load_run(None, words.split())).meshes
    assert {mesh.size("pipeline") for mesh in meshes} == {1, 2} and all(mesh.data == 4 for mesh in meshes)


def test_groups_across_a_node_s_border_leave_it() -> None:
    """Three neighbours on nodes of four: no group is larger than a node, and one lies on two."""
    meshes = points(run(ranks=12, nodes=3, batch=24, shard=3, pipeline=1)).meshes
    mesh = next(mesh for mesh in meshes if mesh.stride("shard") == 1)
    assert [mesh.crosses("shard", per_node) for per_node in (2, 3, 4, 6, 12)] == [True, False, True, False, False]


def test_a_pin_reaches_beyond_what_is_worth_trying() -> None:
    assert len(points(run(tensor=8)))  # two nodes of four
    assert not len(points(run(tensor=3)))
    assert not len(points(run(batch=15, shard=8)))


def test_the_largest_question_is_a_matter_of_thousands() -> None:
    question = replace(run("llama3-405b", batch=2048), cluster=ClusterSpec(gpu="H100", nodes=2048, gpus_per_node=8))
    assert 10_000 < len(points(question)) < 200_000


def test_links_that_leave_a_host_widen_what_is_tried() -> None:
    rack = replace(run("llama3-70b", batch=16), cluster=ClusterSpec(gpu="GB200", nodes=4, gpus_per_node=4))
    split = replace(rack, cluster=replace(rack.cluster, network=NetworkSpec(domain=4)))
    widest = [max(mesh.size("tensor") for mesh in points(question).meshes) for question in (rack, split)]
    assert widest == [16, 4]


def test_ports_as_fast_as_links_widen_what_is_tried() -> None:
    few = replace(run("llama3-8b", batch=64), cluster=ClusterSpec(gpu="A10", nodes=16, gpus_per_node=2))
    fast = replace(few, cluster=replace(few.cluster, network=NetworkSpec(port_gb_per_s=20)))
    widest = [max(mesh.size("tensor") for mesh in points(question).meshes) for question in (few, fast)]
    assert widest == [2, 8]
