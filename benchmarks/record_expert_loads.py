"""Records the loads of experts of small models over 500 steps, with 64 and 128 experts and three weights of the balance loss.

    python benchmarks/record_expert_loads.py --out FOLDER       # six runs at a time, on the GPU or CPU found; needs minutes on a GPU
    python benchmarks/record_expert_loads.py --out FOLDER --from RUNS     # from finished runs
    python benchmarks/record_expert_loads.py --out benchmarks/data/expert-loads --compact FOLDER   # the files that are kept here

Writes `64-experts-1e-4.csv.gz` and so on, with columns `layer`, `step`, `expert_0`, …, which `train --replay-routing` and
`train.expert_load` read, and `runs.json` with the losses. `--compact` keeps the middle layers, with loads in whole parts of `PARTS`
of a layer's mean load: finer differences are chance.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import gzip
import io
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sides import MESHWRIGHT, run_ours, step_records

from meshwright.data.stdlib import ensure_stdlib, stdlib_folder

EXPERTS = {64: 4, 128: 8}
"""Experts of a model's layers, and how many a token uses."""
BALANCE_LOSSES = ("0", "1e-4", "1e-2")
LAYERS, KEPT_LAYERS = 4, {64: [1, 2], 128: [1]}
PARTS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--from", dest="finished", type=Path, help="folder of finished runs")
    parser.add_argument("--compact", type=Path, help="folder of recordings to make smaller")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--budget", type=float, default=600, help="seconds of a run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.compact:
        compact(options.compact, options.out)
        return
    if not options.finished:
        ensure_stdlib(stdlib_folder())
        names = [(experts, loss) for experts in EXPERTS for loss in BALANCE_LOSSES]
        with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
            codes = list(pool.map(lambda name: train(*name, options), names))
        if any(codes):
            sys.exit(f"exit codes {codes}: see {options.out}/*.log")
    record(options.finished or options.runs, options.out)


def train(experts: int, balance_loss: str, options: argparse.Namespace) -> int:
    """Train one model; the exit code."""
    name = run_name(experts, balance_loss)
    overrides = [
        "model=llama-nano",
        f"name={name}",
        "model.family=mixtral",
        f"model.layers={LAYERS}",
        f"model.experts={experts}",
        f"model.experts_per_token={EXPERTS[experts]}",
        "model.expert_hidden=128",
        f"train.balance_loss={balance_loss}",
        "data.mix=stdlib",
        f"train.steps={options.steps}",
        "train.global_batch=64",
        "train.seq_len=256",
        "train.learning_rate=1e-3",
        f"train.warmup_steps={options.steps // 10}",
        "cluster.gpus_per_node=1",
        f"train.validate_every={options.steps}",
        "checkpoint.every=0",
        "observe.spans=false",
        "checkpoint.at_end=false",
    ]
    threads = str(max(1, (os.cpu_count() or 1) // (len(EXPERTS) * len(BALANCE_LOSSES))))
    log = options.out / f"{name}.log"
    return run_ours(
        [*MESHWRIGHT, "train"], overrides, name, options.runs, log, {"OMP_NUM_THREADS": threads}, options.budget
    ).code


def run_name(experts: int, balance_loss: str) -> str:
    return f"{experts}-experts-{balance_loss}"


def record(runs: Path, out: Path) -> None:
    """Write the loads and losses of the runs under `runs`."""
    losses: dict[str, Any] = {}
    for experts in EXPERTS:
        for balance_loss in BALANCE_LOSSES:
            name = run_name(experts, balance_loss)
            records = [record for record in step_records(runs / name) if "expert_loads" in record]
            write_loads(out / f"{name}.csv.gz", np.array([record["expert_loads"] for record in records]))
            last = statistics.mean(record["loss"] for record in records[-20:])
            losses[name] = {"loss_of_last_20_steps": round(last, 4), "steps": records[-1]["step"]}
    (out / "runs.json").write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")


def compact(recordings: Path, out: Path) -> None:
    """Write the kept layers of each recording with coarser loads."""
    for path in sorted(recordings.glob("*.csv.gz")):
        loads = read_recording(path)
        loads = loads[:, KEPT_LAYERS[loads.shape[2]]]
        parts = np.rint(loads * (PARTS / loads.mean(2, keepdims=True))).astype(np.int64)
        write_loads(out / path.name, parts)


def read_recording(path: Path) -> np.ndarray:
    """Loads `(steps, layers, experts)` of a file of `write_loads`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        table = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.int64)
    layers = int(table[:, 0].max()) + 1
    return table[:, 2:].reshape(layers, -1, table.shape[1] - 2).swapaxes(0, 1)


def write_loads(path: Path, loads: np.ndarray) -> None:
    """Write `loads` `(steps, layers, experts)`, layer by layer; the same bytes for the same loads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["layer", "step", *(f"expert_{expert}" for expert in range(loads.shape[2]))])
    for layer in range(loads.shape[1]):
        writer.writerows([layer, step + 1, *loads[step, layer].tolist()] for step in range(len(loads)))
    path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
