"""Runs with `train.deterministic`, one of them killed and resumed: whether losses and final weights are equal in bits, and the price.

    python benchmarks/deterministic.py 1b moe --out build/deterministic.json

Of each model: `--plain` runs without the key, `--runs` with it, and one more that is killed (SIGKILL to all its processes) after its
first checkpoint and started again. Times are medians of the steps after the fifth of runs that were not killed. Weights and optimizer
state are compared by the digests in the manifest of the last checkpoint. Loss and memory are in the result; FLOPs follow from tokens/s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.inventory import newest_checkpoint
from meshwright.checkpoint.format.manifest import read_manifest

RUN = """\
model: {{{model}}}
data: {{mix: stdlib}}
train: {{steps: {steps}, global_batch: {batch}, seq_len: {length}, learning_rate: {rate}, warmup_steps: 1, validate_every: 0}}
cluster: {{gpu: {gpu}, gpus_per_node: 1}}
checkpoint: {{at_end: true, every: {every}, keep: 1}}
plan: {{micro_batch: {micro}}}
"""
CASES: dict[str, dict[str, Any]] = {
    "1b": {
        "model": "family: llama, layers: 16, hidden: 2048, heads: 32, kv_heads: 8, head_dim: 64, ffn_hidden: 8192, "
        "vocab_size: 128256, max_seq_len: 4096, tied: true",
        "batch": 4,
        "micro": 4,
        "length": 4096,
        "rate": 1e-4,
    },
    "moe": {
        "model": "family: qwen3_moe, layers: 3, hidden: 2048, heads: 32, kv_heads: 4, head_dim: 128, ffn_hidden: 6144, experts: 64, "
        "experts_per_token: 8, expert_hidden: 768, max_seq_len: 4096",
        "batch": 4,
        "micro": 4,
        "length": 4096,
        "rate": 3e-4,
    },
    "tiny": {
        "model": "family: llama, layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn_hidden: 128, max_seq_len: 64",
        "batch": 8,
        "micro": 4,
        "length": 64,
        "rate": 1e-3,
    },
}
KILL_AFTER = 2
"""Steps of a run behind its first checkpoint, after which it is killed."""


class Runs:
    """Runs of one model in one folder."""

    def __init__(self, folder: Path, case: str, steps: int, gpu: str) -> None:
        self._folder, self._every = folder, steps // 2
        self._file = folder / "run.yaml"
        self._file.write_text(RUN.format(**CASES[case], steps=steps, every=self._every, gpu=gpu))

    def train(self, name: str, *, deterministic: bool, killed: bool = False) -> dict[str, Any]:
        """Losses by step, median seconds of a step, peak memory and digests of the last checkpoint; the run's folder is removed."""
        command = [
            sys.executable,
            "-m",
            "meshwright",
            "train",
            str(self._file),
            "--runs",
            str(self._folder),
            f"name={name}",
        ]
        command.append(f"train.deterministic={json.dumps(deterministic)}")
        run = self._folder / name
        with (self._folder / f"{name}.log").open("w") as log:
            if killed:
                self._kill(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True), run)
            result = subprocess.run(command, stdout=log, stderr=log)
        if result.returncode != 0:
            sys.exit(f"{name} ended with {result.returncode}:\n{(self._folder / f'{name}.log').read_text()[-3000:]}")
        lines = self._steps(run)
        files = read_manifest(newest_checkpoint(run)).files
        shutil.rmtree(run)
        seconds = [line["step_seconds"] for line in lines if line["step"] > 5]
        return {
            "losses": {line["step"]: line["loss"] for line in lines},
            "norms": {line["step"]: line["grad_norm"] for line in lines},
            "step_seconds": statistics.median(seconds),
            "peak_bytes": max(line["memory_peak_bytes"] for line in lines),
            "mfu": [
                statistics.median(found) if (found := _values(lines, key)) else None for key in ("mfu", "mfu_full")
            ],
            "digests": {name: record.digest for name, record in sorted(files.items()) if name.endswith(".safetensors")},
        }

    def _kill(self, process: subprocess.Popen[bytes], run: Path) -> None:
        """Kill all processes of a run some steps after its first checkpoint."""
        while not any(step >= self._every + KILL_AFTER for step in (line["step"] for line in self._steps(run))):
            if process.poll() is not None:
                sys.exit(f"{run.name} ended with {process.returncode} before it was killed")
            time.sleep(0.02)
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if f"--runs\0{run.parent}\0".encode() in status.read_bytes():
                    os.kill(int(status.parent.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue
        process.wait()

    @staticmethod
    def _steps(run: Path) -> list[dict[str, Any]]:
        file = run / "metrics.jsonl"
        if not file.is_file():
            return []
        whole = file.read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, whole) if line.get("kind") == "step"]


def _values(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines if line.get(key) is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--plain", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpu", default="H200", help="the cluster's gpu, or cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(Path(folder), case, options.steps, options.gpu)
            plain, same = [], []
            for number in range(max(options.plain, options.runs)):  # in turn, so that the machine's drift reaches both
                if number < options.plain:
                    plain.append(runs.train(f"plain-{number}", deterministic=False))
                if number < options.runs:
                    same.append(runs.train(f"same-{number}", deterministic=True))
            resumed = runs.train("resumed", deterministic=True, killed=True)
        seconds = [statistics.median(run["step_seconds"] for run in side) for side in (plain, same)]
        first = same[0]
        results[case] = {
            "configuration": CASES[case],
            "steps": options.steps,
            "equal_losses": all(run[key] == first[key] for run in [*same, resumed] for key in ("losses", "norms")),
            "equal_weights": all(run["digests"] == first["digests"] for run in [*same, resumed]),
            "plain_runs_equal": all(run["losses"] == plain[0]["losses"] for run in plain),
            "step_seconds": {"plain": seconds[0], "deterministic": seconds[1], "ratio": seconds[1] / seconds[0]},
            "tokens_per_second": [CASES[case]["batch"] * CASES[case]["length"] / each for each in seconds],
            "peak_bytes": [max(run["peak_bytes"] for run in side) for side in (plain, same)],
            "mfu": {"plain": plain[0]["mfu"], "deterministic": first["mfu"]},
            "last_loss": first["losses"][options.steps],
            "digests": first["digests"],
        }
        print(case, json.dumps(results[case]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
