"""Bytes across nodes against sums by hand."""

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
    family="llama", layers=8, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn_hidden=64, vocab_size=64, max_seq_len=SEQ, tied=True
)  # fmt: skip
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


def played(chosen: Plan) -> Schedule:
    """The plan's schedule in units, as the executor plays it."""
    table = stage_table(chosen.schedule, chosen.axis_size("pipeline"), MODEL.layers)
    stages = sorted((stage for row in table for stage in row), key=lambda stage: stage.start)
    return expand(
        build(chosen.schedule.name, len(table), chosen.batch.accumulate, len(table[0])),
        [len(stage) + (stage.start == 0) + (stage.stop == MODEL.layers) for stage in stages],
        order="layered" if chosen.layered else "depth_first",
        gather="stretch" if chosen.layers[0].reshard else "step",
        reduce="stretch" if chosen.layers[0].gradients == "shard" else "once",
    )


def crossing(model: ModelSpec, chosen: Plan, per_node: int = 4) -> dict[str, float]:
    layout = Layout.of(chosen, per_node)
    return vars(cross_node_bytes(model, chosen, layout, SEQ, collective_counts(played(chosen))))


def test_one_node_sends_nothing() -> None:
    for chosen in (plan(("shard", 4)), plan(("pipeline", 2), ("shard", 2)), plan(("replicate", 2), ("shard", 2))):
        assert set(crossing(TIED, chosen).values()) == {0.0}


def test_a_sharded_layered_step_gathers_twice_and_reduces_once() -> None:
    """Over a ring of eight ranks on two nodes each byte crosses twice; the head alone stays gathered from forward to backward."""
    found = crossing(MODEL, plan(("shard", 8), schedule="breadth_first"))
    head = MODEL.vocab_size * MODEL.hidden + MODEL.hidden
    assert found["gather"] == 2 * 7 / 8 * 2 * (2 * COUNT - head)
    assert found["reduce"] == 2 * 7 / 8 * 4 * COUNT
    assert found["replicas"] == found["pipeline"] == 0
    kept = crossing(MODEL, plan(("shard", 8), schedule="breadth_first", reshard=False))
    assert kept["gather"] == 2 * 7 / 8 * 2 * COUNT


def test_depth_first_gathers_and_reduces_for_every_micro_batch() -> None:
    layered = crossing(MODEL, plan(("shard", 8), schedule="breadth_first", accumulate=16))
    depth_first = crossing(MODEL, plan(("shard", 8), accumulate=16))
    assert depth_first["reduce"] == 16 * layered["reduce"]
    # 32 gathers, but 16 of the head, which turns round, and 17 of the embedding, where one micro-batch ends and the next begins.
    ends = MODEL.vocab_size * MODEL.hidden
    assert depth_first["gather"] == 2 * 7 / 8 * 2 * (32 * COUNT - 16 * (ends + MODEL.hidden) - 15 * ends)
    assert crossing(MODEL, plan(("shard", 8), gradients="whole"))["reduce"] == layered["reduce"]


def test_replicas_on_two_nodes_send_each_shard_there_and_back() -> None:
    found = crossing(MODEL, plan(("replicate", 2), ("shard", 4)))
    assert found["replicas"] == 2 * COUNT * 2
    assert found["gather"] == found["reduce"] == 0


