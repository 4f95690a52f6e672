"""Memory under pipelines, layered accumulation and whole gradients, against sums worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, layer_parameters, parameter_count
from meshwright.spec.plan import BatchPlan, ExpertPlan, LayerStrategy, MeshAxis, Plan, Precision, SchedulePlan
from meshwright.workload.activations import activation_bytes
from meshwright.workload.buffers import STAGED_ELEMENTS, STAGING_BUFFERS
from meshwright.workload.plan_bytes import FRAMEWORK_BYTES, allocated, fullest_rank_memory, memory_by_rank
from meshwright.workload.tensor_bytes import Formats

HIDDEN, FFN, VOCAB, LAYERS = 1024, 4096, 32768, 8
MODEL = ModelSpec(
    family="llama", layers=LAYERS, hidden=HIDDEN, heads=16, kv_heads=8, head_dim=64, ffn_hidden=FFN, vocab_size=VOCAB
)
TRAIN = TrainSpec(steps=1, global_batch=32, seq_len=2048, loss_chunk=1024)
TOKENS, MICRO_BATCHES = 2 * 2048, 4
BLOCK = HIDDEN * (1024 + 1024) + 1024 * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
"""qkv, out, gate-up and down, two norms."""
TABLE = VOCAB * HIDDEN
QKV = 1024 + 2 * 512
KEPT = 2 * (4 * HIDDEN + QKV + 1024 + 512 + 1024 + 2 * FFN + FFN)
"""bf16 bytes that one block keeps for one token.

Two residuals, the outputs of two norms, the joined projection (values are a view of it), rotated queries and keys,
attention's output, and the MLP.
"""
MADE = TOKENS * 2 * (2 * FFN + HIDDEN)
"""Bytes of gradients in a block's backward: gate and up, and the stream."""
SCRATCH = Formats.workspace
HEAD = 1024 * VOCAB * 2 + 2 * 4 * TABLE + 2 * TOKENS * HIDDEN * 2
"""A chunk's logits, the head's gradient in fp32 and the product that is added to it, hidden states and their gradient."""
STREAM = TOKENS * HIDDEN * 2
"""One micro-batch's residual stream in bf16."""
AGAIN = TOKENS * KEPT - STREAM
"""What a block that kept its input makes again."""


def plan(mesh: dict[str, int], schedule: str = "1f1b", stages=(), **layer) -> Plan:
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in mesh.items()),
        batch=BatchPlan(global_batch=32, micro_batch=2, accumulate=MICRO_BATCHES),
        schedule=SchedulePlan(name=schedule, stages=stages),
        layers=(LayerStrategy(**layer),),
    )


def memory_by_use(given: Plan, **options) -> dict[str, int]:
    return fullest_rank_memory(MODEL, TRAIN, given, cpu=False, **options)


def test_the_numbers_of_this_page_are_the_model_s() -> None:
    assert parameter_count(MODEL) == LAYERS * BLOCK + 2 * TABLE + HIDDEN


def test_one_rank_of_four_shards() -> None:
    found = memory_by_use(plan({"shard": 4}, reshard=True))
    mine = parameter_count(MODEL) // 4
    assert found == {
        "weights": 4 * mine,
        "gradients": 4 * mine,
        "optimizer": 8 * mine,
        "gathered": 2 * (2 * BLOCK + 2 * (TABLE + HIDDEN)),  # two blocks, the head and the buffer it was gathered in
        "activations": TOKENS * LAYERS * KEPT + SCRATCH,
        "logits": HEAD,
        "framework": FRAMEWORK_BYTES["cuda"],
    }


def test_a_pipeline_rank_holds_its_stages_and_its_end_of_the_model() -> None:
    first, second = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 2, "shard": 2}), cpu=False, alive=(7e9, 3e9))
    half = LAYERS // 2 * BLOCK
    assert first["weights"] == 4 * (half + TABLE) // 2
    assert second["weights"] == 4 * (half + HIDDEN + TABLE) // 2
    assert second["optimizer"] == 2 * second["weights"]
    assert (first["activations"], second["activations"]) == (
        7_000_000_000 + MADE + SCRATCH,
        3_000_000_000 + SCRATCH,
    )
    assert (first["logits"], second["logits"]) == (0, HEAD)
    # The reduction before the fullest moment was the embedding's, at the end of the micro-batch before.
    assert first["gathered"] == 2 * 3 * BLOCK + 4 * TABLE * 3 // 2 + 2 * BLOCK
    assert first["transfers"] == second["transfers"] == (2 + 1) * STREAM


