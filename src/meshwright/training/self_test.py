"""Self-test of a host's devices: a matmul with a known result, a memory pattern, and exchanges between pairs of ranks.

After a failure that hardware may have caused, processes that wait for the next attempt call `answer_self_test`.

`python -m meshwright.training.self_test cpu|cuda RANKS [SECONDS]` starts one process per device of this host and prints one JSON object:
{ok, device, ranks, seconds, checks: [{rank, check, ok, detail}]}. The exit code is 0 if all checks pass, else 3. A process that does not
answer in time fails the check `answer`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.events.messages import SelfTest, SelfTestResult
from meshwright.events.terminal import write_line
from meshwright.parallel.world import open_store
from meshwright.spec.errors import EXIT_DONE, EXIT_NO_RESOURCES
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.spec.secrets import without_secrets

SECONDS = 60.0
"""Default time limit of a whole test, in seconds."""
SIZE = 512
"""Number of rows and columns of the matrices."""
MATMULS = 8
"""Number of matmuls for each dtype."""
MEMORY_BYTES = {"cpu": 256 << 20, "cuda": 8 << 30}
EXCHANGE_ELEMENTS = 1 << 20
Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Check:
    """The result of one check on one rank. `detail` says what was wrong; it is empty if `ok`."""

    rank: int
    check: str
    ok: bool
    detail: str = ""


def wrong_matmul(device: torch.device, multiply: Multiply = torch.mm) -> str:
    """Compute matmuls of small integers on `device` and compare them with the exact result. Returns the first error, or an empty text."""
    left = _integers(3, 5)
    right = _integers(2, 11)
    exact = left @ right  # int64 on the CPU, whose arithmetic the matmuls below do not use
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        a, b, expected = (matrix.to(dtype).to(device) for matrix in (left, right, exact))
        for number in range(MATMULS):
            differs = (multiply(a, b) != expected).nonzero()
            if len(differs):
                row, column = differs[0].tolist()
                return (
                    f"{dtype} matmul {number}: {len(differs)} of {SIZE * SIZE} elements differ, first [{row}, {column}]"
                )
    return ""


def _integers(row_factor: int, column_factor: int) -> Tensor:
    """Return a matrix of integers from -3 to 3. Their products, and sums of these, are exact in fp32."""
    index = torch.arange(SIZE)
    return (index[:, None] * row_factor + index * column_factor + index[:, None] * index) % 7 - 3


def wrong_memory(device: torch.device, count: int) -> str:
    """Write a pattern and its complement to `count` bytes of memory and read them back. Returns the first error, or an empty text."""
    words = torch.empty(count // 8, dtype=torch.int64, device=device)
    for pattern in (0x5555555555555555, -0x5555555555555556):
        write_pattern(words, pattern)
        wrong = find_wrong_word(words, pattern)
        if wrong is not None:
            return f"byte {8 * wrong:,} of {count:,} does not hold what was written"
    return ""


def write_pattern(words: Tensor, pattern: int) -> None:
    """Fill `words` with their indices, each xor `pattern`."""
    torch.arange(len(words), out=words)
    words.bitwise_xor_(pattern)


def find_wrong_word(words: Tensor, pattern: int) -> int | None:
    """Return the index of the first word that differs from what `write_pattern` wrote; None if there is none."""
    for start in range(0, len(words), 1 << 22):
        part = words[start : start + (1 << 22)]
        expected = torch.arange(start, start + len(part), device=words.device).bitwise_xor_(pattern)
        differs = (part != expected).nonzero()
        if len(differs):
            return start + int(differs[0])
    return None


def partners(rank: int, ranks: int) -> list[int | None]:
    """Return the partner of `rank` in each round of a round-robin, in which every pair meets once; None: no partner in this round."""
    even = ranks + ranks % 2
    rounds: list[int | None] = []
    for turn in range(even - 1):
        if rank == even - 1:
            partner = turn * (even // 2) % (even - 1)  # the solution p of 2 · p = turn modulo even - 1
        else:
            partner = (turn - rank) % (even - 1)
            partner = even - 1 if partner == rank else partner
        rounds.append(partner if partner < ranks else None)
    return rounds


def wrong_exchange(device: torch.device, rank: int, ranks: int) -> str:
    """Exchange data with each other rank and check it. Returns the first error, or an empty text. Collective."""
    for partner in partners(rank, ranks):
        if partner is None:
            continue
        index = torch.arange(EXCHANGE_ELEMENTS, device=device)
        sent = index * (rank + 1)
        received = torch.empty_like(index)
        works = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        differs = (received != index * (partner + 1)).nonzero()
        if len(differs):
            return (
                f"from rank {partner}: {len(differs)} of {EXCHANGE_ELEMENTS} elements differ, first {int(differs[0])}"
            )
    return ""


def run_rank(device_type: str, rank: int, ranks: int, store: str) -> Iterator[Check]:
    """Run all checks of one rank and yield their results."""
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    functions: dict[str, Callable[[], str]] = {
        "matmul": lambda: wrong_matmul(device),
        "memory": lambda: wrong_memory(device, _memory_bytes(device, ranks)),
        "exchange": lambda: _join_and_exchange(
            backend, device, rank, ranks, lambda: dist.FileStore(store, ranks), timedelta(seconds=SECONDS)
        ),
    }
    for name, function in functions.items():
        detail = _run_check(function)
        yield Check(rank, name, not detail, detail)


def _run_check(function: Callable[[], str]) -> str:
    """Run a check and return the error that it found or raised; empty if there is none."""
    try:
        return function()
    except Exception as error:
        return _description(error)


def _description(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def answer_self_test(device_type: str, request: SelfTest) -> SelfTestResult:
    """Run the self-test in a process that waits for an attempt, together with the other ranks that `request` names."""
    environment = RankEnvironment.from_environment({**os.environ, **request.environment})
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", environment.local_rank)
    matmul = _run_check(lambda: _prepare(device) or wrong_matmul(device))
    memory = _run_check(lambda: _wrong_memory_if_free(device, environment.local_ranks))
    limit = timedelta(seconds=request.seconds / 2)
    backend = "gloo" if device.type == "cpu" else "nccl"
    try:
        exchange = _join_and_exchange(
            backend, device, environment.rank, environment.ranks, lambda: open_store(environment, limit), limit
        )
    except Exception as error:
        return SelfTestResult(matmul or memory, _description(error), exchanged=False)
    return SelfTestResult(matmul or memory, exchange)


def _prepare(device: torch.device) -> str:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return ""


def _wrong_memory_if_free(device: torch.device, ranks: int) -> str:
    """`wrong_memory` for free memory. Memory that other processes use is no error. Afterwards the allocator's statistics start anew."""
    try:
        return wrong_memory(device, _memory_bytes(device, ranks))
    except Exception as error:
        if as_meshwright_error(error).exit_code == EXIT_NO_RESOURCES:
            return ""
        raise
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _memory_bytes(device: torch.device, ranks: int) -> int:
    if device.type == "cpu":
        return MEMORY_BYTES["cpu"] // ranks
    return min(MEMORY_BYTES["cuda"], torch.cuda.mem_get_info(device)[0] // 2)


def _join_and_exchange(
    backend: str, device: torch.device, rank: int, ranks: int, store: Callable[[], dist.Store], limit: timedelta
) -> str:
    """Exchange data with each other rank. `store` opens the store through which the ranks find each other."""
    if ranks == 1:
        return ""
    dist.init_process_group(backend, store=store(), rank=rank, world_size=ranks, timeout=limit)
    detail = wrong_exchange(device, rank, ranks)
    dist.barrier()
    dist.destroy_process_group()
    return detail


def check_host(device_type: str, ranks: int, seconds: float = SECONDS) -> list[Check]:
    """Run the checks of all ranks of this host, each rank in a process of its own."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshwright.training.self_test", device_type]
        env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **without_secrets()}
        processes = [
            subprocess.Popen(
                [*command, f"rank={rank}", str(ranks), str(Path(folder) / "store")], stdout=subprocess.PIPE, env=env
            )
            for rank in range(ranks)
        ]
        try:
            return [check for rank, process in enumerate(processes) for check in _answers(process, rank, deadline)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _answers(process: subprocess.Popen[bytes], rank: int, deadline: float) -> list[Check]:
    with suppress(subprocess.TimeoutExpired):
        output = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
        checks = [Check(**json.loads(line)) for line in output.splitlines() if line.startswith(b"{")]
        ended = [] if len(checks) == 3 else [Check(rank, "answer", False, f"ended with exit code {process.returncode}")]
        return [*checks, *ended]
    return [Check(rank, "answer", False, "did not answer in time")]


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments: device, ranks and time limit. For other arguments prints a usage and ends with code 2."""
    parser = argparse.ArgumentParser(prog="python -m meshwright.training.self_test", description="Test this host.")
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("ranks", type=int, help="number of GPUs, or of processes on a CPU")
    parser.add_argument("seconds", type=float, nargs="?", default=SECONDS, help="longest time for an answer")
    given = parser.parse_args(words)
    if given.ranks < 1:
        parser.error(f"argument ranks: expected at least 1, got {given.ranks}")
    return given


def main() -> None:
    words = sys.argv[1:]
    if words[1:] and words[1].startswith("rank="):
        for check in run_rank(words[0], int(words[1][5:]), int(words[2]), words[3]):
            write_line(json.dumps(asdict(check)), sys.stdout)
        os._exit(EXIT_DONE)  # communicator destructors must not wait for peers
    began = time.monotonic()
    given = _arguments(words)
    checks = check_host(given.device, given.ranks, given.seconds)
    good = all(check.ok for check in checks)
    answer = {"ok": good, "device": given.device, "ranks": given.ranks, "seconds": round(time.monotonic() - began, 3)}
    write_line(json.dumps({**answer, "checks": [asdict(check) for check in checks]}), sys.stdout)
    sys.exit(EXIT_DONE if good else EXIT_NO_RESOURCES)


if __name__ == "__main__":
    main()
