"""Compares implementations of weight gathers and gradient sums on one host, alone and under a stream of matmuls.

    python benchmarks/gathers.py [--gpus N] [--out FILE] [--only nccl,zero_pool,…] [--rounds 7] [--megabytes 436,1000]

The implementations, each in its own processes, so that one that fails or hangs loses only its own lines:

  nccl        NCCL with default settings, on a separate communicator
  few_ctas    NCCL limited to four thread blocks (`max_ctas`)
  zero_pool   the zero-CTA policy, buffers in a memory pool registered as symmetric windows
  zero_symm   the zero-CTA policy, buffers from torch's symmetric memory over NCCL
  kernels     copies out of peers' memory, ordered by torch's barrier kernels
  peers       copies out of peers' memory on one, two or three streams, ordered by stream memory operations (peer_copies.py)

Sizes are of the whole gathered weight in bf16, and of the whole gradient with the same number of elements, in bf16 and fp32. Each line
has the time of the collective alone (`alone`), the time that it adds to concurrent matmuls (`adds`; the matmuls are
8192 × 4096 × 14336 and take at least 1.5 times as long), the hidden share of the collective (`hidden`), and its own
time beside the matmuls (`under`). Times are medians over rounds: for matmuls of the slowest rank, for collectives of
the rank that started last. Results are compared with NCCL's. `both` is a gather in bf16 with a concurrent reduction in
fp32. NVLink multicast is off.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FAMILIES = ("nccl", "few_ctas", "zero_pool", "zero_symm", "kernels", "peers")
LIMIT_SECONDS = 75
"""Longest time of the processes of one family."""
MATMUL_SHAPE = (8192, 4096, 14336)
"""(m, k, n) of the concurrent matmuls."""
MATMULS_PER_COLLECTIVE = 1.5
"""Time of the concurrent matmuls relative to that of the collective alone."""
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

OPERATIONS = (
    ("all_gather", "bfloat16"),
    ("reduce_scatter", "bfloat16"),
    ("reduce_scatter", "float32"),
    ("both", "float32"),
)

Call = Callable[[], object]


@dataclass(frozen=True)
class Line:
    """A measurement of one collective and size; the fields are keys of the result file.

    `family` is a group of implementations that share processes, `way` an implementation in it.
    """

    family: str
    way: str
    op: str
    dtype: str
    megabytes: int
    alone_ms: float = 0.0
    gigabytes_per_second: float = 0.0
    added_ms: float = 0.0
    hidden: float = 0.0
    under_ms: float = 0.0
    matmuls_ms: float = 0.0
    equal: str = ""
    error: str = ""


def main() -> None:
    options = parser().parse_args()
    os.environ |= WITHOUT_MULTICAST | LOOPBACK
    if options.family:
        run_rank(options)
        return
    gpus = options.gpus or torch.cuda.device_count()
    lines: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    for family in options.only.split(","):
        family_lines, note = run_family(family, gpus, options)
        lines += family_lines
        notes[family] = note
        for line in family_lines:
            print(format_line(line), flush=True)
        if note:
            print(f"{family}: {note}", flush=True)
    from meshwright.observe.environment import environment

    results = {"gpus": gpus, "environment": environment(), "notes": notes, "lines": lines}
    if options.out:
        options.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", default="436,1000")
    parser.add_argument("--family", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def run_family(family: str, gpus: int, options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Run a family in its own processes; returns their lines and a note."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--family", family, "--folder", name, "--gpus", str(gpus)]
        command += ["--rounds", str(options.rounds), "--megabytes", options.megabytes]
        extra = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": f"{name}/nccl.%p"}
        ranks = []
        for rank in range(gpus):
            log = (folder / f"rank{rank}").open("w")
            environment = os.environ | extra | {"RANK": str(rank), "WORLD_SIZE": str(gpus)}
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        note = finish(ranks)
        file = folder / "lines"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if note:
            tails = [(folder / f"rank{rank}").read_text()[-700:] for rank in range(gpus)]
            note += " | " + " | ".join(tails)
        return lines, " ".join([*algorithm_counts(folder), note]).strip()


def finish(ranks: list[subprocess.Popen[bytes]]) -> str:
    """Wait for processes; end the others when one fails or at the time limit."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return ""
        if any(code for code in codes):
            time.sleep(2)
            break
        time.sleep(0.1)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    return f"exit codes {codes} (None: stopped)"


def algorithm_counts(folder: Path) -> Iterator[str]:
    """Texts with the algorithms that NCCL chose and their counts, from its log."""
    log = "\n".join(file.read_text(errors="replace") for file in folder.glob("nccl.*"))
    choices = re.findall(r"(AllGather|ReduceScatter)[^\n]*?(\[Copy Engine\]|\[Symmetric\]|Algo \w+ proto \w+)", log)
    for choice in sorted(set(choices)):
        yield f"[{choice[0]} {choice[1].strip('[]')}: {choices.count(choice)}]"


