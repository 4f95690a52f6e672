"""Simulation of a plan's step on a cluster.

One rank takes the closed form's time, pipelines idle as in the papers, and collectives run as the plan says.
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
"""Its ends cost next to nothing, so that even numbers of layers make even stages."""
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


def job(given: Plan, seq: int = 4096) -> TrainSpec:
    return TrainSpec(steps=1, global_batch=given.batch.global_batch, seq_len=seq)


def play(given: Plan, cluster: ClusterSpec = NODE, model: ModelSpec = LLAMA):
    return simulate_plan(model, job(given), given, cluster)


@pytest.mark.parametrize("recompute", get_args(Recompute))
@pytest.mark.parametrize("mesh", [{"shard": 1}, {"shard": 1, "tensor": 2}, {"shard": 1, "context_ring": 2}])
def test_one_rank_without_sharding_takes_what_the_closed_form_says(mesh: dict[str, int], recompute: str) -> None:
    given = plan(mesh, micro=2, recompute=recompute)
    closed = plan_time(LLAMA, job(given), given, NODE)
    assert closed is not None
    # Weights that the next use needs again stay; context ranks hold shards of the weights too, and gather them.
    close = 0.005 if "context_ring" not in mesh else 0.05
    assert play(given).step_seconds == pytest.approx(closed.seconds, rel=close)


@pytest.mark.parametrize("reshard", [True, False])
def test_sharding_that_compute_hides_is_near_the_closed_form(reshard: bool) -> None:
    given = plan({"shard": 8}, reshard=reshard)
    closed = plan_time(LLAMA, job(given), given, NODE)
    assert closed is not None
    # The closed form has gradients travel in bf16; the plan sums in fp32.
    assert play(given).step_seconds == pytest.approx(closed.seconds, rel=0.03)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("accumulate", [8, 16])
def test_even_stages_idle_as_the_papers_say(pipeline: int, accumulate: int) -> None:
    """(p − 1) / (m + p − 1) under 1F1B, (p − 1) / (2 m + p − 1) interleaved with two stages (arXiv 2104.04473)."""
    ends = pipeline - 1
    plain = play(plan({"pipeline": pipeline, "shard": 1}, accumulate=accumulate), model=NARROW)
    assert plain.bubble == pytest.approx(ends / (accumulate + ends), abs=0.01)
    mixed = play(plan({"pipeline": pipeline, "shard": 1}, 1, accumulate, "interleaved"), model=NARROW)
    assert mixed.bubble == pytest.approx(ends / (2 * accumulate + ends), abs=0.02)
    assert mixed.step_seconds < plain.step_seconds


def test_uneven_stages_follow_the_head() -> None:
    """The rank with the head has more to do than its layers; a layer less there makes the step shorter."""
    even = play(plan({"pipeline": 4, "shard": 1}, accumulate=32))
    moved = play(plan({"pipeline": 4, "shard": 1}, 1, 32, "1f1b", (("0-8",), ("9-17",), ("18-25",), ("26-31",))))
    assert even.compute_seconds[-1] > 1.05 * even.compute_seconds[0]
    assert moved.step_seconds < 0.97 * even.step_seconds


GATHERS = {("1f1b", True): 16, ("1f1b", False): 1, ("breadth_first", True): 2, ("breadth_first", False): 1}
"""Of one block in a step of 8 micro-batches, by schedule and resharding."""


@pytest.mark.parametrize(("schedule", "reshard"), GATHERS)
def test_gathers_and_reductions_are_as_many_as_the_plan_says(schedule: str, reshard: bool) -> None:
    whole = plan({"shard": 8}, 1, 8, schedule, reshard=reshard, gradients="whole")
    sharded = plan({"shard": 8}, 1, 8, schedule, reshard=reshard, gradients="shard")
    for given, reductions in ((whole, 1), (sharded, 1 if schedule == "breadth_first" else 8)):
        count = Counter((a.op, a.unit) for a in training_schedule(given, LLAMA.layers).actions[0])
        assert count["unshard", 7] == GATHERS[schedule, reshard]
        assert count["reduce_grad", 7] == reductions


def test_nothing_travels_where_nothing_is_sharded() -> None:
    """The executor plays the verbs all the same (they cast weights and move gradients); no bytes go anywhere."""
    lanes = {lane for _, lane, *_ in play(plan({"shard": 1})).records}
    assert not lanes & {"unshard", "reduce", "replicate"}
    lanes = {lane for _, lane, *_ in play(plan({"replicate": 8, "shard": 1})).records}
    assert "replicate" in lanes and not lanes & {"unshard", "reduce"}


def test_replicas_sum_once_a_step_and_unit() -> None:
    timeline = play(plan({"replicate": 2, "shard": 4}, gradients="shard"))
    lanes = Counter(lane for _, lane, *_ in timeline.records)
    assert lanes["replicate"] == LLAMA.layers + 2
    last_reduction = max(end for _, lane, _, _, end in timeline.records if lane == "reduce")
    assert min(start for _, lane, _, start, _ in timeline.records if lane == "replicate") < last_reduction


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v", "breadth_first"])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_every_schedule_of_a_plan_is_complete_and_does_all_the_work(schedule: str, pipeline: int) -> None:
    given = plan({"pipeline": pipeline, "shard": 2}, 1, 8, schedule)
    made = training_schedule(given, LLAMA.layers)
    check(made)
    assert sum(made.units or ()) == LLAMA.layers + 2
    timing, timeline = timing_of(LLAMA, job(given), given, NODE), play(given)
    columns = (timing.forward, timing.backward_input, timing.backward_weight)
    work = 8 * sum(sum(row) for column in columns for row in column)
    copies = sum(sum(row) for table in (timing.copy_out, timing.copy_in, timing.accumulate) for row in table)
    slowed = sum(timeline.compute_seconds)
    assert work <= slowed + 1e-9 and slowed <= (work + 16 * copies) * timing.reduce_slowdown


def test_copied_gathers_wait_for_no_reduction_and_slow_compute_less() -> None:
    given = plan({"shard": 8}, accumulate=2, reshard=True)
    kernels, copies = (
        timing_of(LLAMA, job(given), replace(given, gather_engine=engine), NODE) for engine in ("kernel", "copy")
    )
    assert kernels.shared_communicator and kernels.gather_slowdown == kernels.reduce_slowdown
    assert (
        not copies.shared_communicator
        and 1 < copies.gather_slowdown < copies.reduce_slowdown == kernels.reduce_slowdown
    )
    assert copies.reduce == kernels.reduce and copies.copy_out == kernels.copy_out
    assert kernels.unshard[0][1] / copies.unshard[0][1] == pytest.approx(1.34, abs=0.1)
    rows = {
        lane: [(s, e) for _, at, _, s, e in play(replace(given, gather_engine="copy")).records if at == lane]
        for lane in ("unshard", "reduce")
    }
    assert any(a < d and c < b for a, b in rows["unshard"] for c, d in rows["reduce"]), "they run at one time"


def test_products_that_add_up_move_six_of_ten_bytes() -> None:
    """In blocks alone; in fp8, whose products cannot add, all ten. One sum over a step, and the closed form agrees."""
    whole = plan({"shard": 8}, accumulate=4, gradients="whole")
    low = replace(whole, precision=replace(whole.precision, linear="fp8_tensorwise"))
    bf16, fp8 = (timing_of(LLAMA, job(whole), given, NODE).accumulate[0] for given in (whole, low))
    assert [here / there for here, there in zip(bf16, fp8, strict=True)] == pytest.approx(
        [1.0, *[0.6] * LLAMA.layers, 1.0]
    )
    alone = plan({"shard": 1}, accumulate=4)
    each = timing_of(LLAMA, job(alone), alone, NODE).copy_in[0]
    assert each[1] == pytest.approx(bf16[1]), "a lone rank adds to its shard what others add to a whole sum"
    for given in (whole, alone):
        closed = plan_time(LLAMA, job(given), given, NODE)
        assert closed and closed.seconds == pytest.approx(play(given).step_seconds, rel=0.02)


def test_experts_on_ranks_of_their_own_are_gathered_by_kernels() -> None:
    model = from_plain(ModelSpec, MODEL_PRESETS["mixtral-8x7b"])
    spread, together = (
        replace(plan({"shard": 8}), gather_engine="copy", experts=ExpertPlan(expert=ranks, expert_shard=8 // ranks))
        for ranks in (2, 1)
    )
    slow, fast = (timing_of(model, job(given), given, NODE) for given in (spread, together))
    assert slow.gather_slowdown == slow.reduce_slowdown > fast.gather_slowdown


def test_gathers_and_reductions_share_a_communicator_and_not_a_row() -> None:
    timeline = play(plan({"shard": 8}, accumulate=2))
    rows = {lane: sorted((s, e) for _, at, _, s, e in timeline.records if at == lane) for lane in ("unshard", "reduce")}
    assert rows["unshard"] and rows["reduce"]
    both = sorted(rows["unshard"] + rows["reduce"])
    assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(both))


def test_layered_accumulation_saves_a_slow_network() -> None:
    """Weights cross TCP once a step and direction in place of once a micro-batch (arXiv 2106.02679)."""
    cluster = replace(NODE, emulate_nodes=2)
    each = play(plan({"shard": 8}, 1, 16, "1f1b", reshard=True), cluster)
    layered = play(plan({"shard": 8}, 1, 16, "breadth_first", reshard=True), cluster)
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
    given = plan({"pipeline": 2, "shard": 4})
    network = NetworkSpec(fabric="tcp", port_gb_per_s=min(LOOPBACK_GB_PER_S / 4, LOOPBACK_PORT_GB_PER_S))
    assert play(given, played).step_seconds == play(given, replace(real, network=network)).step_seconds
    assert play(given, played).step_seconds > play(given).step_seconds


def test_only_the_stage_on_slow_nodes_is_slow() -> None:
    mixed = ClusterSpec(gpu="H100", nodes=2, gpus_per_node=4, groups=(NodeGroup(nodes=1, gpu="A100"),))
    given = plan({"pipeline": 2, "shard": 4}, accumulate=16)
    timeline = play(given, mixed, NARROW)
    assert timeline.compute_seconds[1] > 2 * timeline.compute_seconds[0]
    uneven = plan({"pipeline": 2, "shard": 4}, 1, 16, "1f1b", (("0-22",), ("23-31",)))
    assert play(uneven, mixed, NARROW).step_seconds < 0.75 * timeline.step_seconds


def test_memory_is_the_schedule_s() -> None:
    """1F1B holds min(m, p − r) micro-batches on rank r; GPipe all of them (arXiv 2006.09503)."""
    one, all_of_them = (plan({"pipeline": 4, "shard": 1}, 1, 8, name) for name in ("1f1b", "gpipe"))
    rows, piled = (memory_of(NARROW, job(one), given, cpu=False) for given in (one, all_of_them))
    one_held = activation_bytes(NARROW, job(one), one)[0]
    beside = rows[3]["activations"] - one_held  # of the block at work
    assert [round((row["activations"] - beside) / one_held, 3) for row in rows] == [4, 3, 2, 1]
    assert [round((row["activations"] - beside) / one_held, 3) for row in piled] == [8, 8, 8, 8]


def test_units_hold_every_parameter_once() -> None:
    given = plan({"pipeline": 2, "shard": 2}, 1, 4, "zbv")
    assert [len(stage) for stage in stages_of(given, LLAMA.layers)] == [8, 8, 8, 8]
    timing = timing_of(LLAMA, job(given), given, NODE)
    block = sum(row.count for row in layer_parameters(LLAMA, 0)) * 2 / 2  # bf16, half of it from the other rank
    bandwidth = CHIPS["H200"].link
    assert block / bandwidth < timing.unshard[1][0] < 2 * block / bandwidth
    assert timing.unshard[1][0] < timing.reduce[1][0] <= 2 * timing.unshard[1][0]  # fp32, at one start


def test_narrow_replica_sums_take_half_the_time() -> None:
    given = plan({"replicate": 2, "shard": 4}, accumulate=1)
    narrow = replace(given, precision=Precision(reduce_replicas="bf16"))
    cluster = ClusterSpec(gpu="H200", nodes=2, gpus_per_node=4, network=TCP)
    wide, half = (timing_of(LLAMA, job(given), one, cluster).replicate[0][5] for one in (given, narrow))
    assert wide / 2 <= half < 0.55 * wide  # what the backward beside it takes does not shrink


def test_blocks_are_played_in_their_own_format() -> None:
    wide = plan({"pipeline": 2, "shard": 4}, schedule="zb_h1")
    low = replace(wide, precision=Precision(linear="fp8_rowwise"))
    fast, slow = (timing_of(LLAMA, job(given), given, NODE) for given in (low, wide))
    own = replace(wide, layers=(LayerStrategy(range="0-15", linear="fp8_rowwise"), LayerStrategy(range="16-31")))
    mixed = timing_of(LLAMA, job(own), own, NODE)
    for column in ("forward", "backward_input", "backward_weight"):
        first, last = getattr(mixed, column)
        assert (first, last) == (getattr(fast, column)[0], getattr(slow, column)[1])
        assert first[1] < 0.9 * last[1]
    alike = replace(wide, layers=(LayerStrategy(linear="fp8_rowwise"),))
    assert play(alike).step_seconds == play(low).step_seconds < play(own).step_seconds < play(wide).step_seconds


@pytest.mark.parametrize("cluster", [ClusterSpec(gpu="X1", gpus_per_node=2), ClusterSpec(gpu="V100", gpus_per_node=8)])
def test_what_the_cost_model_does_not_know_is_refused(cluster: ClusterSpec) -> None:
    with pytest.raises(BadInput, match=f"no figures for {cluster.gpu} in bf16.*H200"):
        play(plan({"shard": 2}), cluster)


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(BadInput, match="dualpipe_v needs at least 8 micro-batches"):
        play(plan({"pipeline": 4, "shard": 1}, 1, 4, "dualpipe_v"))
