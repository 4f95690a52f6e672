"""Closed-form step time of layouts: limits that follow from arithmetic, textbook formulas, and monotonicity."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.calibration.model_dimensions import dimensions_by_name, shape_from_dimensions
from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.collective_costs import all_to_all, copy_engine_group, gather, rank_group
from meshwright.costs.compute import layer_times
from meshwright.costs.constants import OWN, Constants, at_release, constants
from meshwright.costs.layer_costs import context_traffic, layer_exposure
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.step import step_cost
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec
from meshwright.workload.arrays import side_by_side
from meshwright.workload.layouts import ALL_BUT_ATTENTION, FULL, SELECTIVE, Layouts
from meshwright.workload.model_shape import shape_of
from meshwright.workload.rank_layers import balanced_layers

MODEL = shape_from_dimensions(dimensions_by_name("Llama-3-8B"))
CLUSTER = ClusterSpec(gpu="H100", nodes=8, gpus_per_node=8)
K = constants("hopper", "megatron_tuned")


def test_ranks_wait_for_the_longest_of_their_virtual_stages() -> None:
    """With the head as 2.5 layers no rank has more than 9 of 32 layers, but the last rank's last stage is longer than those beside it."""

    def seconds(virtual: int) -> float:
        layers = balanced_layers(32, 2.5, 4, virtual, 0)
        columns = {"slowest_layers": layers.slowest, "slowest_head_layers": layers.slowest_with_head}
        return float(cost(layout(pipeline=4, virtual=virtual, **columns)).compute)

    # Simulated by units, 8B on 64 H100 with 4 ranks takes 1.66 s with 2 and with 3 stages a rank, and 1.86 s with 6.
    assert seconds(3) == pytest.approx(seconds(2)) and seconds(6) > 1.1 * seconds(3)
    assert seconds(6) < 0.95 * cost(layout(pipeline=4, virtual=6)).compute


def layout(**changed: Any) -> Layouts:
    columns: dict[str, Any] = {
        "tensor": 1,
        "pipeline": 1,
        "virtual": 1,
        "context": 1,
        "expert": 1,
        "data": 8,
        "zero": 1,
        "micro_batch": 1,
        "global_batch": 64,
        "seq": 4096,
        "recompute": 0,
    }
    columns |= changed
    columns.setdefault("shards", columns["data"] * columns["context"])
    return Layouts(**{name: float(value) for name, value in columns.items()})


def cost(plan: Layouts, k: Constants = K, cluster: ClusterSpec = CLUSTER) -> Any:
    return step_cost(MODEL, machine_of(cluster), plan, k)


plans = st.builds(
    lambda tensor, pipeline, data, micro, rounds, zero, recompute: layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        micro_batch=micro,
        global_batch=data * micro * rounds,
        zero=zero,
        recompute=recompute,
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 8, 64]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 32),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, SELECTIVE, ALL_BUT_ATTENTION, FULL]),
)


@given(plans)
@settings(max_examples=60, deadline=None)
def test_no_plan_beats_the_peak_and_no_part_is_negative(plan: Layouts) -> None:
    step = cost(plan)
    tokens = plan.global_batch * plan.seq
    matmuls = MODEL.dense_params + MODEL.table_params
    floor = 6 * matmuls * tokens / plan.ranks / 989e12
    assert step.seconds >= floor * (4 / 3 if plan.recompute == FULL else 1) * 0.8
    parts = [step.compute, step.bubble, step.host, step.optimizer, step.constant, *step.exposed.values()]
    assert all(float(part) >= 0 for part in parts)
    assert float(step.compute) <= float(step.seconds)


@given(plans)
@settings(max_examples=30, deadline=None)
def test_more_work_or_a_slower_part_never_costs_less(plan: Layouts) -> None:
    base = float(cost(plan).seconds)
    assert float(cost(replace(plan, global_batch=plan.global_batch * 2)).seconds) > base
    assert float(cost(replace(plan, recompute=FULL)).seconds) >= base
    for slower in ({"net": K.net / 2}, {"link": K.link / 2}, {"gemm": K.gemm / 2}, {"step_ms": K.step_ms * 2}):
        assert float(cost(plan, replace(K, **slower)).seconds) >= base


