"""Measures what checkpoints cost: step times of runs that save, beside torchtitan's and beside predictions, and rates of saves and loads.

    python benchmarks/checkpoint_stall.py [--models llama3-1b,llama3-3b] [--rounds 2] [--runs /dev/shm/meshwright-runs] [--out FILE]
    python benchmarks/checkpoint_stall.py --models llama3-1b --modes async --peer   # torchtitan after each run of ours
    python benchmarks/checkpoint_stall.py --cpu                  # a tiny model on one CPU rank

Prints JSON lines (and appends them to --out):

  run    one run: of ours with `checkpoint.mode` async or sync, or of torchtitan with async_with_pinned_mem. `stall_seconds`: for each
         asynchronous save the longest step between its begin and its end, minus the median of the steps without a save in flight; for sync
         the time that training waited. `beside_percent`: how much slower the mean step with a save in flight is than the mean step without;
         `copy_step_percent` is that of the steps beside the copies (the first of each save), `writing_percent` that of the others, so the
         first has the stall and the second the writer. `predictions` (ours, async): what `meshwright plan` predicts, the measured value and
         the relative error.
  write  bytes per second from a snapshot buffer to the folder --runs with digests and fsync, and of a plain copy with as many threads.
  load   seconds to load a checkpoint to the device, and to read its files in pieces with as many threads and copy them there.

The planner knows the rate of writes to tmpfs on GPU hosts. For another folder and on a CPU the prediction uses the rates that this command
measures; `rates` says which. A run has its own folder, which is deleted afterwards; the text is Python's standard library. The folder
must hold two checkpoints of a model (llama3-1b: 15 GB each; llama3-3b, whose runs save once: 39 GB), and the host's memory a snapshot
beside it. A run of torchtitan needs two checkpoints, its last weights and its staged state in /dev/shm (llama3-1b: 50 GB; llama3-3b, with
one checkpoint: 90 GB).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from checkpoint_figures import Line, MemoryWatch, our_save_figures, peer_save_figures, predictions
from checkpoint_rates import host_copy_rate, is_in_memory, load_rates, write_rates
from sides import LOG_TAIL, MESHWRIGHT, TORCHTITAN, run_logged, run_torchtitan

from meshwright.planner.checkpoint_cost import WRITE_RATE, SaveRates

PEER, PEER_MODE = "torchtitan", "async_with_pinned_mem"
FEWEST_SECONDS = 60.0
"""With less time left no run is started."""


@dataclass(frozen=True)
class BenchmarkCase:
    """Runs of one model: overrides of the run file, steps, and steps between saves."""

    model: str
    sequences: int
    """Per step, of 8192 tokens."""
    steps: int
    save_interval: int
    rounds: int = 2
    saved_bytes: float = 0.0
    """One checkpoint."""
    overrides: tuple[str, ...] = ("train.seq_len=8192",)
    peer: tuple[str, ...] = ()
    """torchtitan's arguments for the model; none where it is not compared."""
    peer_steps: int = 0
    peer_interval: int = 1
    """Steps between its saves, enough that a save ends before the next: torchtitan waits for it otherwise."""
    peer_batches: tuple[int, ...] = (4, 2)
    """torchtitan's sequences per micro-batch, of which the first that fits into memory is used."""


ONE_GPU = (
    "--experimental.custom_import",
    "small_llama",
    "--model.name",
    "small_llama",
    "--training.seq_len",
    "8192",
    "--compile.enable",
    "--activation_checkpoint.mode",
    "none",
)
"""torchtitan's best configuration for small models on one GPU, as in dense/one-gpu.yaml."""
CASES = {
    case.model: case
    for case in (
        BenchmarkCase(
            "llama3-1b",
            4,
            52,
            16,
            saved_bytes=14.83e9,
            peer=(*ONE_GPU, "--model.flavor", "1B"),
            peer_steps=84,
            peer_interval=30,
        ),
        BenchmarkCase(
            "llama3-3b", 4, 30, 14, 1, 38.56e9, peer=(*ONE_GPU, "--model.flavor", "3B"), peer_steps=49, peer_interval=25
        ),
        BenchmarkCase("llama3-8b", 16, 32, 20, 1, 96.4e9),
    )
}
TINY_MODEL = "{preset: llama-nano, layers: 1, hidden: 64, heads: 2, kv_heads: 2, head_dim: 32, ffn_hidden: 128, vocab_size: 4096}"
TINY = BenchmarkCase(
    TINY_MODEL,
    2,
    24,
    9,
    overrides=("train.seq_len=64", "cluster={gpu: cpu, gpus_per_node: 1}", "plan.compile=false", "plan.compute=fp32"),
)


