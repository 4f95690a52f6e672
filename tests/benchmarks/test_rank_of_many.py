"""A step of one rank of several on one device, with a tiny model on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rank_of_many.py"
SIZES = "layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, ffn_hidden: 32, vocab_size: 64, max_seq_len: 32"
TINY = f"model={{family: llama, {SIZES}}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "axes"),
    [(1, {"shard": 1}), (4, {"shard": 1, "context_ring": 2, "context_ulysses": 2}), (4, {"shard": 4})],
)
def test_the_rank_has_its_part_of_the_tokens_and_trains(ranks: int, axes: dict[str, int]) -> None:
    pins = [f"plan.{axis}={size}" for axis, size in axes.items()]
    command = [sys.executable, str(SCRIPT), "--ranks", str(ranks), "--seq-len", "32", "--steps", "3"]
    command += ["cluster.gpu=cpu", TINY, f"train.global_batch={axes['shard']}", "plan.micro_batch=1", *pins]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert answer["tokens"] == 32 * axes["shard"] and len(answer["step_seconds"]) == 3
    assert {axis: size for axis, size in answer["plan"]["mesh"].items() if size > 1 or axis == "shard"} == axes
    # The rank's loss is divided by all valid tokens that it knows of; with copies for collectives it falls as elsewhere.
    first, *_, last = answer["losses"]
    assert 0 < last < first
