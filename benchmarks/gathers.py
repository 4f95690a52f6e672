"""Compares implementations of weight gathers and gradient sums on one host, alone and under a stream of matrix products.

    python benchmarks/gathers.py [--gpus N] [--out FILE] [--only nccl,zero_pool,…] [--rounds 7] [--megabytes 436,1000]

The implementations, each in its own processes, so that one that fails or hangs loses only its own lines:

  nccl        the library as it comes, on a communicator of its own
  few_ctas    the same held to four thread blocks (`max_ctas`)
  zero_pool   the zero-CTA policy, buffers in a memory pool registered as symmetric windows
  zero_symm   the zero-CTA policy, buffers from torch's symmetric memory over NCCL
  kernels     copies out of peers' memory, ordered by torch's barrier kernels
  peers       copies out of peers' memory on one, two or three streams, ordered by stream memory operations (peer_copies.py)

Sizes are of the whole gathered weight in bf16, and of the whole gradient with the same number of elements, in bf16 and fp32. A line has the
time of the collective alone, the time that it adds to concurrent products (8192 × 4096 × 14336, at least 1.5 times as long), its hidden
share, and its time beside them. Times are medians over rounds, of the slowest rank for products, and of the rank that started last for
collectives. Results are compared with NCCL's. `both` is a gather in bf16 with a concurrent reduction in fp32. NVLink multicast is off.
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
SHAPE = (8192, 4096, 14336)
LONGER = 1.5
OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
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
    """A measurement: a family of implementations, a collective and a size."""

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
    products_ms: float = 0.0
    equal: str = ""
    error: str = ""


def main() -> None:
    options = parser().parse_args()
    os.environ |= OFF | LOOPBACK
    if options.family:
        be_rank(options)
        return
    gpus = options.gpus or torch.cuda.device_count()
    lines: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    for family in options.only.split(","):
        family_lines, note = run_family(family, gpus, options)
        lines += family_lines
        notes[family] = note
        for line in family_lines:
            print(text_of(line), flush=True)
        if note:
            print(f"{family}: {note}", flush=True)
    from meshwright.observe.environment import environment

    result = {"gpus": gpus, "environment": environment(), "notes": notes, "lines": lines}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


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
        words = [sys.executable, __file__, "--family", family, "--folder", name, "--gpus", str(gpus)]
        words += ["--rounds", str(options.rounds), "--megabytes", options.megabytes]
        extra = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": f"{name}/nccl.%p"}
        ranks = []
        for rank in range(gpus):
            log = (folder / f"rank{rank}").open("w")
            environment = os.environ | extra | {"RANK": str(rank), "WORLD_SIZE": str(gpus)}
            ranks.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT))
        note = finish(ranks)
        file = folder / "lines"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if note:
            tails = [(folder / f"rank{rank}").read_text()[-700:] for rank in range(gpus)]
            note += " | " + " | ".join(tails)
        return lines, " ".join([*chosen(folder), note]).strip()


def finish(ranks: list[subprocess.Popen[bytes]]) -> str:
    """Wait for processes; end the others when one fails or at the time limit."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
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


def chosen(folder: Path) -> Iterator[str]:
    """Counts of the algorithms that NCCL chose, from its log."""
    text = "\n".join(file.read_text(errors="replace") for file in folder.glob("nccl.*"))
    choices = re.findall(r"(AllGather|ReduceScatter)[^\n]*?(\[Copy Engine\]|\[Symmetric\]|Algo \w+ proto \w+)", text)
    for choice in sorted(set(choices)):
        yield f"[{choice[0]} {choice[1].strip('[]')}: {choices.count(choice)}]"


def text_of(line: dict[str, Any]) -> str:
    name = f"{line['family']:9} {line['way']:12} {line['op']:14} {line['dtype']:8} {line['megabytes']:5} MB"
    if line["error"]:
        return f"{name}  failed: {line['error'][:300]}"
    return (
        f"{name}  alone {line['alone_ms']:6.2f} ms {line['gigabytes_per_second']:6.1f} GB/s  adds {line['added_ms']:6.2f} ms"
        f"  hidden {line['hidden']:5.0%}  under {line['under_ms']:6.2f} ms  {line['equal']}"
    )


