"""Gradients that travel as they were computed and are added up where they arrive: against one device, kernels and sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.parallel.gradient_exchange import GradientExchange
from meshwright.spec.plan import LayerStrategy, Plan, Precision
from tests.distributed.pool import Pool
from tests.distributed.test_equality import GPT, LLAMA, compare, one_device, plan, sharded
from tests.distributed.test_experts import EVEN
from tests.distributed.test_fp8 import low
from tests.distributed.test_fsdp import COLUMNS, ROWS, unit_of
from tests.distributed.test_schedules import DEEP, Case
from tests.slow import quick_first


def exchanging(chosen: Plan) -> Plan:
    return replace(chosen, reduce_engine="exchange")


WHOLE = (LayerStrategy(gradients="whole"),)
CASES = {
    "fsdp 2, accumulate 4, tied": (GPT, plan(1, 2, 1)),
    "hsdp 2x2, accumulate 2": (LLAMA, plan(2, 2, 1)),
    "zbv 2 x fsdp 2": (DEEP, Case("zbv", pipeline=2, shard=2, micro=2).plan),
    "fsdp 4, keep gathered": (LLAMA, plan(1, 4, 1, reshard=False)),
    "fsdp 2, gradients whole": (LLAMA, plan(1, 2, 1, layers=WHOLE)),
    "tensor 2 x fsdp 2": (LLAMA, Case("1f1b", tensor=2, shard=2, micro=2).plan),
    "experts on ranks of their own, fsdp 4": (EVEN, Case("1f1b", shard=4, expert=2).plan),
    "ring 2 x fsdp 2": (LLAMA, Case("1f1b", ring=2, shard=2, micro=2).plan),
    "layered, fsdp 2": (DEEP, Case("breadth_first", shard=2).plan),
}


@pytest.mark.parametrize("name", quick_first(2, CASES))
def test_float64_equals_one_device(pool: Pool, name: str) -> None:
    spec, chosen = CASES[name]
    compare(pool.run(sharded, chosen.ranks, spec, exchanging(chosen)), one_device(spec), 1e-9)


def mean(world, chosen: Plan) -> list[dict[str, Any]]:
    """A run whose exchange takes the mean of what came in place of its sum."""
    plain = GradientExchange.__call__

    def divided(self: GradientExchange, total: torch.Tensor, parts: torch.Tensor, group: Any) -> None:
        plain(self, total, parts, group)
        total /= group.size()

    with mock.patch.object(GradientExchange, "__call__", divided):
        return sharded(world, LLAMA, chosen, 1.0, 1)


def test_a_mean_in_place_of_the_sum_is_noticed(pool: Pool) -> None:
    with pytest.raises(AssertionError):
        compare(pool.run(mean, 2, exchanging(plan(1, 2, 4))), one_device(LLAMA)[:1], 1e-9)


BITS = {
    "2 micro-batches": plan(1, 2, 2, compute="bf16"),
    "gradients whole": plan(1, 2, 2, compute="bf16", layers=WHOLE),
    "products in fp8": low(plan(1, 2, 2, compute="bf16")),
}


@pytest.mark.parametrize("name", quick_first(1, BITS))
def test_two_ranks_get_the_bits_of_kernels(pool: Pool, name: str) -> None:
    """A sum of two has no order, and a kernel's fp32 gradients are the exchanged bf16 ones: not a bit may differ, in three steps."""
    kernels, exchange = (pool.run(sharded, 2, LLAMA, one) for one in (BITS[name], exchanging(BITS[name])))
    assert_same(exchange, kernels)


def test_a_run_repeats_its_bits(pool: Pool) -> None:
    chosen = exchanging(plan(1, 4, 1, compute="bf16"))
    once, again = (pool.run(sharded, 4, LLAMA, chosen, 1.0, 2) for _ in range(2))
    assert_same(once, again)


def assert_same(ours: list[list[dict[str, Any]]], theirs: list[list[dict[str, Any]]]) -> None:
    for mine, other in zip(
        (step for run in ours for step in run), (step for run in theirs for step in run), strict=True
    ):
        assert (mine["loss"], mine["norm"]) == (other["loss"], other["norm"])
        for kind in ("gradients", "weights"):
            assert mine[kind].keys() == other[kind].keys()
            assert all(torch.equal(value, other[kind][name]) for name, value in mine[kind].items())


VALUES = (256.0, 1.0, 1 / 64, 1 / 2)
"""A rank's gradient each. In bf16 it is exact; the sum of all is in fp32, and of no two with the first in bf16."""


def exchanged(world, precision: Precision) -> dict[str, Any]:
    """One gradient a rank, then two added up before they travel, on uneven shards; and the format and bytes of what was sent."""
    layer, unit = unit_of(world, precision=precision)
    unit.reduce_through(exchange := Counted())
    sums = []
    for times in (1, 2):
        unit.unshard()
        unit.wait()
        for _ in range(times):
            layer(torch.full((1, COLUMNS), VALUES[world.rank], dtype=layer.weight.dtype)).sum().backward()
            if times > 1:
                unit.accumulate()
        unit.reshard()
        unit.reduce()
        unit.finish()
        sums.append(layer.weight.grad.to_local().clone())
        layer.weight.grad = None
    return {"sums": sums, "sent": exchange.sent}


class Counted(GradientExchange):
    def __init__(self) -> None:
        self.sent: list[tuple[torch.dtype, int]] = []

    def __call__(self, total: torch.Tensor, parts: torch.Tensor, group: Any) -> None:
        self.sent.append((parts.dtype, parts.numel()))
        super().__call__(total, parts, group)


@pytest.mark.parametrize(
    ("precision", "formats"),
    [
        (Precision(), (torch.bfloat16, torch.float32)),
        (Precision(compute="fp32"), (torch.float32, torch.float32)),
        (Precision(compute="fp32", reduce="bf16"), (torch.bfloat16, torch.bfloat16)),
    ],
)
def test_sums_are_those_of_fp32_and_travel_as_they_were_made(
    pool: Pool, precision: Precision, formats: tuple[torch.dtype, ...]
) -> None:
    total = torch.tensor(VALUES).sum()
    padded = 4 * -(-ROWS // 4) * COLUMNS
    for rank, seen in enumerate(pool.run(exchanged, 4, precision)):
        assert seen["sent"] == [(kind, padded) for kind in formats]
        rows = (2, 2, 1, 0)[rank]
        kind = torch.bfloat16 if precision.reduce == "bf16" else torch.float32
        for found, factor in zip(seen["sums"], (1, 2), strict=True):
            assert torch.equal(found, torch.full((rows, COLUMNS), (factor * total).to(kind).item()))
            assert found.dtype == torch.float32
