from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.costs.plan_costs import as_nodes
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search
from meshwright.planner.what_if import what_if
from meshwright.spec.layout import with_node_crossings
from meshwright.spec.network import NetworkSpec
from meshwright.spec.run import RunSpec

CLUSTER = "model=llama3-1b cluster.gpu=H100 cluster.gpus_per_node=4 cluster.emulate_nodes=2 train.seq_len=4096 train.global_batch=16"
PINS = ("plan.replicate=2", "plan.shard=2", "plan.micro_batch=4", "plan.recompute=none", "plan.reshard=false")


def run_of(*words: str) -> RunSpec:
    return load_run(None, [*CLUSTER.split(), *words])


def test_a_change_has_the_price_of_the_plan_on_the_changed_cluster() -> None:
    run = run_of(*PINS)
    plan = search(run, trainable=True).best.plan
    changes = {change.name.partition(" (")[0]: change for change in what_if(run, plan)}
    assert [change.gain for change in changes.values()] == sorted((c.gain for c in changes.values()), reverse=True)
    before = reprice(run, plan).predicted
    assert before is not None and before.step_seconds is not None

    cluster = as_nodes(run.cluster)
    assert cluster.network is not None and cluster.network.port_gb_per_s is not None
    doubled = NetworkSpec(fabric="tcp", port_gb_per_s=2 * cluster.network.port_gb_per_s)
    faster = reprice(replace(run, cluster=replace(cluster, network=doubled)), plan).predicted
    network = changes["twice the network"]
    assert faster is not None and network.seconds == pytest.approx(faster.step_seconds)
    assert network.gain == pytest.approx(before.step_seconds / network.seconds - 1) and network.gain > 0.01

    assert changes["twice the memory"].gain == pytest.approx(0)  # all that it could buy is pinned
    batch = changes["twice the batch"]
    assert batch.tokens_per_second == pytest.approx(32 * 4096 / batch.seconds) and batch.gain > 0
    assert changes["plan.reduce_replicas=bf16"].gain > 0
    fp8 = changes["plan.linear=fp8_tensorwise"]
    assert fp8.gain > 0 and "bf16" in fp8.note


def test_only_what_the_cluster_has_is_doubled() -> None:
    run = run_of("cluster.emulate_nodes=1", "plan.shard=4")
    names = [change.name for change in what_if(run, search(run).best.plan)]
    assert not [name for name in names if "network" in name or "reduce_replicas" in name]
    alone = run_of("cluster.emulate_nodes=1", "cluster.gpus_per_node=1")
    assert not [change for change in what_if(alone, search(alone).best.plan) if "links" in change.name]


def test_more_memory_gains_where_memory_was_the_limit() -> None:
    run = run_of("cluster.memory_gib=24", "plan.shard=4", "plan.micro_batch=4")
    plan = search(run, trainable=True).best.plan
    assert any(layer.recompute != "none" or layer.reshard for layer in plan.layers)
    (memory,) = (change for change in what_if(run, plan) if "memory" in change.name)
    assert memory.gain > 0.01 and memory.note


@pytest.mark.parametrize(
    "words",
    [
        "model=gemma2-2b cluster.gpu=A100 cluster.nodes=8 cluster.gpus_per_node=6 train.seq_len=32768 train.global_batch=1024 "
        "cluster.network.port_gb_per_s=5 model.max_seq_len=32768",
        "model=glm4.5 cluster.gpu=A100-40GB cluster.nodes=64 cluster.gpus_per_node=2 train.seq_len=32768 train.global_batch=8 "
        "cluster.network.port_gb_per_s=18",
    ],
)
def test_more_of_the_cluster_makes_no_step_slower(words: str) -> None:
    """For these plans another setting is faster on the present cluster already; the changed clusters must not lose it."""
    run = load_run(None, words.split())
    helpful = [change for change in what_if(run, search(run).best.plan) if change.name.startswith("twice the ")]
    assert len(helpful) == 4
    assert min(change.gain for change in helpful) > -1e-9


def test_twice_the_batch_keeps_micro_batches_that_fill_the_memory() -> None:
    """Gradients kept between micro-batches need memory, so some layers recompute more, but not all."""
    words = "model=llama3-8b cluster.gpu=H100 plan.shard=8 plan.schedule=1f1b plan.micro_batch=2"
    run = load_run(None, words.split())
    plan = search(run, trainable=True).best.plan
    (batch,) = (change for change in what_if(run, plan) if "batch" in change.name)
    assert batch.gain > -0.01, batch


