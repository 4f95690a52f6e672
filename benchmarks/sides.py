"""One run of either side, `meshwright train` or torchtitan, in processes of its own, and what its files or its log say of it."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
MESHWRIGHT = (sys.executable, "-m", "meshwright")
TORCHTITAN = "0.2.2"
KERNELS = 5
"""Counts up when a kernel of ours changes what a step takes; results say it, so that old ones are not held to today's. 1: before the
loss's slope was a kernel, a lone rank cast its weights once and heads were padded. 2: clipping a pass of its own. 3: gradients laid out by
torch. 4: those of several micro-batches added up by a pass of torch's."""
SAID = 1500
"""Characters of a failed run's log that are kept."""


@dataclass(frozen=True)
class OurRun:
    """A run of ours that has ended: its exit code, its folder when it came that far, and its steps."""

    code: int
    folder: Path | None
    records: list[dict[str, Any]]


KEPT = (
    "mesh",
    "batch",
    "schedule",
    "experts",
    "layers",
    "precision",
    "gather_engine",
    "tensor_engine",
)
"""What of a plan says how it ran."""


def run_ours(
    start: list[str], words: list[str], name: str, runs: Path, log: Path, env: dict[str, str], limit: float
) -> OurRun:
    """`start` is the command up to the run file; the run is a fresh one of this name under `runs`."""
    before = set(runs.glob(f"{name}*"))
    command = [*start, "--runs", str(runs), "--fresh", *words]
    code = run_logged(command, log, {**os.environ, **env}, limit)
    made = [folder for folder in runs.glob(f"{name}*") if folder not in before]
    return OurRun(code, made[0] if made else None, step_records(made[0]) if made else [])


def run_logged(command: list[str], log: Path, env: dict[str, str], limit: float) -> int:
    """Run to its end or its limit, and leave none of its processes behind."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            # Its ranks have sessions of their own and end with it: they ask the kernel to.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124


def step_records(folder: Path) -> list[dict[str, Any]]:
    return list(lines_of(folder, "step"))


def lines_of(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics.jsonl of one kind; none where it wrote none."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return (record for record in map(json.loads, lines) if record["kind"] == kind)


def our_figures(folder: Path, records: list[dict[str, Any]], skip: int, last: int | None = None) -> dict[str, Any]:
    """What is kept of a run, medians over the steps behind `skip` up to `last`; bytes are of all steps, since one step's count may hold a
    part of the next one's."""
    kept = records[skip:last]
    middle = sorted(kept, key=lambda record: record["step_seconds"])[len(kept) // 2]
    plan = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    return {
        "tokens_per_second_per_gpu": round(statistics.median(r["tokens_per_second_per_gpu"] for r in kept), 1),
        "step_seconds": round(statistics.median(record["step_seconds"] for record in kept), 4),
        "step_seconds_all": [round(record["step_seconds"], 4) for record in records],
        "mfu_causal": middle.get("mfu"),
        "mfu_full": middle.get("mfu_full"),
        "memory_allocated_peak_gib": max(r.get("memory_allocated_peak_bytes", 0) for r in records) / 2**30,
        "memory_reserved_peak_gib": max(record["memory_peak_bytes"] for record in records) / 2**30,
        "loss_first": records[0]["loss"],
        "loss_last": records[-1]["loss"],
        "grad_norm_first": records[0]["grad_norm"],
        "steps": records[-1]["step"],
        "phases": middle["phases"],
        "traffic": {key: statistics.mean(r[key] for r in records) for key in middle if key.endswith("_wire_bytes")},
        "predicted": plan.get("predicted"),
        "start": next(lines_of(folder, "start"), None),
        "plan": {key: plan[key] for key in KEPT if plan.get(key) is not None},
        "environment": json.loads((folder / "environment.json").read_text(encoding="utf-8")),
    }


@dataclass(frozen=True)
class TitanStep:
    """One line of torchtitan's log: the mean rate since the line before."""

    step: int
    loss: float
    memory_gib: float
    """Largest reserved so far."""
    rate: float
    """Tokens per second and GPU."""


def run_torchtitan(
    name: str, gpus: int, arguments: list[str], logs: Path, env: dict[str, str], limit: float
) -> tuple[list[TitanStep], str]:
    """Its steps, and what it printed."""
    env = {**os.environ, "LOGS": str(logs), "LIMIT": str(round(limit)), **env}
    command = ["bash", str(HERE / "peers" / "torchtitan.sh"), name, str(gpus), *arguments]
    answer = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    log = (logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    return titan_steps(plain), answer.stdout + plain


def titan_steps(log: str) -> list[TitanStep]:
    found = re.finditer(r"step: +(\d+) .*?loss: +([\d.]+).*?memory: +([\d.]+)GiB.*?tps: +([\d,]+)", log)
    return [TitanStep(int(m[1]), float(m[2]), float(m[3]), float(m[4].replace(",", ""))) for m in found]
