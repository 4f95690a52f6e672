"""Tensor and sequence parallelism, alone and with other axes, equal one device: loss, gradient norm, gradients, weights.

The oracle is that of test_equality. Heads, documents and the vocabulary divide unevenly where they may.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.parallel.world import World
from meshwright.spec.layout import token_exchanges
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan, Precision, Transport
from tests.distributed import cases_training as cases
from tests.distributed.cases_training import Seen
from tests.distributed.drawn import FAMILIES
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BF16_BOUND, GPT, LLAMA, compare, one_device, sharded
from tests.distributed.test_schedules import DEEP_TIED, STEPS, UNEVEN_V, Case, named
from tests.distributed.test_training import STEPS as STEPS_OF_A_RUN
from tests.distributed.test_training import compare as same_run
from tests.distributed.test_training import merge_tensors, same_bits, tiny, trained
from tests.slow import quick_first
from tests.training.tiny import prepared, ranks, staged

__all__ = ["tiny"]

QWEN = replace(LLAMA, family="qwen3", qk_norm=True, tied=True, layers=4)
GPT4 = replace(GPT, heads=4, kv_heads=4, layers=4)
PARALLEL = replace(GPT, heads=4, kv_heads=1, parallel_block=True, tied=False, positions="rope")
"""One key/value head for all ranks, biases, attention and feed-forward network beside one norm."""
GATED = replace(LLAMA, parallel_block=True, layers=4)
WHOLE_NORMS = FAMILIES["olmo2"]
"""Norms of queries and keys over all heads, which ranks divide; of four ranks two have each key head."""
OUTSIDE = ("tensor", "pipeline", "replicate", "shard")
CASES = [
    (LLAMA, Case("1f1b", tensor=2, micro=4)),
    (LLAMA, Case("1f1b", tensor=4)),
    (GATED, Case("zb_h1", tensor=2, pipeline=2, micro=2, recompute="selective")),
    (GATED, Case("1f1b", tensor=2, shard=2, micro=2)),
    (QWEN, Case("1f1b", tensor=4, micro=2, recompute="selective")),
    (PARALLEL, Case("1f1b", tensor=4, micro=2)),
    (WHOLE_NORMS, Case("zb_h1", tensor=4, recompute="selective")),
    (GPT4, Case("1f1b", tensor=2, shard=2, micro=2)),
    (LLAMA, Case("1f1b", tensor=2, shard=2, reshard=False, gradients="whole")),
    (LLAMA, Case("breadth_first", tensor=2, shard=2, recompute="selective")),
    (GPT4, Case("1f1b", tensor=2, replicate=2, recompute="full", order=OUTSIDE)),
    (QWEN, Case("1f1b", tensor=2, pipeline=2)),
    (QWEN, Case("zbv", tensor=2, pipeline=2, recompute="full")),
    (GPT4, Case("zbv", tensor=2, pipeline=2, micro=2)),
    (GPT4, Case("gpipe", tensor=2, pipeline=2, micro=4)),
    (QWEN, Case("interleaved", tensor=2, pipeline=2, micro=4)),
    (QWEN, Case("breadth_first", tensor=2, pipeline=2, micro=4)),
    (GPT4, Case("zb_h1", tensor=2, pipeline=2, recompute="selective", order=OUTSIDE)),
]
LARGE = [
    (QWEN, Case("1f1b", tensor=2, pipeline=2, shard=2, micro=2)),
    (DEEP_TIED, Case("zbv", tensor=2, pipeline=2, shard=2, gradients="whole", stages=UNEVEN_V)),
    (QWEN, Case("1f1b", tensor=2, shard=2, replicate=2, micro=2)),
]
COMPILED = [
    (WHOLE_NORMS, Case("1f1b", tensor=2, micro=4, recompute="selective", compile=True)),
    (QWEN, Case("zb_h1", tensor=2, micro=4, recompute="selective", compile=True)),
    (GATED, Case("zb_h1", tensor=2, micro=4, recompute="selective", compile=True)),
    (PARALLEL, Case("1f1b", tensor=2, micro=4, compile=True)),
]


@pytest.mark.parametrize(("spec", "case"), quick_first(1, CASES, unpack=True), ids=named)
def test_up_to_four_ranks(pool: Pool, spec: ModelSpec, case: Case) -> None:
    check(pool, spec, case)


@pytest.mark.parametrize(("spec", "case"), quick_first(1, LARGE, unpack=True), ids=named)
def test_eight_ranks(pool: Pool, spec: ModelSpec, case: Case) -> None:
    check(pool, spec, case)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "case"), COMPILED, ids=named)
def test_compiled(pool: Pool, spec: ModelSpec, case: Case) -> None:
    check(pool, spec, case)


def check(pool: Pool, spec: ModelSpec, case: Case) -> None:
    results = pool.run(sharded, case.plan.ranks, spec, case.plan, 1.0, STEPS)
    compare(results, one_device(spec)[:STEPS], 1e-9)


def test_bf16_stays_within_its_bound(pool: Pool) -> None:
    """The bound of test_equality holds: partial sums that travel in bf16 are no worse than bf16 matmuls."""
    results = pool.run(sharded, 4, LLAMA, bf16(Case("1f1b", tensor=2, shard=2, micro=2).plan), 1.0, 1)
    compare(results, one_device(LLAMA)[:1], BF16_BOUND, weights=False)


@pytest.mark.parametrize("narrow", [False, True], ids=["fp64", "bf16"])
def test_a_wrong_factor_is_noticed(pool: Pool, narrow: bool) -> None:
    plan = Case("1f1b", tensor=2, micro=4).plan
    results = pool.run(sharded, 2, LLAMA, bf16(plan) if narrow else plan, 2.0, 1)
    with pytest.raises(AssertionError):
        compare(results, one_device(LLAMA)[:1], BF16_BOUND if narrow else 1e-9, weights=False)


def bf16(plan: Plan) -> Plan:
    return replace(plan, precision=Precision(compute="bf16", reduce="fp32"))


def test_copies_must_be_summed(pool: Pool) -> None:
    """Without the sum over what tensor ranks hold alike the comparison fails: on norms, and on key/value heads."""
    for tensor, name in ((2, "norm"), (4, "qkv")):
        plan = Case("1f1b", tensor=tensor, micro=4).plan
        assert pool.run(copies_differ, tensor, LLAMA, plan, name) == [True] * tensor


def copies_differ(world: World, spec: ModelSpec, plan: Plan, unsummed: str) -> bool:
    """Whether gradients of replicated parameters differ if the sum omits those whose name contains `unsummed`."""
    from meshwright.parallel import apply

    class Leaving(apply.TensorCopySums):
        def __init__(self, model: Any, boxes: Any, mesh: Any) -> None:
            remaining = {name: () if unsummed in name else parameter_boxes for name, parameter_boxes in boxes.items()}
            super().__init__(model, remaining, mesh)

    original, apply.TensorCopySums = apply.TensorCopySums, Leaving  # type: ignore[misc]
    try:
        sharded(world, spec, plan, 1.0, 1)
    except AssertionError:
        return True
    finally:
        apply.TensorCopySums = original  # type: ignore[misc]
    return False


CHAIN = [
    [*ranks(4), "plan.tensor=2", "plan.shard=2"],
    ranks(4),
    [*staged(4, "1f1b"), "plan.tensor=2", "plan.shard=1"],
    [*ranks(4), "plan.tensor=4", "plan.shard=1"],
]
"""A run under three plans, opened under a fourth, in which two ranks each hold a key/value head."""


@pytest.mark.slow
def test_any_plan_goes_on_with_any_other_bit_for_bit(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    deep = ("model.layers=4", "plan.compute=fp64")
    one_rank = trained(pool, tiny, tmp_path / "one", *ranks(1), *deep)
    attempts: list[list[Seen]] = []
    for number, plan in enumerate(CHAIN):
        if attempts:
            assignment = prepared(tiny, tmp_path, *plan, *deep).assignment
            final_tensors: dict[str, torch.Tensor] = {}
            for _, tensors in pool.run(cases.opened, 4, assignment):
                final_tensors |= tensors
            assert same_bits(final_tensors, merge_tensors(attempts[-1]))
        if len(attempts) < 3:
            attempts.append(trained(pool, tiny, tmp_path, *plan, *deep, stop_at=(2, 4, 0)[number]))
    assert [results[0].began for results in attempts] == [0, 2, 4]
    same_run(attempts, one_rank[0])
    with CheckpointReader(tmp_path / "tiny" / "checkpoints" / f"step-{STEPS_OF_A_RUN:08d}") as reader:
        saved = {name: reader.read(name) for name in reader.tensors}
    assert same_bits(saved, merge_tensors(attempts[-1]))


@pytest.mark.slow
def test_validation_and_initial_weights_are_those_of_one_rank(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """Learned positions, biases and tied ends too, from a checkpoint's rows."""
    model = "model={family: gpt2, layers: 4, hidden: 16, heads: 4, kv_heads: 4, ffn_hidden: 32, max_seq_len: 16, init_std: 0.1}"
    precise = [model, "plan.compute=fp64", "train.steps=2", "train.warmup_steps=0", "train.validate_every=1"]
    first = trained(pool, tiny, tmp_path / "first", *ranks(1), *precise)
    precise.append(f"model.init=checkpoint:{tmp_path / 'first' / 'tiny'}")
    one_rank = trained(pool, tiny, tmp_path / "one", *ranks(1), *precise)[0].validations
    results = trained(pool, tiny, tmp_path / "tensor", *ranks(4), "plan.tensor=2", "plan.shard=2", *precise)
    assert one_rank != first[0].validations
    assert all(result.validations == results[0].validations for result in results)
    for (_, actual), (_, truth) in zip(results[0].validations, one_rank, strict=True):
        assert actual.loss == pytest.approx(truth.loss, rel=1e-9) and actual.tokens == truth.tokens