def test_a_mesh_in_another_order_is_kept() -> None:
    run = run_of("plan.pipeline=2", "plan.shard=2", "plan.schedule=1f1b")
    plan = search(run, trainable=True).best.plan
    reordered = with_node_crossings(replace(plan, mesh=tuple(reversed(plan.mesh))), run.cluster.ranks_per_node)
    assert [axis.axis for axis in reordered.mesh] == ["shard", "pipeline"]
    names = [change.name for change in what_if(run, reprice(run, reordered))]
    assert any("twice the network" in name for name in names)


@pytest.mark.parametrize("batch, name", [(24, "one more node (3 × 4 GPUs)"), (16, "2 more nodes (4 × 4 GPUs)")])
def test_more_nodes_are_the_next_number_that_divides_the_batch(batch: int, name: str) -> None:
    """Each rank has a shard and its own sequences: 24 sequences divide over 12 ranks, 16 do not."""
    run = run_of(f"train.global_batch={batch}", "cluster.gpus_per_node=8", "plan.shard=8")
    plan = search(run, trainable=True).best.plan
    grown = [change for change in what_if(run, plan) if "more node" in change.name]
    assert [change.name for change in grown] == [name]
    assert ("one more node does not fit this layout and batch" in grown[0].note) == (batch == 16)
    assert f"FSDP {12 if batch == 24 else 16} " in grown[0].note
    assert grown[0].tokens_per_second == pytest.approx(batch * 4096 / grown[0].seconds)


def test_a_plan_without_a_step_time_has_no_changes() -> None:
    run = run_of(*PINS)
    plan = search(run).best.plan
    assert plan.predicted is not None
    assert what_if(run, replace(plan, predicted=replace(plan.predicted, step_seconds=None))) == ()


@pytest.mark.parametrize(
    "words",
    [
        ("cluster.gpu=A100",),
        ("plan.compute=fp32",),
        ("train.seq_len=4088",),
        ("plan.linear=fp8_rowwise",),
        ("plan.tensor=2", "plan.shard=1"),
    ],
)
def test_fp8_is_not_offered_where_it_cannot_be_used(words: tuple[str, ...]) -> None:
    run = run_of(*PINS, *words)
    assert not [change.name for change in what_if(run, search(run).best.plan) if "fp8" in change.name]


def test_fp8_is_offered_to_layers_that_have_no_format_of_their_own() -> None:
    run = run_of(*PINS)
    plan = search(run).best.plan
    (layer,) = plan.layers
    first = replace(plan, layers=(replace(layer, range="0", linear="fp8_rowwise"), replace(layer, range="1-15")))
    gains = [
        [change.gain for change in what_if(run, reprice(run, given)) if "fp8" in change.name]
        for given in (plan, first, replace(plan, layers=(replace(layer, linear="fp8_rowwise"),)))
    ]
    assert not gains[2] and gains[0][0] > gains[1][0] > 0.8 * gains[0][0], "what is tried keeps each layer's format"


def test_the_planner_takes_fp8_only_when_asked() -> None:
    chosen = search(run_of(*PINS)).best.plan.precision
    assert (chosen.linear, chosen.gather) == ("compute", "compute")
    dtypes_by_words = {
        ("plan.linear=fp8_tensorwise",): ("fp8_tensorwise", "fp8"),
        ("plan.linear=fp8_tensorwise", "plan.gather=compute"): ("fp8_tensorwise", "compute"),
        ("plan.linear=fp8_rowwise",): ("fp8_rowwise", "compute"),
    }
    for words, expected in dtypes_by_words.items():
        precision = search(run_of(*PINS, *words)).best.plan.precision
        assert (precision.linear, precision.gather) == expected


def test_a_plan_with_copied_experts_is_changed_too() -> None:
    pins = ("shard=2", "expert=2", "expert_policy=hecate", "expert_slots=4", "micro_batch=1", "recompute=none")
    words = ["model=qwen3-30b-a3b", "model.layers=4", "cluster.gpu=H200", "cluster.gpus_per_node=2", "train.steps=1"]
    run = load_run(None, [*words, "train.global_batch=4", "train.seq_len=4096", *(f"plan.{pin}" for pin in pins)])
    plan = search(run).best.plan
    assert plan.experts is not None and plan.experts.policy == "hecate"
    changes = {change.name.partition(" (")[0]: change for change in what_if(run, plan)}
    assert changes["twice the batch"].gain > 0 and changes["twice the links in a node"].gain > 0
