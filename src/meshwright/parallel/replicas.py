"""Gradient sums over the `replicate` axis of HSDP, the part of a hierarchical reduction that crosses nodes.

A unit is a part of the model whose parameters are gathered and reduced together: the embedding, a block, or the head. Its gradients are
first reduce-scattered over the ranks that shard its parameters, inside a node if the mesh permits it. Then each rank all-reduces its shard
with the ranks that have the same shard of other replicas, once per step and unit. The shards of a unit are parts of one buffer, so one
large message sums them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


class ReplicaSums:
    """Sums gradients over `group`, one unit after another, on a stream of its own.

    `dtype` is the dtype in which gradients are sent; None: their own dtype. bf16 instead of fp32 halves the bytes and adds one rounding
    (docs/design/networks.md).
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype | None, device: torch.device) -> None:
        self._group = group
        self._dtype = dtype
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers_in_use: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start(
        self, shards: Sequence[torch.Tensor], ready: Sequence[Any], span: AbstractContextManager[None] | None = None
    ) -> None:
        """Start to sum the buffers that contain `shards`, in place, over the group.

        `ready` are the events after which the shards are complete. `span` is entered on the stream of the sums just before the first
        collective and left just after the last.
        """
        buffers = {shard.untyped_storage().data_ptr(): shard for shard in shards if shard.numel()}
        if not buffers:
            return
        if self.stream is not None:
            for event in ready:
                self.stream.wait_event(event)
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream), span or nullcontext():
            for shard in buffers.values():
                self._sum(torch.empty(0, dtype=shard.dtype, device=shard.device).set_(shard.untyped_storage()))

    def finish(self) -> None:
        """Make the compute stream wait for the sums."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self._buffers_in_use.clear()

    def _sum(self, buffer: torch.Tensor) -> None:
        message = buffer if self._dtype in (None, buffer.dtype) else buffer.to(self._dtype)
        dist.all_reduce(message, group=self._group)
        if message is not buffer:
            buffer.copy_(message)
        # Without a reference the host would free the message while the stream still uses it.
        self._buffers_in_use.append((buffer, message))
