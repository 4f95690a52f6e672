"""Compares tensor-parallel matmuls with collectives around them and with copies by copy engines that overlap them.

    python benchmarks/tensor_overlap.py [--gpus N] [--widths 2,4,8] [--tokens 8192] [--batch 1] [--rows 1024,2048,4096] [--out FILE]

Prints a line for each matmul of Llama-3-8B and direction, in ms of the slowest rank, medians over rounds of several
calls in a row:

  plain      collectives before or after the matmul (`plan.tensor_transport: nccl`)
  beside     copies by copy engines that overlap the matmul in pieces (`copy`), for each minimum number of rows per
  piece matmuls   the undivided matmuls alone, the lower bound
  exchange   the collectives alone
  hidden     share of the exchange time by which `beside` is faster than `plain`; 100% equals `matmuls`

`--widths` are the numbers of tensor ranks for which the matrices are divided (default: the number of GPUs); on fewer GPUs the exchange is
between these only. The results of both implementations are compared. NVLink multicast is off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HIDDEN = 4096
"""Hidden size of Llama-3-8B."""
MATMULS = {
    "qkv": ("gathered", 6144),
    "out": ("scattered", 4096),
    "gate_up": ("gathered", 28672),
    "down": ("scattered", 14336),
}
"""Matmuls of a layer: whether tokens are gathered before or summed after it, and its width other than the hidden size.
"""
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
LIMIT_SECONDS = 400
"""Longest time of all ranks."""
CALLS = 8
"""Calls in a row per sample, so that the host runs ahead of the device as in a step."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Times of a matmul in one direction; the fields are keys of the result file."""

    product: str
    width: int
    direction: str
    plain_ms: float
    beside_ms: dict[int, float] = field(default_factory=dict)
    products_ms: float
    exchange_ms: float
    error: float
    """Largest difference between the two results, relative to the largest value."""

    def text(self) -> str:
        overlapped_text = "  ".join(
            f"beside/{rows} {ms:6.3f} ({(self.plain_ms - ms) / self.exchange_ms:4.0%})"
            for rows, ms in self.beside_ms.items()
        )
        return (
            f"{self.product:8} /{self.width}  {self.direction:8}  plain {self.plain_ms:6.3f}  {overlapped_text}  "
            f"matmuls {self.products_ms:6.3f}  exchange {self.exchange_ms:6.3f}  error {self.error:.1e}"
        )


