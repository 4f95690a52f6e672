"""Offloaded optimizers side by side: the words of runs, and on a CPU the same first loss as a peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest
from benchmarks.offload_largest import BASE, GPT, gpt_arguments, largest_arguments
from bounded import run_for

from benchmarks import offload_largest, offload_peers
from meshwright.config.load import load_run
from meshwright.spec.model import parameter_count

CLUSTER = ["cluster.gpu=H200", "cluster.host_memory_gib=128"]


@pytest.mark.slow
def test_models_that_are_tried_are_valid_runs_each_smaller_than_the_last() -> None:
    tried = [
        load_run(None, [*arguments, *BASE[1:], *CLUSTER]).model
        for arguments in islice(largest_arguments(CLUSTER, "int8"), 3)
    ]
    counts = [parameter_count(model) for model in tried]
    assert 25e9 < counts[-1] < counts[0] and all(later <= 0.98 * count for count, later in pairwise(counts))
    (arguments,) = gpt_arguments()
    model = load_run(None, [*arguments, *BASE[1:], *CLUSTER]).model
    assert model.tied and model.hidden == GPT["hidden"] and parameter_count(model) == pytest.approx(20e9, rel=0.05)


@pytest.mark.slow
def test_a_trial_on_a_cpu_trains_the_given_model(tmp_path: Path) -> None:
    out, arguments = (
        tmp_path / "largest.json",
        ["model=llama-nano", "train.seq_len=32", "cluster.gpu=cpu", "plan.compute=bf16"],
    )
    command = [
        sys.executable,
        offload_largest.__file__,
        *arguments,
        "--only",
        "bf16",
        "--tries",
        "1",
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (result,) = json.loads(out.read_text())["results"]
    assert result["model"][0] == arguments[0] and not result["failed"] and len(result["losses"]) == 6
    assert result["step_seconds"] > 0 and result["offload_fraction"] == 1


OPTIMIZER_OF_TORCHAO = """
class CPUOffloadOptimizer:  # with the signature of torchao 0.17's, which needs a GPU
    def __init__(self, params, optimizer_class, *, offload_gradients=False, minimal_size=4096, **kwargs):
        assert kwargs.pop("fused")
        self._optimizer = optimizer_class(params, **kwargs)
        self.step, self.zero_grad = self._optimizer.step, self._optimizer.zero_grad
"""


@pytest.mark.slow
def test_peers_on_a_cpu_begin_with_our_loss(tmp_path: Path) -> None:
    """torchao's optimizer is played by torch's; its weights are in bf16."""
    arguments = ["model=llama-nano", "train.seq_len=32", "train.global_batch=2", "cluster.gpu=cpu", "--steps", "4"]
    out, package = tmp_path / "peers.json", tmp_path / "torchao"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "optim.py").write_text(OPTIMIZER_OF_TORCHAO)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, offload_peers.__file__, *arguments, "--only", "ours,fsdp2,torchao", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": path})
    ours, fsdp2, torchao = json.loads(out.read_text())["results"]
    for peer, error in ((fsdp2, 1e-3), (torchao, 1e-2)):
        assert peer["losses"][0] == pytest.approx(ours["losses"][0], rel=error) and len(peer["losses"]) == 4, peer


def test_steps_of_a_method_that_was_stopped_count() -> None:
    lines = [{"kind": "start"}, *({"kind": "step", "step_seconds": float(n), "loss": 9.0 - n} for n in range(4))]
    text = "\n".join([*map(json.dumps, lines), '{"kind": "step", "step_sec'])
    run = load_run(None, ["model=llama-nano", "train.seq_len=32", "train.global_batch=2", "cluster.gpu=cpu"])
    steps = offload_peers.steps_of(text)
    assert offload_peers.figures(run, steps)["step_seconds"] == 2.5
    begun = offload_peers.figures(run, steps[1:2])
    assert (begun["step_seconds"], begun["tokens_per_second"], begun["timed_steps"]) == (1.0, 64.0, 1)


def test_a_program_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    """The shell's child holds the pipe open while it lives; its end is read at once."""
    reading, writing = os.pipe()
    assert run_for(["sh", "-c", "sleep 60 & wait"], 0.2, writing) is None
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert run_for([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == 3