def test_batched_layouts_cost_the_same_as_single_layouts() -> None:
    several = [layout(tensor=t, pipeline=p, data=d) for t, p, d in ((1, 1, 8), (2, 4, 8), (8, 1, 2), (4, 8, 2))]
    batched = cost(side_by_side(several))
    single = [cost(plan) for plan in several]
    assert batched.seconds == pytest.approx([float(step.seconds) for step in single])
    for axis, seconds in batched.exposed.items():
        assert np.broadcast_to(seconds, 4) == pytest.approx([float(step.exposed[axis]) for step in single])


def test_bubble_equals_the_textbook_formula() -> None:
    """With even stages, no head and free communication: (p − 1) / v micro-batches of one stage."""
    free = replace(K, bubble=1.0, host_us=0.0, host_tensor_us=0.0, host_micro_us=0.0)
    headless = replace(MODEL, vocab=0.0)
    machine = machine_of(CLUSTER)
    for depth, virtual in ((2, 1), (4, 1), (8, 1), (4, 2), (8, 4)):
        plan = layout(pipeline=depth, virtual=virtual, data=2, global_batch=64)
        step = step_cost(headless, machine, plan, free)
        ideal = float(step.compute) / plan.micro_batches * (depth - 1) / virtual
        assert float(step.bubble) == pytest.approx(ideal, rel=0.02)


def test_an_axis_of_one_rank_has_no_exposed_time() -> None:
    step = cost(layout(data=1, global_batch=8))
    assert {axis: float(np.max(seconds)) for axis, seconds in step.exposed.items()} == dict.fromkeys(step.exposed, 0.0)


def test_tensor_exchanges_across_nodes_cost_more_than_inside_a_node() -> None:
    in_node = cost(layout(tensor=8, data=1)).exposed["tensor"]
    across_nodes = cost(layout(tensor=8, data=1), cluster=ClusterSpec(gpu="H100", nodes=2, gpus_per_node=4)).exposed[
        "tensor"
    ]
    h800 = step_cost(MODEL, replace(machine_of(CLUSTER), domain=4.0), layout(tensor=8, data=1), K).exposed["tensor"]
    assert float(h800) > float(in_node)
    assert float(across_nodes) >= float(in_node)


def test_tensor_exchanges_of_a_parallel_block_take_half_the_time() -> None:
    llama = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
    for mode in (0, FULL):
        plan, seconds = layout(tensor=8, data=1, recompute=mode), []
        for is_parallel in (False, True):
            shape = shape_of(replace(llama, parallel_block=is_parallel), 8192)
            times = layer_times(shape, machine_of(CLUSTER), plan, K)
            seconds.append(float(layer_exposure(shape, machine_of(CLUSTER), plan, K, times).tensor))
        assert seconds[1] == pytest.approx(seconds[0] / 2) and seconds[0] > 0


def test_layered_accumulation_gathers_once_a_step() -> None:
    plan = layout(zero=3, global_batch=64, data=8)
    slow_network = replace(K, net=K.net / 100, link=K.link / 100)
    depth_first, layered = (float(cost(p, slow_network).exposed["shard"]) for p in (plan, replace(plan, layered=1.0)))
    assert layered < depth_first / 4


def test_unbalanced_routing_costs_the_time_of_the_busiest_rank() -> None:
    experts = shape_from_dimensions(dimensions_by_name("Qwen3-30B-A3B"))
    plan = layout(expert=8)
    k = replace(K, moe_us=0.0)
    even, skewed = (step_cost(experts, machine_of(CLUSTER), p, k) for p in (plan, replace(plan, imbalance=1.5)))
    assert float(skewed.exposed["expert"]) == pytest.approx(1.5 * float(even.exposed["expert"]), rel=1e-6)
    assert float(skewed.compute) > float(even.compute)


def test_launches_of_local_experts_are_exposed_unless_sizes_stay_on_the_device() -> None:
    experts, k = shape_from_dimensions(dimensions_by_name("Qwen3-30B-A3B")), replace(K, moe_us=100.0)
    machine, micro_batches = machine_of(CLUSTER), layout().micro_batches

    def waits_for(plan: Layouts) -> float:
        waiting, free = (step_cost(experts, machine, replace(plan, host_sizes=sizes), k) for sizes in (1.0, 0.0))
        return float(waiting.exposed["expert"] - free.exposed["expert"])

    eight, four = (waits_for(layout(expert=ranks)) for ranks in (8.0, 4.0))
    assert eight == pytest.approx(float(micro_batches) * 48 * 128 / 8 * 100e-6)
    assert four == pytest.approx(2 * eight)