# --- in a rank


def be_rank(options: argparse.Namespace) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    bound = {} if options.family.startswith(("zero", "few")) else {"device_id": device}
    store = dist.FileStore(str(options.folder / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, **bound)
    bench = Bench(options, rank, ranks, device)
    for way in WAYS[options.family](bench):
        for megabytes in map(int, options.megabytes.split(",")):
            for op, dtype in OPERATIONS:
                if way.only and op not in way.only:
                    continue
                line = Line(options.family, way.name, op, dtype, megabytes)
                bench.write(bench.measured(way, line))
    torch.cuda.synchronize()
    os._exit(0)  # after a failure the communicator may not shut down


class Bench:
    """Products and timers of a rank."""

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> None:
        self.options, self.rank, self.ranks, self.device = options, rank, ranks, device
        self.hosts = dist.new_group(backend="gloo")
        rows, inner, columns = SHAPE
        self.a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        self.b = torch.randn(inner, columns, device=device, dtype=torch.bfloat16)
        self.c = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        self.aside = torch.cuda.Stream(device, priority=-1)
        self.product_ms = self.timed(10, None)[0] / 10

    def write(self, line: Line) -> None:
        if self.rank == 0:
            with (self.options.folder / "lines").open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")

    def measured(self, way: Way, line: Line) -> Line:
        entries = line.megabytes * 1_000_000 // 2 // (256 * self.ranks) * 256 * self.ranks
        dtype = getattr(torch, line.dtype)
        try:
            call, equal = getattr(way, line.op)(entries, dtype)
            for _ in range(3):
                self.timed(0, call)
            alone = self.median(lambda: self.timed(0, call)[1])
            count = max(4, math.ceil(LONGER * alone / self.product_ms))
            products, together, under = [], [], []
            for _ in range(self.options.rounds):
                products.append(self.timed(count, None)[0])
                both = self.timed(count, call)
                together.append(both[0])
                under.append(both[1])
            # Each difference is of measurements next to each other in time, as clocks drift.
            added = statistics.median(b - a for a, b in zip(products, together, strict=True))
            width = dtype.itemsize + (2 if line.op == "both" else 0)
            moved = entries * width * (self.ranks - 1) / self.ranks
            equality = equal()
        except Exception as error:
            return Line(**(asdict(line) | {"error": f"{type(error).__name__}: {error}"}))
        return Line(
            **asdict(line)
            | {
                "alone_ms": alone,
                "gigabytes_per_second": moved / alone / 1e6,
                "added_ms": added,
                "hidden": 1 - added / alone,
                "under_ms": statistics.median(under),
                "products_ms": statistics.median(products),
                "equal": equality,
            }
        )  # fmt: skip

    def median(self, call: Callable[[], float]) -> float:
        return statistics.median(call() for _ in range(self.options.rounds))

    def timed(self, count: int, call: Call | None) -> tuple[float, float]:
        """Milliseconds of `count` products on the compute stream and of `call`, started with them on another stream.

        The products' time is of the slowest rank, the call's of the rank that started last.
        """
        current = torch.cuda.current_stream()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        dist.barrier(self.hosts)
        torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host queues the work
        events[0].record()
        self.aside.wait_stream(current)
        with torch.cuda.stream(self.aside):
            events[2].record()
            if call:
                call()
            events[3].record()
        for _ in range(count):
            torch.mm(self.a, self.b, out=self.c)
        events[1].record()
        torch.cuda.synchronize()
        times = [events[0].elapsed_time(events[1]), -events[2].elapsed_time(events[3])]
        both = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.hosts)
        return float(both[0]), -float(both[1])

    def share(self, count: int, dtype: torch.dtype, owner: int | None = None) -> Tensor:
        """Random numbers of a rank that every rank can reproduce."""
        generator = torch.Generator(self.device).manual_seed(1 + (self.rank if owner is None else owner))
        return torch.randn(count, device=self.device, generator=generator).to(dtype)

    def says(self, ours: Tensor, theirs: Tensor) -> str:
        """Whether a result equals NCCL's on all ranks."""
        worst = ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).cpu()
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.hosts)
        return "equal" if worst == 0 else f"off by {float(worst):.1e} of the largest"


