"""Loading a checkpoint against reading its files raw: same threads, same buffers, same copies to the device.

    python benchmarks/bench_load.py --folder /dev/shm/load --gigabytes 14.8 --rounds 5

Both run in turn on the same committed checkpoint, and each round begins with the other one. One JSON line for each round has the seconds
of both and their ratio; the last line has the medians and whether their ratio is within the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from meshwright.checkpoint.format.files import BLOCK_BYTES
from meshwright.checkpoint.read.block_reader import READ_THREADS
from meshwright.checkpoint.store import CheckpointStore

LIMIT, GOAL = 1.3, 1.1
"""Largest ratio of the medians that is accepted, and the one aimed at."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="empty or absent; removed at the end")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=440, help="as many as llama3-1b has weights and moments")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    elements = int(arguments.gigabytes * 1e9) // 4 // arguments.tensors // 256
    tensors = {f"model.{index}": torch.rand(elements, 256, device=device) for index in range(arguments.tensors)}
    store = CheckpointStore(arguments.folder)
    path = store.save(1, tensors, {}, {}).path
    expected = {name: float(tensor.double().sum()) for name, tensor in tensors.items()}
    size = sum(file.stat().st_size for file in path.iterdir())
    buffers = [
        torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(READ_THREADS)
    ]
    target = torch.empty(BLOCK_BYTES * READ_THREADS, dtype=torch.uint8, device=device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rounds: list[dict[str, float]] = []
    try:
        for number in range(arguments.rounds):
            for tensor in tensors.values():
                tensor.zero_()
            calls = {"raw_s": lambda: _read_raw(path, buffers, target), "load_s": lambda: store.load(path, tensors)}
            order = list(calls)[:: 1 if number % 2 == 0 else -1]
            seconds = {key: _timed(calls[key]) for key in order}
            assert all(float(tensor.double().sum()) == expected[name] for name, tensor in tensors.items())
            rounds.append(seconds)
            print(
                json.dumps(
                    {"round": number, "first": order[0], **seconds, "ratio": seconds["load_s"] / seconds["raw_s"]}
                )
            )
    finally:
        shutil.rmtree(arguments.folder)
    medians = {key: statistics.median(seconds[key] for seconds in rounds) for key in ("raw_s", "load_s")}
    ratio = medians["load_s"] / medians["raw_s"]
    summary = {"device": name, "bytes": size, "threads": READ_THREADS, "rounds": len(rounds), **medians, "ratio": ratio}
    print(json.dumps({"median": summary, "limit": LIMIT, "goal": GOAL, "ok": ratio <= LIMIT}))
    return 0 if ratio <= LIMIT else 1


def _timed(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _read_raw(path: Path, buffers: list[torch.Tensor], target: torch.Tensor) -> None:
    """Every byte of every file into a buffer and from there to the device, nothing checked."""
    free_buffers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(buffers)):
        free_buffers.put(number)

    def read(job: tuple[int, int, int]) -> None:
        descriptor, offset, count = job
        number = free_buffers.get()
        block = buffers[number][:count]
        os.preadv(descriptor, [block.numpy().data], offset)
        target[number * BLOCK_BYTES : number * BLOCK_BYTES + count].copy_(block, non_blocking=True)
        if target.is_cuda:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        free_buffers.put(number)

    descriptors = [os.open(file, os.O_RDONLY) for file in sorted(path.iterdir())]
    jobs = [
        (descriptor, offset, min(BLOCK_BYTES, os.fstat(descriptor).st_size - offset))
        for descriptor in descriptors
        for offset in range(0, os.fstat(descriptor).st_size, BLOCK_BYTES)
    ]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(read, jobs))
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