def test_biases_of_experts_cost_memory_passes() -> None:
    model = shape_from_dimensions(dimensions_by_name("GPT-OSS-120B"))
    biased, unbiased = (
        step_cost(replace(model, expert_bias=bias), machine_of(CLUSTER), layout(expert=8.0), K).compute
        for bias in (1.0, 0.0)
    )
    assert float(model.expert_bias) == 1.0
    assert float(biased) > 1.02 * float(unbiased)


def test_ulysses_exposes_less_than_a_ring_with_many_key_value_heads() -> None:
    model = replace(MODEL, kv_width=2 * MODEL.query_width)
    plan = layout(context=8, data=1, seq=65536, global_batch=1)
    ring, heads = (step_cost(model, machine_of(CLUSTER), p, K) for p in (plan, replace(plan, ulysses=8.0)))
    assert float(heads.exposed["context"]) < float(ring.exposed["context"])


def test_ulysses_and_ring_times_add_up() -> None:
    """Two rings of four ranks: each ring passes half of the heads, and each rank exchanges heads with one other rank."""
    plan = layout(context=8, data=1, seq=65536, global_batch=1)
    priced = partial(context_traffic, MODEL, machine_of(CLUSTER), k=replace(K, start_us=0.0, link_us=0.0, net_us=0.0))
    both, ring, heads = (
        np.array(priced(layout=changed_layout)).ravel()
        for changed_layout in (
            replace(plan, ulysses=2.0),
            replace(plan, context=4.0, seq=32768.0, ring_stride=2.0),
            replace(plan, context=2.0, ulysses=2.0, seq=16384.0),
        )
    )
    assert both == pytest.approx(ring + heads)


def test_a_head_size_that_is_no_multiple_of_eight_is_slower() -> None:
    ragged = replace(MODEL, heads=36.0)
    machine = machine_of(CLUSTER)
    assert float(step_cost(ragged, machine, layout(), K).compute) > 1.2 * float(cost(layout()).compute)


def test_a_loss_of_log_probabilities_takes_a_matmul_of_the_head_more() -> None:
    """Of three matmuls of the head then four, and a third of the time of its logits; blocks take what they took."""
    machine = machine_of(CLUSTER)
    without, with_objective = (layer_times(MODEL, machine, layout(objective=on), K) for on in (0, 1))
    assert 1.2 * without.head < with_objective.head < 1.4 * without.head
    assert (with_objective.forward, with_objective.backward) == (without.forward, without.backward)
    tensor = [layer_times(MODEL, machine, layout(tensor=4, data=2, objective=on), K).head for on in (0, 1)]
    assert 1.2 * tensor[0] < tensor[1] < 1.4 * tensor[0]


def test_newer_software_is_never_slower() -> None:
    assert float(cost(layout(), at_release(K, 1.0)).seconds) < float(cost(layout(), K).seconds)


def test_the_table_has_every_constant() -> None:
    assert all(getattr(constants("no such chip", "no such stack"), field.name) >= 0 for field in fields(Constants))


def test_copy_engine_gathers_are_faster_and_slow_compute_less() -> None:
    """A fully hidden collective costs its seconds times its overlap tax. Copy engines change only the gathers."""
    k, machine = constants("hopper", OWN), machine_of(ClusterSpec(gpu="H200", gpus_per_node=8))
    kernels = layout(zero=3, micro_batch=4, global_batch=32)
    by_kernel, by_copy = (
        step_cost(MODEL, machine, replace(kernels, weights_by_copy_engine=value), k) for value in (0.0, 1.0)
    )
    shards = rank_group(machine, k, 8.0, 1.0)
    seconds = [
        float(2 * gather(group, k, 2 * MODEL.params, MODEL.layers))
        for group in (shards, copy_engine_group(shards, machine, k))
    ]
    assert float(copy_engine_group(shards, machine, k).bandwidth / shards.bandwidth) == pytest.approx(1.34)
    saved = seconds[0] * k.overlap_tax - seconds[1] * k.overlap_tax * k.copy_tax
    assert by_kernel.exposed["shard"] - by_copy.exposed["shard"] == pytest.approx(saved, rel=1e-6)
    unsharded = [
        step_cost(MODEL, machine, replace(kernels, weights_by_copy_engine=v, shards=1.0, zero=0.0), k).seconds
        for v in (0.0, 1.0)
    ]
    assert unsharded[0] == unsharded[1], "nothing is gathered"


