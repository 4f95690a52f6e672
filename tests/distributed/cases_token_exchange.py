"""A layer's experts on several ranks, by messages and by kernels in mapped memory: outputs and gradients of both."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.grouped import ExpertOrder
from meshwright.models.moe import Experts
from meshwright.parallel import experts as experts_module
from meshwright.parallel.experts import AllToAll, DistributedExperts
from meshwright.parallel.token_exchange import PeerTokenExchange, TokenExchange, open_symmetric_window
from meshwright.parallel.token_exchange_peers import MappedWindow, PeerExchange
from meshwright.parallel.world import World
from meshwright.spec.model import moe_of
from tests.distributed.test_experts import MIXTRAL
from tests.kernels.emulated_ranks import drawn_loads

LOADS = ["uneven", "one expert", "one rank", "uneven"]


def open_shared_window(world: World, folder: Path, size: int) -> MappedWindow:
    """A window of CPU ranks, in files that all of them map."""
    number = len(list(folder.glob(f"{world.rank}-*")))
    names = [folder / f"{rank}-{number}" for rank in range(world.ranks)]
    memory = torch.from_file(str(names[world.rank]), shared=True, size=size, dtype=torch.uint8)
    memory.zero_()
    dist.barrier()
    others = [torch.from_file(str(name), shared=True, size=size, dtype=torch.uint8) for name in names]
    others[world.rank] = memory
    _windows.append(others)
    return MappedWindow(memory, torch.tensor([other.data_ptr() for other in others]))


_windows: list[list[Tensor]] = []
"""Mapped files, which windows of other ranks point into."""


def outputs_and_gradients(
    exchange: TokenExchange, rank: int, ranks: int, row_count: int, device: str, dtype: torch.dtype, compiled: bool
) -> list[Tensor]:
    """The outputs of each load, and the gradients of rows, weights and experts."""
    spec, draw = replace(MIXTRAL, hidden=32, expert_hidden=16, experts=4), torch.Generator().manual_seed(rank)
    experts = DistributedExperts(Experts(moe_of(spec), spec.hidden, reference=dtype != torch.bfloat16), exchange).to(
        device, dtype
    )
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw).to(device, dtype)
    run = torch.compile(experts, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else experts
    results: list[Tensor] = []
    for name in LOADS:
        load = drawn_loads(name, ranks, ranks * spec.experts, row_count).counts[rank].to(device)
        positions = torch.arange(row_count, device=device)
        order = ExpertOrder(positions, positions[:, None], load.cumsum(0).int())
        inputs = [
            torch.randn(row_count, spec.hidden, generator=draw).to(device, dtype),
            torch.rand(row_count, generator=draw).to(device),
        ]
        leaves = [value.requires_grad_() for value in inputs]
        output = run(leaves[0], order, leaves[1])
        output.backward(torch.randn(output.shape, generator=draw).to(device, dtype))
        results += [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return results + [parameter.grad for parameter in experts.parameters() if parameter.grad is not None]


def by_kernels_and_messages(
    world: World, folder: Path | None, row_count: int, compiled: bool
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of results by kernels and by messages, in shared files of CPU ranks or, without `folder`, on GPUs.

    GPU ranks may share a GPU, where NCCL sends no messages: these go over the host.
    """
    group, cuda = world_group(), folder is None
    device, dtype = "cpu", torch.float64
    if cuda:
        device, dtype = f"cuda:{world.rank % torch.cuda.device_count()}", torch.bfloat16
        torch.cuda.set_device(device)
    opener = (
        partial(open_symmetric_window, group, torch.device(device))
        if cuda
        else partial(open_shared_window, world, folder)
    )
    peers = PeerTokenExchange(
        group.group_name, PeerExchange(world.rank, world.ranks, float(world.ranks), False, opener)
    )
    arguments = (world.rank, world.ranks, row_count, device, dtype, compiled)
    by_kernels = outputs_and_gradients(peers, *arguments)
    with mock.patch.object(experts_module, "ALL_TO_ALL", over_host):
        by_messages = outputs_and_gradients(AllToAll(group.group_name, world.ranks), *arguments)
    return [(ours.cpu(), theirs.cpu()) for ours, theirs in zip(by_kernels, by_messages, strict=True)]


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def over_host(
    received: Tensor, sent: Tensor, *splits: list[int], group: dist.ProcessGroup, async_op: bool = False
) -> None:
    """An all-to-all of Gloo in fp64, of tensors that may be on a GPU."""
    assert not async_op
    host = torch.empty_like(received, device="cpu", dtype=torch.float64)
    dist.all_to_all_single(host, sent.cpu().double(), *splits, group=group)
    received.copy_(host)
