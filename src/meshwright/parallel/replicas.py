"""Gradient sums over replicas: the part of a hierarchical reduction that crosses nodes.

A unit's gradients are first reduce-scattered over its shards, inside a node when the plan can; then each rank sums its shard with the ranks
that hold the same shard of other replicas, once a step and unit. The shards of a unit lie in one buffer, so that this is one large message.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


class ReplicaSums:
    """Sums over `group`, begun unit by unit on a stream of their own; `finish` waits for all of them.

    `dtype` is the format that travels: half the bytes in bf16, at the price of one rounding (docs/design/networks.md).
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype | None, device: torch.device) -> None:
        self._group, self._dtype = group, dtype
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._travelling: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(
        self, shards: Sequence[torch.Tensor], after: Any, around: AbstractContextManager[None] | None = None
    ) -> None:
        """Sum `shards` in place over the group; `after` is the event they are complete at (None: now).

        `around` is entered on the stream of the sums just before them and left just behind them.
        """
        buffers = {shard.untyped_storage().data_ptr(): shard for shard in shards if shard.numel()}
        if not buffers:
            return
        if self.stream is not None:
            self.stream.wait_event(after)
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream), around or nullcontext():
            for shard in buffers.values():
                self._sum(torch.empty(0, dtype=shard.dtype, device=shard.device).set_(shard.untyped_storage()))

    def finish(self) -> None:
        """Let compute wait for the sums."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self._travelling.clear()

    def _sum(self, flat: torch.Tensor) -> None:
        narrow = flat if self._dtype in (None, flat.dtype) else flat.to(self._dtype)
        dist.all_reduce(narrow, group=self._group)
        if narrow is not flat:
            flat.copy_(narrow)
        # Made on this stream and read on it, but freed by the host: kept until compute has waited.
        self._travelling.append((flat, narrow))