def kept_by_a_block(world: World, spec: ModelSpec, plan: Plan) -> set[tuple[int, ...]]:
    """Shapes of what a block's forward leaves for its backward."""
    shapes = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        through_a_block(world, spec, plan)
    return shapes


def exchanges_of_a_block(world: World, spec: ModelSpec, plan: Plan) -> list[tuple[int, int]]:
    """Gathers and sums of tokens in a block's forward, and in its backward."""
    from meshwright.parallel import linear_exchanges, peers

    copied = plan.tensor_transport == "copy_engine"
    owner, names = (
        (peers.MessagePeers, ("start_gather", "start_sum")) if copied else (linear_exchanges, ("_gather", "_scatter"))
    )
    with ExitStack() as stack:
        calls_by_name = [stack.enter_context(counting(owner, name)) for name in names]
        _engine, y = through_a_block(world, spec, plan)  # backward needs the engine alive
        forward = tuple(map(len, calls_by_name))
        y.sum().backward()
    return [
        forward,
        tuple(len(calls) - calls_in_forward for calls, calls_in_forward in zip(calls_by_name, forward, strict=True)),
    ]


@contextmanager
def counting(owner: Any, name: str) -> Iterator[list[None]]:
    """Grows by an entry with every call."""
    calls: list[None] = []
    real = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return real(*args, **options)

    setattr(owner, name, counted)
    try:
        yield calls
    finally:
        setattr(owner, name, real)


