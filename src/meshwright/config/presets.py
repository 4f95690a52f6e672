"""The run-file keys that `extends: NAME` of a preset means, and the built-in example clusters. The presets are in `families`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.families.registry import MODEL_PRESETS, PRESETS

__all__ = ["CLUSTER_PRESETS", "MODEL_PRESETS", "PRESET_EXPECTED", "cluster_names", "run_preset"]

CLUSTER_PRESETS = Path(__file__).with_name("clusters")
"""Folder of the example clusters, one YAML file each."""

PRESET_EXPECTED = (
    f"a preset such as llama3-8b, qwen3-8b or deepseek-v3 (the reference of run files lists all {len(PRESETS)})"
)
"""What is expected in place of a name that is no preset; the nearest name is told beside it."""


def run_preset(name: str) -> dict[str, Any]:
    """Return the run-file keys that `extends: NAME` means: the preset's model and training settings."""
    preset = PRESETS[name]
    train = {"seq_len": preset.seq_len, "learning_rate": preset.learning_rate, **preset.train}
    return {"model": {"preset": name}, "train": train}


def cluster_names() -> list[str]:
    """Return the names of the built-in example clusters, for `cluster: NAME`."""
    return sorted(file.stem for file in CLUSTER_PRESETS.glob("*.yaml"))
