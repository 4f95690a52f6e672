"""Continues a Llama-3-8B checkpoint on another number of GPUs and compares the tokens and losses of both runs.

    python benchmarks/resume.py --gpus 8 --resume-gpus 4 --out resume.json
    python benchmarks/resume.py --run runs/bf16 --resume-gpus 4 --out resume.json

Trains benchmarks/llama3-8b.yaml with a checkpoint on the way, starts again from it on fewer GPUs, and holds the steps behind it against the
first run's own; --run takes the folder of a run that has ended in place of the first. Prints and writes one JSON object. It needs 100 GB in
--runs for the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from sides import HERE, MESHWRIGHT, run_logged, step_records

NAME = "llama3-8b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run's folder with a checkpoint before its last steps; trains none")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--resume-gpus", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--resume-at", type=int, default=80, help="step of the checkpoint")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for either run")
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path, default=Path("resume.json"))
    parser.add_argument("overrides", nargs="*", help="key=value for both runs")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    if options.run:
        overrides = [str(options.run / "config.yaml"), "--runs", str(options.run.parent), *options.overrides]
        cluster = yaml.safe_load((options.run / "config.yaml").read_text(encoding="utf-8"))["cluster"]
        options.gpus, folder = cluster["nodes"] * cluster["gpus_per_node"], options.run
    else:
        run_overrides = [f"train.steps={options.steps}", f"checkpoint.every={options.resume_at}", f"name={NAME}"]
        overrides = [str(HERE / "llama3-8b.yaml"), "--runs", str(options.runs), *run_overrides, *options.overrides]
        folder = options.runs / NAME
        train(overrides, options.gpus, options)
    first_run = records_by_step(folder)
    train(overrides, options.resume_gpus, options)
    second_run = {step: record for step, record in records_by_step(folder).items() if step > options.resume_at}
    header = {"benchmark": "resume", "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
    result = {**header, "gpus": options.gpus, "resume_gpus": options.resume_gpus, **compare(first_run, second_run)}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def train(overrides: list[str], gpus: int, options: argparse.Namespace) -> None:
    """Run on `gpus` GPUs, from the newest checkpoint if there is one. Exits the program when the run fails."""
    log = options.logs / f"resume-{gpus}.log"
    command = [*MESHWRIGHT, "train", *overrides, f"cluster.gpus_per_node={gpus}"]
    if code := run_logged(command, log, dict(os.environ), options.limit):
        sys.exit(f"exit code {code} on {gpus} GPUs: {log.read_text(encoding='utf-8', errors='replace')[-1500:]}")


def records_by_step(folder: Path) -> dict[int, dict[str, Any]]:
    """The step records of a run; for a repeated step the later record."""
    return {record["step"]: record for record in step_records(folder)}


def compare(first_run: dict[int, dict[str, Any]], second_run: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Compares the steps of the second start with those of the first."""
    pairs = [(first_run[step], second_run[step]) for step in sorted(second_run)]
    return {
        "steps": len(pairs),
        "same_tokens": all(first["token_sum"] == second["token_sum"] for first, second in pairs),
        "largest_relative_loss_difference": max(
            abs(first["loss"] - second["loss"]) / abs(first["loss"]) for first, second in pairs
        ),
        "tokens_per_second_per_gpu": statistics.median(
            second["tokens_per_second_per_gpu"] for _, second in pairs[2:] or pairs
        ),
    }


if __name__ == "__main__":
    main()
