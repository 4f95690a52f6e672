from __future__ import annotations

import pytest

from meshwright.costs.of_plan import plan_time
from meshwright.planner.data_parallel import choose
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.network import NetworkSpec, NodeGroup
from meshwright.spec.plan import PlanPins
from meshwright.spec.presets import MODEL_PRESETS
from meshwright.spec.run import ModelSection, RunSpec


def seconds(cluster: ClusterSpec, **pins: object) -> float:
    """The middle of the prediction for Llama-3-8B, two sequences of 8192 on each GPU."""
    model = from_plain(ModelSection, MODEL_PRESETS["llama3-8b"])
    train = TrainSpec(steps=1, global_batch=2 * cluster.ranks, seq_len=8192)
    run = RunSpec(name="x", model=model, train=train, cluster=cluster, plan=PlanPins(**pins))
    time = plan_time(model, train, choose(run)[0], cluster)
    assert time is not None and time.low < time.seconds < time.high
    assert sum(time.breakdown.values()) == pytest.approx(time.seconds, rel=0.02)
    return time.seconds


TWO_NODES = {"gpu": "H200", "nodes": 2, "gpus_per_node": 8}


def test_a_slow_network_and_a_slow_group_show() -> None:
    fast = seconds(ClusterSpec(**TWO_NODES))
    assert seconds(ClusterSpec(**TWO_NODES, network=NetworkSpec(fabric="tcp", port_gb_per_s=1.0))) > 1.5 * fast
    assert seconds(ClusterSpec(**TWO_NODES, groups=(NodeGroup(nodes=1, gpu="A100"),))) > 1.5 * fast


def test_recompute_and_small_micro_batches_cost_time() -> None:
    node = ClusterSpec(gpu="H200", gpus_per_node=8)
    plain = seconds(node)
    assert plain < seconds(node, micro_batch=1) < seconds(node, recompute="full")


def test_it_says_nothing_of_what_it_does_not_know() -> None:
    model = from_plain(ModelSection, {**MODEL_PRESETS["llama-nano"], "vocab_size": 4096})
    train = TrainSpec(steps=1, global_batch=2, seq_len=64)
    cluster = ClusterSpec(gpu="cpu", gpus_per_node=2)
    run = RunSpec(name="x", model=model, train=train, cluster=cluster)
    assert plan_time(model, train, choose(run)[0], cluster) is None
