"""Llama-3-8B on one 8-GPU host: torchtitan and meshwright in one go, then our checkpoint resumed on fewer GPUs.

    python benchmarks/dense_8b.py --out results.json            # all three parts
    python benchmarks/dense_8b.py --parts peer,ours --steps 40  # the comparison only

Prints a table and writes one JSON object: both sides' tokens per second and GPU (median after step 10), MFU in both FLOP conventions,
peak memory, losses, and the environment. torchtitan runs at its best simple configuration found (see benchmarks/peers/README.md).
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

HERE = Path(__file__).resolve().parent
SKIPPED_STEPS = 10
GFLOP_PER_TOKEN = {"causal": 51.47, "full": 57.91}
"""Llama-3-8B at 8192, without the embedding look-up: the two conventions (docs/models.md)."""
PEAK_TFLOPS = 989.0
PEER = (
    "--model.name llama3 --model.flavor 8B --training.seq_len 8192 --compile.enable --activation_checkpoint.mode none "
    "--training.local_batch_size 2 --parallelism.fsdp_reshard_after_forward never --training.steps"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="peer,ours,resume", help="which of peer, ours, resume to run")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--resume-gpus", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="our steps")
    parser.add_argument("--peer-steps", type=int, default=40)
    parser.add_argument("--resume-at", type=int, default=80, help="step of the checkpoint that is resumed")
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path, default=Path("dense_8b.json"))
    parser.add_argument("overrides", nargs="*", help="key=value for our run")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    parts = options.parts.split(",")
    result: dict[str, Any] = {
        "benchmark": "dense_8b",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
        "gpus": options.gpus,
    }
    if "peer" in parts:
        result["torchtitan"] = peer(options)
    if "ours" in parts:
        result["meshwright"] = ours(options)
    if {"peer", "ours"} <= set(parts) and result["torchtitan"].get("tokens_per_second_per_gpu"):
        ratio = result["meshwright"]["tokens_per_second_per_gpu"] / result["torchtitan"]["tokens_per_second_per_gpu"]
        result["ratio"] = round(ratio, 4)
    if "resume" in parts:
        result["resume"] = resume(options)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """One torchtitan run; its figures are what its own log says."""
    arguments = [*PEER.split(), str(options.peer_steps)]
    command = ["bash", str(HERE / "peers" / "torchtitan.sh"), "torchtitan", str(options.gpus), *arguments]
    answer = subprocess.run(
        command, env={**os.environ, "LOGS": str(options.logs)}, text=True, capture_output=True, check=False
    )
    log = (options.logs / "torchtitan.log").read_text(encoding="utf-8", errors="replace")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    steps = [
        (int(m[1]), float(m[2]), float(m[3]), float(m[4].replace(",", "")))
        for m in re.finditer(r"step: +(\d+) .*?loss: +([\d.]+).*?memory: +([\d.]+)GiB.*?tps: +([\d,]+)", plain)
    ]
    kept = [step for step in steps if step[0] > SKIPPED_STEPS]
    if not kept:
        return {"error": (answer.stdout + plain)[-2000:]}
    rate = statistics.median(step[3] for step in kept)
    return figures(rate) | {
        "version": "0.2.2",
        "arguments": " ".join(arguments),
        "memory_peak_gib": max(step[2] for step in steps),
        "loss_first": steps[0][1],
        "loss_last": steps[-1][1],
        "steps": steps[-1][0],
    }


def ours(options: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    code = train(options, [f"train.steps={options.steps}", *options.overrides])
    wall = time.perf_counter() - started
    folder = options.runs / "llama3-8b"
    if code:
        return {"error": f"exit code {code}"}
    records = step_records(folder)
    kept = [record for record in records if record["step"] > SKIPPED_STEPS]
    losses = [record["loss"] for record in records]
    return figures(statistics.median(record["tokens_per_second_per_gpu"] for record in kept)) | {
        "memory_peak_gib": max(record["memory_peak_bytes"] for record in records) / 2**30,
        "loss_first_10": statistics.mean(losses[:10]),
        "loss_last_10": statistics.mean(losses[-10:]),
        "losses": [round(loss, 5) for loss in losses],
        "steps": records[-1]["step"],
        "step_seconds": statistics.median(record["step_seconds"] for record in kept),
        "phases": kept[-1]["phases"],
        "data_wait_seconds": statistics.median(record["data_wait_seconds"] for record in kept),
        "wall_seconds": wall,
        "plan": (folder / "plan.yaml").read_text(encoding="utf-8"),
        "config": (folder / "config.yaml").read_text(encoding="utf-8"),
        "environment": json.loads((folder / "environment.json").read_text(encoding="utf-8")),
    }


def resume(options: argparse.Namespace) -> dict[str, Any]:
    """The same run continued from its checkpoint on fewer GPUs, step by step beside the first run's own last steps."""
    folder = options.runs / "llama3-8b"
    before = {record["step"]: record for record in step_records(folder)}
    code = train(
        options,
        [
            f"train.steps={options.steps}",
            f"cluster.gpus_per_node={options.resume_gpus}",
            "cluster.gpu=H200",
            *options.overrides,
        ],
    )
    if code:
        return {"error": f"exit code {code}"}
    after = {record["step"]: record for record in step_records(folder) if record["step"] > options.resume_at}
    pairs = [(before[step], after[step]) for step in sorted(after)]
    worst = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs)
    return {
        "gpus": options.resume_gpus,
        "from_step": options.resume_at,
        "steps": len(pairs),
        "same_tokens": all(a["token_sum"] == b["token_sum"] for a, b in pairs),
        "largest_relative_loss_difference": worst,
        "tokens_per_second_per_gpu": statistics.median(b["tokens_per_second_per_gpu"] for _, b in pairs[2:] or pairs),
    }


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "train",
        str(HERE / "llama3-8b.yaml"),
        "--runs",
        str(options.runs),
        *overrides,
    ]
    return subprocess.run(command, check=False).returncode


def step_records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def figures(rate: float) -> dict[str, Any]:
    mfu = {f"mfu_{kind}": rate * gflop / 1e3 / PEAK_TFLOPS for kind, gflop in GFLOP_PER_TOKEN.items()}
    return {"tokens_per_second_per_gpu": rate, **{key: round(value, 4) for key, value in mfu.items()}}


def show(result: dict[str, Any]) -> None:
    for side in ("torchtitan", "meshwright"):
        row = result.get(side)
        if row and "error" not in row:
            mfu = f"MFU {row['mfu_causal']:.1%} causal {row['mfu_full']:.1%} full"
            print(
                f"{side:12s} {row['tokens_per_second_per_gpu']:9,.0f} tok/s/GPU  {mfu}  {row['memory_peak_gib']:.0f} GiB"
            )
        elif row:
            print(f"{side:12s} failed: {row['error'][-600:]}")
    print(json.dumps({key: result[key] for key in ("ratio", "resume") if key in result}))
    if "losses" in result.get("meshwright", {}):
        print(
            "losses",
            result["meshwright"]["losses"][::10],
            result["meshwright"]["loss_first_10"],
            result["meshwright"]["loss_last_10"],
        )


if __name__ == "__main__":
    main()
