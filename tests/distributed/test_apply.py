"""The rows of a parameter that each rank stores, on meshes of all axes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.parallel.apply import build_engine, local_weights
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.world import World
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import Plan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import LLAMA, plan
from tests.slow import quick_first


def local_rows(world: World, tested_plan: Plan) -> list[tuple[str, int, int, bool]]:
    """For each parameter: name, first row, number of rows on this rank, and whether they equal those of the whole weight."""
    model = build_engine(LLAMA, tested_plan, build_mesh(tested_plan, world), loss_chunk=8, seed=1).model
    rows_by_parameter = []
    weights = local_weights(model)
    for name, parameter in model.named_parameters():
        local, boxes = weights[name].local, weights[name].boxes
        first = boxes[0].offsets[0] if boxes else len(parameter)
        assert isinstance(parameter, DTensor)
        full = parameter.full_tensor()
        rows_by_parameter.append((name, first, len(local), torch.equal(local, full[first : first + len(local)])))
    return rows_by_parameter


@pytest.mark.parametrize(("replicate", "shard"), quick_first(1, [(2, 2), (1, 4), (4, 1)], unpack=True))
def test_ranks_hold_the_rows_they_say(pool: Pool, replicate: int, shard: int) -> None:
    tested_plan = plan(replicate, shard, 1)
    answers = pool.run(local_rows, 4, tested_plan)
    for rank, rank_rows in enumerate(answers):
        assert all(is_equal for *_, is_equal in rank_rows)
        # The shard axis is innermost, and replicas store the same rows.
        assert rank_rows == answers[rank % shard]
    for rows_of_ranks in zip(*answers[:shard], strict=True):
        name, total = rows_of_ranks[0][0], sum(count for _, _, count, _ in rows_of_ranks)
        assert total == dict(WHOLE)[name]
        assert [first for _, first, _, _ in rows_of_ranks] == [
            sum(count for _, _, count, _ in rows_of_ranks[:n]) for n in range(shard)
        ]


WHOLE = [("embed.weight", 37), ("norm.weight", 16), ("head.weight", 37)] + [
    (f"layers.{layer}.{name}.weight", size)
    for layer in (0, 1)
    for name, size in {
        "attention_norm": 16,
        "attention.qkv": 32,
        "attention.out": 16,
        "mlp_norm": 16,
        "mlp.gate_up": 48,
        "mlp.down": 16,
    }.items()
]


def refusal_text(world: World, tested_plan: Plan) -> str:
    try:
        build_mesh(tested_plan, world)
    except BadInput as error:
        return str(error)
    return "nothing"


def test_a_plan_for_other_ranks_is_refused(pool: Pool) -> None:
    assert (
        pool.run(refusal_text, 2, plan(2, 2, 1))
        == ["the plan is for 4 ranks and the job has 2; plan again or change plan.mesh"] * 2
    )
