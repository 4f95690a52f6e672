"""What recompute leaves unsaid."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._logging import warning_once

from meshwright.parallel.recompute import recomputing


def test_a_compiler_s_remark_on_every_block_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    warning_once.cache_clear()  # said by an earlier test of this process it would not be said again
    block = torch.compile(recomputing(lambda x: torch.sin(x @ x).sum(), "selective"), backend="aot_eager")
    with caplog.at_level(logging.WARNING):
        block(torch.eye(3, requires_grad=True)).backward()
        logging.getLogger("torch._higher_order_ops.wrap").warning("another remark")
    assert [record.getMessage() for record in caplog.records] == ["another remark"]
