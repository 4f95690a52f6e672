"""All-gathers of weights by the devices' copy engines, which leave the multiprocessors free for compute.

With its zero-CTA policy NCCL executes an all-gather by copies between devices instead of a kernel. This needs ranks that map each other's
memory, and buffers in a window: a memory range that all ranks of the communicator have registered. So these gathers have a communicator of
their own with that policy, and a window that is allocated once and divided into a few slots. A slot has the gathered weights of one unit (a
block, the embedding or the head). A buffer must have the same offset in the window on all ranks; all ranks make the same calls in the same
order, so each of them selects the same slot. If no slot is free, the gather uses ordinary memory and a kernel. (NCCL 2.28, zero-CTA policy;
PyTorch, "Copy Engine Collectives".)
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
from meshwright.parallel.linear_exchanges import ALL_GATHER
from meshwright.parallel.mesh import Mesh
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import SHARD_AXES
from meshwright.workload.buffers import BLOCK_SLOTS

ALIGNED = 4096
"""Alignment of a slot in bytes, which NCCL requires of windows."""


def use_copy_engines(blocks: Iterable[ParameterGroup], ends: Iterable[ParameterGroup], mesh: Mesh) -> None:
    """Make parameter groups gather by copy engines, into two slots for the groups of `blocks` and one slot for embedding and head (`ends`).

    Call it after `CommunicationStreams` are created. Collective over all ranks of the job. Does nothing if the parameters are not sharded.
    CPU ranks gather into the same slots by Gloo.

    Raises BadInput if the shard and context ranks are on several nodes, if devices cannot map each other's memory, or if NCCL has no
    zero-CTA policy.
    """
    blocks = list(blocks)
    ends = list(ends)
    group = _gather_group(mesh)
    if group is None:
        return
    sizes = BLOCK_SLOTS * [max(block.gathered_bytes for block in blocks)]
    sizes += [max(end.gathered_bytes for end in ends)] if ends else []
    gather = CopyGather(group, sizes, mesh.device)
    for parameters in (*blocks, *ends):
        parameters.use_copy_gather(gather)


@dataclass
class WindowSlot:
    """A part of the window; `last_read` is the event after which the previous contents are no longer read (None on a CPU)."""

    memory: Tensor
    in_use: bool = False
    last_read: Any = None


class CopyGather:
    """Replaces FSDP2's all-gather (`AllGather`): gathers over `group` into slots of `sizes` bytes."""

    def __init__(self, group: dist.ProcessGroup, sizes: Sequence[int], device: torch.device) -> None:
        self._group = group
        self._cuda = device.type == "cuda"
        aligned_sizes = [-(-size // ALIGNED) * ALIGNED for size in sorted(sizes)]
        memory, self._pool = _allocate_window(group, sum(aligned_sizes), device)
        self._slots = [WindowSlot(part) for part in memory.split(aligned_sizes)]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for a gather: in the smallest free slot that is large enough, or in ordinary memory if there is none.

        The current stream may write to the buffer at once.
        """
        count = math.prod(size) * dtype.itemsize
        slot = next((slot for slot in self._slots if not slot.in_use and len(slot.memory) >= count), None)
        if slot is None:
            return torch.empty(*size, dtype=dtype, device=device)
        slot.in_use = True
        if slot.last_read is not None:
            torch.cuda.current_stream().wait_event(slot.last_read)
        return slot.memory[:count].view(dtype).view(*size)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """All-gather the `input_tensor` `(n,)` of every rank into `output_tensor` `(ranks × n,)`. The input is this rank's part of it."""
        return ALL_GATHER(output_tensor, input_tensor, group=self._group, async_op=async_op)

    def release_buffer(self, output: Tensor) -> None:
        """Make the slot of `output` free again, after the work launched so far on the current stream. Other buffers are ignored."""
        for slot in self._slots:
            if slot.memory.data_ptr() == output.data_ptr():
                slot.in_use = False
                slot.last_read = torch.cuda.current_stream().record_event() if self._cuda else None


def _gather_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """A communicator over the ranks that shard parameters, with the zero-CTA policy; None if parameters are not sharded."""
    shards = mesh.group_over(SHARD_AXES)
    if shards is None:
        return None
    ranks = dist.get_process_group_ranks(shards)
    mesh.world.refuse_across_nodes(ranks, "plan.gather_transport = copy_engine")
    if mesh.device.type == "cpu":
        return shards
    mesh.world.refuse_unmapped(ranks, "plan.gather_transport = copy_engine")
    library: Any = dist.ProcessGroupNCCL
    if not hasattr(library, "NCCL_CTA_POLICY_ZERO"):
        raise BadInput(
            "plan.gather_transport = copy_engine: this NCCL has no zero-CTA policy; expected NCCL 2.28 or later"
        )
    options = library.Options()
    options.config.cta_policy = library.NCCL_CTA_POLICY_ZERO
    return mesh.world.split(mesh.layout.groups(*SHARD_AXES), "gathers by copy engines", options)


def _allocate_window(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[Tensor, Any]:
    """Allocate `size` bytes in a window of the group's communicator. Returns them, and the memory pool that owns them."""
    if device.type == "cpu":
        return torch.empty(size, dtype=torch.uint8), None
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # creates the communicator, which the window needs
    backend: Any = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    backend.register_mem_pool(pool, symm=True)
    return memory, pool
