"""Creates small checkpoints for the tests of `meshwright.checkpoint`: seven tensors whose values follow from the step."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.checkpoint.format.contents import Contents, read_contents
from meshwright.checkpoint.format.manifest import read_manifest
from meshwright.checkpoint.store import CheckpointStore

TEXTS = {"config.yaml": "name: tiny\n", "plan.yaml": "mesh: []\n"}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Weights and moments of several shapes and dtypes, different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(7, 4, generator=generator),
        "model.norm.weight": torch.randn(5, generator=generator).to(torch.bfloat16),
        "model.scale": torch.randn((), generator=generator, dtype=torch.float64),
        "model.nothing": torch.empty(0, 3),
        "optimizer.exp_avg.embed.weight": torch.randn(7, 4, generator=generator),
        "optimizer.count": torch.randint(0, 100, (3,), generator=generator),
        "optimizer.mask": torch.rand(9, generator=generator) > 0.5,
    }


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}


def save(folder: Path, step: int, store: CheckpointStore | None = None) -> Path:
    """A committed checkpoint whose values follow from its step."""
    store = store or CheckpointStore(folder)
    return store.save(step, tensors(step), {"step": step, "samples": 8 * step}, TEXTS).path


def stored(path: Path) -> Contents:
    """What the checkpoint at `path` records of its tensors."""
    return read_contents(path, read_manifest(path))


def holds(path: Path, step: int) -> bool:
    """Whether the checkpoint at `path` loads as `save` wrote it."""
    loaded = blank()
    state = CheckpointStore(path.parent).load(path, loaded)
    return state == {"step": step, "samples": 8 * step} and same(loaded, tensors(step))


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
