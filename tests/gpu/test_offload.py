"""GPU: activations in host memory give the same losses and free device memory; takes a minute on one H200."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from tests.gpu.runs import RUNS_LIMIT, Record, steps, trained

from meshwright.kernels.pinned import allocate_pinned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

LAYERS = 8
RUN = f"""
model: {{family: llama, layers: {LAYERS}, hidden: 1024, heads: 16, kv_heads: 8, head_dim: 64, ffn_hidden: 3584, max_seq_len: 1024}}
data: {{mix: stdlib}}
train:
  {{steps: 6, global_batch: 16, seq_len: 1024, learning_rate: 1e-3, warmup_steps: 1, validate_every: 0, loss_chunk: 1024,
   deterministic: true}}
cluster: {{gpu: H200, gpus_per_node: 1}}
checkpoint: {{at_end: false}}
plan: {{micro_batch: 8}}
"""
FIGURES = ("loss", "grad_norm")
"""Figures of a step that are equal in bits in deterministic runs with the same sums."""


def same_figures(first: Sequence[Record], second: Sequence[Record]) -> bool:
    """Whether two runs have the same `FIGURES` in each step."""
    return [[step[name] for name in FIGURES] for step in first] == [[step[name] for name in FIGURES] for step in second]


def peak(records: list[Record]) -> int:
    return max(record["memory_allocated_peak_bytes"] for record in records)


def foretold(folder: Path) -> int:
    return yaml.safe_load((folder / "plan.yaml").read_text())["predicted"]["memory_peak_bytes"]


def test_locked_memory_is_its_owners() -> None:
    class Owner:
        pass

    owner, size = Owner(), 3 * 2**20 + 1
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    for _ in range(8):  # a buffer that is dropped stays locked, and no other gets its pages
        line = allocate_pinned(owner, size, "a test")
        assert line.is_pinned()
        line.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(line, source.cpu())


FIRST = LAYERS // 2
LAYERS_AWAY = f"plan.layers=[{{range: 0-{FIRST - 1}, offload: activations}}, {{range: {FIRST}-{LAYERS - 1}}}]"


@pytest.mark.parametrize(
    ("recompute", "overrides"),
    [
        ("none", ["plan.offload=activations", "plan.recompute=none"]),
        ("full", ["plan.offload=activations", "plan.recompute=full"]),
        ("none", [LAYERS_AWAY]),
    ],
    ids=["all, recompute none", "all, recompute full", "the first half"],
)
def test_device_memory_is_freed_and_losses_are_equal(tmp_path: Path, recompute: str, overrides: list[str]) -> None:
    without_offload = ["plan.offload=none", f"plan.recompute={recompute}"]
    on_device, offloaded = (
        steps(trained(tmp_path, RUN, name, 1, arguments))
        for name, arguments in (("here", without_offload), ("away", overrides))
    )
    assert same_figures(offloaded, on_device)
    predicted_saving = foretold(tmp_path / "here") - foretold(tmp_path / "away")
    print(f"let go {peak(on_device) - peak(offloaded)}, foretold {predicted_saving}")
    assert predicted_saving > 0 and peak(on_device) - peak(offloaded) == pytest.approx(predicted_saving, rel=0.15)