def through_a_block(world: World, spec: ModelSpec, plan: Plan) -> tuple[Any, torch.Tensor]:
    """The engine, and the output of its first block for a rank's part of two sequences of 12 tokens."""
    from meshwright.data.loader import MicroBatch
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    engine = build_engine(spec, plan, build_mesh(plan, world), loss_chunk=5, seed=0)
    block, tokens = engine.executor.rank_model.stages[0][1], torch.zeros(2, 12, dtype=torch.int64)
    block.sharded.gather()
    block.sharded.wait_for_gather()
    shared = engine.model.shared_inputs(tokens, None, None, torch.float64)
    x = torch.randn(2, 12 // plan.axis_size("tensor"), spec.hidden, dtype=torch.float64, requires_grad=True)
    y = block.run(x, MicroBatch(tokens, None, None, None, 0), shared)
    assert y.shape == x.shape
    return engine, y


@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_a_parallel_block_exchanges_once_where_another_does_twice(pool: Pool, transport: Transport) -> None:
    """Forward a gather and a sum; backward as many, and the gather for weights' gradients again."""
    for spec, times in ((LLAMA, 2), (GATED, 1), (PARALLEL, 1)):
        plan = replace(Case("1f1b", tensor=2).plan, tensor_transport=transport)
        assert token_exchanges(spec, 0) == times
        expected = [(times, times), (2 * times, times)]
        assert pool.run(exchanges_of_a_block, 2, spec, plan) == [expected] * 2


@pytest.mark.parametrize("spec", [LLAMA, GATED], ids=["one after another", "beside each other"])
def test_a_block_keeps_its_own_part_of_the_sequence(pool: Pool, spec: ModelSpec) -> None:
    """Saved hidden states have this rank's tokens only; saved tensors of all tokens have this rank's features only (8 or 12)."""
    for shapes in pool.run(kept_by_a_block, 2, spec, Case("1f1b", tensor=2).plan):
        assert (2, 6, 16) in shapes
        assert not {shape for shape in shapes if shape[:2] == (2, 12) and shape[2:] == (16,)}
