"""Context parallelism equals one device, alone and with everything else: loss, gradient norm, every gradient and weight.

The oracle is that of test_equality. Every case runs with whole rows, whose keys and values pass round the ring, and with documents that
begin anywhere, also across the cuts of the sequence. Small pipelines run once: those with Ulysses ranks with documents, those with a ring
alone with whole rows. Some have fewer key/value heads than ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.parallel.world import World
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan, Precision
from tests.distributed import cases_training as cases
from tests.distributed.drawn import GEMMA2, GPT_OSS
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BF16_BOUND, GPT, LLAMA, compare, one_device, sharded
from tests.distributed.test_experts import EVEN, QWEN3_MOE, SHARED
from tests.distributed.test_schedules import DEEP_TIED, SCHEDULES, STEPS, UNEVEN, Case, named
from tests.distributed.test_training import compare as same_run
from tests.distributed.test_training import merge_tensors, same_bits, tiny, trained
from tests.slow import quick_first
from tests.training.tiny import prepared, ranks

__all__ = ["tiny"]

QWEN = replace(LLAMA, family="qwen3", qk_norm=True, tied=True, layers=4)
GPT4 = replace(GPT, heads=4, kv_heads=4, layers=4)
LONG = replace(LLAMA, max_seq_len=16)
WINDOW = replace(QWEN, sliding_window=5)
OUTSIDE = ("context_ulysses", "tensor", "context_ring", "pipeline", "replicate", "shard")
CASES = [
    (LLAMA, Case("1f1b", ulysses=2, micro=4, recompute="all_but_attention")),
    (GPT4, Case("1f1b", pipeline=2, ring=2, micro=2)),
    (EVEN, Case("zbv", pipeline=2, ulysses=2, expert=2, recompute="all_but_attention")),
]
WIDER = [
    (LLAMA, Case("1f1b", ring=2, micro=4)),
    (SHARED, Case("1f1b", ring=2, shard=2, expert=2, micro=2, recompute="selective")),
    (SHARED, Case("1f1b", ring=2, expert=2, micro=4)),
    (EVEN, Case("1f1b", ulysses=2, expert=2, micro=4)),
    (LONG, Case("1f1b", ring=4, micro=2, recompute="full")),
    (LLAMA, Case("1f1b", ulysses=4, micro=2)),
    (LLAMA, Case("1f1b", ring=2, ulysses=2, micro=2, recompute="all_but_attention")),
    (SHARED, Case("1f1b", ring=2, tensor=2, micro=2, recompute="all_but_attention")),
    (QWEN, Case("1f1b", ring=2, ulysses=2, micro=2, recompute="selective")),
    (LLAMA, Case("1f1b", ring=2, ulysses=2, micro=2, reshard=False, gradients="whole", offload="activations")),
    (WINDOW, Case("1f1b", ring=2, micro=4)),
    (GPT4, Case("1f1b", ring=2, shard=2, reshard=False, gradients="whole")),
    (QWEN, Case("breadth_first", ulysses=2, shard=2, recompute="full")),
    (GPT4, Case("1f1b", ulysses=2, replicate=2, micro=2)),
    (QWEN, Case("1f1b", ring=2, replicate=2, recompute="all_but_attention", order=OUTSIDE)),
    (GPT4, Case("1f1b", ring=2, tensor=2, micro=2)),
    (LLAMA, Case("1f1b", ulysses=2, tensor=2, micro=2, recompute="selective", order=OUTSIDE)),
    *(
        (GPT4 if number % 2 else QWEN, Case(name, pipeline=2, ring=1 + number % 2, ulysses=2 - number % 2, micro=2))
        for number, name in enumerate(SCHEDULES)
        if name != "1f1b"
    ),
    (QWEN3_MOE, Case("1f1b", ring=2, micro=4)),
    (QWEN3_MOE, Case("1f1b", ulysses=2, shard=2, micro=2, recompute="selective")),
    (SHARED, Case("1f1b", ring=2, tensor=2, micro=2, recompute="full")),
    (EVEN, Case("1f1b", ulysses=2, expert=2, recompute="full")),
    (SHARED, Case("1f1b", ulysses=2, shard=2, expert=4, order=OUTSIDE)),
    (SHARED, Case("1f1b", ring=2, ulysses=2, expert=2, gradients="whole")),
    (SHARED, Case("1f1b", ring=2, tensor=2, expert=2, micro=2)),
    (GEMMA2, Case("1f1b", ring=2, micro=4)),
    (GPT_OSS, Case("1f1b", ring=2, micro=4)),
    (GPT_OSS, Case("1f1b", ring=2, tensor=2, expert=2, micro=2, recompute="selective")),
    (GPT_OSS, Case("1f1b", ulysses=2, shard=2, micro=2, recompute="all_but_attention")),
]
"""The last ones: MoE layers, of whose experts tensor ranks and the fold over context ranks leave each rank a part."""
SHALLOW = replace(SHARED, layers=2)
LARGE = [
    (LLAMA, Case("1f1b", replicate=2, ring=2, tensor=2, micro=4)),
    (SHALLOW, Case("1f1b", shard=2, ring=2, ulysses=2, expert=2, micro=4, recompute="selective")),
    (SHALLOW, Case("1f1b", replicate=2, ulysses=2, tensor=2, expert=2, micro=4)),
    (DEEP_TIED, Case("zb_h1", ring=2, ulysses=2, pipeline=2, micro=4, stages=UNEVEN)),
    (LONG, Case("1f1b", ring=2, tensor=2, shard=2, micro=4)),
    (LLAMA, Case("1f1b", ulysses=2, replicate=2, shard=2, micro=2)),
]
COMPILED = [
    (LLAMA, Case("zb_h1", ring=2, micro=4, recompute="selective", compile=True), False),
    (LLAMA, Case("1f1b", ring=2, micro=4, compile=True), True),
    (LLAMA, Case("1f1b", ring=2, micro=4, compile=True, recompute="all_but_attention"), False),
    (LLAMA, Case("1f1b", ulysses=2, micro=4, compile=True), False),
    (SHARED, Case("1f1b", ring=2, expert=2, micro=4, compile=True, recompute="selective"), False),
    (GPT_OSS, Case("1f1b", ring=2, micro=4, compile=True, recompute="selective"), False),
]


@pytest.mark.parametrize(
    ("spec", "case"), [*CASES, *(pytest.param(*row, marks=pytest.mark.slow) for row in WIDER)], ids=named
)
def test_up_to_four_ranks(pool: Pool, spec: ModelSpec, case: Case) -> None:
    check(pool, spec, case, (False, True) if case.pipeline == 1 else (case.ulysses > 1,))


@pytest.mark.parametrize("masked", quick_first(1, [True, False]), ids=["documents", "whole rows"])
@pytest.mark.parametrize(("spec", "case"), quick_first(3, LARGE, unpack=True), ids=named)
def test_eight_ranks(pool: Pool, spec: ModelSpec, case: Case, masked: bool) -> None:
    check(pool, spec, case, (masked,))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "case", "masked"), COMPILED, ids=named)
def test_compiled(pool: Pool, spec: ModelSpec, case: Case, masked: bool) -> None:
    results = pool.run(sharded, case.plan.ranks, spec, case.plan, 1.0, STEPS, masked)
    compare(results, one_device(spec, masked)[:STEPS], 1e-9)


def check(pool: Pool, spec: ModelSpec, case: Case, documents: tuple[bool, ...]) -> None:
    results = pool.run(with_and_without_documents, case.plan.ranks, spec, case.plan, documents)
    for masked, result in zip(documents, zip(*results, strict=True), strict=True):
        compare(list(result), one_device(spec, masked)[:STEPS], 1e-9)


def with_and_without_documents(
    world: World, spec: ModelSpec, plan: Plan, documents: tuple[bool, ...]
) -> list[list[dict[str, Any]]]:
    return [sharded(world, spec, plan, 1.0, STEPS, masked) for masked in documents]


@pytest.mark.parametrize("case", [Case("1f1b", ring=2, ulysses=2, micro=4)], ids=str)
def test_bf16_stays_within_its_bound(pool: Pool, case: Case) -> None:
    """The bound of test_equality holds, as a ring's partial results are joined in fp32."""
    plan = replace(case.plan, precision=Precision(compute="bf16", reduce="fp32"))
    for masked in (True, False):
        results = pool.run(sharded, plan.ranks, LLAMA, plan, 1.0, 1, masked)
        compare(results, one_device(LLAMA, masked)[:1], BF16_BOUND, weights=False)