def test_one_message_a_direction_is_on_its_way() -> None:
    """Two receives are posted ahead.

    Per micro-batch the ends of a line send one message, its middle ranks two, and ranks of a ring with two stages more.
    """
    line = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 4, "shard": 1}), cpu=False)
    assert [row["transfers"] // STREAM - 2 for row in line] == [1, 2, 2, 1]
    ring = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 4, "shard": 1}, "interleaved"), cpu=False)
    assert [row["transfers"] // STREAM - 2 for row in ring] == [3, 4, 4, 3]
    vee = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 4, "shard": 1}, "zbv"), cpu=False)
    assert [row["transfers"] // STREAM - 2 for row in vee] == [2, 4, 4, 2]


def test_the_fullest_rank_is_reported() -> None:
    given = plan({"pipeline": 2, "shard": 2})
    rows = memory_by_rank(MODEL, TRAIN, given, cpu=False, alive=(9e9, 1e9))
    assert memory_by_use(given, alive=(9e9, 1e9)) == rows[0] != rows[1]
    assert memory_by_use(given, alive=(1e9, 9e9)) == memory_by_rank(MODEL, TRAIN, given, cpu=False, alive=(1e9, 9e9))[1]


def test_a_middle_stage_has_no_end_of_the_model() -> None:
    rows = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 4, "shard": 1}), cpu=False)
    assert rows[1]["weights"] == 4 * LAYERS // 4 * BLOCK
    assert (
        rows[1]["gathered"] == 2 * 2 * BLOCK + 4 * 2 * BLOCK + 2 * BLOCK
    )  # alone, a unit's gradients are copied once more
    assert rows[1]["logits"] == 0


def test_a_tied_table_is_held_at_both_ends() -> None:
    tied = replace(MODEL, tied=True)
    first, last = memory_by_rank(tied, TRAIN, plan({"pipeline": 2, "shard": 2}), cpu=False)
    assert last["weights"] - first["weights"] == 4 * HIDDEN // 2  # the final norm
    v_shaped = memory_by_rank(tied, TRAIN, plan({"pipeline": 2, "shard": 2}, "zbv"), cpu=False)
    assert v_shaped[0]["weights"] - v_shaped[1]["weights"] == 4 * (TABLE + HIDDEN) // 2


def test_activations_by_virtual_stage() -> None:
    uneven = (("0-1", "6-7"), ("2-4", "5"))
    found = activation_bytes(MODEL, TRAIN, plan({"pipeline": 2, "shard": 2}, "zbv", (uneven[0], uneven[1])))
    assert found == tuple(TOKENS * layers * KEPT for layers in (2, 3, 1, 2))


def test_the_first_backward_may_be_the_fuller_moment() -> None:
    """One block is gathered again and has its gradients while the head's gradients are reduced.

    The head's are in fp32, whole and a fourth, the block's in bf16.
    """
    found = memory_by_use(plan({"shard": 4}, recompute="full"))
    assert found["activations"] == LAYERS * STREAM + AGAIN + MADE + SCRATCH
    assert found["gathered"] == 2 * (2 * BLOCK + 2 * (TABLE + HIDDEN)) + 4 * (TABLE + HIDDEN) * 5 // 4 + 2 * BLOCK
    assert found["logits"] == STREAM


def test_layered_accumulation_keeps_every_micro_batch_and_two_units() -> None:
    found = memory_by_use(plan({"shard": 4}, "breadth_first", reshard=True, recompute="full"))
    kept = MICRO_BATCHES * LAYERS * STREAM  # each block's input
    between = MICRO_BATCHES * STREAM  # each micro-batch's gradient between two units
    assert found["activations"] == kept + between + AGAIN + MADE + SCRATCH
    # A block's gradients are summed in fp32 until its last micro-batch.
    assert found["gathered"] == memory_by_use(plan({"shard": 4}, recompute="full"))["gathered"] + 4 * BLOCK
    assert found["logits"] == MICRO_BATCHES * STREAM


def test_earlier_micro_batches_leave_their_gradients() -> None:
    """Gradients held when activations are at their peak.

    A rank's own sum of the whole, or its shard; none where every unit's gradients are finished at once.
    """
    sharded, whole = (memory_by_use(plan({"shard": 4}, gradients=kept)) for kept in ("shard", "whole"))
    norm = HIDDEN  # the final norm is in no table
    assert whole["gradients"] == pytest.approx(4 * parameter_count(MODEL), abs=4 * norm)
    assert sharded["gradients"] == pytest.approx(parameter_count(MODEL), abs=4 * norm)
    alone, summed = (memory_by_use(plan({"shard": 1}, gradients=kept)) for kept in ("shard", "whole"))
    assert alone == summed
    first = replace(plan({"shard": 4}), batch=BatchPlan(global_batch=8, micro_batch=2, accumulate=1))
    assert memory_by_use(first)["gradients"] == 0


