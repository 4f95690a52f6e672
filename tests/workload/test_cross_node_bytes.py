"""Bytes that a step sends between nodes, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

from meshwright.schedules.collective_counts import collective_counts
from meshwright.schedules.expand import expand
from meshwright.schedules.registry import build
from meshwright.schedules.schedule import Schedule
from meshwright.spec.fields import from_plain
from meshwright.spec.layout import Layout, stage_table
from meshwright.spec.model import ModelSpec, parameter_count, parameters
from meshwright.spec.plan import (
    AxisName,
    BatchPlan,
    ExpertPlan,
    LayerStrategy,
    MeshAxis,
    Plan,
    Precision,
    ScheduleName,
    SchedulePlan,
)
from meshwright.workload.cross_node_bytes import cross_node_bytes

SEQ = 16
MODEL = ModelSpec(
    family="llama", layers=8, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn_hidden=64, vocab_size=64, max_seq_len=SEQ
)
TIED = ModelSpec(
    family="llama",
    layers=8,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_hidden=64,
    vocab_size=64,
    max_seq_len=SEQ,
    tied=True,
)
COUNT = parameter_count(MODEL)


def plan(*axes: tuple[AxisName, int], schedule: ScheduleName = "1f1b", accumulate: int = 8, **layer: object) -> Plan:
    data = 1
    for axis, size in axes:
        data *= size if axis in ("replicate", "shard") else 1
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in axes),
        batch=BatchPlan(global_batch=2 * accumulate * data, micro_batch=2, accumulate=accumulate),
        schedule=SchedulePlan(name=schedule),
        layers=(from_plain(LayerStrategy, layer),),
        precision=Precision(reduce_replicas="bf16"),
    )


def unit_schedule(plan_given: Plan) -> Schedule:
    """The plan's schedule in actions of FSDP units, as the executor runs it."""
    table = stage_table(plan_given.schedule, plan_given.axis_size("pipeline"), MODEL.layers)
    stages = sorted((stage for stages in table for stage in stages), key=lambda stage: stage.start)
    return expand(
        build(plan_given.schedule.name, len(table), plan_given.batch.accumulate, len(table[0])),
        [len(stage) + (stage.start == 0) + (stage.stop == MODEL.layers) for stage in stages],
        order="layered" if plan_given.layered else "depth_first",
        gather="stretch" if plan_given.layers[0].reshard else "step",
        reduce="stretch" if plan_given.layers[0].gradients == "shard" else "once",
    )


def bytes_across(model: ModelSpec, plan_given: Plan, per_node: int = 4) -> dict[str, float]:
    layout = Layout.of(plan_given, per_node)
    return vars(cross_node_bytes(model, plan_given, layout, SEQ, collective_counts(unit_schedule(plan_given))))


def test_one_node_sends_nothing() -> None:
    for plan_given in (plan(("shard", 4)), plan(("pipeline", 2), ("shard", 2)), plan(("replicate", 2), ("shard", 2))):
        assert set(bytes_across(TIED, plan_given).values()) == {0.0}


def test_a_sharded_layered_step_gathers_twice_and_reduces_once() -> None:
    """In a ring of eight ranks on two nodes each byte crosses twice; only the head stays gathered until its backward."""
    sent = bytes_across(MODEL, plan(("shard", 8), schedule="breadth_first"))
    head = MODEL.vocab_size * MODEL.hidden + MODEL.hidden
    assert sent["gather"] == 2 * 7 / 8 * 2 * (2 * COUNT - head)
    assert sent["reduce"] == 2 * 7 / 8 * 4 * COUNT
    assert sent["replicas"] == sent["pipeline"] == 0
    without_reshard = bytes_across(MODEL, plan(("shard", 8), schedule="breadth_first", reshard=False))
    assert without_reshard["gather"] == 2 * 7 / 8 * 2 * COUNT


def test_depth_first_gathers_and_reduces_for_every_micro_batch() -> None:
    layered = bytes_across(MODEL, plan(("shard", 8), schedule="breadth_first", accumulate=16))
    depth_first = bytes_across(MODEL, plan(("shard", 8), accumulate=16))
    assert depth_first["reduce"] == 16 * layered["reduce"]
    # 32 gathers of each block, 16 of the head, whose backward follows its forward, and 17 of the embedding.
    ends = MODEL.vocab_size * MODEL.hidden
    assert depth_first["gather"] == 2 * 7 / 8 * 2 * (32 * COUNT - 16 * (ends + MODEL.hidden) - 15 * ends)
    assert bytes_across(MODEL, plan(("shard", 8), gradients="whole"))["reduce"] == layered["reduce"]


