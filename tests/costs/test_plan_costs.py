"""The closed form of a Plan: what makes a step longer, and whom it prices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.collective_costs import rank_group
from meshwright.costs.constants import OWN, table
from meshwright.costs.plan_costs import (
    LOOPBACK_GB_PER_S,
    LOOPBACK_PORT_GB_PER_S,
    as_nodes,
    band,
    number,
    plan_time,
    pricing,
)
from meshwright.costs.sources import sources
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.network import NetworkSpec, NodeGroup
from meshwright.spec.plan import (
    AxisName,
    BatchPlan,
    LayerStrategy,
    MeshAxis,
    Plan,
    Precision,
    ScheduleName,
    SchedulePlan,
)

LLAMA = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
NODE = ClusterSpec(gpu="H200", gpus_per_node=8)
TWO_NODES = ClusterSpec(gpu="H200", nodes=2, gpus_per_node=8)


def plan_of(
    mesh: dict[AxisName, int], micro: int = 1, accumulate: int = 2, schedule: ScheduleName = "1f1b", **layer: Any
) -> Plan:
    data = mesh.get("replicate", 1) * mesh.get("shard", 1)
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in mesh.items()),
        batch=BatchPlan(global_batch=data * micro * accumulate, micro_batch=micro, accumulate=accumulate),
        schedule=SchedulePlan(name=schedule),
        layers=(LayerStrategy(**layer),),
    )


def seconds(plan: Plan, cluster: ClusterSpec = NODE, model: ModelSpec = LLAMA) -> float:
    """The middle of the prediction for sequences of 8192."""
    time = plan_time(model, TrainSpec(steps=1, global_batch=plan.batch.global_batch, seq_len=8192), plan, cluster)
    assert time is not None and time.low < time.seconds < time.high
    assert sum(time.breakdown.values()) == pytest.approx(time.seconds, rel=0.02)
    return time.seconds


def test_a_slow_network_and_a_slow_group_show() -> None:
    given = plan_of({"shard": 16})
    fast = seconds(given, TWO_NODES)
    assert seconds(given, replace(TWO_NODES, network=NetworkSpec(fabric="tcp", port_gb_per_s=1.0))) > 1.5 * fast
    assert seconds(given, replace(TWO_NODES, groups=(NodeGroup(nodes=1, gpu="A100"),))) > 1.5 * fast


def test_recompute_and_small_micro_batches_cost_time() -> None:
    plain = plan_of({"shard": 8}, micro=2, accumulate=1)
    small = plan_of({"shard": 8}, micro=1, accumulate=2)
    modes = [seconds(replace(plain, layers=(LayerStrategy(recompute=mode),))) for mode in ("none", "selective", "full")]
    assert modes == sorted(modes) and len(set(modes)) == 3
    assert modes[0] < seconds(small)


def test_full_recompute_repeats_all_but_the_last_product() -> None:
    """Two thirds of the products' work is backward, so a forward more would be a third more."""
    plain, full = (seconds(plan_of({"shard": 8}, micro=4, recompute=mode)) for mode in ("none", "full"))
    assert 1.15 < full / plain < 1.33


@pytest.mark.parametrize(
    "layer, other", [({"reshard": False}, {"reshard": True}), ({"gradients": "whole"}, {"gradients": "shard"})]
)
def test_what_crosses_a_slow_network_once_a_step_is_cheaper_than_once_a_micro_batch(
    layer: dict[str, Any], other: dict[str, Any]
) -> None:
    played = replace(NODE, emulate_nodes=2)
    once, each = (seconds(plan_of({"shard": 8}, accumulate=8, **kind), played) for kind in (layer, other))
    assert once < 0.8 * each


def test_narrow_sums_between_replicas_save_time_over_tcp() -> None:
    wide = plan_of({"replicate": 2, "shard": 4})
    narrow = replace(wide, precision=Precision(reduce_replicas="bf16"))
    played = replace(NODE, emulate_nodes=2)
    assert seconds(narrow, played) < 0.9 * seconds(wide, played)
    assert seconds(wide) < seconds(wide, played)


def test_a_sliding_window_costs_the_scores_that_it_admits() -> None:
    given = plan_of({"shard": 8})
    whole, wide, half, none = (
        seconds(given, model=replace(LLAMA, sliding_window=window)) for window in (None, 1 << 20, 4096, 1)
    )
    assert none < half < wide == whole
    assert (half - none) / (whole - none) == pytest.approx(0.75, abs=0.01)


def test_a_vocabulary_that_is_no_multiple_of_eight_costs_its_logits() -> None:
    """Its products run aligned (kernels.loss)."""
    given = plan_of({"shard": 8})
    ragged, even = (seconds(given, model=replace(LLAMA, vocab_size=size)) for size in (128257, 128256))
    assert even < ragged < 1.0001 * even


def test_a_ring_through_many_ranks_of_tcp_nodes_is_slower_than_one_through_two() -> None:
    rates, reached = [], 1.0
    for ranks in (4, 8):
        cluster = ClusterSpec(gpu="H200", gpus_per_node=ranks, emulate_nodes=2)
        train = TrainSpec(steps=1, global_batch=ranks, seq_len=64)
        priced = pricing(LLAMA, train, plan_of({"shard": ranks}), cluster)
        assert priced is not None
        rates.append(number(rank_group(priced.machine, priced.constants, float(ranks), 1.0).bandwidth))
        reached = number(priced.constants.net_ring)
    assert reached < 1 and rates[1] == pytest.approx(reached * rates[0])


