"""Shards on a GPU: staged through page-locked memory on the way out, filled by threads on the way in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write import live_state
from tests.checkpoint.made import same, tensors

pytestmark = pytest.mark.gpu


def test_gpu_tensors_come_back_bit_for_bit_wherever_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_state, "WINDOW_BLOCKS", 1)  # the large tensor passes through both buffers
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    saved = {name: tensor.to(device) for name, tensor in tensors(3).items()}
    saved |= {"large": torch.randn(3000, 3333, device=device), "strided": torch.randn(50, 70, device=device).t()}
    saved |= {
        "on.host": torch.arange(5),
        "fp8": torch.randn(64, device=device).to(torch.float8_e4m3fn).view(torch.uint8),
    }
    store = CheckpointStore(tmp_path)
    path = store.save(1, saved, {}, {}).path
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    store.load(path, loaded)
    assert same(loaded, saved)
    host = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in saved.items()}
    store.load(path, host)
    assert same(host, {name: tensor.cpu() for name, tensor in saved.items()})