def test_replicas_on_two_nodes_send_each_shard_in_both_directions() -> None:
    sent = bytes_across(MODEL, plan(("replicate", 2), ("shard", 4)))
    assert sent["replicas"] == 2 * COUNT * 2
    assert sent["gather"] == sent["reduce"] == 0


def test_a_pipeline_sends_activations_down_and_gradients_up() -> None:
    message = 2 * SEQ * MODEL.hidden * 2
    two_nodes = plan(("pipeline", 2), ("shard", 4))
    assert bytes_across(MODEL, two_nodes) == {
        "gather": 0,
        "reduce": 0,
        "replicas": 0,
        "pipeline": 2 * 8 * 4 * message,
        "tied": 0,
        "tensor": 0,
        "expert": 0,
        "context": 0,
    }
    assert bytes_across(TIED, two_nodes)["tied"] == 2 * TIED.vocab_size * TIED.hidden * 4
    four_stages = plan(("pipeline", 4), ("shard", 2))
    assert (
        bytes_across(MODEL, four_stages)["pipeline"] == 2 * 8 * 2 * message
    )  # one of three stage boundaries is between nodes
    looped = plan(("pipeline", 2), ("shard", 4), schedule="interleaved")
    assert bytes_across(MODEL, looped)["pipeline"] == 3 * 2 * 8 * 4 * message
    vee = plan(("pipeline", 2), ("shard", 4), schedule="zbv")
    assert bytes_across(TIED, vee)["pipeline"] == 2 * 2 * 8 * 4 * message
    assert bytes_across(TIED, vee)["tied"] == 0


def test_a_shard_axis_outside_the_pipeline_crosses_nodes_in_every_stage() -> None:
    sent = bytes_across(MODEL, plan(("shard", 2), ("pipeline", 4), gradients="whole"))
    assert sent["reduce"] == 2 * 1 / 2 * 4 * COUNT
    assert sent["pipeline"] == 0


def test_context_ranks_shard_weights_and_send_keys_and_heads() -> None:
    """Eight ranks, four per node. With context outermost, the two context ranks are on different nodes."""
    in_node = bytes_across(MODEL, plan(("shard", 4), ("context_ring", 2), gradients="whole"))
    assert in_node["context"] == 0
    padded = bytes_across(MODEL, plan(("shard", 8), gradients="whole"))
    assert (in_node["reduce"], in_node["gather"]) == (padded["reduce"], padded["gather"])
    tokens, query, kv = 2 * SEQ / 2, MODEL.heads * MODEL.head_dim, 2 * MODEL.kv_heads * MODEL.head_dim
    ring = bytes_across(MODEL, plan(("context_ring", 2), ("shard", 4)))
    passed = (
        2 * tokens * kv * (2 * 2 + 2 * 4)
    )  # both directions: keys and values in forward and backward, then fp32 gradient sums
    assert ring["context"] == 4 * 8 * 8 * passed
    heads = bytes_across(MODEL, plan(("context_ulysses", 2), ("shard", 4)))
    assert heads["context"] == 4 * 8 * 8 * 2 * tokens * (2 * query + kv) / 2 * 2 * 2


def test_tensor_ranks_divide_weights_and_exchange_tokens() -> None:
    """Eight ranks, four per node, tensor 2 innermost: the shard group of each tensor rank crosses nodes."""
    undivided = ("attention_norm", "mlp_norm", "norm")
    rank_parameters = sum(
        parameter.count // (1 if parameter.name.split(".")[-2] in undivided else 2) for parameter in parameters(MODEL)
    )
    in_node = bytes_across(MODEL, plan(("shard", 4), ("tensor", 2), gradients="whole"))
    assert in_node["reduce"] == 2 * (2 * 3 / 4 * 4 * rank_parameters)
    assert in_node["tensor"] == 0
    staged = bytes_across(MODEL, plan(("pipeline", 2), ("shard", 2), ("tensor", 2)))
    message = 2 * SEQ * MODEL.hidden * 2
    assert staged["pipeline"] == 2 * 8 * 4 * message / 2
    across_nodes = bytes_across(MODEL, plan(("tensor", 2), ("shard", 4), recompute="full"))
    collectives = 8 * (4 + 6 + 4) + 2 + 2
    assert across_nodes["tensor"] == 8 * 4 * 2 * (1 / 2 * message) * collectives
    parallel_block = bytes_across(
        replace(MODEL, parallel_block=True), plan(("tensor", 2), ("shard", 4), recompute="full")
    )
    assert parallel_block["tensor"] == 8 * 4 * 2 * (1 / 2 * message) * (8 * (2 + 3 + 2) + 2 + 2)