class Way:
    """An implementation of gather and reduce; each method returns the call and a check of its last result."""

    only: tuple[str, ...] = ()
    beside: Way | None = None
    """The family that reduces while this one gathers; None for the same family."""

    def __init__(self, bench: Bench, name: str, group: dist.ProcessGroup | None = None) -> None:
        self.bench, self.name, self.group = bench, name, group

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.bench.device)

    def all_gather(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        output = self.memory(entries, dtype)
        own = entries // self.bench.ranks
        part = output[own * self.bench.rank :][:own]
        part.copy_(self.bench.share(own, dtype))
        call = self.gathering(output, part)
        return call, lambda: self.compare_gather(output, part)

    def gathering(self, output: Tensor, part: Tensor) -> Call:
        return lambda: dist.all_gather_into_tensor(output, part, group=self.group)

    def compare_gather(self, output: Tensor, part: Tensor) -> str:
        theirs = torch.empty_like(output)
        dist.all_gather_into_tensor(theirs, part.clone())
        return self.bench.says(output, theirs)

    def reduce_scatter(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        whole, part = self.memory(entries, dtype), self.memory(entries // self.bench.ranks, dtype)
        whole.copy_(self.bench.share(entries, dtype))
        return lambda: dist.reduce_scatter_tensor(part, whole, group=self.group), lambda: self.compare_sum(part, whole)

    def both(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        """A gather and a concurrent reduction on another stream."""
        gather, gathered = self.all_gather(entries, torch.bfloat16)
        reduce, reduced = (self.beside or self).reduce_scatter(entries, dtype)
        other = torch.cuda.Stream(self.bench.device, priority=-1)

        def call() -> None:
            current = torch.cuda.current_stream()
            other.wait_stream(current)
            gather()
            with torch.cuda.stream(other):
                reduce()
            current.wait_stream(other)

        return call, lambda: f"{gathered()}, {reduced()}"

    def compare_sum(self, part: Tensor, whole: Tensor) -> str:
        theirs = torch.empty_like(part)
        dist.reduce_scatter_tensor(theirs, whole.clone())
        return self.bench.says(part, theirs)


def nccl(bench: Bench) -> Iterator[Way]:
    yield Way(bench, "default", dist.new_group())
    two = Way(bench, "2 groups", dist.new_group())
    two.beside, two.only = Way(bench, "", dist.new_group()), ("both",)
    yield two


def few_ctas(bench: Bench) -> Iterator[Way]:
    chosen = dist.ProcessGroupNCCL.Options()
    chosen.config.max_ctas = 4
    yield Way(bench, "4 CTAs", dist.new_group(pg_options=chosen))


def zero_group() -> dist.ProcessGroup:
    chosen = dist.ProcessGroupNCCL.Options()
    chosen.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(pg_options=chosen)
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)  # registering needs the communicator to exist
    return group


def zero_pool(bench: Bench) -> Iterator[Way]:
    yield PoolWay(bench, "pool", zero_group())
    engine = PoolWay(bench, "engine's", zero_group())
    engine.beside, engine.only = Way(bench, "", dist.new_group()), ("both",)
    yield engine


class PoolWay(Way):
    """Buffers of NCCL's allocator, registered as symmetric windows once all buffers of a collective exist."""

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        backend = self.group._get_backend(self.bench.device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(count, dtype=dtype, device=self.bench.device)
        backend.register_mem_pool(pool, symm=True)
        kept.append((pool, tensor))
        return tensor


kept: list[Any] = []
"""Memory pools that stay registered."""


def zero_symm(bench: Bench) -> Iterator[Way]:
    from torch.distributed import _symmetric_memory as symmetric

    group = zero_group()
    symmetric.set_backend("NCCL")
    yield SymmetricWay(bench, "symmetric", group)


class SymmetricWay(Way):
    """Buffers of torch's symmetric memory."""

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric

        tensor = symmetric.empty(count, dtype=dtype, device=self.bench.device)
        kept.append(symmetric.rendezvous(tensor, self.group.group_name))
        return tensor


def kernels(bench: Bench) -> Iterator[Way]:
    yield BarrierWay(bench, "1 stream", dist.group.WORLD)


class BarrierWay(SymmetricWay):
    """Copies between two barrier kernels, as in torch's low-contention collectives."""

    def gathering(self, output: Tensor, part: Tensor) -> Call:
        from torch.distributed import _symmetric_memory as symmetric

        ranks, rank = self.bench.ranks, self.bench.rank
        handle = symmetric.rendezvous(output, self.group.group_name)
        rows = output.view(ranks, -1)
        peers = [(rank + step) % ranks for step in range(1, ranks)]
        sources = {p: handle.get_buffer(p, part.shape, part.dtype, p * part.numel()) for p in peers}

        def call() -> None:
            handle.barrier(channel=0)
            for peer in peers:
                rows[peer].copy_(sources[peer], non_blocking=True)
            handle.barrier(channel=1)

        return call

    def reduce_scatter(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        from torch.distributed import _symmetric_memory as symmetric

        ranks, rank, own = self.bench.ranks, self.bench.rank, entries // self.bench.ranks
        whole = self.memory(entries, dtype)
        whole.copy_(self.bench.share(entries, dtype))
        handle = symmetric.rendezvous(whole, self.group.group_name)
        rows, part = whole.new_empty(ranks, own), whole.new_empty(own)
        sources = [handle.get_buffer(p, (own,), dtype, rank * own) for p in range(ranks)]

        def call() -> None:
            handle.barrier(channel=0)
            for step in range(ranks):
                peer = (rank + step) % ranks
                rows[peer].copy_(sources[peer], non_blocking=True)
            handle.barrier(channel=1)
            torch.sum(rows, 0, out=part)

        return call, lambda: self.compare_sum(part, whole)


def peers(bench: Bench) -> Iterator[Way]:
    for streams in (1, 2, 3):
        yield PeerWay(bench, streams)


class PeerWay(Way):
    """Rings of slots in a window (peer_copies.py)."""

    def __init__(self, bench: Bench, streams: int) -> None:
        from peer_copies import Copies

        super().__init__(bench, f"{streams} streams")
        self.copies, self.more_copies = Copies(bench.device, streams), Copies(bench.device, streams)
        # As the engine makes the group of an axis.
        self.members = dist.split_group(None, [list(range(bench.ranks))], group_desc="shard")

    def ring(self, size: int, slots: int) -> Any:
        from peer_copies import DeviceWindow, Ring

        assert self.members is not None
        window = DeviceWindow(self.members, size * slots, 2, self.bench.device)
        return Ring(window, 0, size, slots, (0, 1))

    def gathering(self, output: Tensor, part: Tensor) -> Call:
        from peer_copies import PeerGather

        gather = PeerGather(self.ring(part.nbytes, 2), self.copies)
        return lambda: gather(output, part)

    def reduce_scatter(self, entries: int, dtype: torch.dtype) -> tuple[Call, Callable[[], str]]:
        from peer_copies import PeerReduce

        reduce = PeerReduce(self.ring(entries * dtype.itemsize, 1), self.more_copies)
        values = self.bench.share(entries, dtype)
        part = self.memory(entries // self.bench.ranks, dtype)
        whole = reduce.allocate((entries,), dtype=dtype, device=self.bench.device)
        whole.copy_(values)

        def call() -> None:
            # With one slot every use has the same memory, so the numbers written there stay.
            again = (
                whole
                if reduce._input_buffer is not None
                else reduce.allocate((entries,), dtype=dtype, device=whole.device)
            )
            reduce(part, again)

        return call, lambda: self.compare_sum(part, values)


WAYS: dict[str, Callable[[Bench], Iterator[Way]]] = {
    "nccl": nccl, "few_ctas": few_ctas, "zero_pool": zero_pool, "zero_symm": zero_symm, "kernels": kernels, "peers": peers,
}  # fmt: skip


if __name__ == "__main__":
    main()
