"""On GPUs, modules that predict further tokens: compiled, fused and divided layouts give the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.runs import LAYOUT_BOUND, LLAMA, RUNS_LIMIT, figures, needs, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

COMMON = ["model.layers=4", "model.prediction_depth=2", "plan.micro_batch=2"]
CASES = {
    "not compiled": (1, ["plan.compile=false"]),
    "recompute full": (1, ["plan.recompute=full"]),
    "shard 2": (2, ["plan.shard=2", "plan.reshard=true"]),
    "tensor 2": (2, ["plan.tensor=2"]),
    "pipeline 2": (2, ["plan.pipeline=2", "plan.schedule=1f1b"]),
    "pipeline 2, both ends on one rank": (2, ["plan.pipeline=2", "plan.schedule=zbv"]),
}


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return figures(trained(tmp_path_factory.mktemp("one"), LLAMA, "one", 1, COMMON))


@pytest.mark.parametrize("name", CASES)
def test_layouts_agree(name: str, one_gpu: list[float], tmp_path: Path) -> None:
    gpus, overrides = CASES[name]
    needs(gpus)
    assert figures(trained(tmp_path, LLAMA, "run", gpus, [*COMMON, *overrides])) == pytest.approx(
        one_gpu, rel=LAYOUT_BOUND
    )