def main() -> None:
    options = arguments()
    options.logs.mkdir(parents=True, exist_ok=True)
    options.runs.mkdir(parents=True, exist_ok=True)
    cases = [TINY] if options.cpu else [CASES[name] for name in options.models.split(",")]
    deadline = time.monotonic() + options.limit
    for line in lines(cases, options, deadline):
        text = json.dumps({"benchmark": "checkpoint_stall", "date": time.strftime("%Y-%m-%d"), **line})
        print(text, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="llama3-1b,llama3-3b", help=f"any of {', '.join(CASES)}; 8B needs eight GPUs"
    )
    parser.add_argument(
        "--rounds", type=int, help="runs of each mode and model; by default 2 of llama3-1b and 1 of llama3-3b"
    )
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--limit", type=float, default=460.0, help="seconds for the whole benchmark; later runs are skipped"
    )
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the written and loaded data")
    parser.add_argument("--modes", default="async,sync", help="modes of our runs")
    parser.add_argument("--peer", action="store_true", help="run torchtitan with pinned asynchronous saves, too")
    parser.add_argument("--no-rates", action="store_true", help="leave out the write and load lines")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("overrides", nargs="*", help="key=value for all runs of ours")
    return parser.parse_args()


def lines(cases: list[BenchmarkCase], options: argparse.Namespace, deadline: float) -> Iterator[Line]:
    device = torch.device("cpu" if options.cpu else "cuda")
    yield {"kind": "machine", **machine(device, options.runs), "command": " ".join(sys.argv)}
    rates, rate_lines = SaveRates(), []
    known_storage = not options.cpu and is_in_memory(options.runs)
    if not options.no_rates or not known_storage:
        rate_lines = list(write_rates(options))
    if not options.no_rates:
        rate_lines += load_rates(options, device)
    yield from rate_lines
    if not known_storage:
        write = 1e9 * rate_lines[0]["save_gb_per_second"]
        rates = SaveRates(write, host_copy_rate() if options.cpu else None)
    modes = [*options.modes.split(","), *([PEER] if options.peer else [])]
    for number in range(options.rounds or max(case.rounds for case in cases)):
        for case in (case for case in cases if options.rounds or number < case.rounds):
            for mode in reversed(modes) if number % 2 else modes:
                yield run_line(case, mode, number, options, rates, deadline)


def machine(device: torch.device, runs: Path) -> Line:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "devices": torch.cuda.device_count() if device.type == "cuda" else 1,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "runs_free_gb": round(shutil.disk_usage(runs).free / 1e9, 1),
        "runs_in_memory": is_in_memory(runs),
    }


def run_line(
    case: BenchmarkCase, mode: str, number: int, options: argparse.Namespace, rates: SaveRates, deadline: float
) -> Line:
    """The line of one run of ours in `mode`, or of torchtitan."""
    side = {"side": PEER, "mode": PEER_MODE} if mode == PEER else {"side": "meshwright", "mode": mode}
    model = "llama-nano" if options.cpu else case.model
    header = {"kind": "run", "model": model, **side, "round": number}
    obstacle = peer_obstacle(case, options) if mode == PEER else None
    if deadline - time.monotonic() < FEWEST_SECONDS and not options.cpu:
        obstacle = f"{deadline - time.monotonic():.0f} s are left"
    if obstacle:
        return header | {"kind": "skipped", "reason": obstacle}
    start = time.monotonic()
    if mode == PEER:
        figures = peer_run(case, number, options, deadline - start)
    else:
        figures = our_run(case, mode, f"stall-{model}-{mode}-{number}", options, rates, deadline - start)
    return {**header, "wall_seconds": round(time.monotonic() - start, 1), **figures}