def test_a_pipeline_sends_activations_down_and_gradients_up() -> None:
    message = 2 * SEQ * MODEL.hidden * 2
    two_nodes = plan(("pipeline", 2), ("shard", 4))
    assert crossing(MODEL, two_nodes) == {
        "gather": 0,
        "reduce": 0,
        "replicas": 0,
        "pipeline": 2 * 8 * 4 * message,
        "tied": 0,
        "tensor": 0,
        "expert": 0,
        "context": 0,
    }
    assert crossing(TIED, two_nodes)["tied"] == 2 * TIED.vocab_size * TIED.hidden * 4
    four_stages = plan(("pipeline", 4), ("shard", 2))
    assert crossing(MODEL, four_stages)["pipeline"] == 2 * 8 * 2 * message  # one border of three is a node's
    looped = plan(("pipeline", 2), ("shard", 4), schedule="interleaved")
    assert crossing(MODEL, looped)["pipeline"] == 3 * 2 * 8 * 4 * message
    vee = plan(("pipeline", 2), ("shard", 4), schedule="zbv")
    assert crossing(TIED, vee)["pipeline"] == 2 * 2 * 8 * 4 * message
    assert crossing(TIED, vee)["tied"] == 0


def test_a_shard_axis_outside_the_pipeline_crosses_nodes_in_every_stage() -> None:
    found = crossing(MODEL, plan(("shard", 2), ("pipeline", 4), gradients="whole"))
    assert found["reduce"] == 2 * 1 / 2 * 4 * COUNT
    assert found["pipeline"] == 0


def test_context_ranks_shard_weights_and_send_keys_and_heads() -> None:
    """Eight ranks, four to a node. Neighbours of a ring of two are on either node, and so are the two that exchange heads."""
    inside = crossing(MODEL, plan(("shard", 4), ("context_ring", 2), gradients="whole"))
    assert inside["context"] == 0
    padded = crossing(MODEL, plan(("shard", 8), gradients="whole"))
    assert (inside["reduce"], inside["gather"]) == (padded["reduce"], padded["gather"])
    tokens, query, kv = 2 * SEQ / 2, MODEL.heads * MODEL.head_dim, 2 * MODEL.kv_heads * MODEL.head_dim
    ring = crossing(MODEL, plan(("context_ring", 2), ("shard", 4)))
    passed = (
        2 * tokens * kv * (2 * 2 + 2 * 4)
    )  # both ways: keys and values forward and backward, sums in fp32 and home again
    assert ring["context"] == 4 * 8 * 8 * passed
    heads = crossing(MODEL, plan(("context_ulysses", 2), ("shard", 4)))
    assert heads["context"] == 4 * 8 * 8 * 2 * tokens * (2 * query + kv) / 2 * 2 * 2


