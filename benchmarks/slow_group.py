"""Runs `meshwright train` on a cluster whose last ranks are slower: a calibrated spin extends each of their blocks.

    python benchmarks/slow_group.py --from-rank 2 benchmarks/llama3-8b.yaml --runs runs --fresh name=alike plan.pipeline=2 …
    python benchmarks/slow_group.py --from-rank 2 --slower 1.5 --like alike benchmarks/llama3-8b.yaml --runs runs --fresh plan.pipeline=2 …

It emulates a group of older chips on a host of equal ones (the test of Holmes, arXiv 2312.03549), for benchmarks only. After a block's
forward, and before its backward, a kernel spins on the compute stream until the block has taken --slower times its time on that rank in the
run --like (first command), by CUDA events. A chip that spins is below its power limit, and its matmuls run a tenth
faster: without --like, a block takes --slower times this shorter time.

The spin is fitted during the first steps: --warm blocks run unchanged, then rounds of --round blocks adjust it. The ratio that it reached
is written to RUN/slowed-rank-N.json with the times, and the run continues with the last round's spin. Where backward is split, the spin is
in the part that computes the input gradient; head and embedding are not slowed.

--tcp-links disables NVLink and shared memory between the slow ranks, so they communicate over TCP too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.cli.options import load, print_now
from meshwright.cli.train import announce
from meshwright.events.start import StartClock
from meshwright.launch.folder import renamed
from meshwright.launch.local import run_ranks
from meshwright.launch.prepare import prepare_run
from meshwright.models.decoder import Decoder
from meshwright.parallel import apply
from meshwright.spec.plan import Plan
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.spec.run import Assignment
from meshwright.training import worker
from meshwright.training.lifecycle import RankLife

FIRST_CYCLES_PER_MS = 1_500_000
"""Cycles of the spin kernel per millisecond, until the first round has measured them: about the clock rate of a GPU."""
ROUNDS = 3
"""Adjustments of the spin; one more round measures the result."""


def main() -> None:
    if os.environ.get("RANK") is not None:
        run_rank()
    options, overrides = parser().parse_known_args()
    run = load(overrides, options.runs)
    run = renamed(run, options.runs) if options.fresh else run
    prepared = prepare_run(run, options.runs, profile=None, note=print_now)
    if prepared is None:
        return
    announce(prepared)
    slow = {"from_rank": options.from_rank, "slower": options.slower, "tcp_links": options.tcp_links}
    slow |= {"warm": options.warm, "round": options.round, "like": options.like and str(options.runs / options.like)}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])
    arguments = [str(prepared.folder / "assignment.json"), json.dumps(slow)]
    threads = max(1, min(8, (os.cpu_count() or 1) // run.cluster.gpus_per_node))
    sys.exit(run_ranks("slow_group", arguments, cluster=run.cluster, logs=prepared.folder / "logs", threads=threads))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-rank", type=int, required=True, help="the first slow rank; those after it are slow too")
    parser.add_argument("--slower", type=float, default=1.0, help="time of a slow block over its usual time")
    parser.add_argument(
        "--like", metavar="NAME", help="a run in --runs without --slower, whose block times are the reference"
    )
    parser.add_argument("--tcp-links", action="store_true", help="slow ranks communicate with each other over TCP only")
    parser.add_argument("--warm", type=int, default=200, help="blocks run before the first round")
    parser.add_argument("--round", type=int, default=64, help="blocks of one round")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--fresh", action="store_true")
    return parser


def run_rank() -> None:
    """Run a rank with the trainer's worker; on a slow rank blocks are wrapped before they are sharded."""
    assignment, slow = Assignment.read(Path(sys.argv[1])), json.loads(sys.argv[2])
    rank = int(os.environ["RANK"])
    if rank >= slow["from_rank"]:
        if slow["tcp_links"]:
            os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        name = f"slowed-rank-{rank}.json"
        like = json.loads((Path(slow["like"]) / name).read_text(encoding="utf-8"))["own_ms"] if slow["like"] else None
        spin = Spin(slow, assignment.run.cluster.is_cpu, Path(assignment.folder) / name, like)
        apply.wrap_blocks = with_spin(apply.wrap_blocks, spin)  # pyrefly: ignore [bad-assignment]  # names of the arguments
    clock = StartClock.for_rank()
    clock.end("imports")
    worker.main(RankLife(RankEnvironment.from_environment()), Path(sys.argv[1]), clock)


def with_spin(wrap_blocks: Callable[[Decoder, Plan], None], spin: Spin) -> Callable[[Decoder, Plan], None]:
    """The trainer's wrapping (recompute, compilation) with the spin around it."""

    def wrap(model: Decoder, plan: Plan) -> None:
        wrap_blocks(model, plan)
        for block in model.layers.values():
            spin.surround(block)

    return wrap