def main() -> None:
    options = parser().parse_args()
    os.environ |= WITHOUT_MULTICAST | LOOPBACK
    if options.folder:
        run_rank(options)
        return
    gpus = options.gpus or torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--gpus", str(gpus)]
        environment = [os.environ | {"RANK": str(rank)} for rank in range(gpus)]
        ranks = [subprocess.Popen(command, env=variables) for variables in environment]
        try:
            codes = [rank.wait(LIMIT_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        lines = json.loads((Path(folder) / "lines").read_text())
    if options.out:
        from meshwright.observe.environment import environment as machine

        result = {"command": " ".join(sys.argv), "gpus": gpus, "tokens": options.tokens, "batch": options.batch}
        options.out.write_text(
            json.dumps({**result, "environment": machine(), "lines": lines}, indent=1, default=str) + "\n"
        )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--widths", help="by default the number of GPUs")
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--rows", default="1024,2048,4096")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


# --- in a rank


def run_rank(options: argparse.Namespace) -> None:
    rank, ranks = int(os.environ["RANK"]), options.gpus
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(options.folder / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=device)
    bench = Bench(options, device, ranks)
    lines = []
    for width in map(int, (options.widths or str(ranks)).split(",")):
        for matmul in MATMULS:
            for direction in ("forward", "backward"):
                line = bench.line(matmul, width, direction)
                lines.append(line)
                if rank == 0:
                    print(line.text(), flush=True)
    if rank == 0:
        (options.folder / "lines").write_text(json.dumps([asdict(line) for line in lines]))
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    def __init__(self, options: argparse.Namespace, device: torch.device, ranks: int) -> None:
        from meshwright.parallel.peers import PeerMemory

        group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        self.device, self.ranks, self.name = device, ranks, group.group_name
        self.peers = PeerMemory(group, device)
        self.batch, self.tokens, self.rounds = options.batch, options.tokens, options.rounds
        self.rows = list(map(int, options.rows.split(",")))

    def line(self, matmul: str, width: int, direction: str) -> Line:
        from meshwright.parallel import async_tensor
        from meshwright.parallel.peers import close_peers, register

        exchange_type, width_in = MATMULS[matmul]
        operator = self.gather_calls if exchange_type == "gathered" else self.scatter_calls
        call, matmuls_only, exchange = operator(width_in // width)
        call, matmuls_only, exchange = (pair[direction == "backward"] for pair in (call, matmuls_only, exchange))
        close_peers(self.name)
        expected, plain_seconds = call(), self.seconds(call)
        register(self.name, self.peers)
        overlapped_ms, error = {}, 0.0
        for min_rows in self.rows:
            async_tensor.PIECE_ROWS = min_rows
            error = max(
                error,
                *(
                    float((value - reference).abs().max() / reference.abs().max())
                    for value, reference in zip(call(), expected, strict=True)
                ),
            )
            overlapped_ms[min_rows] = 1e3 * self.seconds(call)
        close_peers(self.name)
        return Line(
            product=matmul,
            width=width,
            direction=direction,
            plain_ms=1e3 * plain_seconds,
            beside_ms=overlapped_ms,
            products_ms=1e3 * self.seconds(matmuls_only),
            exchange_ms=1e3 * self.seconds(exchange),
            error=error,
        )

    def gather_calls(self, outputs: int) -> Any:
        """(forward, backward) calls of the whole operator, of its matmuls alone, and of its exchanges alone."""
        from meshwright.parallel import linear_exchanges as ops

        x, weight, grad = self.random_shard(HIDDEN), self.random_tensor(outputs, HIDDEN), self.random_tokens(outputs)
        all_tokens, name = self.random_tokens(HIDDEN), (self.name, self.ranks)

        def backward() -> tuple[Tensor, Tensor]:
            x_grad, (weight_grad,) = ops.all_gather_matmul_backward(x, [weight], [grad], *name)
            return x_grad, weight_grad

        return (
            (lambda: ops.all_gather_matmul(x, [weight], [None], *name), backward),
            (
                lambda: all_tokens @ weight.t(),
                lambda: (grad @ weight, grad.flatten(0, 1).t() @ all_tokens.flatten(0, 1)),
            ),
            (
                lambda: ops.all_gather_tokens(x, *name),
                lambda: (ops.all_gather_tokens(x, *name), ops.reduce_scatter_tokens(all_tokens, *name)),
            ),
        )

    def scatter_calls(self, width_in: int) -> Any:
        """The same for the operator that sums and scatters its result; the weight gradient belongs to its backward."""
        from meshwright.parallel import linear_exchanges as ops

        x, weight, grad = self.random_tokens(width_in), self.random_tensor(HIDDEN, width_in), self.random_shard(HIDDEN)
        all_tokens, name = self.random_tokens(HIDDEN), (self.name, self.ranks)

        def backward() -> tuple[Tensor, Tensor]:
            (x_grad,), gathered = ops.matmul_reduce_scatter_input_backward(grad, [weight], *name)
            return x_grad, gathered.flatten(0, 1).t() @ x.flatten(0, 1)

        return (
            (lambda: (ops.matmul_reduce_scatter([x], [weight], *name),), backward),
            (lambda: x @ weight.t(), lambda: (all_tokens @ weight, all_tokens.flatten(0, 1).t() @ x.flatten(0, 1))),
            (lambda: ops.reduce_scatter_tokens(all_tokens, *name), lambda: ops.all_gather_tokens(grad, *name)),
        )

    def random_shard(self, width: int) -> Tensor:
        return self.random_tensor(self.batch, self.tokens // self.ranks, width)

    def random_tokens(self, width: int) -> Tensor:
        return self.random_tensor(self.batch, self.tokens, width)

    def random_tensor(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of a call on the slowest rank."""
        for _ in range(3):
            call()
        samples = []
        for _ in range(self.rounds):
            dist.barrier()
            torch.cuda.synchronize()
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            for _ in range(CALLS):
                call()
            end_event.record()
            torch.cuda.synchronize()
            samples.append(start_event.elapsed_time(end_event) / 1e3 / CALLS)
        slowest = torch.tensor(statistics.median(samples), device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


if __name__ == "__main__":
    main()
