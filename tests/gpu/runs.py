"""Starts `meshwright train` as a separate process for tests of complete runs on GPUs, and reads its metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

LLAMA = """
model: {family: llama, layers: 3, hidden: 512, heads: 8, kv_heads: 4, head_dim: 64, ffn_hidden: 1024, max_seq_len: 512}
data: {mix: stdlib, validation_tokens: 4096}
train: {steps: 6, global_batch: 8, seq_len: 512, learning_rate: 1e-3, warmup_steps: 1, timeout_seconds: 100}
cluster: {gpu: H200, gpus_per_node: 1}
checkpoint: {at_end: false}
"""
"""A small run file of bf16."""
LAYOUT_BOUND = 2e-3
"""Relative difference of bf16 losses over six steps between layouts: the same matmuls, gradients summed in another
order."""
LIMIT = 200
"""Seconds for one run; ranks that wait for each other say so before it is over (`timeout_seconds`)."""
RUNS_LIMIT = 5 * LIMIT
"""Seconds for one test, of up to five runs: pytest's own limit is for one."""

Record = Mapping[str, Any]


def needs(gpus: int) -> None:
    """Skip the test on a host with fewer GPUs."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")


def trained(folder: Path, text: str, name: str, gpus: int, overrides: Iterable[str] = ()) -> list[Record]:
    """The metrics of the run `name` of the run file `text` on so many GPUs of this host, with `overrides` laid over it."""
    file = folder / "run.yaml"
    file.write_text(text)
    arguments = [f"name={name}", f"cluster.gpus_per_node={gpus}", *overrides]
    command = [sys.executable, "-m", "meshwright", "train", str(file), "--runs", str(folder), *arguments]
    subprocess.run(command, check=True, timeout=LIMIT)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def figures(records: Sequence[Record]) -> list[float]:
    """The loss of every step and of the final validation, and the gradient norm of the first step.

    The norm shows a factor common to all gradients, which clipping and Adam's normalisation remove from the other figures.
    """
    losses = [record["loss"] for record in records if record["kind"] in ("step", "validation")]
    return [*losses, steps(records)[0]["grad_norm"]]


def steps(records: Iterable[Record]) -> list[Record]:
    """The lines of steps alone."""
    return [record for record in records if record["kind"] == "step"]
