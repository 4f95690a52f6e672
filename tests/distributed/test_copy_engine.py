"""Gathers by copy engines into reused slots (buffers for gathered parameters) equal one device.

On CPUs Gloo copies the data; slots, their order and refused plans are the same as on GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.parallel.copy_engine import CopyGather
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import Plan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import GPT, LLAMA, compare, one_device, plan, sharded
from tests.distributed.test_experts import EVEN
from tests.distributed.test_fp8 import LAYOUT_BOUND, expected_of, first_step, with_fp8
from tests.distributed.test_schedules import DEEP, Case
from tests.slow import quick_first


def with_copy_engine(kernel_plan: Plan) -> Plan:
    return replace(kernel_plan, gather_transport="copy_engine")


CASES = {
    "fsdp 2, accumulate 4, tied": (GPT, plan(1, 2, 1)),
    "fsdp 4, keep gathered": (LLAMA, plan(1, 4, 1, reshard=False)),
    "hsdp 2x2, accumulate 2": (LLAMA, plan(2, 2, 1)),
    "zbv 2 x fsdp 2": (DEEP, Case("zbv", pipeline=2, shard=2, micro=2).plan),
    "experts on ranks of their own, fsdp 2": (EVEN, Case("1f1b", shard=2, expert=2).plan),
    "experts on ranks of their own, paired": (EVEN, Case("paired", shard=2, expert=2).plan),
    "ring 2 x fsdp 2": (LLAMA, Case("1f1b", ring=2, shard=2, micro=2).plan),
    "layered, fsdp 2": (DEEP, Case("breadth_first", shard=2).plan),
}
IN_FP8 = with_fp8(plan(1, 2, 2))


@pytest.mark.parametrize("name", quick_first(1, CASES))
def test_float64_equals_one_device(pool: Pool, name: str) -> None:
    spec, tested_plan = CASES[name]
    compare(pool.run(sharded, tested_plan.ranks, spec, with_copy_engine(tested_plan)), one_device(spec), 1e-9)


def test_weights_travel_in_fp8(pool: Pool) -> None:
    truth = expected_of(first_step(pool, LLAMA, IN_FP8))
    compare(first_step(pool, LLAMA, with_copy_engine(IN_FP8)), truth, LAYOUT_BOUND, weights=False)


def count_slots(world, tested_plan: Plan, takes_slots_early: bool) -> tuple[list[dict[str, Any]], int, int]:
    """Run one step; returns it, the number of gather buffers and of those in slots. `early` frees slots while they are in use."""
    allocate = CopyGather.allocate
    slot_counts = [0, 0]

    def counting(self: CopyGather, *args: Any, **options: Any) -> torch.Tensor:
        output = allocate(self, *args, **options)
        slot_counts[0] += 1
        for slot in self._slots:
            slot_counts[1] += slot.memory.data_ptr() == output.data_ptr()
            slot.in_use = slot.in_use and not takes_slots_early
        return output

    CopyGather.allocate = counting  # type: ignore[method-assign]
    try:
        return sharded(world, LLAMA, tested_plan, 1.0, 1), *slot_counts
    finally:
        CopyGather.allocate = allocate  # type: ignore[method-assign]


def test_every_gather_finds_a_slot_and_none_is_taken_early(pool: Pool) -> None:
    tested_plan = with_copy_engine(plan(1, 2, 4))
    counts_by_rank = pool.run(count_slots, 2, tested_plan, False)
    compare([steps for steps, _, _ in counts_by_rank], one_device(LLAMA)[:1], 1e-9)
    assert all(used_slots == slots > 0 for _, used_slots, slots in counts_by_rank)
    with pytest.raises(AssertionError):
        compare([steps for steps, _, _ in pool.run(count_slots, 2, tested_plan, True)], one_device(LLAMA)[:1], 1e-9)


def refusal_text(world) -> str:
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    tested_plan = with_copy_engine(plan(1, world.ranks, 1))
    with pytest.raises(BadInput) as error:
        build_engine(LLAMA, tested_plan, build_mesh(tested_plan, replace(world, node_ranks=1)), loss_chunk=5, seed=0)
    return str(error.value)


def test_nodes_played_on_one_host_share_no_memory(pool: Pool) -> None:
    assert all("plan.gather_transport = copy_engine between rank 0" in text for text in pool.run(refusal_text, 2))