def test_the_end_of_backward_may_be_the_fuller_moment() -> None:
    """Layered, a rank's gradients come as its activations go; copies that travel between replicas wait there too."""
    short = replace(TRAIN, seq_len=16)
    found = fullest_rank_memory(MODEL, short, plan({"replicate": 2, "shard": 2}, "breadth_first"), cpu=False)
    assert found["activations"] == SCRATCH
    assert found["gradients"] == 4 * parameter_count(MODEL) // 2
    narrow = plan({"replicate": 2, "shard": 2}, "breadth_first")
    narrow = replace(narrow, precision=replace(narrow.precision, reduce_replicas="bf16"))
    assert fullest_rank_memory(MODEL, short, narrow, cpu=False)["gradients"] == 6 * parameter_count(MODEL) // 2
    long = fullest_rank_memory(MODEL, TRAIN, plan({"replicate": 2, "shard": 2}, "breadth_first"), cpu=False)
    assert long["activations"] > 0 == long["gradients"]


@pytest.mark.parametrize("axis", ["context_ring", "context_ulysses", "tensor"])
def test_splitting_a_sequence_or_a_matrix_splits_activations_and_states(axis: str) -> None:
    short = replace(TRAIN, loss_chunk=128)  # the head is not the fuller moment
    meshes = ({"shard": 2}, {"shard": 2, axis: 2})
    one, two = (fullest_rank_memory(MODEL, short, plan(mesh, recompute="full"), cpu=False) for mesh in meshes)
    for kind in ("weights", "optimizer"):
        assert two[kind] == pytest.approx(one[kind] / 2, rel=1e-3), kind
    others = TOKENS // 2 * 2 * (4 * HIDDEN if axis == "tensor" else QKV)  # what the block at work was sent
    assert two["activations"] - SCRATCH - others == pytest.approx((one["activations"] - SCRATCH) / 2, rel=1e-3)


def test_two_layers_of_one_micro_batch_stay_where_activations_are_offloaded() -> None:
    away = plan({"shard": 4}, offload="activations")
    assert activation_bytes(MODEL, TRAIN, away) == (0.0,)
    assert memory_by_use(away)["activations"] == 2 * TOKENS * KEPT + SCRATCH
    half = replace(away, layers=(LayerStrategy(range="0-3", offload="activations"), LayerStrategy(range="4-7")))
    assert memory_by_use(half)["activations"] == 6 * TOKENS * KEPT + SCRATCH


def test_under_a_pipeline_one_more_comes_while_another_goes() -> None:
    away = plan({"pipeline": 2, "shard": 2}, "1f1b", offload="activations")
    first, _ = memory_by_rank(MODEL, TRAIN, away, cpu=False)
    assert first["activations"] == 3 * TOKENS * KEPT + MADE + SCRATCH


def test_an_optimizer_in_host_memory_leaves_the_compute_format_and_the_sums() -> None:
    """Master weights and moments go; bf16 shards stay to gather from, and gradients are summed on the device."""
    here, away = (memory_by_use(plan({"shard": 4}, offload=kept)) for kept in ("none", "optimizer"))
    chunks = STAGING_BUFFERS * 3 * STAGED_ELEMENTS * 4
    assert 4 * BLOCK / 4 > STAGED_ELEMENTS, "also where only half of the blocks are away"
    assert (2 * away["weights"], away["optimizer"]) == (here["weights"], chunks)
    assert all(away[kind] == here[kind] for kind in ("gradients", "gathered", "activations"))
    half = replace(
        plan({"shard": 4}), layers=(LayerStrategy(range="0-3", offload="optimizer"), LayerStrategy(range="4-7"))
    )
    # The embedding goes with the first block.
    gone = (4 * BLOCK + TABLE) / parameter_count(MODEL)
    assert memory_by_use(half)["optimizer"] == pytest.approx(here["optimizer"] * (1 - gone) + chunks)


def test_an_optimizer_in_host_memory_leaves_masters_that_are_gathered_as_they_are() -> None:
    """In fp32, and where weights are measured at full width before they travel in fp8."""
    for precision in (Precision(compute="fp32"), Precision(linear="fp8_tensorwise", gather="fp8")):
        here, away = (
            memory_by_use(replace(plan({"shard": 4}, offload=kept), precision=precision))
            for kept in ("none", "optimizer")
        )
        assert (away["weights"], away["optimizer"]) == (here["weights"], STAGING_BUFFERS * 2 * STAGED_ELEMENTS * 4)


def test_layers_may_differ() -> None:
    """Half of the blocks recomputed, the other half gathered for the step."""
    mixed = replace(
        plan({"shard": 4}),
        layers=(LayerStrategy(range="0-3", recompute="full"), LayerStrategy(range="4-7", reshard=False)),
    )
    found, plain = memory_by_use(mixed), memory_by_use(plan({"shard": 4}, recompute="full"))
    assert found["activations"] == 4 * STREAM + 4 * TOKENS * KEPT + AGAIN + MADE + SCRATCH
    assert found["gathered"] - plain["gathered"] == 2 * (
        2 * BLOCK + TABLE
    )  # two blocks more, and the embedding beside the head