def our_run(
    case: BenchmarkCase, mode: str, name: str, options: argparse.Namespace, rates: SaveRates, seconds_left: float
) -> Line:
    folder, log = options.runs / name, options.logs / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        f"model={case.model}",
        "data.mix=stdlib",
        f"name={name}",
        f"train.steps={case.steps}",
        "train.warmup_steps=5",
        f"train.global_batch={case.sequences}",
        "data.validation_tokens=131072",
        f"checkpoint.every={case.save_interval}",
        f"checkpoint.mode={mode}",
        "checkpoint.keep=1",
        "checkpoint.at_end=false",
        *case.overrides,
        *options.overrides,
    ]
    command = [*MESHWRIGHT, "train", *overrides, "--runs", str(options.runs)]
    try:
        with MemoryWatch() as memory:
            code = run_logged(command, log, dict(os.environ), seconds_left)
        if code:
            log_tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            return {"error": f"exit code {code}: {log_tail}"}
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        line = our_save_figures(records, case.save_interval, mode)
        if mode == "async":
            line["predictions"] = predictions(folder, line, rates, memory.peak_bytes)
            line["rates"] = {"write": rates.write, "host_copy": rates.host_copy, "measured": rates.write != WRITE_RATE}
        return line
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def peer_is_installed() -> bool:
    return importlib.util.find_spec("torchtitan") is not None


def peer_obstacle(case: BenchmarkCase, options: argparse.Namespace) -> str | None:
    """Why torchtitan cannot run, or None.

    Two checkpoints, the last weights and the staged state are in the memory of /dev/shm, if --runs is there.
    """
    if not case.peer:
        return "torchtitan's arguments for this model are not known"
    if not peer_is_installed():
        return f"torchtitan {TORCHTITAN} cannot be imported (benchmarks/peers/README.md)"
    saves = case.peer_steps // case.peer_interval
    need = (saves + 1 / 3 + 1) * case.saved_bytes
    free = shutil.disk_usage(options.runs).free
    return f"{options.runs} has {free / 1e9:.0f} GB free, of {need / 1e9:.0f} GB needed" if free < need else None


def peer_run(case: BenchmarkCase, number: int, options: argparse.Namespace, seconds_left: float) -> Line:
    """torchtitan on as many tokens per step, with a line in its log for every step."""
    name, folder = f"stall-{case.model}-{PEER}-{number}", options.runs / f"stall-{PEER}"
    deadline = time.monotonic() + seconds_left
    line: Line = {}
    for batch in case.peer_batches:
        arguments = [
            *case.peer,
            "--training.steps",
            str(case.peer_steps),
            "--training.global_batch_size",
            str(case.sequences),
            "--training.local_batch_size",
            str(batch),
            "--checkpoint.enable",
            "--checkpoint.interval",
            str(case.peer_interval),
            "--checkpoint.folder",
            str((folder / "checkpoints").resolve()),
            "--checkpoint.async_mode",
            PEER_MODE,
        ]
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with MemoryWatch() as memory:
                run_torchtitan(name, 1, arguments, options.logs, {"LOG_FREQ": "1"}, deadline - time.monotonic())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        log = (options.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        try:
            figures = peer_save_figures(log, case.sequences * 8192) | {"host_bytes": memory.peak_bytes}
            if (done := len(figures["step_seconds"])) < case.peer_steps:
                figures["error"] = f"ended after {done} of {case.peer_steps} steps: {log[-LOG_TAIL:]}"
            return {"arguments": arguments, **figures}
        except ValueError as error:
            line = {"arguments": arguments, "error": f"{error}: {log[-LOG_TAIL:]}"}
        if "out of memory" not in log.lower() or deadline - time.monotonic() < FEWEST_SECONDS:
            break
    return line


if __name__ == "__main__":
    main()
