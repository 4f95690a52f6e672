"""Offloaded optimizers side by side: the words of runs, and on a CPU the same first loss as a peer."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest
from benchmarks.offload_largest import BASE, GPT, gpt_words, largest_words

from benchmarks import offload_peers
from meshwright.config.load import load_run
from meshwright.spec.model import parameter_count

CLUSTER = ["cluster.gpu=H200", "cluster.host_memory_gib=128"]


@pytest.mark.slow
def test_models_that_are_tried_are_valid_runs_each_smaller_than_the_last() -> None:
    tried = [load_run(None, [*words, *BASE[1:], *CLUSTER]).model for words in islice(largest_words(CLUSTER, "int8"), 3)]
    counts = [parameter_count(model) for model in tried]
    assert 25e9 < counts[-1] < counts[0] and all(later <= 0.98 * count for count, later in pairwise(counts))
    (words,) = gpt_words()
    model = load_run(None, [*words, *BASE[1:], *CLUSTER]).model
    assert model.tied and model.hidden == GPT["hidden"] and parameter_count(model) == pytest.approx(20e9, rel=0.05)


@pytest.mark.slow
def test_a_peer_on_a_cpu_begins_with_our_loss(tmp_path: Path) -> None:
    words = ["model=llama-nano", "train.seq_len=32", "train.global_batch=2", "cluster.gpu=cpu", "--steps", "4"]
    out = tmp_path / "peers.json"
    command = [sys.executable, offload_peers.__file__, *words, "--only", "ours,fsdp2", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    ours, peer = json.loads(out.read_text())["results"]
    assert ours["losses"][0] == pytest.approx(peer["losses"][0], rel=1e-3) and len(peer["losses"]) == 4
