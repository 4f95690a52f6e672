"""Memory account of plans against sums by hand: pipelines, layered accumulation, offload, experts, fp8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.spec.blocks.adapter import AdapterSpec
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, layer_parameters, parameter_count, trained_parameter_count
from meshwright.spec.plan import BatchPlan, ExpertPlan, LayerStrategy, MeshAxis, Plan, Precision, SchedulePlan
from meshwright.workload.activations import activation_bytes
from meshwright.workload.buffers import STAGING_BUFFERS
from meshwright.workload.plan_bytes import FRAMEWORK_BYTES, allocated, fullest_rank_memory, memory_by_rank
from meshwright.workload.tensor_bytes import TensorFormats

HIDDEN, FFN, VOCAB, LAYERS = 1024, 4096, 32768, 8
MODEL = ModelSpec(
    family="llama", layers=LAYERS, hidden=HIDDEN, heads=16, kv_heads=8, head_dim=64, ffn_hidden=FFN, vocab_size=VOCAB
)
TRAIN = TrainSpec(steps=1, global_batch=32, seq_len=2048, loss_chunk=3072)
TOKENS, MICRO_BATCHES = 2 * 2048, 4
BLOCK = HIDDEN * (1024 + 1024) + 1024 * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
"""qkv, out, gate-up and down, two norms."""
TABLE = VOCAB * HIDDEN
QKV = 1024 + 2 * 512
SAVED = 2 * (4 * HIDDEN + QKV + 1024 + 512 + 1024 + 2 * FFN + FFN)
"""bf16 bytes that the forward of one block saves for one token.

Two residuals, the outputs of two norms, the joined projection (values are a view of it), rotated queries and keys,
attention's output, and the MLP.
"""
BACKWARD_TEMPORARIES = TOKENS * 2 * (2 * FFN + HIDDEN)
"""Bytes of temporary gradients in a block's backward: of gate and up, and of the residual stream."""
SCRATCH = TensorFormats.workspace
HEAD = 3072 * VOCAB * 2 + 4 * TABLE + 2 * TOKENS * HIDDEN * 2
"""Bytes in the head: a chunk's logits, the head's fp32 gradient, hidden states and their gradient."""
STREAM = TOKENS * HIDDEN * 2
"""One micro-batch's residual stream in bf16."""
RECOMPUTED = TOKENS * SAVED - STREAM
"""Bytes that the backward of a block with full recompute computes again."""


def plan(mesh: dict[str, int], schedule: str = "1f1b", stages=(), **layer) -> Plan:
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in mesh.items()),
        batch=BatchPlan(global_batch=32, micro_batch=2, accumulate=MICRO_BATCHES),
        schedule=SchedulePlan(name=schedule, stages=stages),
        layers=(LayerStrategy(**layer),),
    )


def fullest_memory(measured_plan: Plan, **options) -> dict[str, int]:
    return fullest_rank_memory(MODEL, TRAIN, measured_plan, cpu=False, **options)


def test_constants_of_this_file_match_the_model() -> None:
    assert parameter_count(MODEL) == LAYERS * BLOCK + 2 * TABLE + HIDDEN


def test_memory_of_one_rank_of_four_shards() -> None:
    memory = fullest_memory(plan({"shard": 4}, reshard=True))
    shard = parameter_count(MODEL) // 4
    assert memory == {
        "weights": 4 * shard,
        "gradients": 4 * shard,
        "optimizer": 8 * shard,
        "gathered": 2 * (2 * BLOCK + 2 * (TABLE + HIDDEN)),  # two blocks, the head and its gather buffer
        "activations": TOKENS * LAYERS * SAVED + SCRATCH,
        "logits": HEAD,
        "framework": FRAMEWORK_BYTES["cuda"],
    }


def test_a_pipeline_rank_stores_its_stages_and_its_end_of_the_model() -> None:
    first, second = memory_by_rank(
        MODEL, TRAIN, plan({"pipeline": 2, "shard": 2}), cpu=False, activation_peaks=(7e9, 3e9)
    )
    half = LAYERS // 2 * BLOCK
    assert first["weights"] == 4 * (half + TABLE) // 2
    assert second["weights"] == 4 * (half + HIDDEN + TABLE) // 2
    assert second["optimizer"] == 2 * second["weights"]
    assert (first["activations"], second["activations"]) == (
        7_000_000_000 + BACKWARD_TEMPORARIES + SCRATCH,
        3_000_000_000 + SCRATCH,
    )
    assert (first["logits"], second["logits"]) == (0, HEAD)
    # The last reduction before the peak is the embedding's, at the end of the previous micro-batch.
    assert first["gathered"] == 2 * 3 * BLOCK + 4 * TABLE * 3 // 2 + 2 * BLOCK
    assert first["transfers"] == second["transfers"] == (2 + 1) * STREAM


