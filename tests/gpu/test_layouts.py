"""On real GPUs every layout of one small run gives the same losses; each case is one `meshwright train` with its own ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

RUN = """
model: {family: llama, layers: 3, hidden: 512, heads: 8, kv_heads: 4, head_dim: 64, ffn_hidden: 1024, max_seq_len: 512}
data: {mix: stdlib}
train: {steps: 6, global_batch: 8, seq_len: 512, learning_rate: 1e-3, warmup_steps: 1, validate_batches: 1}
cluster: {gpu: H200, gpus_per_node: 1}
checkpoint: {at_end: false}
"""
LAYOUT_BOUND = 2e-3
"""Relative difference of bf16 losses over six steps between layouts: the same products, gradients summed in another order."""
CASES = {
    "shard 2": (2, ["plan.reshard=true"]),
    "shard 2, kept, accumulate 2": (2, ["plan.reshard=false", "plan.micro_batch=2"]),
    "shard 4": (4, []),
    "replicate 2 x shard 2": (4, ["plan.replicate=2", "plan.micro_batch=1"]),
    "tensor 2": (2, ["plan.tensor=2"]),
    "tensor 2, several sequences, not compiled": (2, ["plan.tensor=2", "plan.micro_batch=4", "plan.compile=false"]),
    "tensor 2 x shard 2, recompute selective": (4, ["plan.tensor=2", "plan.shard=2", "plan.recompute=selective"]),
    "tensor 2 x pipeline 2": (4, ["plan.tensor=2", "plan.pipeline=2", "plan.schedule=1f1b", "plan.micro_batch=1"]),
    "tensor 8, two ranks a key/value head": (8, ["plan.tensor=8"]),
    "context ring 2": (2, ["plan.context_ring=2"]),
    "context ring 2, several sequences, not compiled": (
        2,
        ["plan.context_ring=2", "plan.micro_batch=4", "plan.compile=false"],
    ),
    "context ring 2, recompute selective": (2, ["plan.context_ring=2", "plan.recompute=selective"]),
    "ulysses 2": (2, ["plan.context_ulysses=2"]),
    "ulysses 2, recompute full, not compiled": (
        2,
        ["plan.context_ulysses=2", "plan.recompute=full", "plan.compile=false"],
    ),
    "ring 2 x ulysses 2": (4, ["plan.context_ring=2", "plan.context_ulysses=2"]),
    "ring 2 x tensor 2": (4, ["plan.context_ring=2", "plan.tensor=2"]),
    "ulysses 8, two ranks a key/value head": (8, ["plan.context_ulysses=8"]),
    "recompute full": (1, ["plan.recompute=full"]),
    "recompute selective": (1, ["plan.recompute=selective"]),
    "not compiled": (1, ["plan.compile=false"]),
}


def losses(folder: Path, name: str, gpus: int, overrides: list[str]) -> list[float]:
    (folder / "run.yaml").write_text(RUN)
    words = [f"name={name}", f"cluster.gpus_per_node={gpus}", *overrides]
    command = [sys.executable, "-m", "meshwright", "train", str(folder / "run.yaml"), "--runs", str(folder), *words]
    subprocess.run(command, check=True, timeout=300)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] in ("step", "validation")]


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("one"), "one", 1, [])


@pytest.mark.parametrize("name", CASES)
def test_layouts_agree(name: str, one_gpu: list[float], tmp_path: Path) -> None:
    gpus, overrides = CASES[name]
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    assert losses(tmp_path, "run", gpus, overrides) == pytest.approx(one_gpu, rel=LAYOUT_BOUND)


def test_document_masks_agree_with_the_plain_kernels(tmp_path: Path) -> None:
    """Flex attention over packed documents against the dense mask of fp32 on the CPU, and across layouts."""
    masked = ["data.document_mask=true"]
    on_gpu = losses(tmp_path, "gpu", 1, masked)
    on_cpu = losses(tmp_path, "cpu", 1, [*masked, "cluster.gpu=cpu"])
    assert on_gpu == pytest.approx(on_cpu, rel=1e-2)
    if torch.cuda.device_count() >= 2:
        for name, axis in (("two", "shard"), ("ring", "context_ring"), ("ulysses", "context_ulysses")):
            assert losses(tmp_path, name, 2, [*masked, f"plan.{axis}=2"]) == pytest.approx(on_gpu, rel=LAYOUT_BOUND)