class Spin:
    """Slows a rank down: spins after each block's forward and backward, with lengths fitted to the blocks' own times."""

    def __init__(
        self, slow: dict[str, Any], cpu: bool, file: Path, reference_ms: dict[str, float] | None = None
    ) -> None:
        self.slower, self.file, self.reference_ms = slow["slower"], file, reference_ms
        self.clock: HostClock | DeviceClock = HostClock() if cpu else DeviceClock()
        self.amount = {"forward": 0.0, "backward": 0.0}
        self.marks: dict[str, list[list[Any]]] = {"forward": [], "backward": []}
        self.blocks_left, self.round, self.rounds = slow["warm"], slow["round"], 0

    def surround(self, block: nn.Module) -> None:
        block_forward = block.forward

        def forward(x: Tensor, *arguments: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return block_forward(x, *arguments)
            marks = [self.clock.stamp()]
            output = block_forward(_BlockInput.apply(x, self), *arguments)
            self.spin("forward", marks)
            return _BlockOutput.apply(output, self)

        block.forward = forward  # type: ignore[method-assign]

    def spin(self, direction: str, marks: list[Any]) -> None:
        """Spin after the work that `marks` started, and store its three times: begin, end, end of the spin."""
        marks.append(self.clock.stamp())
        self.clock.spin(self.amount[direction])
        marks.append(self.clock.stamp())
        self.marks[direction].append(marks)

    def finish_backward(self) -> None:
        """Store the end of a block's backward, and adjust the spins after each round; called when a block's backward has finished."""
        self.marks["backward"][-1].append(self.clock.stamp())
        if self.rounds > ROUNDS:
            for marks in self.marks.values():
                marks.clear()
            return
        self.blocks_left -= 1
        if self.blocks_left == 0:
            self.adjust()

    def adjust(self) -> None:
        """Fit the spins to the blocks since the last fit; after the last round, write the slow-down that was reached."""
        forward = [self.clock.intervals(marks) for marks in self.marks["forward"][-self.round :]]
        backward = [self.clock.intervals(marks) for marks in self.marks["backward"][-self.round :] if len(marks) == 4]
        block_ms = {"forward": median_of(forward, 0), "backward": median_of(backward, 2)}
        spin_ms = {"forward": median_of(forward, 1), "backward": median_of(backward, 1)}
        self.rounds, self.blocks_left = self.rounds + 1, self.round
        for marks in self.marks.values():
            marks.clear()
        reference_ms = self.reference_ms or block_ms
        if self.rounds > ROUNDS:
            ratio = {
                direction: (block_ms[direction] + spin_ms[direction]) / reference_ms[direction]
                for direction in block_ms
            }
            facts = {
                "rank": int(os.environ["RANK"]),
                "wanted": self.slower,
                "reached": ratio,
                "own_ms": block_ms,
                "like_ms": self.reference_ms,
            }
            self.file.write_text(json.dumps(facts | {"spun_ms": spin_ms}), encoding="utf-8")
            return
        for direction in block_ms:
            rate = self.amount[direction] / spin_ms[direction] if self.amount[direction] else self.clock.per_ms
            self.amount[direction] = max(0.0, self.slower * reference_ms[direction] - block_ms[direction]) * rate


def median_of(samples: list[list[float]], index: int) -> float:
    return statistics.median(sample[index] for sample in samples)


class _BlockInput(torch.autograd.Function):
    """Identity around a block's input; its backward runs after the block's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spin: Spin) -> Tensor:
        ctx.spin = spin
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.spin.finish_backward()
        return gradients[0], None


class _BlockOutput(torch.autograd.Function):
    """Identity around a block's output; its backward runs before the block's backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, spin: Spin) -> Tensor:
        ctx.spin = spin
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.spin.spin("backward", [ctx.spin.clock.stamp()])
        return gradients[0], None


class DeviceClock:
    """Events on the compute stream, and a kernel that spins there."""

    per_ms = float(FIRST_CYCLES_PER_MS)

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spin(self, cycles: float) -> None:
        if cycles >= 1:
            torch.cuda._sleep(int(cycles))

    def intervals(self, marks: list[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [mark.elapsed_time(next_mark) for mark, next_mark in pairwise(marks)]


class HostClock:
    """As `DeviceClock`, for a CPU rank; spins are in milliseconds."""

    per_ms = 1.0

    def stamp(self) -> float:
        return time.perf_counter()

    def spin(self, milliseconds: float) -> None:
        until = time.perf_counter() + milliseconds / 1e3
        while time.perf_counter() < until:
            pass

    def intervals(self, marks: list[float]) -> list[float]:
        return [1e3 * (next_mark - mark) for mark, next_mark in pairwise(marks)]


if __name__ == "__main__":
    main()
