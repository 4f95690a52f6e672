"""Runs `meshwright train` or torchtitan in a process of its own, and reads the figures from its files or its log."""

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
KERNELS = 6
"""Version of our kernels, stored with results; it increases when a kernel changes the step time. 1: before the loss gradient was a kernel,
a single rank cast its weights once, and heads were padded. 2: clipping in a separate pass. 3: gradients packed by torch. 4: gradients of
several micro-batches added by torch. 5: token copies of MoE models moved by torch."""
LOG_TAIL = 1500
"""Last characters of a failed run's log that are stored."""


@dataclass(frozen=True)
class OurRun:
    """A finished run of ours: its exit code, its folder if it was created, and its step records."""

    code: int
    folder: Path | None
    records: list[dict[str, Any]]


NOT_STORED = ("predicted", "why")
"""Keys of a plan file that are not stored with results."""


def run_ours(
    command: list[str], overrides: list[str], name: str, runs: Path, log: Path, env: dict[str, str], limit: float
) -> OurRun:
    """Start a fresh run `name` under `runs`; `command` ends with the run file."""
    existing_folders = set(runs.glob(f"{name}*"))
    command = [*command, "--runs", str(runs), "--fresh", *overrides]
    code = run_logged(command, log, {**os.environ, **env}, limit)
    new_folders = [folder for folder in runs.glob(f"{name}*") if folder not in existing_folders]
    return OurRun(code, new_folders[0] if new_folders else None, step_records(new_folders[0]) if new_folders else [])


def run_logged(command: list[str], log: Path, env: dict[str, str], limit: float) -> int:
    """Run a command until its end or its time limit, then end its processes; returns the exit code, 124 at the limit."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            # The ranks have their own sessions; the kernel ends them with their parent process.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124


def step_records(folder: Path) -> list[dict[str, Any]]:
    return list(lines_of(folder, "step"))


def lines_of(folder: Path, line_kind: str) -> Iterator[dict[str, Any]]:
    """The records of one type in a run's metrics.jsonl; empty without the file."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return (record for record in map(json.loads, lines) if record["kind"] == line_kind)


def our_figures(folder: Path, records: list[dict[str, Any]], skip: int, last: int | None = None) -> dict[str, Any]:
    """The figures of a run that are stored: medians over the steps after `skip` up to `last`.

    Bytes are means over all steps, as the count of a step may include a part of the next one.
    """
    counted = records[skip:last]
    median_record = sorted(counted, key=lambda record: record["step_seconds"])[len(counted) // 2]
    plan = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    return {
        "tokens_per_second_per_gpu": round(
            statistics.median(record["tokens_per_second_per_gpu"] for record in counted), 1
        ),
        "step_seconds": round(statistics.median(record["step_seconds"] for record in counted), 4),
        "step_seconds_all": [round(record["step_seconds"], 4) for record in records],
        "mfu_causal": median_record.get("mfu"),
        "mfu_full": median_record.get("mfu_full"),
        "memory_allocated_peak_gib": max(record.get("memory_allocated_peak_bytes", 0) for record in records) / 2**30,
        "memory_reserved_peak_gib": max(record["memory_peak_bytes"] for record in records) / 2**30,
        "loss_first": records[0]["loss"],
        "loss_last": records[-1]["loss"],
        "grad_norm_first": records[0]["grad_norm"],
        "steps": records[-1]["step"],
        "phases": median_record["phases"],
        "traffic": {
            key: statistics.mean(record[key] for record in records)
            for key in median_record
            if key.endswith("_wire_bytes")
        },
        "predicted": plan.get("predicted"),
        "start": next(lines_of(folder, "start"), None),
        "plan": {key: value for key, value in plan.items() if key not in NOT_STORED},
        "environment": json.loads((folder / "environment.json").read_text(encoding="utf-8")),
    }


@dataclass(frozen=True)
class TitanStep:
    """A line of torchtitan's log, with the mean rate since the line before."""

    step: int
    loss: float
    memory_gib: float
    """Most GiB reserved so far."""
    rate: float
    """Tokens per second and GPU."""


def run_torchtitan(
    name: str, gpus: int, arguments: list[str], logs: Path, env: dict[str, str], limit: float
) -> tuple[list[TitanStep], str]:
    """Run torchtitan; returns its steps and its output."""
    env = {**os.environ, "LOGS": str(logs), "LIMIT": str(round(limit)), **env}
    command = ["bash", str(HERE / "peers" / "torchtitan.sh"), name, str(gpus), *arguments]
    completed = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    log = (logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    log_text = re.sub(r"\x1b\[[0-9;]*m", "", log)
    return titan_steps(log_text), completed.stdout + log_text


def titan_steps(log: str) -> list[TitanStep]:
    matches = re.finditer(r"step: +(\d+) .*?loss: +([\d.]+).*?memory: +([\d.]+)GiB.*?tps: +([\d,]+)", log)
    return [
        TitanStep(int(match[1]), float(match[2]), float(match[3]), float(match[4].replace(",", "")))
        for match in matches
    ]
