"""Rates of the parts of a save and a load on this machine: writes from a snapshot buffer, copies into it, reads to the device."""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer
from meshwright.checkpoint.read.block_reader import READ_THREADS
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write.background import writer_threads
from meshwright.checkpoint.write.file_writer import write_file
from meshwright.checkpoint.write.source_checksum import host_checksum

Line = dict[str, Any]
BLOCK_BYTES = 16 << 20
"""Bytes of one write of the plain copy."""
PIECE_BYTES = 64 << 20
"""Bytes of one raw read."""


def write_rates(options: argparse.Namespace) -> Iterator[Line]:
    """Write rates of the writer process's save and of a plain copy of the same memory, measured alternately."""
    size = int((0.2 if options.cpu else options.gigabytes) * 1e9) // mmap.PAGESIZE * mmap.PAGESIZE
    buffer, threads = SnapshotBuffer.create(size), writer_threads(1)
    sample = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    data = torch.frombuffer(buffer.memory, dtype=torch.uint8)
    for start in range(0, len(data), len(sample)):
        data[start : start + len(sample)] = sample[: len(data) - start]
    path = options.runs / "written"
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: write_file(path, [[buffer.data[:size]]], threads),
        "copy": lambda: plain_copy(path, buffer.data[:size], threads),
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


def host_copy_rate(count: int = 32 << 20) -> float:
    """Bytes per second of a CPU rank's copy of its state into a snapshot buffer, with the checksums that are computed before."""
    source, target = torch.ones(count // 4), torch.empty(count // 4)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        host_checksum(source.view(torch.uint8))
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return count / min(seconds)


def is_in_memory(folder: Path) -> bool:
    """Whether the folder's file system is a tmpfs."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    mount = max(
        (mount for mount in mounts if folder.resolve().is_relative_to(mount[0])), key=lambda mount: len(mount[0])
    )
    return mount[1] == "tmpfs"


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