@pytest.mark.parametrize(("recompute", "repeated"), [(0, 0), (ALL_BUT_ATTENTION, 0), (FULL, 1)])
def test_ring_backward_sends_keys_values_and_fp32_gradients(recompute: float, repeated: int) -> None:
    """Closed form of parallel/ring.py: c - 1 passes forward and in backward, c of fp32 sums; half of them exposed."""
    k, machine = constants("hopper", OWN), machine_of(ClusterSpec(gpu="H200", gpus_per_node=8))
    plan = layout(context=4, data=1, seq=65536, global_batch=1, recompute=recompute)
    forward, backward = context_traffic(MODEL, machine, plan, k)
    passed = float(gather(rank_group(machine, k, 4.0, 1.0), k, 65536 * MODEL.kv_width * 2)) * MODEL.attention_layers
    assert float(forward) == pytest.approx(0.5 * passed)
    assert float(backward) == pytest.approx(0.5 * passed * (1 + repeated + 2 * 4 / 3))
    other = context_traffic(MODEL, machine, plan, K)
    assert float(other[1]) == pytest.approx(2 * float(other[0])), "published stacks are priced as they were fitted"


@pytest.mark.parametrize(("recompute", "forwards"), [(0, 1), (ALL_BUT_ATTENTION, 2), (FULL, 2)])
def test_expert_ranks_pay_for_the_exchange_and_host_sync_of_row_counts(recompute: float, forwards: int) -> None:
    k, machine = constants("hopper", OWN), machine_of(ClusterSpec(gpu="H200", gpus_per_node=8))
    moe = replace(MODEL, moe_layers=8.0, dense_layers=24.0, experts=16.0, top_k=2.0, expert_ffn=1024.0)
    plan = layout(expert=8, zero=3, recompute=recompute, global_batch=8)
    step, group = step_cost(moe, machine, plan, k), rank_group(machine, k, 8.0, 1.0)
    exchange, counts_exchange = (
        float(all_to_all(group, k, machine, size)) for size in (4096 * 2 * moe.expert_in * 2, 0.0)
    )
    expected = 8 * ((2 + 2 * forwards) * exchange + forwards * (counts_exchange + 50e-6))
    assert float(step.exposed["expert"]) == pytest.approx(expected, rel=1e-6)
    without_expert_ranks = step_cost(moe, machine, replace(plan, expert=1.0), k)
    assert float(without_expert_ranks.exposed["expert"]) == 0


def test_a_token_crosses_the_network_once_to_each_of_its_nodes() -> None:
    """64 expert ranks on 8 nodes, 8 experts a token: copies, distinct nodes of independent draws, the router's limit."""
    shape = shape_from_dimensions(dimensions_by_name("DeepSeek-V3"))
    machine = replace(machine_of(CLUSTER), link=np.inf)
    k = replace(K, own_engine=0.0, expert_exposed=1.0, start_us=0.0, net_us=0.0, moe_us=0.0)

    def nodes_per_token(**columns: float) -> float:
        plan = layout(expert=64, data=64, micro_batch=1, **columns)
        seconds = layer_exposure(shape, machine, plan, k, layer_times(shape, machine, plan, k)).expert
        message_seconds = 4096 * 7168 * 2 / (machine.nic * k.net)
        return float(seconds / (4 * 58 * message_seconds))

    draws = np.random.default_rng(0).integers(8, size=(200_000, 8))
    distinct = np.mean([np.sum((draws == node).any(axis=1)) for node in range(1, 8)]) * 7 / len(draws)
    assert nodes_per_token() == pytest.approx(8 * 7 / 8)
    assert nodes_per_token(one_copy=1) == pytest.approx(distinct, rel=0.005)
    assert nodes_per_token(one_copy=1, domains_per_token=4) == pytest.approx(4 * 7 / 8)
    assert nodes_per_token(one_copy=1, domains_per_token=7) == pytest.approx(distinct, rel=0.005)
    assert nodes_per_token(exchanged_bytes=1.5) == pytest.approx(0.75 * 8 * 7 / 8)
