"""The prefix cache of an engine on several tensor ranks. Rank 0 gives other processes access to it.

Each rank holds a slice of every cache block: the KV heads that it computes. (Blocks of latents are not divided; every
rank has them whole.) To read whole blocks, rank 0 gathers the slices of all ranks; to write them, it scatters slices to
all ranks. Rank 0 manages the block pools and records its changes, which the other ranks repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.parallel.world import World, world_group
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.policies.recorded_blocks import recorded_blocks
from meshwright.serve.head_slices import HeadSlices
from meshwright.serve.kv_cache import KVCache
from meshwright.serve.prefix_blocks import PrefixBlocks
from meshwright.serve.weight_sums import weight_sums
from meshwright.spec.layout import AxisPart
from meshwright.spec.model import ModelSpec


class RankSlices(PrefixBlocks):
    """This rank's slices of all cache blocks. All ranks call each method together, with the same block tables."""

    def __init__(
        self, model: Decoder, spec: ModelSpec, policy: BatchPolicy[CacheBlocks], cache: KVCache, world: World
    ) -> None:
        """`spec` has the dimensions of the whole model, `model` and `cache` are this rank's part, `policy` holds the pools."""
        super().__init__(model, policy, cache)
        self._spec = spec
        self._world = world
        self._heads = HeadSlices(spec, world.ranks, cache.tokens_per_block, self._dtype.itemsize)
        self._slice_bytes = self.block_bytes
        # Other processes cannot map whole blocks here, because each rank has only a slice of them.
        self.own_blocks = None

    def gather(self, tables: Sequence[Sequence[int]]) -> Tensor | None:
        """Return whole blocks as uint8 `(blocks, bytes)` on rank 0; None on other ranks.

        `tables` has, for each block, its number in each group of layers: `(blocks, groups)`.
        """
        own = self._empty(len(tables))
        for part, content, blocks in self._parts(own, tables):
            part.copy_(content.index_select(0, blocks.to(content.device)))
        parts = [torch.empty_like(own) for _ in range(self._world.ranks)] if self._world.leads else None
        dist.gather(own, parts, dst=0, group=world_group())
        return None if parts is None else self._heads.join(parts)

    def scatter(self, tables: Sequence[Sequence[int]], whole: Tensor | None) -> None:
        """Write whole blocks, uint8 `(blocks, bytes)`, into the caches of all ranks. Only rank 0 passes `whole`.

        `tables` has, for each block, its number in each group of layers: `(blocks, groups)`.
        """
        own = self._empty(len(tables))
        parts = None
        if whole is not None:
            parts = [self._heads.cut(whole, rank).contiguous() for rank in range(self._world.ranks)]
        dist.scatter(own, parts, src=0, group=world_group())
        for part, cached, blocks in self._parts(own, tables):
            cached.index_copy_(0, blocks.to(cached.device), part)

    def summed_weights(self) -> Tensor:
        """Return `weight_sums` of the whole model: the ranks' sums, all-reduced."""
        sums = weight_sums(self._model, self._spec, AxisPart(self._world.rank, self._world.ranks))
        dist.all_reduce(sums, group=self._world.control)
        return sums

    def _empty(self, blocks: int) -> Tensor:
        return torch.empty((blocks, self._slice_bytes), dtype=torch.uint8, device=self._contents[0].device)


class LeadingBlocks(RankSlices):
    """Rank 0's view of the blocks. Its methods send messages, so that the other ranks join each collective call."""

    def __init__(
        self,
        model: Decoder,
        spec: ModelSpec,
        policy: BatchPolicy[CacheBlocks],
        cache: KVCache,
        world: World,
        *,
        record: Callable[[Sequence[Any]], None],
        send: Callable[..., None],
    ) -> None:
        """`record` is called with each change of the block pools; the other ranks repeat the changes before they handle
        the next message.

        `send` sends a message to the other ranks.
        """
        super().__init__(model, spec, policy, cache, world)
        self._cache = recorded_blocks(policy.cache, record)
        self._send = send
        self._shapes = self._heads.shapes
        self.block_bytes = self._heads.block_bytes

    def read(self, tables: Sequence[Sequence[int]], out: memoryview) -> None:
        """Copy whole blocks into the host memory `out`, one after the other. `tables` is as in `gather`."""
        self._send(gather=tables)
        whole = self.gather(tables)
        assert whole is not None
        torch.frombuffer(out, dtype=torch.uint8).view(whole.shape).copy_(whole)

    def write(self, tables: Sequence[Sequence[int]], content: memoryview) -> None:
        """Write whole blocks from host memory into the caches of all ranks. `tables` is as in `gather`.

        On CUDA this waits for the copy, so that the caller may change `content` afterwards.
        """
        source = torch.frombuffer(content, dtype=torch.uint8).view(len(tables), self.block_bytes)
        self._send(scatter=tables)
        self.scatter(tables, source.to(self._contents[0].device))
        if self._contents[0].is_cuda:
            torch.cuda.current_stream(self._contents[0].device).synchronize()

    def _weight_sums(self) -> Tensor:
        self._send(weight_sums=True)
        return self.summed_weights()