def format_line(line: dict[str, Any]) -> str:
    name = f"{line['family']:9} {line['way']:12} {line['op']:14} {line['dtype']:8} {line['megabytes']:5} MB"
    if line["error"]:
        return f"{name}  failed: {line['error'][:300]}"
    return (
        f"{name}  alone {line['alone_ms']:6.2f} ms {line['gigabytes_per_second']:6.1f} GB/s  adds {line['added_ms']:6.2f} ms"
        f"  hidden {line['hidden']:5.0%}  under {line['under_ms']:6.2f} ms  {line['equal']}"
    )


# --- in a rank


def run_rank(options: argparse.Namespace) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    device_option = {} if options.family.startswith(("zero", "few")) else {"device_id": device}
    store = dist.FileStore(str(options.folder / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, **device_option)
    bench = Bench(options, rank, ranks, device)
    for implementation in IMPLEMENTATIONS[options.family](bench):
        for megabytes in map(int, options.megabytes.split(",")):
            for op, dtype in OPERATIONS:
                if implementation.operations and op not in implementation.operations:
                    continue
                line = Line(options.family, implementation.name, op, dtype, megabytes)
                bench.write(bench.measure(implementation, line))
    torch.cuda.synchronize()
    os._exit(0)  # after a failure the communicator may not shut down


class Bench:
    """Matmuls, timers and comparisons of a rank."""

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> None:
        self.options, self.rank, self.ranks, self.device = options, rank, ranks, device
        self.host_group = dist.new_group(backend="gloo")
        rows, inner, columns = MATMUL_SHAPE
        self.left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        self.right = torch.randn(inner, columns, device=device, dtype=torch.bfloat16)
        self.matmul = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        self.collective_stream = torch.cuda.Stream(device, priority=-1)
        self.matmul_ms = self.time_calls(10, None)[0] / 10

    def write(self, line: Line) -> None:
        if self.rank == 0:
            with (self.options.folder / "lines").open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")

    def measure(self, implementation: Implementation, line: Line) -> Line:
        entries = line.megabytes * 1_000_000 // 2 // (256 * self.ranks) * 256 * self.ranks
        dtype = getattr(torch, line.dtype)
        try:
            call, equal = getattr(implementation, line.op)(entries, dtype)
            for _ in range(3):
                self.time_calls(0, call)
            collective_ms = self.median(lambda: self.time_calls(0, call)[1])
            count = max(4, math.ceil(MATMULS_PER_COLLECTIVE * collective_ms / self.matmul_ms))
            matmuls, with_collective, collective_beside = [], [], []
            for _ in range(self.options.rounds):
                matmuls.append(self.time_calls(count, None)[0])
                times_ms = self.time_calls(count, call)
                with_collective.append(times_ms[0])
                collective_beside.append(times_ms[1])
            # Each difference is of measurements next to each other in time, as clocks drift.
            added = statistics.median(
                concurrent_ms - alone_ms for alone_ms, concurrent_ms in zip(matmuls, with_collective, strict=True)
            )
            width = dtype.itemsize + (2 if line.op == "both" else 0)
            bytes_moved = entries * width * (self.ranks - 1) / self.ranks
            equality = equal()
        except Exception as error:
            return Line(**(asdict(line) | {"error": f"{type(error).__name__}: {error}"}))
        return Line(
            **asdict(line)
            | {
                "alone_ms": collective_ms,
                "gigabytes_per_second": bytes_moved / collective_ms / 1e6,
                "added_ms": added,
                "hidden": 1 - added / collective_ms,
                "under_ms": statistics.median(collective_beside),
                "products_ms": statistics.median(matmuls),
                "equal": equality,
            }
        )

    def median(self, call: Callable[[], float]) -> float:
        return statistics.median(call() for _ in range(self.options.rounds))

    def time_calls(self, count: int, call: Call | None) -> tuple[float, float]:
        """Milliseconds of `count` matmuls on the compute stream and of `call`, started with them on another stream.

        The matmuls' time is of the slowest rank, the call's of the rank that started last.
        """
        current = torch.cuda.current_stream()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        dist.barrier(self.host_group)
        torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host queues the work
        events[0].record()
        self.collective_stream.wait_stream(current)
        with torch.cuda.stream(self.collective_stream):
            events[2].record()
            if call:
                call()
            events[3].record()
        for _ in range(count):
            torch.mm(self.left, self.right, out=self.matmul)
        events[1].record()
        torch.cuda.synchronize()
        times = [events[0].elapsed_time(events[1]), -events[2].elapsed_time(events[3])]
        times_ms = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(times_ms, dist.ReduceOp.MAX, group=self.host_group)
        return float(times_ms[0]), -float(times_ms[1])

    def random_values(self, count: int, dtype: torch.dtype, owner: int | None = None) -> Tensor:
        """`count` random numbers of rank `owner` (default: this rank), which every rank can reproduce."""
        generator = torch.Generator(self.device).manual_seed(1 + (self.rank if owner is None else owner))
        return torch.randn(count, device=self.device, generator=generator).to(dtype)

    def compare(self, result: Tensor, expected: Tensor) -> str:
        """Whether a result equals NCCL's on all ranks."""
        largest_error = ((result.double() - expected.double()).abs().max() / expected.double().abs().max()).cpu()
        dist.all_reduce(largest_error, dist.ReduceOp.MAX, group=self.host_group)
        return "equal" if largest_error == 0 else f"off by {float(largest_error):.1e} of the largest"


class Implementation:
    """An implementation of gather and reduce; each method returns the call and a check of its last result."""

    operations: tuple[str, ...] = ()
    reducer: Implementation | None = None
    """The implementation that reduces while this one gathers; None for the same."""

    def __init__(self, bench: Bench, name: str, group: dist.ProcessGroup | None = None) -> None:
        self.bench, self.name, self.group = bench, name, group

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.bench.device)

    def all_gather(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        output = self.memory(entries, dtype)
        shard_size = entries // self.bench.ranks
        shard = output[shard_size * self.bench.rank :][:shard_size]
        shard.copy_(self.bench.random_values(shard_size, dtype))
        call = self.gather_call(output, shard)
        return call, lambda: self.compare_gather(output, shard)

    def gather_call(self, output: Tensor, shard: Tensor) -> Call:
        return lambda: dist.all_gather_into_tensor(output, shard, group=self.group)

    def compare_gather(self, output: Tensor, shard: Tensor) -> str:
        expected = torch.empty_like(output)
        dist.all_gather_into_tensor(expected, shard.clone())
        return self.bench.compare(output, expected)

    def reduce_scatter(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        gradient, shard = self.memory(entries, dtype), self.memory(entries // self.bench.ranks, dtype)
        gradient.copy_(self.bench.random_values(entries, dtype))
        return lambda: dist.reduce_scatter_tensor(shard, gradient, group=self.group), lambda: self.compare_sum(
            shard, gradient
        )

    def both(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        """A gather and a concurrent reduction on another stream."""
        gather, gathered = self.all_gather(entries, torch.bfloat16)
        reduce, reduced = (self.reducer or self).reduce_scatter(entries, dtype)
        reduce_stream = torch.cuda.Stream(self.bench.device, priority=-1)

        def call() -> None:
            current = torch.cuda.current_stream()
            reduce_stream.wait_stream(current)
            gather()
            with torch.cuda.stream(reduce_stream):
                reduce()
            current.wait_stream(reduce_stream)

        return call, lambda: f"{gathered()}, {reduced()}"

    def compare_sum(self, shard: Tensor, gradient: Tensor) -> str:
        expected = torch.empty_like(shard)
        dist.reduce_scatter_tensor(expected, gradient.clone())
        return self.bench.compare(shard, expected)


def nccl(bench: Bench) -> Iterator[Implementation]:
    yield Implementation(bench, "default", dist.new_group())
    two_groups = Implementation(bench, "2 groups", dist.new_group())
    two_groups.reducer, two_groups.operations = Implementation(bench, "", dist.new_group()), ("both",)
    yield two_groups


def few_ctas(bench: Bench) -> Iterator[Implementation]:
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options.config.max_ctas = 4
    yield Implementation(bench, "4 CTAs", dist.new_group(pg_options=nccl_options))


def zero_group() -> dist.ProcessGroup:
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(pg_options=nccl_options)
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)  # registering needs the communicator to exist
    return group


def zero_pool(bench: Bench) -> Iterator[Implementation]:
    yield PoolImplementation(bench, "pool", zero_group())
    engine = PoolImplementation(bench, "engine's", zero_group())
    engine.reducer, engine.operations = Implementation(bench, "", dist.new_group()), ("both",)
    yield engine


class PoolImplementation(Implementation):
    """Buffers of NCCL's allocator, registered as symmetric windows once all buffers of a collective exist."""

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        backend = self.group._get_backend(self.bench.device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(count, dtype=dtype, device=self.bench.device)
        backend.register_mem_pool(pool, symm=True)
        registered_memory.append((pool, tensor))
        return tensor


registered_memory: list[Any] = []
"""Memory pools and handles that must exist until the end of the process."""


def zero_symm(bench: Bench) -> Iterator[Implementation]:
    from torch.distributed import _symmetric_memory as symmetric

    group = zero_group()
    symmetric.set_backend("NCCL")
    yield SymmetricImplementation(bench, "symmetric", group)


class SymmetricImplementation(Implementation):
    """Buffers of torch's symmetric memory."""

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric

        tensor = symmetric.empty(count, dtype=dtype, device=self.bench.device)
        registered_memory.append(symmetric.rendezvous(tensor, self.group.group_name))
        return tensor


def kernels(bench: Bench) -> Iterator[Implementation]:
    yield BarrierImplementation(bench, "1 stream", dist.group.WORLD)


class BarrierImplementation(SymmetricImplementation):
    """Copies between two barrier kernels, as in torch's low-contention collectives."""

    def gather_call(self, output: Tensor, shard: Tensor) -> Call:
        from torch.distributed import _symmetric_memory as symmetric

        ranks, rank = self.bench.ranks, self.bench.rank
        handle = symmetric.rendezvous(output, self.group.group_name)
        received = output.view(ranks, -1)
        peers = [(rank + step) % ranks for step in range(1, ranks)]
        sources = {peer: handle.get_buffer(peer, shard.shape, shard.dtype, peer * shard.numel()) for peer in peers}

        def call() -> None:
            handle.barrier(channel=0)
            for peer in peers:
                received[peer].copy_(sources[peer], non_blocking=True)
            handle.barrier(channel=1)

        return call

    def reduce_scatter(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        from torch.distributed import _symmetric_memory as symmetric

        ranks, rank, shard_size = self.bench.ranks, self.bench.rank, entries // self.bench.ranks
        gradient = self.memory(entries, dtype)
        gradient.copy_(self.bench.random_values(entries, dtype))
        handle = symmetric.rendezvous(gradient, self.group.group_name)
        received, shard = gradient.new_empty(ranks, shard_size), gradient.new_empty(shard_size)
        sources = [handle.get_buffer(peer, (shard_size,), dtype, rank * shard_size) for peer in range(ranks)]

        def call() -> None:
            handle.barrier(channel=0)
            for step in range(ranks):
                peer = (rank + step) % ranks
                received[peer].copy_(sources[peer], non_blocking=True)
            handle.barrier(channel=1)
            torch.sum(received, 0, out=shard)

        return call, lambda: self.compare_sum(shard, gradient)


def peers(bench: Bench) -> Iterator[Implementation]:
    for streams in (1, 2, 3):
        yield PeerImplementation(bench, streams)


class PeerImplementation(Implementation):
    """Rings of slots in a window (peer_copies.py)."""

    def __init__(self, bench: Bench, streams: int) -> None:
        from peer_copies import Copies

        super().__init__(bench, f"{streams} streams")
        self.copies, self.reduce_copies = Copies(bench.device, streams), Copies(bench.device, streams)
        # The engine creates the group of a mesh axis in the same way.
        self.peer_group = dist.split_group(None, [list(range(bench.ranks))], group_desc="shard")

    def ring(self, size: int, slots: int) -> Any:
        from peer_copies import DeviceWindow, Ring

        assert self.peer_group is not None
        window = DeviceWindow(self.peer_group, size * slots, 2, self.bench.device)
        return Ring(window, 0, size, slots, (0, 1))

    def gather_call(self, output: Tensor, shard: Tensor) -> Call:
        from peer_copies import PeerGather

        gather = PeerGather(self.ring(shard.nbytes, 2), self.copies)
        return lambda: gather(output, shard)

    def reduce_scatter(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        from peer_copies import PeerReduce

        reduce = PeerReduce(self.ring(entries * dtype.itemsize, 1), self.reduce_copies)
        values = self.bench.random_values(entries, dtype)
        shard = self.memory(entries // self.bench.ranks, dtype)
        gradient = reduce.allocate((entries,), dtype=dtype, device=self.bench.device)
        gradient.copy_(values)

        def call() -> None:
            # With one slot every use returns the same memory, so its values remain.
            next_gradient = (
                gradient
                if reduce._input_buffer is not None
                else reduce.allocate((entries,), dtype=dtype, device=gradient.device)
            )
            reduce(shard, next_gradient)

        return call, lambda: self.compare_sum(shard, values)


IMPLEMENTATIONS: dict[str, Callable[[Bench], Iterator[Implementation]]] = {
    "nccl": nccl,
    "few_ctas": few_ctas,
    "zero_pool": zero_pool,
    "zero_symm": zero_symm,
    "kernels": kernels,
    "peers": peers,
}


if __name__ == "__main__":
    main()
