"""Asynchronous tensor-parallel matmuls on two GPUs: operators against blocking ones, with delays, and whole runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.runs import LAYOUT_BOUND, LLAMA, RUNS_LIMIT, figures, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

GPUS = 2
ROUNDS = 40
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest error over the largest value: the same matmuls in pieces; in bf16 each rank's matmul is rounded."""
FP32_BOUND = 1e-4
"""Relative difference of fp32 losses over six steps, twenty times closer than bf16's."""
CASES = {
    "tensor 2": ["plan.micro_batch=2"],
    "tensor 2, not compiled, recompute full": ["plan.compile=false", "plan.recompute=full"],
    "tensor 2, recompute selective": ["plan.recompute=selective"],
}


def needs_mapped_gpus() -> None:
    if torch.cuda.device_count() < GPUS or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip(f"needs {GPUS} GPUs that map each other's memory")


def test_operators_equal_their_plain_twins_however_late_a_rank_is(tmp_path: Path) -> None:
    """Exchanges follow one another without a rest, on ranks that are late by turns: a slot that was taken early would show."""
    needs_mapped_gpus()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.test_async_tensor", str(tmp_path / "store")],
            env=os.environ | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(GPUS)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * GPUS, "\n".join(outputs)


@pytest.mark.parametrize("name", CASES)
def test_runs_train_alike(name: str, tmp_path: Path) -> None:
    needs_mapped_gpus()
    common = ["plan.tensor=2", *CASES[name]]
    by_collectives, by_copies = (
        figures(trained(tmp_path, LLAMA, transport, GPUS, [*common, f"plan.tensor_transport={transport}"]))
        for transport in ("nccl", "copy_engine")
    )
    assert by_copies == pytest.approx(by_collectives, rel=LAYOUT_BOUND)


def test_runs_train_alike_in_fp32(tmp_path: Path) -> None:
    """Tight: over six steps nothing but the order of sums differs."""
    needs_mapped_gpus()
    common = ["plan.tensor=2", "plan.compute=fp32", "plan.micro_batch=2"]
    by_collectives, by_copies = (
        figures(trained(tmp_path, LLAMA, transport, GPUS, [*common, f"plan.tensor_transport={transport}"]))
        for transport in ("nccl", "copy_engine")
    )
    assert by_copies == pytest.approx(by_collectives, rel=FP32_BOUND)


def be_rank(store: str, rank: int) -> None:
    """One of the ranks: rounds of all operators, both ways on the same numbers."""
    from meshwright.parallel import async_tensor
    from meshwright.parallel.peers import PeerMemory, close_peers, register

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(store, GPUS), rank=rank, world_size=GPUS, device_id=device)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    name, draw = group.group_name, torch.Generator().manual_seed(rank)

    def delay() -> None:
        if torch.rand((), generator=draw) < 0.3:
            torch.cuda._sleep(int(2e6))

    peers = PeerMemory(group, device)
    async_tensor.PIECE_ROWS = 1
    for dtype, bound in BOUNDS.items():
        worst: dict[str, float] = {}
        rounds = []
        for number in range(ROUNDS):
            # Sizes change, and grow beyond the window.
            inputs = numbers(
                number, dtype, device, batch=1 + number % 2, local_tokens=160 if number > ROUNDS // 2 else 96
            )
            by_collectives = all_of(inputs, name)
            register(name, peers)
            rounds.append((by_collectives, all_of(inputs, name, delay)))
            close_peers(name)
        for by_collectives, by_copies in rounds:
            for operator_name in by_collectives:
                for a, b in zip(by_copies[operator_name], by_collectives[operator_name], strict=True):
                    error = float((a - b).abs().max() / b.abs().max())
                    worst[operator_name] = max(worst.get(operator_name, 0.0), error)
        print(dtype, worst, flush=True)  # shown when the test fails
        assert max(worst.values()) < bound, (dtype, worst)
    dist.destroy_process_group()


def numbers(
    seed: int, dtype: torch.dtype, device: torch.device, batch: int, local_tokens: int
) -> dict[str, torch.Tensor]:
    """Return the operands of a round; ranks draw their own."""
    draw = torch.Generator(device).manual_seed(1000 * seed + device.index)
    outer_width, inner_width = 256, 192

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device, dtype=torch.float32).to(dtype)

    return {
        "x": normal(batch, local_tokens, outer_width),
        "y": normal(batch, GPUS * local_tokens, inner_width),
        "rows": normal(inner_width, outer_width),
        "columns": normal(outer_width, inner_width),
        "bias": normal(inner_width),
    }


def all_of(
    tensors: dict[str, torch.Tensor], name: str, before_each: Callable[[], None] = lambda: None
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the results of every operator by its name; `before_each` is called before each operator."""
    from meshwright.parallel import linear_exchanges

    x, y, row_weight, column_weight = (tensors[key] for key in ("x", "y", "rows", "columns"))
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    biases, pair = [tensors["bias"], None], [row_weight, row_weight.flip(0)]
    for operator_name, operator, inputs in (
        ("gathered", linear_exchanges.all_gather_matmul, (x, [row_weight], biases[:1])),
        ("gathered backward", linear_exchanges.all_gather_matmul_backward, (x, [row_weight], [y])),
        ("scattered", linear_exchanges.matmul_reduce_scatter, ([y], [column_weight])),
        ("gathered backward, split", linear_exchanges.all_gather_matmul_input_backward, (x, [row_weight], [y])),
        ("scattered backward", linear_exchanges.matmul_reduce_scatter_input_backward, (x, [column_weight])),
        ("gathered for two", linear_exchanges.all_gather_matmul, (x, pair, biases)),
        ("gathered backward of two", linear_exchanges.all_gather_matmul_backward, (x, pair, [y, y])),
        (
            "sum of two scattered",
            linear_exchanges.matmul_reduce_scatter,
            ([y, y], [column_weight, column_weight.flip(1)]),
        ),
    ):
        before_each()
        results[operator_name] = tuple(leaves(operator(*inputs, name, GPUS)))
    return results


def leaves(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [leaf for element in result for leaf in leaves(element)]


if __name__ == "__main__":
    be_rank(sys.argv[1], int(os.environ["RANK"]))