def test_expert_ranks_exchange_tokens_and_reduce_weights_with_ranks_of_the_same_experts() -> None:
    """Eight ranks on two nodes of four, with four or eight expert ranks.

    With four, all in one node, each expert's two halves lie on two nodes. With eight, half of all routed tokens cross
    between nodes, whole experts stay where they are, and only the other weights are gathered. Context ranks count like
    shards.
    """
    model = replace(MODEL, experts=16, experts_per_token=2, expert_hidden=16)
    expert_parameters = [parameter for parameter in parameters(model) if parameter.expert]
    expert_count, other_count = (
        sum(parameter.count for parameter in expert_parameters),
        parameter_count(model) - sum(parameter.count for parameter in expert_parameters),
    )
    gathered = {}
    for expert, crossing_share in ((4, 0.0), (8, 0.5)):
        for axes in ((("shard", 8),), (("shard", 4), ("tensor", 2)), (("shard", 4), ("context_ring", 2))):
            plan_given = plan(*axes, gradients="whole", recompute="selective")
            tensor, ring = plan_given.axis_size("tensor"), plan_given.axis_size("context_ring")
            size = expert // tensor
            fold = ExpertPlan(expert=size, expert_shard=8 // tensor // size)
            sent = bytes_across(model, replace(plan_given, experts=fold))
            token_bytes = 2 * SEQ * 2 * model.hidden * 2 / tensor / ring
            assert sent["expert"] == 8 * model.layers * 4 * 8 * token_bytes * crossing_share
            gathered[expert, axes[-1][0]] = sent["reduce"]
    assert gathered[8, "shard"] == 2 * (7 / 8 * 4 * other_count)
    for axis in ("shard", "tensor", "context_ring"):
        assert gathered[4, axis] - gathered[8, axis] == 4 * 2 * (1 / 2 * 4 * expert_count / 4)


def test_tied_ends_are_one_unit_on_a_single_rank_and_two_units_on_two_ranks() -> None:
    """On one rank a single unit has embedding and head, with one reduction; on two ranks each has a unit."""
    count, end = parameter_count(TIED), TIED.vocab_size * TIED.hidden
    without_reshard = bytes_across(TIED, plan(("shard", 8), schedule="breadth_first", reshard=False))
    assert without_reshard["gather"] == 2 * 7 / 8 * 2 * count
    assert without_reshard["reduce"] == 2 * 7 / 8 * 4 * count
    resharded = bytes_across(TIED, plan(("shard", 8), schedule="breadth_first"))
    assert resharded["gather"] == 2 * 7 / 8 * 2 * (
        2 * count + end + TIED.hidden
    )  # forward and backward of the blocks, and one more gather of the tied unit
    pipelined = bytes_across(TIED, plan(("shard", 4), ("pipeline", 2), reshard=False, gradients="whole"))
    assert pipelined["gather"] == 2 * 3 / 4 * 2 * (count + end)
    assert pipelined["reduce"] == 2 * pipelined["gather"]


def test_replica_sums_use_the_stored_dtype_by_default() -> None:
    """`precision.reduce`, the dtype of reductions over shards, has no effect on replica sums."""
    narrow = plan(("replicate", 2), ("shard", 4))
    wide = replace(narrow, precision=Precision(reduce="bf16"))
    assert bytes_across(MODEL, wide)["replicas"] == 2 * bytes_across(MODEL, narrow)["replicas"] > 0


def test_blocks_gathered_in_fp8_send_half_the_bytes() -> None:
    """A byte less per element and gather of the eight blocks; two of eight ring neighbours are on another node."""
    wide = plan(("shard", 8))
    low = replace(wide, precision=replace(wide.precision, linear="fp8_tensorwise", gather="fp8"))
    counts, block = collective_counts(unit_schedule(wide)), (COUNT - 2 * 64 * 32 - 32) / 8
    gathers = sum(counts[0, unit][0] for unit in range(1, 9))
    bf16_bytes, fp8_bytes = bytes_across(MODEL, wide), bytes_across(MODEL, low)
    assert bf16_bytes["gather"] - fp8_bytes["gather"] == 2 * 7 / 8 * gathers * block
    assert {**fp8_bytes, "gather": 0} == {**bf16_bytes, "gather": 0}
    ranges = (LayerStrategy(range="0-1", linear="compute"), LayerStrategy(range="2-7"))
    bf16_gathers = sum(counts[0, unit][0] for unit in (1, 2))
    partly_fp8 = bytes_across(MODEL, replace(low, layers=ranges))
    assert partly_fp8["gather"] - fp8_bytes["gather"] == 2 * 7 / 8 * bf16_gathers * block
