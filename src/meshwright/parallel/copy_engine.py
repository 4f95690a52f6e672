"""Weights gathered by the devices' copy engines, which leaves their multiprocessors to compute.

Under its zero-CTA policy NCCL moves an all-gather by copies between devices instead of a kernel, where the ranks of the communicator map
each other's memory and the buffers lie in a window that all of them registered. So gathers get a communicator of their own with that
policy, and a few slots in one window, which are made once: what a rank lays a unit into must lie at the same place of the window on all
ranks, and only the order of calls, alike on all of them, says which slot is next. A unit that finds no slot is gathered from ordinary
memory, by a kernel. (NCCL 2.28, zero-CTA policy; PyTorch, "Copy Engine Collectives".)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.fsdp import ParameterGroup
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.products import ALL_GATHER
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import SHARD_AXES
from meshwright.workload.buffers import BLOCK_SLOTS

ALIGNED = 4096
"""Bytes: where a slot begins; NCCL asks it of windows."""


def gather_by_copies(blocks: Iterable[ParameterGroup], ends: Iterable[ParameterGroup], mesh: Mesh) -> None:
    """Gather parameter groups by copy engines: two slots for blocks, one for the ends.

    Call it once `CommunicationStreams` exist. Collective over all ranks of the job. Does nothing on one rank; CPU ranks
    gather into the same slots by Gloo.

    Raises BadInput if the shard and context ranks are on several nodes, if devices cannot map each other's memory, or if
    NCCL has no zero-CTA policy.
    """
    blocks, ends = list(blocks), list(ends)
    group = _group(mesh)
    if group is None:
        return
    sizes = BLOCK_SLOTS * [max(block.gathered_bytes for block in blocks)]
    sizes += [max(end.gathered_bytes for end in ends)] if ends else []
    gather = CopyGather(group, sizes, mesh.device)
    for parameters in (*blocks, *ends):
        parameters.gather_with(gather)


@dataclass
class Slot:
    """A part of the window; `copied` is the event after which its last contents are no longer needed."""

    memory: Tensor
    given: bool = False
    copied: Any = None


class CopyGather:
    """FSDP2's all-gather on `group`, into slots of `sizes` bytes."""

    def __init__(self, group: dist.ProcessGroup, sizes: Sequence[int], device: torch.device) -> None:
        self._group, self._cuda = group, device.type == "cuda"
        room = [-(-size // ALIGNED) * ALIGNED for size in sorted(sizes)]
        memory, self._pool = _registered(group, sum(room), device)
        self._slots = [Slot(part) for part in memory.split(room)]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The smallest slot that is free, which the current stream may write from here on; ordinary memory when there is none."""
        count = math.prod(size) * dtype.itemsize
        slot = next((slot for slot in self._slots if not slot.given and len(slot.memory) >= count), None)
        if slot is None:
            return torch.empty(*size, dtype=dtype, device=device)
        slot.given = True
        if slot.copied is not None:
            torch.cuda.current_stream().wait_event(slot.copied)
        return slot.memory[:count].view(dtype).view(*size)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """Fill `output_tensor` `(ranks × n,)` with every rank's `input_tensor` `(n,)`, which is its own part of it."""
        return ALL_GATHER(output_tensor, input_tensor, group=self._group, async_op=async_op)

    def copied_out(self, output: Tensor) -> None:
        """Take back what `allocate` gave: the current stream has copied it out when it comes to here."""
        for slot in self._slots:
            if slot.memory.data_ptr() == output.data_ptr():
                slot.given = False
                slot.copied = torch.cuda.current_stream().record_event() if self._cuda else None


def _group(mesh: Mesh) -> dist.ProcessGroup | None:
    shards = mesh.group_over(SHARD_AXES)
    if shards is None:
        return None
    ranks = dist.get_process_group_ranks(shards)
    mesh.world.refuse_across_nodes(ranks, "plan.gather_engine = copy")
    if mesh.device.type == "cpu":
        return shards
    mesh.world.refuse_unmapped(ranks, "plan.gather_engine = copy")
    library: Any = dist.ProcessGroupNCCL
    if not hasattr(library, "NCCL_CTA_POLICY_ZERO"):
        raise BadInput("plan.gather_engine = copy: this NCCL has no zero-CTA policy; expected NCCL 2.28 or later")
    options = library.Options()
    options.config.cta_policy = library.NCCL_CTA_POLICY_ZERO
    return mesh.world.split(mesh.layout.groups(*SHARD_AXES), "gathers by copies", options)


def _registered(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[Tensor, Any]:
    """`size` bytes in a window of the group's communicator, and the pool that keeps them."""
    if device.type == "cpu":
        return torch.empty(size, dtype=torch.uint8), None
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # a window needs its communicator to be there
    backend: Any = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    backend.register_mem_pool(pool, symm=True)
    return memory, pool
