"""The same work under several plans, one after another on one machine: step time, memory, loss, traffic, beside what was predicted.

    python benchmarks/layouts.py benchmarks/layouts/pipeline-4.yaml --out pipeline-4.json
    python benchmarks/layouts.py benchmarks/layouts/tcp-4.yaml --only hsdp,layered --steps 12

A file of layouts names a run file, what all runs share, and by name what each adds (key=value). A layout with `torchtitan:` is a run of
torchtitan with those arguments instead. Prints one line a layout and writes one JSON object. Layouts that no longer fit into
--budget seconds are left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", type=Path)
    parser.add_argument("--only", default="", help="names of the layouts to run, by comma")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--skip", type=int, default=4, help="steps at the start that do not count")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one run")
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path, default=Path("layouts.json"))
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    file = yaml.safe_load(options.layouts.read_text(encoding="utf-8"))
    wanted = [name for name in options.only.split(",") if name] or list(file["layouts"])
    started, rows = time.monotonic(), {}
    for name in wanted:
        if time.monotonic() - started > options.budget:
            rows[name] = {"left_out": "no time"}
        else:
            rows[name] = run(name, file, options)
        show(name, rows[name])
        facts = {"benchmark": options.layouts.stem, "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
        options.out.write_text(json.dumps(facts | {"layouts": rows}, indent=1) + "\n", encoding="utf-8")


def run(name: str, file: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    layout = file["layouts"][name]
    if isinstance(layout, dict) and "torchtitan" in layout:
        return torchtitan(name, layout, options)
    overrides = [*file.get("all", []), *layout, f"name={name}"]
    if options.steps:
        overrides.append(f"train.steps={options.steps}")
    command = [sys.executable, "-m", "meshwright", "train", str(HERE / file["run"]), "--runs", str(options.runs)]
    log = options.logs / f"{name}.log"
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                [*command, "--fresh", *overrides], stdout=output, stderr=output, timeout=options.limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    folder = max(options.runs.glob(f"{name}*"), key=lambda path: path.stat().st_mtime, default=None)
    records = step_records(folder) if folder else []
    if len(records) <= options.skip:
        return {"error": f"exit code {code}", "overrides": overrides, "log": log.read_text(encoding="utf-8")[-1500:]}
    assert folder is not None
    kept = records[options.skip :]
    middle = kept[len(kept) // 2]
    plan = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    return {
        "overrides": overrides,
        "exit_code": code,
        "tokens_per_second_per_gpu": statistics.median(record["tokens_per_second_per_gpu"] for record in kept),
        "step_seconds": statistics.median(record["step_seconds"] for record in kept),
        "mfu_causal": middle.get("mfu"),
        "mfu_full": middle.get("mfu_full"),
        "memory_allocated_peak_gib": max(record.get("memory_allocated_peak_bytes", 0) for record in records) / 2**30,
        "memory_reserved_peak_gib": max(record["memory_peak_bytes"] for record in records) / 2**30,
        "loss_first": records[0]["loss"],
        "loss_last": records[-1]["loss"],
        "grad_norm_first": records[0]["grad_norm"],
        "steps": records[-1]["step"],
        "phases": middle["phases"],
        "traffic": {key: middle[key] for key in middle if key.endswith("_wire_bytes")},
        "wall_seconds": round(time.perf_counter() - began, 1),
        "predicted": plan.get("predicted"),
        "plan": {key: plan[key] for key in ("mesh", "batch", "schedule", "layers", "precision")},
        "environment": json.loads((folder / "environment.json").read_text(encoding="utf-8")),
    }


def torchtitan(name: str, layout: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One torchtitan run; its figures are what its own log says."""
    arguments = str(layout["torchtitan"]).split()
    if options.steps:
        arguments += ["--training.steps", str(options.steps)]
    env = {**os.environ, "LOGS": str(options.logs), **{key: str(value) for key, value in layout.get("env", {}).items()}}
    command = ["bash", str(HERE / "peers" / "torchtitan.sh"), name, str(layout["gpus"]), *arguments]
    answer = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    log = (options.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    found = re.finditer(r"step: +(\d+) .*?loss: +([\d.]+).*?memory: +([\d.]+)GiB.*?tps: +([\d,]+)", plain)
    steps = [(int(m[1]), float(m[2]), float(m[3]), float(m[4].replace(",", ""))) for m in found]
    kept = [step for step in steps if step[0] > options.skip]
    if not kept:
        return {"error": (answer.stdout + plain)[-1500:], "arguments": arguments}
    return {
        "torchtitan": "0.2.2",
        "arguments": arguments,
        "tokens_per_second_per_gpu": statistics.median(step[3] for step in kept),
        "memory_reserved_peak_gib": max(step[2] for step in steps),
        "loss_first": steps[0][1],
        "loss_last": steps[-1][1],
        "steps": steps[-1][0],
    }


def step_records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [record for record in records if record["kind"] == "step"]


def show(name: str, row: dict[str, Any]) -> None:
    if "tokens_per_second_per_gpu" not in row:
        reason = row.get("left_out") or row["error"] + " " + row.get("log", "")[-700:]
        print(f"{name:24s} {reason}", flush=True)
        return
    seconds = f"{row['step_seconds']:7.3f} s" if "step_seconds" in row else " " * 9
    memory = row.get("memory_allocated_peak_gib") or row["memory_reserved_peak_gib"]
    phases = " ".join(f"{key} {value:.3f}" for key, value in row.get("phases", {}).items() if value > 0.0005)
    print(
        f"{name:24s} {row['tokens_per_second_per_gpu']:9,.0f} tok/s/GPU {seconds} {memory:6.1f} GiB "
        f"loss {row['loss_first']:.4f} {row['loss_last']:.4f}  {phases} {row.get('traffic') or ''}",
        flush=True,
    )


if __name__ == "__main__":
    main()