def test_transfers_count_posted_receives_and_one_buffer_per_message() -> None:
    """Transfers: two buffers of posted receives, and one per message that the rank sends for a micro-batch.

    With one stage per rank, the first and last rank send one message and the others two; with two stages per rank, more.
    """
    line = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 4, "shard": 1}), cpu=False)
    assert [memory["transfers"] // STREAM - 2 for memory in line] == [1, 2, 2, 1]
    ring = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 4, "shard": 1}, "interleaved"), cpu=False)
    assert [memory["transfers"] // STREAM - 2 for memory in ring] == [3, 4, 4, 3]
    vee = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 4, "shard": 1}, "zbv"), cpu=False)
    assert [memory["transfers"] // STREAM - 2 for memory in vee] == [2, 4, 4, 2]


def test_the_fullest_rank_is_reported() -> None:
    pipelined = plan({"pipeline": 2, "shard": 2})
    by_rank = memory_by_rank(MODEL, TRAIN, pipelined, cpu=False, activation_peaks=(9e9, 1e9))
    assert fullest_memory(pipelined, activation_peaks=(9e9, 1e9)) == by_rank[0] != by_rank[1]
    assert (
        fullest_memory(pipelined, activation_peaks=(1e9, 9e9))
        == memory_by_rank(MODEL, TRAIN, pipelined, cpu=False, activation_peaks=(1e9, 9e9))[1]
    )


def test_a_middle_stage_has_no_end_of_the_model() -> None:
    by_rank = memory_by_rank(MODEL, TRAIN, plan({"pipeline": 4, "shard": 1}), cpu=False)
    assert by_rank[1]["weights"] == 4 * LAYERS // 4 * BLOCK
    assert by_rank[1]["gathered"] == 2 * 2 * BLOCK + 2 * BLOCK, "one rank adds a gradient to its sum without a buffer"
    assert by_rank[1]["logits"] == 0


def test_first_and_last_rank_store_a_tied_table() -> None:
    tied = replace(MODEL, tied=True)
    first, last = memory_by_rank(tied, TRAIN, plan({"pipeline": 2, "shard": 2}), cpu=False)
    assert last["weights"] - first["weights"] == 4 * HIDDEN // 2  # the final norm
    v_shaped = memory_by_rank(tied, TRAIN, plan({"pipeline": 2, "shard": 2}, "zbv"), cpu=False)
    assert v_shaped[0]["weights"] - v_shaped[1]["weights"] == 4 * (TABLE + HIDDEN) // 2


def test_activations_by_virtual_stage() -> None:
    uneven = (("0-1", "6-7"), ("2-4", "5"))
    memory = activation_bytes(MODEL, TRAIN, plan({"pipeline": 2, "shard": 2}, "zbv", (uneven[0], uneven[1])))
    assert memory == tuple(TOKENS * layers * SAVED for layers in (2, 3, 1, 2))


def test_memory_can_peak_in_the_first_backward() -> None:
    """While the head's gradients are reduced, a block is gathered and has gradients.

    The head's gradients are fp32, whole and a fourth of them; the block's are bf16.
    """
    memory = fullest_memory(plan({"shard": 4}, recompute="full"))
    assert memory["activations"] == LAYERS * STREAM + RECOMPUTED + BACKWARD_TEMPORARIES + SCRATCH
    assert memory["gathered"] == 2 * (2 * BLOCK + 2 * (TABLE + HIDDEN)) + 4 * (TABLE + HIDDEN) * 5 // 4 + 2 * BLOCK
    assert memory["logits"] == STREAM


def test_layered_accumulation_saves_every_micro_batch() -> None:
    memory = fullest_memory(plan({"shard": 4}, "breadth_first", reshard=True, recompute="full"))
    block_inputs = MICRO_BATCHES * LAYERS * STREAM  # each block's input
    stream_gradients = MICRO_BATCHES * STREAM  # each micro-batch's gradient between two units
    assert memory["activations"] == block_inputs + stream_gradients + RECOMPUTED + BACKWARD_TEMPORARIES + SCRATCH
    # A block's gradients are summed in fp32 until its last micro-batch.
    assert memory["gathered"] == fullest_memory(plan({"shard": 4}, recompute="full"))["gathered"] + 4 * BLOCK
    assert memory["logits"] == MICRO_BATCHES * STREAM


def test_gradients_of_earlier_micro_batches_count_at_the_activation_peak() -> None:
    """Gradients stored when activations are at their peak.

    The rank's sum of whole gradients, or its shard of the sum; none with a single micro-batch.
    """
    sharded, whole = (fullest_memory(plan({"shard": 4}, gradients=gradients)) for gradients in ("shard", "whole"))
    norm = HIDDEN  # of the final norm
    assert whole["gradients"] == pytest.approx(4 * parameter_count(MODEL), abs=4 * norm)
    assert sharded["gradients"] == pytest.approx(parameter_count(MODEL), abs=4 * norm)
    unsharded, summed = (fullest_memory(plan({"shard": 1}, gradients=gradients)) for gradients in ("shard", "whole"))
    assert unsharded == summed
    single_micro_batch = replace(plan({"shard": 4}), batch=BatchPlan(global_batch=8, micro_batch=2, accumulate=1))
    assert fullest_memory(single_micro_batch)["gradients"] == 0


def test_memory_can_peak_at_the_end_of_backward() -> None:
    """In layered order gradients accumulate while activations are freed; copies for replica sums add to them."""
    short_sequences = replace(TRAIN, seq_len=16)
    memory = fullest_rank_memory(MODEL, short_sequences, plan({"replicate": 2, "shard": 2}, "breadth_first"), cpu=False)
    assert memory["activations"] == SCRATCH
    assert memory["gradients"] == 4 * parameter_count(MODEL) // 2
    bf16_replica_sums = plan({"replicate": 2, "shard": 2}, "breadth_first")
    bf16_replica_sums = replace(
        bf16_replica_sums, precision=replace(bf16_replica_sums.precision, reduce_replicas="bf16")
    )
    assert (
        fullest_rank_memory(MODEL, short_sequences, bf16_replica_sums, cpu=False)["gradients"]
        == 6 * parameter_count(MODEL) // 2
    )
    long_sequences = fullest_rank_memory(MODEL, TRAIN, plan({"replicate": 2, "shard": 2}, "breadth_first"), cpu=False)
    assert long_sequences["activations"] > 0 == long_sequences["gradients"]


@pytest.mark.parametrize("axis", ["context_ring", "context_ulysses", "tensor"])
def test_splitting_a_sequence_or_a_matrix_splits_activations_and_states(axis: str) -> None:
    small_chunks = replace(TRAIN, loss_chunk=128)  # so that memory does not peak in the head
    meshes = ({"shard": 2}, {"shard": 2, axis: 2})
    unsplit, split = (
        fullest_rank_memory(MODEL, small_chunks, plan(mesh, recompute="full"), cpu=False) for mesh in meshes
    )
    for category in ("weights", "optimizer"):
        assert split[category] == pytest.approx(unsplit[category] / 2, rel=1e-3), category
    received = TOKENS // 2 * 2 * (4 * HIDDEN if axis == "tensor" else QKV)  # received by the computing block
    assert split["activations"] - SCRATCH - received == pytest.approx((unsplit["activations"] - SCRATCH) / 2, rel=1e-3)


def test_offloaded_activations_keep_two_layers_on_the_device() -> None:
    offloaded = plan({"shard": 4}, offload="activations")
    assert activation_bytes(MODEL, TRAIN, offloaded) == (0.0,)
    assert fullest_memory(offloaded)["activations"] == 2 * TOKENS * SAVED + SCRATCH
    half = replace(offloaded, layers=(LayerStrategy(range="0-3", offload="activations"), LayerStrategy(range="4-7")))
    assert fullest_memory(half)["activations"] == 6 * TOKENS * SAVED + SCRATCH


def test_offloaded_activations_keep_three_layers_under_a_pipeline() -> None:
    offloaded = plan({"pipeline": 2, "shard": 2}, "1f1b", offload="activations")
    first, _ = memory_by_rank(MODEL, TRAIN, offloaded, cpu=False)
    assert first["activations"] == 3 * TOKENS * SAVED + BACKWARD_TEMPORARIES + SCRATCH


def test_an_offloaded_optimizer_leaves_bf16_shards_and_gradient_sums() -> None:
    """Master weights and moments are in host memory; bf16 shards for gathers and gradient sums stay on the device."""
    on_device, offloaded = (fullest_memory(plan({"shard": 4}, offload=offload)) for offload in ("none", "optimizer"))
    # A record: two fp32 moments and 16 bits of the master weight, which the kernel unpacks in registers.
    chunks = STAGING_BUFFERS * (4 + 4 + 2) * (1 << 23)
    assert 4 * BLOCK / 4 > 1 << 23, "a chunk is full even if only half of the blocks are offloaded"
    assert (2 * offloaded["weights"], offloaded["optimizer"]) == (on_device["weights"], chunks)
    assert all(offloaded[category] == on_device[category] for category in ("gradients", "gathered", "activations"))
    half = replace(
        plan({"shard": 4}), layers=(LayerStrategy(range="0-3", offload="optimizer"), LayerStrategy(range="4-7"))
    )
    # The embedding is offloaded with the first block.
    offloaded_share = (4 * BLOCK + TABLE) / parameter_count(MODEL)
    assert fullest_memory(half)["optimizer"] == pytest.approx(on_device["optimizer"] * (1 - offloaded_share) + chunks)
    kept = replace(plan({"shard": 4}, offload="optimizer"), offload_fraction=0.25)
    assert fullest_memory(kept)["optimizer"] == pytest.approx(chunks + 0.75 * 10 * parameter_count(MODEL) / 4)
    records = 10 * parameter_count(MODEL)
    for staging, expected in ((0.1, chunks), (0.6, 0.6e9), (50.0, max(chunks, records))):
        staged = replace(plan({"shard": 1}, offload="optimizer"), offload_staging=staging)
        assert fullest_memory(staged)["optimizer"] == pytest.approx(expected), staging


def test_an_offloaded_optimizer_leaves_master_weights_if_they_are_gathered() -> None:
    """With compute in fp32, and with fp8 gathers, whose scales need the master weights."""
    for precision in (Precision(compute="fp32"), Precision(linear="fp8_tensorwise", gather="fp8")):
        on_device, offloaded = (
            fullest_memory(replace(plan({"shard": 4}, offload=offload), precision=precision))
            for offload in ("none", "optimizer")
        )
        assert (offloaded["weights"], offloaded["optimizer"]) == (
            on_device["weights"],
            STAGING_BUFFERS * 2 * 10 * (1 << 20) * 4,
        )


def test_memory_of_layers_with_different_strategies() -> None:
    """Half of the blocks keep gathered weights for the step, the other half use recompute, or the other way round.

    If the first half is computed again, the blocks behind it have freed more than that takes: memory peaks in the head.
    """
    halves = (LayerStrategy(range="0-3", reshard=False), LayerStrategy(range="4-7", recompute="full"))
    mixed = replace(plan({"shard": 4}), layers=halves)
    memory, recomputed = fullest_memory(mixed), fullest_memory(plan({"shard": 4}, recompute="full"))
    saved = 4 * STREAM + 4 * TOKENS * SAVED
    assert memory["activations"] == saved + RECOMPUTED + BACKWARD_TEMPORARIES + SCRATCH
    assert memory["gathered"] - recomputed["gathered"] == 2 * 2 * BLOCK + 2 * TABLE, (
        "the embedding is kept as the first half is"
    )
    swapped = (replace(halves[1], range="0-3"), replace(halves[0], range="4-7"))
    assert fullest_memory(replace(mixed, layers=swapped))["activations"] == saved + SCRATCH


def test_blocks_free_room_for_those_before_them_in_one_stage_only() -> None:
    """Between the backwards of two stages of a rank a forward may fill the room again."""
    layers = (LayerStrategy(range="0-3", recompute="full"), LayerStrategy(range="4-7", reshard=False))
    mixed = [replace(plan({"pipeline": 2}, schedule), layers=layers) for schedule in ("interleaved", "zbv")]
    for several_stages in mixed:
        by_rank = memory_by_rank(MODEL, TRAIN, several_stages, cpu=False, activation_peaks=(1e9, 1e9))
        assert any(memory["activations"] == 1e9 + RECOMPUTED + BACKWARD_TEMPORARIES + SCRATCH for memory in by_rank)


def test_gradients_of_blocks_take_the_room_that_they_free() -> None:
    """One micro-batch over two shards: the last block leaves gradients of half of its parameters, in fp32.

    They take the room of its gathered weights if these were kept.
    """
    full = LayerStrategy(range="0-6", recompute="full", reshard=False)
    layers = (full, LayerStrategy(range="7", reshard=True))
    once = replace(plan({"shard": 2}), layers=layers, batch=BatchPlan(global_batch=4, micro_batch=2, accumulate=1))
    kept = replace(once, layers=(layers[0], replace(layers[1], reshard=False)))
    saved = 7 * STREAM + TOKENS * SAVED + SCRATCH
    without_peak_in_head = replace(MODEL, vocab_size=1024)
    memory, kept_memory = (fullest_rank_memory(without_peak_in_head, TRAIN, each, cpu=False) for each in (once, kept))
    assert kept_memory["activations"] == saved + BACKWARD_TEMPORARIES
    assert memory["activations"] == saved + BACKWARD_TEMPORARIES - STREAM + 2 * BLOCK


MOE = replace(MODEL, experts=8, experts_per_token=2, expert_hidden=2048, first_dense_layers=2)
EXPERT = 3 * HIDDEN * 2048
ATTENTION = HIDDEN * (1024 + QKV) + 2 * HIDDEN


def test_memory_of_experts_by_expert_and_shard_ranks() -> None:
    """Six of 8 layers have 8 experts, and each of 4 ranks holds a fourth of the states.

    It holds two experts of each layer, or a fourth of every expert.
    """
    folds = [
        replace(plan({"shard": 4}, recompute="full"), experts=ExpertPlan(expert=n, expert_shard=4 // n))
        for n in (1, 2, 4)
    ]
    by_rank = [fullest_rank_memory(MOE, TRAIN, fold, cpu=False) for fold in folds]
    assert {memory["weights"] for memory in by_rank} == {parameter_count(MOE)}
    block = ATTENTION + HIDDEN * 8
    for memory, local_experts in zip(by_rank, (8, 4, 2), strict=True):
        rank_block = block + local_experts * EXPERT
        reduced = max(4 * rank_block * 5 // 4, 4 * (TABLE + HIDDEN) * 5 // 4)
        assert memory["gathered"] == 2 * (2 * rank_block + 2 * (TABLE + HIDDEN)) + reduced + 2 * rank_block
    routed = 2 * (4 * HIDDEN + QKV + 1024 + 512 + 1024 + 2 * 3 * 2048 + 2 * HIDDEN + 8)
    assert activation_bytes(MOE, TRAIN, plan({"shard": 4})) == (TOKENS * (2 * SAVED + 6 * routed),)


def test_the_token_exchange_by_kernels_has_room_for_its_bound() -> None:
    """Two slots of a window in bf16, with room for so many times the two copies of each token; also experts' activations."""
    for bound, room in ((None, 4), (1.5, 1.5), (8, 4)):
        whole = replace(plan({"shard": 4}, recompute="full"), experts=ExpertPlan(expert=4))
        peers = replace(whole, experts=ExpertPlan(expert=4, exchange="peer", receive_bound=bound))
        messages, kernels = (fullest_rank_memory(MOE, TRAIN, each, cpu=False) for each in (whole, peers))
        assert kernels["framework"] - messages["framework"] == 2 * room * 2 * TOKENS * HIDDEN * 2
        assert kernels["activations"] > messages["activations"]


def test_layers_with_experts_and_without_them_share_their_states_by_parameters() -> None:
    """The first two of 8 layers are dense. Each of 4 ranks has a fourth of all states, and gathers two of 8 experts."""
    experts = replace(plan({"shard": 4}), experts=ExpertPlan(expert=4))
    layers = (LayerStrategy(range="0-1", offload="optimizer"), LayerStrategy(range="2-7"))
    offloaded = fullest_rank_memory(MOE, TRAIN, replace(experts, layers=layers), cpu=False)
    on_host = 2 * BLOCK + TABLE
    assert offloaded["weights"] == pytest.approx(parameter_count(MOE) - on_host / 2, rel=1e-6)
    adapted = replace(MOE, adapter=AdapterSpec(rank=16, experts=False))
    memory = fullest_rank_memory(adapted, TRAIN, experts, cpu=False)
    assert memory["optimizer"] == pytest.approx(8 * trained_parameter_count(adapted) / 4, rel=1e-6)


def test_a_pair_of_micro_batches_has_two_gradients_of_the_heads_input() -> None:
    """The forward of the loss computes them, for both micro-batches before the first backward."""
    alone, paired = (fullest_memory(plan({"shard": 4}, schedule, recompute="full")) for schedule in ("1f1b", "paired"))
    assert (alone["logits"], paired["logits"]) == (STREAM, 2 * STREAM)


def test_allocated_bytes_exclude_the_framework() -> None:
    memory = fullest_memory(plan({"shard": 4}))
    assert allocated(memory) == sum(memory.values()) - FRAMEWORK_BYTES["cuda"]


def test_fp8_saves_inputs_of_matmuls_and_gathers_blocks_in_one_byte() -> None:
    """One byte for norm outputs, activations and a copy of attention's output; two for residuals and attention inputs."""
    wide = plan({"shard": 4}, reshard=False)
    low = replace(wide, precision=Precision(linear="fp8_tensorwise", gather="fp8"))
    fp8_saved = 2 * (2 * HIDDEN + QKV + 1024 + 512 + 1024 + 2 * FFN) + 2 * HIDDEN + 1024 + FFN
    assert activation_bytes(MODEL, TRAIN, wide) == (LAYERS * TOKENS * SAVED,)
    assert activation_bytes(MODEL, TRAIN, low) == (LAYERS * TOKENS * fp8_saved,)
    gathered = [fullest_memory(precision_plan)["gathered"] for precision_plan in (wide, low)]
    assert gathered[0] - gathered[1] == LAYERS * BLOCK
    one_bf16_layer = replace(low, layers=(LayerStrategy(range="0", linear="compute"), LayerStrategy(range="1-7")))
    assert activation_bytes(MODEL, TRAIN, one_bf16_layer) == (TOKENS * (SAVED + (LAYERS - 1) * fp8_saved),)


def test_fp8_experts_save_their_activations_in_the_compute_dtype() -> None:
    moe = replace(MODEL, experts=8, experts_per_token=2, expert_hidden=64, shared_expert_hidden=32)
    wide = replace(plan({"shard": 4}, reshard=False), layers=(LayerStrategy(reshard=False),))
    low = replace(wide, precision=Precision(linear="fp8_rowwise"))
    norm_outputs, attention_copy = 2 * HIDDEN, 1024
    saved = LAYERS * TOKENS * (norm_outputs - attention_copy + 32)
    assert activation_bytes(moe, TRAIN, wide)[0] - activation_bytes(moe, TRAIN, low)[0] == saved


def test_copy_engine_gathers_use_a_window() -> None:
    """The window holds two blocks and one end in bf16 for the whole run; kernels free their buffer. None on one rank."""
    by_transport = [
        fullest_rank_memory(MODEL, TRAIN, replace(plan({"shard": 4}), gather_transport=transport), cpu=False)
        for transport in TRANSPORTS
    ]
    assert {category for category in by_transport[0] if by_transport[0][category] != by_transport[1][category]} == {
        "gathered"
    }
    window = by_transport[1]["gathered"] - by_transport[0]["gathered"]
    block = sum(parameter.count for parameter in layer_parameters(MODEL, 0))
    assert window == pytest.approx(2 * 2 * block, rel=0.01), (
        "the kernel's last gather buffer, the head's, is as large as the window's slot for an end"
    )
    unsharded = [
        fullest_rank_memory(MODEL, TRAIN, replace(plan({"shard": 1}), gather_transport=transport), cpu=False)
        for transport in TRANSPORTS
    ]
    assert unsharded[0] == unsharded[1]


def test_copy_engine_token_exchange_uses_a_window() -> None:
    """Two slots for all tokens of a micro-batch in bf16, outside the allocator; none for one tensor rank or on CPUs."""
    for tensor, cpu, window in ((4, False, 2 * TOKENS * HIDDEN * 2), (1, False, 0), (4, True, 0)):
        tensor_plan = plan({"tensor": tensor})
        framework_bytes = [
            fullest_rank_memory(MODEL, TRAIN, replace(tensor_plan, tensor_transport=transport), cpu=cpu)["framework"]
            for transport in TRANSPORTS
        ]
        assert framework_bytes[1] - framework_bytes[0] == window, (tensor, cpu)


TRANSPORTS = ("nccl", "copy_engine")