def test_tensor_ranks_divide_weights_and_messages_and_send_tokens_inside_of_layers() -> None:
    """Eight ranks, four to a node, tensor 2 innermost: shards of each tensor rank cross nodes by themselves."""
    whole = ("attention_norm", "mlp_norm", "norm")
    held = sum(row.count // (1 if row.name.split(".")[-2] in whole else 2) for row in parameters(MODEL))
    inside = crossing(MODEL, plan(("shard", 4), ("tensor", 2), gradients="whole"))
    assert inside["reduce"] == 2 * (2 * 3 / 4 * 4 * held)
    assert inside["tensor"] == 0
    staged = crossing(MODEL, plan(("pipeline", 2), ("shard", 2), ("tensor", 2)))
    message = 2 * SEQ * MODEL.hidden * 2
    assert staged["pipeline"] == 2 * 8 * 4 * message / 2
    across = crossing(MODEL, plan(("tensor", 2), ("shard", 4), recompute="full"))
    collectives = 8 * (4 + 6 + 4) + 2 + 2
    assert across["tensor"] == 8 * 4 * 2 * (1 / 2 * message) * collectives
    beside = crossing(replace(MODEL, parallel_block=True), plan(("tensor", 2), ("shard", 4), recompute="full"))
    assert beside["tensor"] == 8 * 4 * 2 * (1 / 2 * message) * (8 * (2 + 3 + 2) + 2 + 2)


def test_tokens_travel_to_experts_and_their_weights_among_those_that_hold_the_same() -> None:
    """Eight ranks on two nodes of four, with four or eight expert ranks.

    With four, all in one node, each expert's two halves lie on two nodes. With eight, half of all routed tokens cross
    between nodes, whole experts stay where they are, and only the other weights are gathered. Context ranks count like
    shards.
    """
    model = replace(MODEL, experts=16, experts_per_token=2, expert_hidden=16)
    rows = [row for row in parameters(model) if row.expert]
    routed, rest = sum(row.count for row in rows), parameter_count(model) - sum(row.count for row in rows)
    gathered = {}
    for expert, rows_across in ((4, 0.0), (8, 0.5)):
        for axes in ((("shard", 8),), (("shard", 4), ("tensor", 2)), (("shard", 4), ("context_ring", 2))):
            chosen = plan(*axes, gradients="whole", recompute="selective")
            tensor, ring = chosen.axis_size("tensor"), chosen.axis_size("context_ring")
            size = expert // tensor
            fold = ExpertPlan(expert=size, expert_shard=8 // tensor // size)
            found = crossing(model, replace(chosen, experts=fold))
            row_bytes = 2 * SEQ * 2 * model.hidden * 2 / tensor / ring
            assert found["expert"] == 8 * model.layers * 4 * 8 * row_bytes * rows_across
            gathered[expert, axes[-1][0]] = found["reduce"]
    assert gathered[8, "shard"] == 2 * (7 / 8 * 4 * rest)
    for axis in ("shard", "tensor", "context_ring"):
        assert gathered[4, axis] - gathered[8, axis] == 4 * 2 * (1 / 2 * 4 * routed / 4)


def test_tied_ends_are_one_unit_on_one_rank_and_two_on_two() -> None:
    """On one rank either end gathers both ends' weights unless they are there, and one reduction serves both."""
    count, end = parameter_count(TIED), TIED.vocab_size * TIED.hidden
    kept = crossing(TIED, plan(("shard", 8), schedule="breadth_first", reshard=False))
    assert kept["gather"] == 2 * 7 / 8 * 2 * count
    assert kept["reduce"] == 2 * 7 / 8 * 4 * count
    dropped = crossing(TIED, plan(("shard", 8), schedule="breadth_first"))
    assert dropped["gather"] == 2 * 7 / 8 * 2 * (2 * count + end + TIED.hidden)  # forward, both at the head, backward
    two = crossing(TIED, plan(("shard", 4), ("pipeline", 2), reshard=False, gradients="whole"))
    assert two["gather"] == 2 * 3 / 4 * 2 * (count + end)
    assert two["reduce"] == 2 * two["gather"]


def test_replicas_are_sent_what_is_stored_unless_the_plan_narrows_it() -> None:
    """The format of the sum inside a replica changes nothing there."""
    narrow = plan(("replicate", 2), ("shard", 4))
    wide = replace(narrow, precision=Precision(reduce="bf16"))
    assert crossing(MODEL, wide)["replicas"] == 2 * crossing(MODEL, narrow)["replicas"] > 0


def test_blocks_gathered_in_fp8_send_half() -> None:
    """A byte less for each element of the eight blocks, each time one is gathered; two of eight neighbours face another node."""
    wide = plan(("shard", 8))
    low = replace(wide, precision=replace(wide.precision, linear="fp8_tensorwise", gather="fp8"))
    counts, block = collective_counts(played(wide)), (COUNT - 2 * 64 * 32 - 32) / 8
    gathers = sum(counts[0, unit][0] for unit in range(1, 9))
    both, ours = crossing(MODEL, wide), crossing(MODEL, low)
    assert both["gather"] - ours["gather"] == 2 * 7 / 8 * gathers * block
    assert {**ours, "gather": 0} == {**both, "gather": 0}
    ranges = (LayerStrategy(range="0-1", linear="compute"), LayerStrategy(range="2-7"))
    as_they_are = sum(counts[0, unit][0] for unit in (1, 2))
    part = crossing(MODEL, replace(low, layers=ranges))
    assert part["gather"] - ours["gather"] == 2 * 7 / 8 * as_they_are * block