def test_an_emulated_node_sends_no_more_than_loopback_gives() -> None:
    ports = []
    for ranks in (2, 4, 8):
        network = as_nodes(ClusterSpec(gpu="H200", gpus_per_node=ranks, emulate_nodes=2)).network
        assert network is not None and network.fabric == "tcp" and network.port_gb_per_s is not None
        ports.append(network.port_gb_per_s)
        assert network.port_gb_per_s * ranks / 2 <= LOOPBACK_GB_PER_S
    assert ports[0] == LOOPBACK_PORT_GB_PER_S and ports == sorted(ports, reverse=True)


def test_it_says_nothing_of_chips_that_nobody_measured() -> None:
    given = plan_of({"shard": 2})
    train = TrainSpec(steps=1, global_batch=given.batch.global_batch, seq_len=64)
    unknown = ClusterSpec(gpu="X1", gpus_per_node=2)
    assert plan_time(LLAMA, train, given, unknown) is None and pricing(LLAMA, train, given, unknown) is None


def ends(cluster: ClusterSpec, mesh: dict[AxisName, int], **layer: Any) -> tuple[float, float]:
    """The band round one second."""
    return band(1.0, cluster, plan_of(mesh, **layer))


def test_the_band_is_narrow_only_where_own_runs_were_like_it() -> None:
    rows = table()["bands"]
    own, near = ((np.exp(-rows[name]), np.exp(rows[name])) for name in (OWN, "hopper"))
    assert ends(NODE, {"shard": 8}) == pytest.approx(own)
    assert ends(replace(NODE, emulate_nodes=2), {"pipeline": 2, "shard": 4}) == pytest.approx(own)
    for unlike in (
        ends(NODE, {"tensor": 2, "shard": 4}),
        ends(NODE, {"context_ring": 2, "shard": 4}),
        ends(NODE, {"shard": 8}, offload="optimizer"),
        ends(TWO_NODES, {"shard": 16}),
    ):
        assert unlike == pytest.approx(near)
    elsewhere = ends(replace(NODE, gpu="A100"), {"shard": 8})
    width = rows["default"]
    assert elsewhere == pytest.approx((np.exp(-width), np.exp(width))) and elsewhere[1] > near[1] > own[1]
    assert ends(replace(TWO_NODES, groups=(NodeGroup(nodes=1, gpu="A100"),)), {"shard": 16}) == elsewhere
    guessed = ends(replace(NODE, gpu="Ascend910"), {"shard": 8})
    assert guessed == pytest.approx((1 / 3, 3), rel=0.01)


def test_what_the_band_rests_on_is_said() -> None:
    said = {
        "tensor ranks": (NODE, {"tensor": 2, "shard": 4}), "several hosts": (TWO_NODES, {"shard": 16}),
        "not measured with ampere devices": (replace(NODE, gpu="A100"), {"shard": 8}),
        "no run on ascend": (replace(NODE, gpu="Ascend910"), {"shard": 8}),
        "runs of meshwright": (NODE, {"shard": 8}),
    }  # fmt: skip
    for text, (cluster, mesh) in said.items():
        assert text in sources(cluster, "bf16", plan_of(mesh))["80% band"]
    assert "80% band" not in sources(ClusterSpec(gpus_per_node=8), "bf16", plan_of({"shard": 8}))
    low = replace(plan_of({"shard": 8}), precision=Precision(linear="fp8_rowwise"))
    assert "fp8 products" in sources(NODE, "fp8", low)["80% band"]
    layers = plan_of({"shard": 8}, linear="fp8_rowwise")
    assert "fp8 products" in sources(NODE, "bf16", layers)["80% band"]
    assert band(1.0, NODE, layers) == band(1.0, NODE, low) != band(1.0, NODE, plan_of({"shard": 8}))


def test_fp8_is_priced_by_its_rate_its_rounding_and_its_gathers() -> None:
    wide = plan_of({"shard": 8}, micro=4)
    low = replace(wide, precision=Precision(linear="fp8_tensorwise"))
    gathered = replace(wide, precision=Precision(linear="fp8_tensorwise", gather="fp8"))
    assert 0.5 * seconds(wide) < seconds(gathered) <= seconds(low) < 0.85 * seconds(wide)
    slow = replace(NODE, emulate_nodes=2)
    assert seconds(gathered, slow) < 0.95 * seconds(low, slow)
    assert seconds(replace(wide, precision=Precision(linear="fp8_rowwise")), replace(NODE, gpu="cpu")) == pytest.approx(
        seconds(wide, replace(NODE, gpu="cpu"))
    )


@pytest.mark.parametrize("gather", ["compute", "fp8"])
@pytest.mark.parametrize("cluster", [NODE, replace(NODE, emulate_nodes=2)], ids=["node", "two over tcp"])
def test_layers_are_priced_in_their_own_format(gather: Literal["compute", "fp8"], cluster: ClusterSpec) -> None:
    wide = plan_of({"shard": 8}, micro=4)
    low = replace(wide, precision=Precision(linear="fp8_tensorwise", gather=gather))
    own = replace(wide, precision=Precision(gather=gather), layers=(LayerStrategy(linear="fp8_tensorwise"),))
    assert seconds(own, cluster) == seconds(low, cluster) < 0.95 * seconds(wide, cluster)
    assert seconds(replace(low, layers=(LayerStrategy(linear="compute"),)), cluster) == seconds(wide, cluster)
    ends = (LayerStrategy(range="0-3", linear="compute"), LayerStrategy(range="4-31"))
    mixed = 1 / 8 * seconds(wide, cluster) + 7 / 8 * seconds(low, cluster)
    assert seconds(replace(low, layers=ends), cluster) == pytest.approx(mixed)
