"""Times copies of experts beside expert parallelism, on CPU ranks with cores of their own or on GPUs, with recorded loads.

    python benchmarks/expert_ranks.py --out FILE.json              # 8 ranks of 16 cores, two each; 30 s a run
    python benchmarks/expert_ranks.py --shares 0 0.05 0.15 0.3 0.5 0.75 1 --chart FILE.svg       # the curve over λ alone
    python benchmarks/expert_ranks.py --gpu H200 --ranks 2 --tokens 32768 --hidden 2048 --steps 16
    python benchmarks/expert_ranks.py --ranks 2 --tokens 256 --hidden 64 --steps 6      # a try

A model with two layers of 64 experts trains on steps of `data/expert-loads` (`train --replay-routing`), with the loads and copies of
`runs_for`, one run after another. Prints a line for each and writes the median step time, the busiest rank's rows over the mean without
copies, the loss, and the speed over expert parallelism with the same loads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from draw_expert_ranks import chart_svg
from record_expert_loads import read_recording, write_loads
from sides import MESHWRIGHT, run_ours

from meshwright.data.stdlib import ensure_stdlib, stdlib_folder
from meshwright.observe.environment import environment
from meshwright.workload.expected_loads import busiest_of

RECORDINGS = Path(__file__).parent / "data" / "expert-loads"
EXPERTS, PER_TOKEN = 64, 4
SKIPPED_STEPS = 5
"""First steps that are not counted: the first decision is used in the third, and the fourth and fifth were slow in every run."""


@dataclass(frozen=True)
class Copies:
    """Weight of the balance loss whose loads are replayed, and the copies; `slots` 0 is expert parallelism."""

    balance_loss: str
    policy: str
    slots: int
    keep: bool = False


def runs_for(ranks: int) -> list[Copies]:
    """The compared runs: the curve over λ for the most uneven loads, and the ends of it for the others."""
    others = EXPERTS - EXPERTS // ranks
    curve = [("none", 0), ("hecate", 8), ("hecate", 2), ("hecate", 24), ("fixed", others)]
    return [
        *(Copies("0", policy, slots, slots > 0) for policy, slots in curve),
        *(Copies(loss, policy, slots, slots > 0) for loss in ("1e-4", "1e-2") for policy, slots in curve[:2]),
    ]


def runs_over(shares: Sequence[float], ranks: int) -> list[Copies]:
    """A run for each share λ of the other ranks' experts that are present on a rank, with the most uneven loads.

    At 0 there are no copies, at 1 all experts are present in every step; between them `hecate` decides.
    """
    others = EXPERTS - EXPERTS // ranks
    slots = [round(share * others) for share in shares]
    policies = {0: "none", others: "fixed"}
    return [Copies("0", policies.get(count, "hecate"), count, count > 0) for count in dict.fromkeys(slots)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=11, help="steps of a run, of which the first five are not counted")
    parser.add_argument("--first", type=int, default=200, help="first recorded step that is replayed")
    parser.add_argument("--budget", type=float, default=100, help="seconds after which no further run starts")
    parser.add_argument("--shares", type=float, nargs="*", help="values of λ to measure instead of the usual runs")
    parser.add_argument("--chart", type=Path, help="SVG file to draw of the runs")
    parser.add_argument("--gpu", default="cpu", help="the cluster's GPU, for ranks on GPUs")
    options = parser.parse_args()
    ensure_stdlib(stdlib_folder())
    began, results = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for copies in runs_for(options.ranks) if options.shares is None else runs_over(options.shares, options.ranks):
            if time.monotonic() - began >= options.budget:
                break
            results.append(measure(copies, options, Path(folder)))
            shown = {key: value for key, value in results[-1].items() if key != "step_seconds_all"}
            print(json.dumps(shown), flush=True)
            report = {"command": command_text(options), "environment": environment(), "runs": with_speeds(results)}
            if options.out:  # after each run, so that a run that is stopped leaves the others
                options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    measured_runs = [result for result in results if "step_seconds" in result]
    if options.chart and measured_runs:
        options.chart.write_text(chart_svg(measured_runs), encoding="utf-8")


def measure(copies: Copies, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one run; only its exit code and the end of its log if it failed."""
    name = f"{copies.policy}-{copies.slots}-{copies.balance_loss}"
    recorded = read_recording(RECORDINGS / f"{EXPERTS}-experts-{copies.balance_loss}.csv.gz")
    loads = recorded[options.first : options.first + options.steps]
    file, log = folder / f"{name}.csv.gz", folder / f"{name}.log"
    write_loads(file, loads)
    seq, compiled = min(256, options.tokens), str(options.gpu != "cpu").lower()
    overrides = [
        "model=llama-nano",
        f"name={name}",
        "model.family=mixtral",
        "model.layers=2",
        f"model.hidden={options.hidden}",
        f"model.experts={EXPERTS}",
        f"model.experts_per_token={PER_TOKEN}",
        f"model.expert_hidden={2 * options.hidden}",
        "data.mix=stdlib",
        f"train.steps={options.steps}",
        f"train.global_batch={options.ranks * options.tokens // seq}",
        f"train.seq_len={seq}",
        f"train.validate_every={options.steps}",
        "data.validation_tokens=131072",
        "train.keep_cores=true",
        f"train.expert_load={file}",
        f"cluster.gpu={options.gpu}",
        f"cluster.gpus_per_node={options.ranks}",
        f"plan.expert={options.ranks}",
        f"plan.micro_batch={options.tokens // seq}",
        f"plan.shard={options.ranks}",
        f"plan.compile={compiled}",
        "plan.recompute=none",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "observe.spans=false",
        f"plan.expert_policy={copies.policy}",
    ]
    if copies.slots:
        overrides += [f"plan.expert_slots={copies.slots}", f"plan.expert_keep={str(copies.keep).lower()}"]
    command = [*MESHWRIGHT, "train", "--replay-routing", str(file)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    run = run_ours(command, overrides, name, folder / "runs", log, {"OMP_NUM_THREADS": threads}, options.budget)
    figures: dict[str, Any] = {
        **vars(copies),
        "exit_code": run.code,
        "device": options.gpu,
        "ranks": options.ranks,
        "tokens": options.tokens,
    }
    if run.code or len(run.records) <= SKIPPED_STEPS:
        return figures | {"log": log.read_text(encoding="utf-8", errors="replace")[-1500:]}
    seconds = [round(record["step_seconds"], 4) for record in run.records]
    return figures | {
        "max_over_mean": round(float(np.asarray(busiest_of(loads, options.ranks).imbalance)), 3),
        "share": round(copies.slots / (EXPERTS - EXPERTS // options.ranks), 3),
        "step_seconds": round(statistics.median(seconds[SKIPPED_STEPS:]), 4),
        "step_seconds_all": seconds,
        "loss_first": run.records[0]["loss"],
        "loss_last": run.records[-1]["loss"],
        "memory_peak_gib": round(max(record["memory_peak_bytes"] for record in run.records) / 2**30, 3),
    }


def with_speeds(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results with their speed over expert parallelism with the same loads."""
    alone = {
        result["balance_loss"]: result["step_seconds"]
        for result in results
        if result["policy"] == "none" and "step_seconds" in result
    }
    return [
        result | {"speed": round(alone[result["balance_loss"]] / result["step_seconds"], 3)}
        if "step_seconds" in result and result["balance_loss"] in alone
        else result
        for result in results
    ]


def command_text(options: argparse.Namespace) -> str:
    words = [f"--{name} {getattr(options, name)}" for name in ("gpu", "ranks", "tokens", "hidden", "steps", "first")]
    words += ["--shares", *map(str, options.shares)] if options.shares is not None else []
    return f"benchmarks/expert_ranks.py {' '.join(words)}"


if __name__ == "__main__":
    main()
