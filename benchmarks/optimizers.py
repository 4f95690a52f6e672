"""Trains the quick-start model with every optimizer: learning rates × seeds, the loss on held-out text, one JSON result.

    python benchmarks/optimizers.py --out benchmarks/results/DATE-optimizers-cpu.json
    python benchmarks/optimizers.py --only muon adamw --seeds 1 --steps 20 --out try.json

One process per core trains one run at a time, the longest first; every run has one thread. The batch is 4 sequences of 128 tokens, and 4
or 8 times as many where a configuration says so, so the runs of all configurations take the same steps but not the same tokens. Each run
ends with the loss of the same held-out sequences. A configuration's result is the median over seeds at its best learning rate. A run
that diverges has no loss, and counts as infinite. Runs that --out has already are not repeated, so an interrupted sweep continues.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.durable.writes import write_durable
from meshwright.observe.environment import environment

HELD_OUT = 128
"""Sequences of the loss at the end, equal for all batches."""
ADAMW_RATES = (1.875e-4, 3.75e-4, 7.5e-4, 1.5e-3, 3e-3)
MUON_RATES = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2)
SGD_RATES = (1.5e-2, 3e-2, 6e-2, 1.2e-1, 2.4e-1)
LAMB_RATES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)


@dataclass(frozen=True)
class Configuration:
    """An optimizer at a batch of `factor` times the base, and the learning rates to try."""

    optimizer: str
    factor: int
    rates: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.optimizer} {self.factor}x"


CONFIGURATIONS = (
    Configuration("adamw", 1, ADAMW_RATES),
    Configuration("muon", 1, MUON_RATES),
    Configuration("sgd", 1, SGD_RATES),
    Configuration("adamw", 4, tuple(2 * rate for rate in ADAMW_RATES)),
    Configuration("lamb", 4, LAMB_RATES),
    Configuration("lamb", 8, LAMB_RATES),
)


@dataclass(frozen=True)
class Job:
    """One training run."""

    configuration: str
    optimizer: str
    factor: int
    learning_rate: float
    seed: int


def jobs_of(configurations: Sequence[Configuration], seeds: int) -> list[Job]:
    """All runs, the longest first."""
    jobs = [
        Job(configuration.name, configuration.optimizer, configuration.factor, rate, seed)
        for configuration in configurations
        for rate in configuration.rates
        for seed in range(seeds)
    ]
    return sorted(jobs, key=lambda job: -job.factor)


def overrides_of(job: Job, steps: int, batch: int, seq_len: int) -> list[str]:
    """The run of a job, as overrides of the quick start's."""
    size = batch * job.factor
    return [
        f"name={job.optimizer}-{job.factor}x-{job.learning_rate:g}-{job.seed}".replace(".", "_"),
        f"seed={job.seed}",
        f"train.optimizer.name={job.optimizer}",
        f"train.learning_rate={job.learning_rate}",
        f"train.steps={steps}",
        f"train.warmup_steps={max(1, steps // 10)}",
        f"train.global_batch={size}",
        f"train.seq_len={seq_len}",
        "train.validate_every=0",
        f"data.validation_tokens={HELD_OUT * seq_len}",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "observe.spans=false",
        "observe.phases=false",
        "cluster={gpu: cpu, gpus_per_node: 1}",
        "supervision.restarts=0",
    ]


def held_out_loss(metrics: Path) -> float | None:
    """The last validation's loss in a run's metrics; None for a run without one, as one that diverged."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [line["loss"] for line in lines if line.get("kind") == "validation"]
    return float(losses[-1]) if losses and losses[-1] is not None else None


def train(job: Job, runs: Path, steps: int, batch: int, seq_len: int) -> dict[str, Any]:
    """Train a job in a process of its own; returns its settings and its loss."""
    overrides = overrides_of(job, steps, batch, seq_len)
    name = overrides[0].removeprefix("name=")
    command = [sys.executable, "-m", "meshwright", "train", "--runs", str(runs), "--fresh", *overrides]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True, check=False)
    loss = held_out_loss(runs / name / "metrics.jsonl") if done.returncode in (0, 6) else None
    if done.returncode not in (0, 6):  # 6: the loss or gradient was not finite
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return {**asdict(job), "loss": loss if done.returncode == 0 and loss is not None and math.isfinite(loss) else None}


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By configuration the best learning rate with its median loss over seeds, and all medians by learning rate."""
    found: dict[str, dict[float, list[float]]] = {}
    for result in results:
        loss = math.inf if result["loss"] is None else result["loss"]
        found.setdefault(result["configuration"], {}).setdefault(result["learning_rate"], []).append(loss)
    answer = {}
    for name, by_rate in found.items():
        medians = {rate: statistics.median(losses) for rate, losses in sorted(by_rate.items())}
        best = min(medians, key=lambda rate: medians[rate])
        shown = {f"{rate:g}": median if math.isfinite(median) else None for rate, median in medians.items()}
        answer[name] = {
            "learning_rate": best,
            "loss": shown[f"{best:g}"],
            "losses": sorted(by_rate[best]),
            "medians": shown,
        }
    return answer


def comparisons(best: dict[str, Any]) -> dict[str, float]:
    """Losses relative to those they are compared with; those of configurations that did not run are left out."""
    pairs = [("muon 1x", "adamw 1x"), ("lamb 4x", "adamw 1x"), ("lamb 4x", "adamw 4x"), ("lamb 8x", "adamw 1x")]
    return {
        f"{name} / {other}": best[name]["loss"] / best[other]["loss"]
        for name, other in pairs
        if all(part in best and best[part]["loss"] is not None for part in (name, other))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="optimizers or configurations (lamb, 'lamb 4x')")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=4, help="sequences at factor 1")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    chosen = [c for c in CONFIGURATIONS if not arguments.only or {c.name, c.optimizer} & set(arguments.only)]
    task = {"model": "llama-nano", "steps": arguments.steps, "batch": arguments.batch, "seq_len": arguments.seq_len}
    results = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    known = {(r["configuration"], r["learning_rate"], r["seed"]) for r in results}
    jobs = [
        job for job in jobs_of(chosen, arguments.seeds) if (job.configuration, job.learning_rate, job.seed) not in known
    ]
    sizes = arguments.steps, arguments.batch, arguments.seq_len
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        # The first run prepares the corpus, which the others share.
        train(Job("warm-up", "adamw", 1, 1e-3, 0), Path(folder), 2, arguments.batch, arguments.seq_len)
        for future in as_completed([pool.submit(train, job, Path(folder), *sizes) for job in jobs]):
            results.append(future.result())
            best = summary(results)
            record = {
                "task": task,
                "best": best,
                "comparisons": comparisons(best),
                "environment": environment(),
                "runs": results,
            }
            write_durable(arguments.out, json.dumps(record, indent=1))
            latest = results[-1]
            print(
                f"{latest['configuration']:>9} rate {latest['learning_rate']:g} seed {latest['seed']}: {latest['loss']}",
                flush=True,
            )
    print(json.dumps({"best": summary(results), "comparisons": comparisons(summary(results))}, indent=1))


if __name__ == "__main__":
    main()