MIXTURE = replace(MODEL, experts=8, experts_per_token=2, expert_hidden=2048, first_dense_layers=2)
EXPERT = 3 * HIDDEN * 2048
ATTENTION = HIDDEN * (1024 + QKV) + 2 * HIDDEN


def test_experts_are_spread_and_sharded_by_their_own_fold() -> None:
    """Six of 8 layers have 8 experts, and each of 4 ranks holds a fourth of the states.

    It holds two experts of each layer, or a fourth of every expert.
    """
    folds = [
        replace(plan({"shard": 4}, recompute="full"), experts=ExpertPlan(expert=n, expert_shard=4 // n))
        for n in (1, 2, 4)
    ]
    rows = [fullest_rank_memory(MIXTURE, TRAIN, fold, cpu=False) for fold in folds]
    assert {row["weights"] for row in rows} == {parameter_count(MIXTURE)}
    block = ATTENTION + HIDDEN * 8
    for row, held in zip(rows, (8, 4, 2), strict=True):
        here = block + held * EXPERT
        reduced = max(4 * here * 5 // 4, 4 * (TABLE + HIDDEN) * 5 // 4)
        assert row["gathered"] == 2 * (2 * here + 2 * (TABLE + HIDDEN)) + reduced + 2 * here
    routed = 2 * (4 * HIDDEN + QKV + 1024 + 512 + 1024 + 2 * 3 * 2048 + 2 * 2 * HIDDEN + 8)
    assert activation_bytes(MIXTURE, TRAIN, plan({"shard": 4})) == (TOKENS * (2 * KEPT + 6 * routed),)


def test_what_an_allocator_sees_leaves_the_framework_out() -> None:
    found = memory_by_use(plan({"shard": 4}))
    assert allocated(found) == sum(found.values()) - FRAMEWORK_BYTES["cuda"]


def test_fp8_keeps_products_inputs_and_gathers_blocks_in_one_byte() -> None:
    """Norms' outputs, the activation and a copy of attention's result in one byte; residuals and what attention reads in two."""
    wide = plan({"shard": 4}, reshard=False)
    low = replace(wide, precision=Precision(linear="fp8_tensorwise", gather="fp8"))
    kept = 2 * (2 * HIDDEN + QKV + 1024 + 512 + 1024 + 2 * FFN) + 2 * HIDDEN + 1024 + FFN
    assert activation_bytes(MODEL, TRAIN, wide) == (LAYERS * TOKENS * KEPT,)
    assert activation_bytes(MODEL, TRAIN, low) == (LAYERS * TOKENS * kept,)
    gathered = [memory_by_use(given)["gathered"] for given in (wide, low)]
    assert gathered[0] - gathered[1] == LAYERS * BLOCK
    sparing = replace(low, layers=(LayerStrategy(range="0", linear="compute"), LayerStrategy(range="1-7")))
    assert activation_bytes(MODEL, TRAIN, sparing) == (TOKENS * (KEPT + (LAYERS - 1) * kept),)


def test_copy_engines_have_a_window_for_what_they_gather() -> None:
    """Two blocks and one of the ends in bf16, where a kernel's buffer is let go; nothing on one rank."""
    long = [
        fullest_rank_memory(MODEL, TRAIN, replace(plan({"shard": 4}), gather_engine=how), cpu=False) for how in ENGINES
    ]
    assert {kind for kind in long[0] if long[0][kind] != long[1][kind]} == {"gathered"}
    more = long[1]["gathered"] - long[0]["gathered"]
    block = sum(row.count for row in layer_parameters(MODEL, 0))
    assert more == pytest.approx(2 * 2 * block, rel=0.01), (
        "the buffer of the last gather was the head's: as large as an end's slot"
    )
    alone = [
        fullest_rank_memory(MODEL, TRAIN, replace(plan({"shard": 1}), gather_engine=how), cpu=False) for how in ENGINES
    ]
    assert alone[0] == alone[1]


def test_tokens_copied_beside_products_have_a_window() -> None:
    """Two slots for all tokens of a micro-batch in bf16, outside the allocator; none for one tensor rank or a processor."""
    for tensor, cpu, more in ((4, False, 2 * TOKENS * HIDDEN * 2), (1, False, 0), (4, True, 0)):
        given = plan({"tensor": tensor})
        told = [
            fullest_rank_memory(MODEL, TRAIN, replace(given, tensor_engine=how), cpu=cpu)["framework"]
            for how in ENGINES
        ]
        assert told[1] - told[0] == more, (tensor, cpu)


ENGINES = ("kernel", "copy")
