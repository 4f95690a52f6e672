"""The token exchange by kernels equals that by messages, on CPU ranks that map shared files, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.cases_token_exchange import by_kernels_and_messages
from tests.distributed.pool import Pool

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "compiled"), [(2, False), (2, True), (3, False)])
def test_outputs_and_gradients_equal_those_by_messages(pool: Pool, tmp_path: Path, ranks: int, compiled: bool) -> None:
    for pairs in pool.run(by_kernels_and_messages, ranks, tmp_path, 5, compiled):
        assert len(pairs) == 4 * 3 + 2
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
