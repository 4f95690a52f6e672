"""Gradients summed by exchange on GPUs: runs train as with kernels, and again the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.runs import LAYOUT_BOUND, LLAMA, RUNS_LIMIT, figures, needs, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

CASES = {
    "shard 2": (2, ["plan.shard=2", "plan.reshard=true", "plan.micro_batch=1"]),
    "shard 2, gradients whole": (2, ["plan.shard=2", "plan.gradients=whole", "plan.micro_batch=2"]),
    "shard 2, copied gathers": (2, ["plan.shard=2", "plan.gather_engine=copy", "plan.micro_batch=2"]),
    "replicate 2 x shard 2": (4, ["plan.replicate=2", "plan.shard=2", "plan.micro_batch=1"]),
    "shard 4": (4, ["plan.shard=4", "plan.micro_batch=1"]),
}


@pytest.mark.parametrize("name", CASES)
def test_runs_train_alike_and_repeat_their_bits(name: str, tmp_path: Path) -> None:
    """Two ranks' sums have no order and get the bits of kernels; more ranks add in another order, and always in the same."""
    gpus, words = CASES[name]
    needs(gpus)
    kernels = figures(trained(tmp_path, LLAMA, "kernel", gpus, [*words, "plan.reduce_engine=kernel"]))
    runs = [
        figures(trained(tmp_path, LLAMA, f"exchange{turn}", gpus, [*words, "plan.reduce_engine=exchange"]))
        for turn in range(2)
    ]
    assert runs[0][0] == kernels[0], "the first loss is made of no gradient"
    assert runs[0] == pytest.approx(kernels, rel=LAYOUT_BOUND)
    assert runs[0] == pytest.approx(runs[1], rel=1e-6), "attention's backward alone may add in another order"
