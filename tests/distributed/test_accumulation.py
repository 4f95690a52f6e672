"""Sums of gradient shards over micro-batches: in host memory they have the same bits, in bf16 they are rounded once per addition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.parallel.world import World
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Accumulation, Plan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import LLAMA
from tests.distributed.test_experts import EVEN
from tests.distributed.test_host_optimizer import bf16, steps
from tests.distributed.test_schedules import DEEP, DEEP_TIED, Case
from tests.slow import quick_first

CASES = {
    "tied pipeline": (DEEP_TIED, Case("1f1b", pipeline=2, shard=2, offload="both", recompute="full")),
    "fsdp": (LLAMA, Case("1f1b", shard=4, offload="optimizer")),
    "zero 2": (DEEP, Case("1f1b", shard=2, reshard=False, offload="optimizer")),
    "one rank": (DEEP_TIED, Case("1f1b", micro=2, offload="optimizer")),
    "one rank, all forwards first": (DEEP, Case("gpipe", micro=2)),
    "weight gradients deferred": (DEEP, Case("zb_h1", pipeline=2, offload="optimizer")),
    "both ends on one rank": (DEEP, Case("zbv", pipeline=2, replicate=2, offload="optimizer")),
    "virtual stages": (DEEP_TIED, Case("interleaved", pipeline=2, shard=2, offload="optimizer")),
    "replicas and tensor ranks": (LLAMA, Case("1f1b", replicate=2, tensor=2, offload="optimizer")),
    "context ranks": (DEEP, Case("1f1b", ring=2, micro=2, offload="optimizer")),
    "experts": (EVEN, Case("1f1b", shard=2, expert=2, offload="optimizer")),
}


def with_accumulation(case: Case, accumulation: Accumulation) -> Plan:
    return replace(bf16(case.plan), accumulation=accumulation)


def host_sums(world: World, spec: ModelSpec, case: Case) -> tuple[set[str], dict[str, int]]:
    """Names of results that differ from sums on the device; and how often sums were sent, freed and copied back."""
    from meshwright.parallel.gradient_offload import GradientOffload

    truth, _ = steps(world, spec, with_accumulation(case, "device"))
    calls = dict.fromkeys(("send", "_free", "_start_copies_back"), 0)

    def counted(name: str) -> Any:
        original = getattr(GradientOffload, name)

        def call(self: GradientOffload, *arguments: Any) -> Any:
            calls[name] += 1
            return original(self, *arguments)

        return mock.patch.object(GradientOffload, name, call)

    with counted("send"), counted("_free"), counted("_start_copies_back"):
        actual, _ = steps(world, spec, with_accumulation(case, "host"))
    assert actual.keys() == truth.keys()
    return {name for name, value in actual.items() if not torch.equal(value, truth[name])}, calls


@pytest.mark.parametrize("name", quick_first(1, CASES))
def test_sums_in_host_memory_have_the_same_bits(pool: Pool, name: str) -> None:
    spec, case = CASES[name]
    for differences, calls in pool.run(host_sums, case.plan.ranks, spec, case):
        assert differences == set()
        assert calls["send"] >= calls["_free"] == calls["_start_copies_back"] > 0
