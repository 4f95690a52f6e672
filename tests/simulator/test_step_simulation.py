"""Simulation of a plan's step on a cluster.

Step times equal the closed form where nothing overlaps, bubbles equal published formulas, collectives follow the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.plan_costs import LOOPBACK_GB_PER_S, LOOPBACK_PORT_GB_PER_S, plan_time
from meshwright.schedules.plan_schedule import stages_of, training_schedule
from meshwright.schedules.validity import check
from meshwright.simulator.step_simulation import memory_of, simulate_plan, timing_of
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, layer_parameters
from meshwright.spec.network import NetworkSpec, NodeGroup
from meshwright.spec.plan import (
    BatchPlan,
    ExpertPlan,
    LayerStrategy,
    MeshAxis,
    Plan,
    Precision,
    Recompute,
    SchedulePlan,
)
from meshwright.workload.activations import activation_bytes

LLAMA = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
NARROW = replace(LLAMA, vocab_size=128)
"""A small vocabulary: embedding and head cost little, so equal numbers of layers make equal stages."""
NODE = ClusterSpec(gpu="H200", gpus_per_node=8)
TCP = NetworkSpec(fabric="tcp", port_gb_per_s=1.5)


def plan(mesh: dict[str, int], micro: int = 1, accumulate: int = 8, schedule: str = "1f1b", stages=(), **layer) -> Plan:
    data = mesh.get("replicate", 1) * mesh.get("shard", 1)
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in mesh.items()),
        batch=BatchPlan(global_batch=data * micro * accumulate, micro_batch=micro, accumulate=accumulate),
        schedule=SchedulePlan(name=schedule, stages=stages),
        layers=(LayerStrategy(**layer),),
    )


def job(chosen_plan: Plan, seq: int = 4096) -> TrainSpec:
    return TrainSpec(steps=1, global_batch=chosen_plan.batch.global_batch, seq_len=seq)


def simulated(chosen_plan: Plan, cluster: ClusterSpec = NODE, model: ModelSpec = LLAMA):
    return simulate_plan(model, job(chosen_plan), chosen_plan, cluster)


@pytest.mark.parametrize("recompute", get_args(Recompute))
@pytest.mark.parametrize("mesh", [{"shard": 1}, {"shard": 1, "tensor": 2}, {"shard": 1, "context_ring": 2}])
def test_one_unsharded_rank_takes_the_time_of_the_closed_form(mesh: dict[str, int], recompute: str) -> None:
    chosen_plan = plan(mesh, micro=2, recompute=recompute)
    closed = plan_time(LLAMA, job(chosen_plan), chosen_plan, NODE)
    assert closed is not None
    # Context ranks shard weights too, so they gather them; the closed form counts some gathers that the schedule omits.
    close = 0.005 if "context_ring" not in mesh else 0.05
    assert simulated(chosen_plan).step_seconds == pytest.approx(closed.seconds, rel=close)


@pytest.mark.parametrize("reshard", [True, False])
def test_sharding_that_compute_hides_is_near_the_closed_form(reshard: bool) -> None:
    chosen_plan = plan({"shard": 8}, reshard=reshard)
    closed = plan_time(LLAMA, job(chosen_plan), chosen_plan, NODE)
    assert closed is not None
    # The closed form sends gradients in bf16; the plan reduces in fp32.
    assert simulated(chosen_plan).step_seconds == pytest.approx(closed.seconds, rel=0.03)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("accumulate", [8, 16])
def test_bubble_of_even_stages_equals_the_published_formulas(pipeline: int, accumulate: int) -> None:
    """(p − 1) / (m + p − 1) under 1F1B, (p − 1) / (2 m + p − 1) interleaved with two stages (arXiv 2104.04473)."""
    ends = pipeline - 1
    one_stage = simulated(plan({"pipeline": pipeline, "shard": 1}, accumulate=accumulate), model=NARROW)
    assert one_stage.bubble == pytest.approx(ends / (accumulate + ends), abs=0.01)
    interleaved = simulated(plan({"pipeline": pipeline, "shard": 1}, 1, accumulate, "interleaved"), model=NARROW)
    assert interleaved.bubble == pytest.approx(ends / (2 * accumulate + ends), abs=0.02)
    assert interleaved.step_seconds < one_stage.step_seconds


def test_uneven_stages_follow_the_head() -> None:
    """The rank with the head takes longest, so moving layers away from it shortens the step."""
    even = simulated(plan({"pipeline": 4, "shard": 1}, accumulate=32))
    moved = simulated(plan({"pipeline": 4, "shard": 1}, 1, 32, "1f1b", (("0-8",), ("9-17",), ("18-25",), ("26-31",))))
    assert even.compute_seconds[-1] > 1.05 * even.compute_seconds[0]
    assert moved.step_seconds < 0.97 * even.step_seconds


GATHERS = {("1f1b", True): 16, ("1f1b", False): 1, ("breadth_first", True): 2, ("breadth_first", False): 1}
"""Gathers of one block in a step of 8 micro-batches, by schedule and reshard."""


@pytest.mark.parametrize(("schedule", "reshard"), GATHERS)
def test_numbers_of_gathers_and_reductions_follow_the_plan(schedule: str, reshard: bool) -> None:
    whole_gradients = plan({"shard": 8}, 1, 8, schedule, reshard=reshard, gradients="whole")
    sharded_gradients = plan({"shard": 8}, 1, 8, schedule, reshard=reshard, gradients="shard")
    for chosen_plan, reductions in ((whole_gradients, 1), (sharded_gradients, 1 if schedule == "breadth_first" else 8)):
        count = Counter((action.op, action.unit) for action in training_schedule(chosen_plan, LLAMA.layers).actions[0])
        assert count["unshard", 7] == GATHERS[schedule, reshard]
        assert count["reduce_grad", 7] == reductions


def test_no_collectives_without_sharding_and_replicas() -> None:
    """The schedule still has unshard and reduce_grad actions (they cast weights, move gradients), but they send nothing."""
    lanes = {lane for _, lane, *_ in simulated(plan({"shard": 1})).records}
    assert not lanes & {"unshard", "reduce", "replicate"}
    lanes = {lane for _, lane, *_ in simulated(plan({"replicate": 8, "shard": 1})).records}
    assert "replicate" in lanes and not lanes & {"unshard", "reduce"}


def test_replicas_sum_once_a_step_and_unit() -> None:
    timeline = simulated(plan({"replicate": 2, "shard": 4}, gradients="shard"))
    lanes = Counter(lane for _, lane, *_ in timeline.records)
    assert lanes["replicate"] == LLAMA.layers + 2
    last_reduction = max(end for _, lane, _, _, end in timeline.records if lane == "reduce")
    assert min(start for _, lane, _, start, _ in timeline.records if lane == "replicate") < last_reduction


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "breadth_first"])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_every_schedule_of_a_plan_is_complete_and_does_all_the_work(schedule: str, pipeline: int) -> None:
    chosen_plan = plan({"pipeline": pipeline, "shard": 2}, 1, 8, schedule)
    schedule_of_plan = training_schedule(chosen_plan, LLAMA.layers)
    check(schedule_of_plan)
    assert sum(schedule_of_plan.units or ()) == LLAMA.layers + 2
    timing, timeline = timing_of(LLAMA, job(chosen_plan), chosen_plan, NODE), simulated(chosen_plan)
    columns = (timing.forward, timing.backward_input, timing.backward_weight)
    work = 8 * sum(sum(entries) for column in columns for entries in column)
    copies = sum(sum(entries) for table in (timing.copy_out, timing.copy_in, timing.accumulate) for entries in table)
    slowed = sum(timeline.compute_seconds)
    assert work <= slowed + 1e-9 and slowed <= (work + 16 * copies) * timing.reduce_slowdown


def test_copy_engine_gathers_overlap_reductions_and_slow_compute_less() -> None:
    chosen_plan = plan({"shard": 8}, accumulate=2, reshard=True)
    kernels, copies = (
        timing_of(LLAMA, job(chosen_plan), replace(chosen_plan, gather_transport=transport), NODE)
        for transport in ("nccl", "copy_engine")
    )
    assert kernels.shared_communicator and kernels.gather_slowdown == kernels.reduce_slowdown
    assert (
        not copies.shared_communicator
        and 1 < copies.gather_slowdown < copies.reduce_slowdown == kernels.reduce_slowdown
    )
    assert copies.reduce == kernels.reduce and copies.copy_out == kernels.copy_out
    assert kernels.unshard[0][1] / copies.unshard[0][1] == pytest.approx(1.34, abs=0.1)
    spans = {
        lane: [
            (s, e)
            for _, at, _, s, e in simulated(replace(chosen_plan, gather_transport="copy_engine")).records
            if at == lane
        ]
        for lane in ("unshard", "reduce")
    }
    assert any(a < d and c < b for a, b in spans["unshard"] for c, d in spans["reduce"]), (
        "a gather and a reduction run at the same time"
    )


def test_accumulation_in_matmuls_moves_six_of_ten_bytes() -> None:
    """Matmuls of bf16 blocks accumulate and move 6 instead of 10 bytes; fp8 matmuls cannot. The closed form agrees."""
    whole_gradients = plan({"shard": 8}, accumulate=4, gradients="whole")
    low = replace(whole_gradients, precision=replace(whole_gradients.precision, linear="fp8_tensorwise"))
    bf16, fp8 = (
        timing_of(LLAMA, job(whole_gradients), chosen_plan, NODE).accumulate[0]
        for chosen_plan in (whole_gradients, low)
    )
    assert [bf16_seconds / fp8_seconds for bf16_seconds, fp8_seconds in zip(bf16, fp8, strict=True)] == pytest.approx(
        [1.0, *[0.6] * LLAMA.layers, 1.0]
    )
    unsharded = plan({"shard": 1}, accumulate=4)
    copy_in = timing_of(LLAMA, job(unsharded), unsharded, NODE).copy_in[0]
    assert copy_in[1] == pytest.approx(bf16[1]), "an unsharded rank accumulates when it copies gradients in"
    for chosen_plan in (whole_gradients, unsharded):
        closed = plan_time(LLAMA, job(chosen_plan), chosen_plan, NODE)
        assert closed and closed.seconds == pytest.approx(simulated(chosen_plan).step_seconds, rel=0.02)


def test_experts_on_ranks_of_their_own_are_gathered_by_kernels() -> None:
    model = from_plain(ModelSpec, MODEL_PRESETS["mixtral-8x7b"])
    spread, together = (
        replace(
            plan({"shard": 8}),
            gather_transport="copy_engine",
            experts=ExpertPlan(expert=ranks, expert_shard=8 // ranks),
        )
        for ranks in (2, 1)
    )
    slow, fast = (timing_of(model, job(chosen_plan), chosen_plan, NODE) for chosen_plan in (spread, together))
    assert slow.gather_slowdown == slow.reduce_slowdown > fast.gather_slowdown


def test_gathers_and_reductions_share_a_communicator_and_not_a_row() -> None:
    timeline = simulated(plan({"shard": 8}, accumulate=2))
    rows = {lane: sorted((s, e) for _, at, _, s, e in timeline.records if at == lane) for lane in ("unshard", "reduce")}
    assert rows["unshard"] and rows["reduce"]
    both = sorted(rows["unshard"] + rows["reduce"])
    assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(both))


def test_layered_accumulation_saves_a_slow_network() -> None:
    """Weights cross TCP once a step and direction in place of once a micro-batch (arXiv 2106.02679)."""
    cluster = replace(NODE, emulate_nodes=2)
    each = simulated(plan({"shard": 8}, 1, 16, "1f1b", reshard=True), cluster)
    layered = simulated(plan({"shard": 8}, 1, 16, "breadth_first", reshard=True), cluster)
    assert each.exposed["shard"] > 3 * layered.exposed["shard"]
    assert each.step_seconds > 2 * layered.step_seconds


def test_boundaries_take_the_link_they_cross() -> None:
    """Each node has 8 ports of 1.5 GB/s.

    Over TCP the 4 devices that send share the node's 12 GB/s; over InfiniBand each device uses its own port only.
    """
    two = ClusterSpec(gpu="H200", nodes=2, gpus_per_node=8)
    across, inside = plan({"pipeline": 2, "shard": 8}), plan({"pipeline": 4, "shard": 4})
    share = timing_of(LLAMA, job(across), across, replace(two, network=TCP)).between(0, 1).bytes_per_second
    own = timing_of(LLAMA, job(across), across, replace(two, network=replace(TCP, fabric="infiniband"))).between(0, 1)
    assert 0.7 * own.bytes_per_second < share <= own.bytes_per_second  # all 8 send, and TCP fills a port less well
    timing = timing_of(LLAMA, job(inside), inside, replace(two, network=TCP))
    assert timing.between(1, 2).bytes_per_second == pytest.approx(2 * share)
    assert timing.between(0, 1).bytes_per_second > 20 * share
    assert timing.boundary_bytes == [4096 * LLAMA.hidden * 2] * 3


def test_a_host_that_plays_nodes_is_those_nodes() -> None:
    played, real = replace(NODE, emulate_nodes=2), ClusterSpec(gpu="H200", nodes=2, gpus_per_node=4)
    chosen_plan = plan({"pipeline": 2, "shard": 4})
    network = NetworkSpec(fabric="tcp", port_gb_per_s=min(LOOPBACK_GB_PER_S / 4, LOOPBACK_PORT_GB_PER_S))
    assert (
        simulated(chosen_plan, played).step_seconds
        == simulated(chosen_plan, replace(real, network=network)).step_seconds
    )
    assert simulated(chosen_plan, played).step_seconds > simulated(chosen_plan).step_seconds


def test_only_the_stage_on_slow_nodes_is_slow() -> None:
    mixed = ClusterSpec(gpu="H100", nodes=2, gpus_per_node=4, groups=(NodeGroup(nodes=1, gpu="A100"),))
    chosen_plan = plan({"pipeline": 2, "shard": 4}, accumulate=16)
    timeline = simulated(chosen_plan, mixed, NARROW)
    assert timeline.compute_seconds[1] > 2 * timeline.compute_seconds[0]
    uneven = plan({"pipeline": 2, "shard": 4}, 1, 16, "1f1b", (("0-22",), ("23-31",)))
    assert simulated(uneven, mixed, NARROW).step_seconds < 0.75 * timeline.step_seconds


def test_activation_memory_follows_the_schedule() -> None:
    """Rank r has min(m, p − r) micro-batches in flight under 1F1B, all of them under GPipe (arXiv 2006.09503)."""
    one_f_one_b, gpipe = (plan({"pipeline": 4, "shard": 1}, 1, 8, name) for name in ("1f1b", "gpipe"))
    one_f_one_b_memory, gpipe_memory = (
        memory_of(NARROW, job(one_f_one_b), chosen_plan, cpu=False) for chosen_plan in (one_f_one_b, gpipe)
    )
    micro_batch_bytes = activation_bytes(NARROW, job(one_f_one_b), one_f_one_b)[0]
    temporary = one_f_one_b_memory[3]["activations"] - micro_batch_bytes  # bytes of the computing block
    assert [round((memory["activations"] - temporary) / micro_batch_bytes, 3) for memory in one_f_one_b_memory] == [
        4,
        3,
        2,
        1,
    ]
    assert [round((memory["activations"] - temporary) / micro_batch_bytes, 3) for memory in gpipe_memory] == [
        8,
        8,
        8,
        8,
    ]


def test_units_contain_every_parameter_once() -> None:
    chosen_plan = plan({"pipeline": 2, "shard": 2}, 1, 4, "zbv")
    assert [len(stage) for stage in stages_of(chosen_plan, LLAMA.layers)] == [8, 8, 8, 8]
    timing = timing_of(LLAMA, job(chosen_plan), chosen_plan, NODE)
    block = (
        sum(parameter.count for parameter in layer_parameters(LLAMA, 0)) * 2 / 2
    )  # bf16, half of it gathered from the other rank
    bandwidth = CHIPS["H200"].link
    assert block / bandwidth < timing.unshard[1][0] < 2 * block / bandwidth
    assert timing.unshard[1][0] < timing.reduce[1][0] <= 2 * timing.unshard[1][0]  # fp32, with the same latency


def test_narrow_replica_sums_take_half_the_time() -> None:
    chosen_plan = plan({"replicate": 2, "shard": 4}, accumulate=1)
    narrow = replace(chosen_plan, precision=Precision(reduce_replicas="bf16"))
    cluster = ClusterSpec(gpu="H200", nodes=2, gpus_per_node=4, network=TCP)
    wide, half = (
        timing_of(LLAMA, job(chosen_plan), summed_plan, cluster).replicate[0][5]
        for summed_plan in (chosen_plan, narrow)
    )
    assert wide / 2 <= half < 0.55 * wide  # the slow-down by the concurrent backward does not shrink


def test_blocks_are_simulated_in_their_own_linear_dtype() -> None:
    wide = plan({"pipeline": 2, "shard": 4}, schedule="zb_h1")
    low = replace(wide, precision=Precision(linear="fp8_rowwise"))
    fast, slow = (timing_of(LLAMA, job(chosen_plan), chosen_plan, NODE) for chosen_plan in (low, wide))
    mixed_plan = replace(wide, layers=(LayerStrategy(range="0-15", linear="fp8_rowwise"), LayerStrategy(range="16-31")))
    mixed = timing_of(LLAMA, job(mixed_plan), mixed_plan, NODE)
    for column in ("forward", "backward_input", "backward_weight"):
        first, last = getattr(mixed, column)
        assert (first, last) == (getattr(fast, column)[0], getattr(slow, column)[1])
        assert first[1] < 0.9 * last[1]
    all_fp8 = replace(wide, layers=(LayerStrategy(linear="fp8_rowwise"),))
    assert (
        simulated(all_fp8).step_seconds
        == simulated(low).step_seconds
        < simulated(mixed_plan).step_seconds
        < simulated(wide).step_seconds
    )


@pytest.mark.parametrize("cluster", [ClusterSpec(gpu="X1", gpus_per_node=2), ClusterSpec(gpu="V100", gpus_per_node=8)])
def test_unknown_chips_are_refused(cluster: ClusterSpec) -> None:
    with pytest.raises(BadInput, match=f"no figures for {cluster.gpu} in bf16.*H200"):
        simulated(plan({"shard": 2}), cluster)
