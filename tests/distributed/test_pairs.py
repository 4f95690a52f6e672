"""Pairs of features that test_schedules and test_equality do not cover, compared with one device.

docs/design/executor.md has the table; tests/docs/test_features.py makes it from these lists.
"""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.test_schedules import UNEVEN, UNEVEN_V, Case, check

UNEVEN_LOOPED = (("0-1", "5-6"), ("2-4", "7"))
LITTLE_MEMORY = [  # gradients="whole": every rank has all gradients of its layers, else they are sharded
    Case("gpipe", pipeline=2, replicate=2, recompute="full", stages=UNEVEN),
    Case("1f1b", pipeline=2, replicate=2, recompute="selective", stages=UNEVEN, reshard=False, gradients="whole"),
    Case("interleaved", pipeline=2, replicate=2, recompute="full", stages=UNEVEN_LOOPED),
    Case("zb_h1", pipeline=2, replicate=2, recompute="full", stages=UNEVEN),
    Case("zbv", pipeline=2, shard=2, recompute="full", stages=UNEVEN_V),
    Case("zbv", pipeline=2, replicate=2, recompute="selective", stages=UNEVEN_V),
    Case("breadth_first", pipeline=2, shard=2, recompute="full", stages=UNEVEN_LOOPED),
]
COMPILED = [
    Case("1f1b", replicate=2, compile=True, reshard=False),
    Case("breadth_first", shard=2, compile=True),
    Case("gpipe", pipeline=2, compile=True, recompute="full"),
    Case("interleaved", pipeline=2, compile=True, reshard=False, gradients="whole"),
    Case("zb_h1", pipeline=2, compile=True, recompute="selective"),
    Case("zbv", pipeline=2, compile=True, recompute="full", stages=UNEVEN_V),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LITTLE_MEMORY, ids=str)
def test_little_device_memory(pool: Pool, case: Case) -> None:
    check(pool, case, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled(pool: Pool, case: Case) -> None:
    check(pool, case, tied=True)