@pytest.mark.parametrize("axis", ["ring", "ulysses"])
def test_a_wrong_factor_is_noticed(pool: Pool, axis: str) -> None:
    plan = Case("1f1b", micro=4, **{axis: 2}).plan
    results = pool.run(sharded, 2, LLAMA, plan, 2.0, 1, False)
    with pytest.raises(AssertionError):
        compare(results, one_device(LLAMA, False)[:1], 1e-9, weights=False)


CHAIN = [
    [*ranks(4), "plan.context_ring=2", "plan.shard=2"],
    [*ranks(4), "plan.context_ulysses=2", "plan.tensor=2", "plan.shard=1"],
    [*ranks(2), "plan.replicate=2", "plan.shard=1"],
]
"""A run under two plans, validated at its end and opened under a third."""


@pytest.mark.slow
def test_any_plan_goes_on_with_any_other_bit_for_bit(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    options = ("plan.compute=fp64", "data.document_mask=false")
    one_rank = trained(pool, tiny, tmp_path / "one", *ranks(1), *options)
    first = trained(pool, tiny, tmp_path, *CHAIN[0], *options, stop_at=3)
    second = trained(pool, tiny, tmp_path, *CHAIN[1], *options)
    assert [results[0].began for results in (first, second)] == [0, 3]
    same_run([first, second], one_rank[0])
    ((_, truth),) = one_rank[0].validations
    for result in second:
        ((_, actual),) = result.validations
        assert actual.loss == pytest.approx(truth.loss, rel=1e-9) and actual.tokens == truth.tokens
    final_tensors: dict[str, torch.Tensor] = {}
    for _, tensors in pool.run(cases.opened, 2, prepared(tiny, tmp_path, *CHAIN[2], *options).assignment):
        final_tensors |= tensors
    assert same_bits(final_tensors, merge_tensors(second))


def kept_by_a_block(world: World, plan: Plan) -> set[tuple[int, ...]]:
    """Shapes of what a block's forward leaves for its backward, when documents are masked."""
    from meshwright.data.loader import MicroBatch
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    engine = build_engine(LLAMA, plan, build_mesh(plan, world), loss_chunk=5, seed=0)
    block, tokens = engine.executor.rank_model.stages[0][1], torch.zeros(2, 12, dtype=torch.int64)
    block.sharded.gather()
    block.sharded.wait_for_gather()
    assert engine.executor.rank_model.context is not None
    local_batch = engine.executor.rank_model.context.local_batch(
        MicroBatch(tokens, None, None, (torch.arange(12) // 5).expand(2, 12), 0)
    )
    shared = engine.executor.rank_model.context.shared_inputs(local_batch, torch.float32)
    x = torch.randn(2, 6, 16, requires_grad=True)
    shapes = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block.run(x, local_batch, shared)
    y.sum().backward()
    return shapes


@pytest.mark.slow
def test_a_compiled_block_does_not_keep_what_a_ring_gathered(pool: Pool) -> None:
    """Of the whole sequence's keys and values (12 tokens, 4 wide) nothing waits for backward; its own 6 tokens' do."""
    # In fp32: torch 2.11 declares the log-sum of attention on a processor to be fp32 also where it is fp64.
    plan = replace(Case("1f1b", ring=2, compile=True).plan, precision=Precision(compute="fp32"))
    for shapes in pool.run(kept_by_a_block, 2, plan):
        assert any(6 in shape and shape[-1] in (4, 16, 32) for shape in shapes)
        assert not [shape for shape in shapes if 12 in shape and shape[-1] in (4, 8)], shapes
