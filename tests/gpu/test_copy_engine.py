"""Gathers by copy engines on two GPUs: NCCL takes them, and runs train as with kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.runs import LAYOUT_BOUND, LLAMA, RUNS_LIMIT, figures, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

CASES = {
    "shard 2": ["plan.reshard=true", "plan.micro_batch=1"],
    "shard 2, kept": ["plan.reshard=false", "plan.micro_batch=2"],
    "shard 2, matmuls in fp8": ["plan.linear=fp8_tensorwise", "plan.gather=compute"],
    "shard 2, gathered in fp8": ["plan.linear=fp8_tensorwise", "plan.gather=fp8"],
}


@pytest.mark.parametrize("name", CASES)
def test_runs_train_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs 2 GPUs that map each other's memory")
    overrides = ["plan.shard=2", *CASES[name]]
    kernels = figures(trained(tmp_path, LLAMA, "nccl", 2, [*overrides, "plan.gather_transport=nccl"]))
    for key, value in (
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "TUNING,COLL"),
        ("NCCL_DEBUG_FILE", f"{tmp_path}/nccl.%p"),
    ):
        monkeypatch.setenv(key, value)
    copies = figures(trained(tmp_path, LLAMA, "copy_engine", 2, [*overrides, "plan.gather_transport=copy_engine"]))
    assert copies[0] == kernels[0], "the first loss is made of gathered weights alone"
    assert copies == pytest.approx(kernels, rel=LAYOUT_BOUND)
    nccl_log = "\n".join(file.read_text(errors="replace") for file in tmp_path.glob("nccl.*"))
    by_kernel = [line for line in nccl_log.splitlines() if "AllGather" in line and "RING" in line]
    assert "AllGather" in nccl_log and not by_kernel, by_kernel[:2]
