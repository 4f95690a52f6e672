"""Measures what checkpoints cost: step times of runs with asynchronous and synchronous saves, and rates of saves and loads.

    python benchmarks/checkpoint_stall.py [--models llama3-1b,llama3-3b] [--rounds 2] [--runs /dev/shm/meshwright-runs] [--out FILE]
    python benchmarks/checkpoint_stall.py --cpu                  # a tiny model on one CPU rank

Prints JSON lines (and appends them to --out):

  run    one run with `checkpoint.mode` async or sync. `stall_seconds`: for async the longest step between the begin of a save and its
         commit, minus the median of the steps without a save in flight; for sync the time that training waited. `beside_percent`: how much
         slower the mean step with a save in flight is than the mean step without; `copy_step_percent` is that of the steps beside the
         copies (the first of each save), `writing_percent` that of the others, so the first has the stall and the second the writer.
  write  bytes per second from an arena to the folder --runs with digests and fsync, and of a plain copy with as many threads.
  load   seconds to load a checkpoint to the device, and to read its files in pieces with as many threads and copy them there.

A run has its own folder, which is deleted afterwards; the text is Python's standard library. The folder must hold two checkpoints of a
model (llama3-1b: 15 GB each; llama3-3b, whose runs save once: 39 GB), and the host's memory an arena beside it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sides import MESHWRIGHT, run_logged

from meshwright.checkpoint.arena import Arena
from meshwright.checkpoint.background import writer_threads
from meshwright.checkpoint.block_file import write_blocks
from meshwright.checkpoint.block_reader import READ_THREADS
from meshwright.checkpoint.store import CheckpointStore

Line = dict[str, Any]
BLOCK_BYTES = 16 << 20
"""Bytes of one write of the plain copy."""
PIECE_BYTES = 64 << 20
"""Bytes of one raw read."""
WARM_STEPS = 6
"""First steps of a run, which are ignored."""


@dataclass(frozen=True)
class BenchmarkCase:
    """Runs of one model: overrides of the run file, steps, and steps between saves."""

    model: str
    overrides: tuple[str, ...]
    steps: int
    save_interval: int
    rounds: int = 2


CASES = {
    case.model: case
    for case in (
        BenchmarkCase("llama3-1b", ("train.seq_len=8192", "train.global_batch=4"), 52, 16),
        BenchmarkCase("llama3-3b", ("train.seq_len=8192", "train.global_batch=4"), 32, 20, rounds=1),
        BenchmarkCase("llama3-8b", ("train.seq_len=8192", "train.global_batch=16"), 32, 20, rounds=1),
    )
}
TINY = BenchmarkCase(
    "llama-nano", ("train.seq_len=128", "train.global_batch=4", "cluster={gpu: cpu, gpus_per_node: 1}"), 30, 8
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="llama3-1b,llama3-3b", help=f"any of {', '.join(CASES)}; 8B needs eight GPUs"
    )
    parser.add_argument(
        "--rounds", type=int, help="pairs of runs for each model; by default 2 of llama3-1b and 1 of llama3-3b"
    )
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--limit", type=float, default=460.0, help="seconds for the whole benchmark; later runs are skipped"
    )
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the written and loaded data")
    parser.add_argument("--modes", default="async,sync", help="modes of the runs")
    parser.add_argument("--no-rates", action="store_true", help="leave out the write and load lines")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("overrides", nargs="*", help="key=value for all runs")
    options = parser.parse_args()
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


def lines(cases: list[BenchmarkCase], options: argparse.Namespace, deadline: float) -> Iterator[Line]:
    device = torch.device("cpu" if options.cpu else "cuda")
    yield {"kind": "machine", **machine(device), "command": " ".join(sys.argv)}
    if not options.no_rates:
        yield from write_rates(options)
        yield from load_rates(options, device)
    modes = options.modes.split(",")
    for number in range(options.rounds or max(case.rounds for case in cases)):
        for case in (case for case in cases if options.rounds or number < case.rounds):
            for mode in reversed(modes) if number % 2 else modes:
                seconds_left = deadline - time.monotonic()
                if seconds_left < 60 and not options.cpu:
                    yield {"kind": "skipped", "model": case.model, "mode": mode, "round": number}
                    continue
                yield run_record(case, mode, number, options, seconds_left)


def machine(device: torch.device) -> Line:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def run_record(case: BenchmarkCase, mode: str, number: int, options: argparse.Namespace, seconds_left: float) -> Line:
    name = f"stall-{case.model}-{mode}-{number}"
    folder, log = options.runs / name, options.logs / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        f"model={case.model}",
        "data.mix=stdlib",
        f"name={name}",
        f"train.steps={case.steps}",
        "train.warmup_steps=5",
    ]
    overrides += ["train.validate_batches=1", f"checkpoint.every={case.save_interval}", f"checkpoint.mode={mode}"]
    overrides += ["checkpoint.keep=1", "checkpoint.at_end=false", *case.overrides, *options.overrides]
    start = time.monotonic()
    code = run_logged(
        [*MESHWRIGHT, "train", *overrides, "--runs", str(options.runs)], log, dict(os.environ), seconds_left
    )
    header = {
        "kind": "run",
        "model": case.model,
        "mode": mode,
        "round": number,
        "wall_seconds": round(time.monotonic() - start, 1),
    }
    try:
        if code:
            return {**header, "error": f"exit code {code}: {log.read_text(encoding='utf-8', errors='replace')[-1500:]}"}
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return {**header, **figures(records, case.save_interval, mode)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def figures(records: list[Line], save_interval: int, mode: str) -> Line:
    """Figures of one run from its metrics.

    In a run folder's metrics the event of a committed checkpoint follows the steps that ran during its save.
    """
    without_save: list[float] = []
    copying: list[float] = []
    writing: list[float] = []
    saves: list[Line] = []
    save_step, steps_since_save = 0, []
    for record in records:
        if record["kind"] == "step" and record["step"] > WARM_STEPS:
            in_flight = mode == "async" and save_step and record["step"] > save_step
            (steps_since_save if in_flight else without_save).append(record["step_seconds"])
            if record["step"] % save_interval == 0 and not save_step:
                save_step = record["step"]
        elif record["kind"] == "event" and record["text"].startswith("checkpoint step-"):
            saves.append(
                save_figures(record["text"])
                | {"longest": max(steps_since_save, default=None), "steps": len(steps_since_save)}
            )
            copying += steps_since_save[:1]
            writing += steps_since_save[1:]
            save_step, steps_since_save = 0, []
    without_save += steps_since_save  # the save was not committed before the run ended
    median = statistics.median(without_save)
    every_step = [round(record["step_seconds"], 4) for record in records if record["kind"] == "step"]
    line: Line = {"steps": len(without_save), "median_step_seconds": median, "step_seconds": every_step, "saves": saves}
    if mode == "sync":
        return line | {"stall_seconds": [save.get("waited") for save in saves]}
    during_save = copying + writing
    return line | {
        "stall_seconds": [round(save["longest"] - median, 5) for save in saves if save["longest"] is not None],
        "beside_percent": slower_percent(during_save, without_save),
        "copy_step_percent": slower_percent(copying, without_save),
        "writing_percent": slower_percent(writing, without_save),
        "mean_step_free": statistics.mean(without_save),
        "mean_step_beside": statistics.mean(during_save) if during_save else None,
    }


def slower_percent(steps: list[float], without_save: list[float]) -> float | None:
    """How much longer the mean of `steps` is than that of the steps without a save; None if there are none."""
    return round(100 * (statistics.mean(steps) / statistics.mean(without_save) - 1), 3) if steps else None


def save_figures(text: str) -> Line:
    """The figures in a checkpoint's line: `… 14,832 MB in 9.1 s`, or `… beside training (seconds: staging 0.31, …)`."""
    megabytes = float(text.split(": ", 1)[1].split(" MB")[0].replace(",", ""))
    if "seconds: " not in text:
        return {"megabytes": megabytes, "waited": float(text.rpartition(" in ")[2].split()[0])}
    phases = text.partition("seconds: ")[2].partition(")")[0].split(", ")
    return {"megabytes": megabytes, **{phase.split()[0]: float(phase.split()[1]) for phase in phases}}


