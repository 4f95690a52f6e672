"""Asynchronous tensor-parallel matmuls equal those with blocking collectives, and runs that use them equal one device.

On CPUs messages transfer the tokens; pieces, their order and the sums are the same as on GPUs (tests/gpu/test_async_tensor.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.parallel.world import World
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BF16_BOUND, LLAMA, compare, one_device, sharded
from tests.distributed.test_experts import SHARED
from tests.distributed.test_schedules import STEPS, Case
from tests.distributed.test_tensor import GATED, GPT4, PARALLEL, QWEN, bf16, named
from tests.slow import quick_first

CASES = [
    (QWEN, Case("zb_h1", tensor=2, pipeline=2, micro=2, recompute="selective")),
    (GPT4, Case("1f1b", tensor=2, shard=2, micro=2)),
    (PARALLEL, Case("1f1b", tensor=4, micro=4, recompute="full")),
    (GATED, Case("zb_h1", tensor=2, pipeline=2, micro=2, recompute="selective")),
    (LLAMA, Case("breadth_first", tensor=2, shard=2, recompute="selective")),
    (QWEN, Case("zbv", tensor=2, pipeline=2, recompute="full")),
    (LLAMA, Case("1f1b", tensor=2, replicate=2, micro=2)),
    (LLAMA, Case("1f1b", tensor=2, ring=2)),
    (SHARED, Case("paired", tensor=2)),
    (QWEN, Case("1f1b", tensor=2, micro=4, recompute="selective", compile=True)),
]


def with_copied_tokens(plan: Plan) -> Plan:
    return replace(plan, tensor_transport="copy_engine")


@pytest.mark.parametrize(("spec", "case"), quick_first(1, CASES, unpack=True), ids=named)
def test_float64_equals_one_device(pool: Pool, spec: ModelSpec, case: Case) -> None:
    plan = with_copied_tokens(case.plan)
    compare(pool.run(sharded, plan.ranks, spec, plan, 1.0, STEPS), one_device(spec)[:STEPS], 1e-9)


def test_a_wrong_factor_is_noticed(pool: Pool) -> None:
    results = pool.run(sharded, 2, LLAMA, with_copied_tokens(Case("1f1b", tensor=2, micro=4).plan), 2.0, 1)
    with pytest.raises(AssertionError):
        compare(results, one_device(LLAMA)[:1], 1e-9, weights=False)


@pytest.mark.slow
def test_bf16_stays_within_its_bound(pool: Pool) -> None:
    results = pool.run(sharded, 2, LLAMA, bf16(with_copied_tokens(Case("1f1b", tensor=2, micro=2).plan)), 1.0, 1)
    compare(results, one_device(LLAMA)[:1], BF16_BOUND, weights=False)


def every_operator(rank: int, group: str, ranks: int, batch: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the results of all operators for the rank's own numbers, in float64."""
    from meshwright.parallel import linear_exchanges

    draw = torch.Generator().manual_seed(rank)
    local_tokens, outer_width, inner_width = 6, 10, 7

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    x, x_grad, y = (
        normal(batch, local_tokens, outer_width),
        normal(batch, local_tokens, outer_width),
        normal(batch, ranks * local_tokens, inner_width),
    )
    row_weight, column_weight, bias = (
        normal(inner_width, outer_width),
        normal(outer_width, inner_width),
        normal(inner_width),
    )
    name, two, ys = (group, ranks), [row_weight, normal(4, outer_width)], [y, normal(batch, ranks * local_tokens, 4)]
    two_columns = [column_weight, normal(outer_width, 4)]

    def backward(weights: list[torch.Tensor], grads: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        summed, gathered = linear_exchanges.all_gather_matmul_backward(x, weights, grads, *name)
        return summed, *gathered

    y_grads, gathered_gradient = linear_exchanges.matmul_reduce_scatter_input_backward(x_grad, two_columns, *name)
    return {
        "gathered": (*linear_exchanges.all_gather_matmul(x, [row_weight], [None], *name),),
        "gathered with bias": (*linear_exchanges.all_gather_matmul(x, [row_weight], [bias], *name),),
        "gathered for two": (*linear_exchanges.all_gather_matmul(x, two, [bias, None], *name),),
        "gathered backward": backward([row_weight], [y]),
        "gathered backward of two": backward(two, ys),
        "gathered backward, split": linear_exchanges.all_gather_matmul_input_backward(x, [row_weight], [y], *name),
        "gathered backward of two, split": linear_exchanges.all_gather_matmul_input_backward(x, two, ys, *name),
        "scattered": (linear_exchanges.matmul_reduce_scatter([y], [column_weight], *name),),
        "sum of two scattered": (linear_exchanges.matmul_reduce_scatter(ys, two_columns, *name),),
        "scattered backward of two": (*y_grads, gathered_gradient),
    }


def both_ways(world: World, ranks: int, piece_rows: int, batch: int) -> dict[str, float]:
    """By operator, how far the asynchronous twin is from the plain one, three times over."""
    from meshwright.parallel import async_tensor
    from meshwright.parallel.mesh import build_mesh
    from meshwright.parallel.peers import close_peers, open_peers

    mesh = build_mesh(Case("1f1b", tensor=ranks).plan, world)
    group = mesh.group("tensor")
    assert group is not None
    by_collectives = every_operator(world.rank, group.group_name, ranks, batch)
    previous_rows, async_tensor.PIECE_ROWS = async_tensor.PIECE_ROWS, piece_rows
    try:
        peers = open_peers(mesh, "tensor", "a test")
        by_copies = [every_operator(world.rank, group.group_name, ranks, batch) for _ in range(3)]
    finally:
        close_peers(group.group_name)
        async_tensor.PIECE_ROWS = previous_rows
    assert peers.ranks == ranks
    errors = {}
    for name, truths in by_collectives.items():
        for repeated in by_copies:
            for a, b in zip(repeated[name], truths, strict=True):
                assert a.is_contiguous() and a.shape == b.shape
                errors[name] = max(errors.get(name, 0.0), float((a - b).abs().max()))
    return errors


@pytest.mark.parametrize(("ranks", "piece_rows", "batch"), [(4, 1, 2), (4, 12, 1), (2, 1, 1)])
def test_every_operator_equals_its_plain_twin(pool: Pool, ranks: int, piece_rows: int, batch: int) -> None:
    """With pieces of one rank's tokens, and of two ranks'."""
    for differences in pool.run(both_ways, ranks, ranks, piece_rows, batch):
        assert max(differences.values()) < 1e-12, differences


def refusal_text(world: World) -> str:
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    plan = with_copied_tokens(Case("1f1b", tensor=2).plan)
    with pytest.raises(BadInput) as error:
        build_engine(LLAMA, plan, build_mesh(plan, replace(world, node_ranks=1)), loss_chunk=5, seed=0)
    return str(error.value)


def test_nodes_played_on_one_host_share_no_memory(pool: Pool) -> None:
    assert all("plan.tensor_transport = copy_engine between rank 0" in text for text in pool.run(refusal_text, 2))
