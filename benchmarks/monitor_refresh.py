"""Seconds of one refresh of `meshwright monitor` for a large job, from generated ring files.

    python benchmarks/monitor_refresh.py --ranks 4096 --steps 1000

Prints one JSON line: the first picture, the mean of the next refreshes, which read older spans, then that without news,
and the median of refreshes with one new step of every rank. Times are processor seconds of one core. `--distinct N`
writes the files of N ranks only; the others are hard links to them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from meshwright.cli.monitor_frame import frame
from meshwright.events.span import SPAN_PHASES
from meshwright.events.span_ring import FIXED_HEADER, HEADER_BYTES, MAGIC, RECORD, VERSION, record_checks, ring_path
from meshwright.launch.progress_file import JobProgress, ProgressFile, RankSnapshot
from meshwright.launch.run_snapshot import SnapshotReader
from meshwright.spec.fields import to_sealed_json

PHASES = (
    "data",
    "collective_wait",
    "forward",
    "receive",
    "collective_wait",
    "collective_wait",
    "backward",
    "send",
    "collective_wait",
    "gradient_norm",
    "optimizer",
    "collective_wait",
    "clock",
    "step",
)
"""Records of a step."""
STEP_NS, NEW_STEPS, OLDER = 10**9, 5, 5


def records_of(first: int, steps: int, slowdown: float) -> np.ndarray:
    """Records of `steps` steps from number `first` on; compute takes `slowdown` times as long as usual."""
    records = np.zeros(steps * len(PHASES), dtype=RECORD)
    step = np.repeat(np.arange(first, first + steps), len(PHASES))
    place = np.tile(np.arange(len(PHASES)), steps)
    records["step"], records["count"], records["micro_batch"] = step, 1, -1
    records["phase"] = np.array([SPAN_PHASES.index(name) for name in PHASES], dtype=np.uint8)[place]
    records["start_ns"] = step * STEP_NS + place * (STEP_NS // len(PHASES))
    durations = np.array([3e8 if name in ("forward", "backward") else 1e6 for name in PHASES])
    durations[-1] = STEP_NS
    noise = np.random.default_rng(first).normal(1, 0.01, len(records))
    records["duration_ns"] = durations[place] * noise * np.where(place == len(PHASES) - 1, 1.0, slowdown)
    words = records.view("<u4").reshape(len(records), -1)
    words[:, -1] = record_checks(words, (first - 1) * len(PHASES))
    return records


def write_files(folder: Path, ranks: int, steps: int, distinct: int) -> None:
    """The ring files of all ranks after `steps` steps, with space for as many; `distinct` of them are not links."""
    usual, slow = records_of(1, steps, 1.0).tobytes(), records_of(1, steps, 1.4).tobytes()
    for rank in range(ranks):
        path = ring_path(folder, 1, 1, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        if rank >= distinct:
            os.link(ring_path(folder, 1, 1, rank % distinct), path)
            continue
        text = json.dumps({"rank": rank, "ranks": ranks, "host": f"host-{rank // 8}", "coordinates": {}}).encode()
        count = steps * len(PHASES)
        fixed = FIXED_HEADER.pack(MAGIC, VERSION, RECORD.itemsize, count, count, count, len(text))
        with path.open("wb") as file:
            file.write((fixed.ljust(64, b"\0") + text).ljust(HEADER_BYTES, b"\0"))
            file.write(slow if rank == distinct // 3 else usual)


def append_step(folder: Path, ranks: int, steps: int, number: int) -> None:
    """Write step `number` of every rank over the oldest one."""
    data, count = records_of(number, 1, 1.0).tobytes(), number * len(PHASES)
    slot = (number - 1) % steps * len(PHASES)
    for rank in range(ranks):
        with ring_path(folder, 1, 1, rank).open("r+b") as file:
            file.seek(24)
            file.write(count.to_bytes(8, "little") * 2)
            file.seek(HEADER_BYTES + slot * RECORD.itemsize)
            file.write(data)


def write_others(folder: Path, ranks: int, steps: int) -> None:
    """metrics.jsonl, supervision.jsonl and progress.json."""
    step = {
        "kind": "step",
        "loss": 2.0,
        "grad_norm": 1.0,
        "tokens_per_second": 1e6,
        "mfu": 0.4,
        "step_seconds": 1.0,
        "phases": {},
    }
    lines = [json.dumps({**step, "step": number, "tokens": number * 10**6}) for number in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(f"train: {{steps: {steps * 10}}}\n")
    (folder / "supervision.jsonl").write_text(
        to_sealed_json({"time": time.time() - steps, "term": 1, "job": "a", "status": "running", "attempt": 1}) + "\n"
    )
    found = tuple(RankSnapshot(rank, f"host-{rank // 8}", "train", steps, rank % 40, 0.1) for rank in range(ranks))
    file = ProgressFile(folder, lambda: JobProgress("a", 1, "running", found))
    file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=0, help="ranks with files of their own (0: all)")
    options = parser.parse_args()
    ranks, steps, distinct = options.ranks, options.steps, options.distinct or options.ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "large"
        folder.mkdir()
        write_files(folder, ranks, steps, distinct)
        write_others(folder, ranks, steps)
        reader, console = SnapshotReader(folder), Console(width=80, height=24, force_terminal=True)

        def refresh() -> float:
            began = time.process_time()
            with console.capture():
                console.print(frame(reader.read(), console))
            return time.process_time() - began

        first, filling = refresh(), []
        while not reader.complete and len(filling) < OLDER:
            filling.append(refresh())
        reader.read(complete=True)
        unchanged = refresh()
        new = []
        for number in range(steps + 1, steps + 1 + NEW_STEPS):
            append_step(folder, distinct, steps, number)
            new.append(refresh())
        console.print(frame(reader.read(), console))
    print(
        json.dumps(
            {
                "ranks": ranks,
                "steps": steps,
                "distinct": distinct,
                "records_per_step": len(PHASES),
                "first_seconds": round(first, 3),
                "older_seconds": round(statistics.mean(filling or [0.0]), 3),
                "unchanged_seconds": round(unchanged, 3),
                "new_step_seconds": round(statistics.median(new), 3),
                "largest_seconds": round(max([first, unchanged, *filling, *new]), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