def write_rates(options: argparse.Namespace) -> Iterator[Line]:
    """Write rates of the writer process's save and of a plain copy of the same memory, measured alternately."""
    size = int((0.2 if options.cpu else options.gigabytes) * 1e9) // mmap.PAGESIZE * mmap.PAGESIZE
    arena, threads = Arena.create(size), writer_threads(1)
    sample = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    data = torch.frombuffer(arena.memory, dtype=torch.uint8)
    for start in range(0, len(data), len(sample)):
        data[start : start + len(sample)] = sample[: len(data) - start]
    path = options.runs / "written"
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: write_blocks(path, [arena.data[:size]], threads),
        "copy": lambda: plain_copy(path, arena.data[:size], threads),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for name, call in calls.items():
            start_time = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start_time)
            path.unlink()
    rates = {f"{name}_gb_per_second": round(size / 1e9 / min(samples), 3) for name, samples in seconds.items()}
    ratio = round(min(seconds["copy"]) / min(seconds["save"]), 3)
    yield {"kind": "write", "bytes": size, "threads": threads, **rates, "save_over_copy": ratio, "seconds": seconds}


def plain_copy(path: Path, data: memoryview, threads: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with ThreadPoolExecutor(threads) as pool:
        list(
            pool.map(
                lambda offset: os.pwrite(descriptor, data[offset : offset + BLOCK_BYTES], offset),
                range(0, len(data), BLOCK_BYTES),
            )
        )
    os.fsync(descriptor)
    os.close(descriptor)


def load_rates(options: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    """Seconds of a load, and of raw reads of the same bytes with the same copies to the device, measured alternately."""
    folder = options.runs / "loaded"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    count, size = 64, int((0.2 if options.cpu else options.gigabytes) * 1e9 / 64 / 4) // 1024
    tensors = {f"model.{number}": torch.randn(size, 1024, device=device) for number in range(count)}
    store = CheckpointStore(folder)
    path = store.save(1, tensors, {}, {}).path
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    file = path / "tensors-00000.safetensors"
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: store.load(path, target),
        "raw": lambda: raw_read(file, list(target.values()), device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for name, call in calls.items():
            start_time = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start_time)
    ratio = round(min(seconds["load"]) / min(seconds["raw"]), 3)
    yield {
        "kind": "load",
        "bytes": file.stat().st_size,
        "threads": READ_THREADS,
        "load_over_raw": ratio,
        "seconds": seconds,
    }
    shutil.rmtree(folder)


def raw_read(file: Path, targets: list[torch.Tensor], device: torch.device) -> None:
    """Read the tensors at the file's end in pieces into staging memory, and copy each piece to its target on the device."""
    target_bytes = [target.view(-1).view(torch.uint8) for target in targets]
    start = file.stat().st_size - sum(target.numel() for target in target_bytes)
    blocks = []
    for target in target_bytes:
        blocks += [
            (start + offset, target[offset : offset + PIECE_BYTES]) for offset in range(0, target.numel(), PIECE_BYTES)
        ]
        start += target.numel()
    descriptor = os.open(file, os.O_RDONLY)

    def read(block: tuple[int, torch.Tensor]) -> None:
        offset, target = block
        buffer = torch.empty(target.numel(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        view = memoryview(buffer.numpy()).cast("B")
        while view:
            count = os.preadv(descriptor, [view], offset)
            view, offset = view[count:], offset + count
        target.copy_(buffer)

    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(read, blocks))
    os.close(descriptor)


if __name__ == "__main__":
    main()
