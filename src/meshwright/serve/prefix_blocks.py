"""The prefix cache of an engine for other processes: blocks by digest, and their content as bytes.

The content of a block is that of each group of layers in turn, as the cache of one device stores it; with one group it is one contiguous
range. Two engines can exchange blocks if their `identity` is equal: the same weights, formats and sizes, on any number of tensor ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.policies.moving_blocks import ReservedBlocks, UnsentBlocks
from meshwright.serve.kv_cache import KVCache
from meshwright.serve.mapped_blocks import OwnBlocks
from meshwright.serve.weight_sums import weight_sums
from meshwright.spec.layout import WHOLE


class PrefixBlocks:
    """Reserves, holds, reads and writes blocks of one engine's cache, between its steps."""

    def __init__(self, model: Decoder, policy: BatchPolicy[CacheBlocks], cache: KVCache) -> None:
        self._model = model
        self._policy = policy
        self._cache = policy.cache
        self.limits = policy.limits
        self._contents = [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in cache.tensors]
        """Bytes of all blocks of each group, `(blocks, bytes)`."""
        self._shapes = [tuple(tensor.shape[1:]) for tensor in cache.tensors]
        """Shapes of the whole blocks of each group."""
        self._dtype = cache.tensors[0].dtype
        self.block_bytes = sum(content.shape[1] for content in self._contents)
        """Bytes of a block of all groups."""
        self.own_blocks: OwnBlocks | None = OwnBlocks(self._contents)
        """Blocks that other processes may map; None if several ranks have parts of them."""

    def identity(self) -> str:
        """Digest of the current weights and of the layout of blocks. Reads all weights once."""
        content = repr((self._weight_sums().tolist(), str(self._dtype), self._shapes))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def digests(self, prompt: Sequence[int], salt: str, *, tail: bool = False) -> list[bytes]:
        """Digests of the full blocks of a prompt, with `tail` also of the tokens behind them."""
        return self._policy.prompt_digests(prompt, salt=salt, tail=tail)

    def keys(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        """Names of the full blocks of a prompt for engines of the same `identity`, however often each has replaced its weights."""
        return self._policy.prompt_digests(prompt, generation=0, salt=salt)

    def missing(self, digests: Sequence[bytes]) -> int:
        """Blocks of a prompt that would have to be filled; 0 if the cache cannot hold the prompt."""
        return len(ReservedBlocks(self._cache, digests)) if self.can_hold(digests) else 0

    def can_hold(self, digests: Sequence[bytes]) -> bool:
        """Whether the cache, if it were empty, could hold these blocks of a prompt."""
        return len(digests) <= min(pool.blocks for pool in self._cache.pools)

    def reserve(self, digests: Sequence[bytes], reserved: int, tokens: int | None = None) -> ReservedBlocks | None:
        """Empty blocks for the part of a prompt that is not cached; None while running requests leave no room.

        `reserved` is the number of reservations that are not released. Each counts as a request of the batch, so that its prompt is
        admitted once it is there. `tokens` as in `ReservedBlocks`. The caller makes sure that the cache can hold the prompt.
        """
        policy = self._policy
        blocks = ReservedBlocks(self._cache, digests, tokens)
        busy = policy.unfinished + reserved
        if busy >= policy.limits.sequences or not blocks.fit(policy.limits.reserve if busy else 0):
            return None
        blocks.take()
        return blocks

    def unsent(self, digests: Sequence[bytes], first: int) -> UnsentBlocks:
        """References on blocks of a prompt, from block `first` on, as they are computed."""
        return UnsentBlocks(self._cache, digests, first)

    def read(self, tables: Sequence[Sequence[int]], out: memoryview) -> None:
        """Copy blocks into host memory one after the other; a table has the block of each group."""
        target = torch.frombuffer(out, dtype=torch.uint8).view(len(tables), self.block_bytes)
        for part, content, blocks in self._parts(target, tables):
            if content.is_cuda:
                part.copy_(content.index_select(0, blocks.to(content.device)))  # one kernel gathers, one copy follows
            else:
                torch.index_select(content, 0, blocks, out=part) if part.is_contiguous() else part.copy_(
                    content[blocks]
                )

    def write(self, tables: Sequence[Sequence[int]], content: memoryview) -> None:
        """Copy blocks from host memory into the cache, once the steps before are computed; the memory may change afterwards."""
        source = torch.frombuffer(content, dtype=torch.uint8).view(len(tables), self.block_bytes)
        for part, cached, blocks in self._parts(source, tables):
            cached.index_copy_(0, blocks.to(cached.device), part.to(cached.device))
            if cached.is_cuda:
                torch.cuda.current_stream(cached.device).synchronize()

    def _weight_sums(self) -> Tensor:
        return weight_sums(self._model, self._model.spec, WHOLE)

    def _parts(self, buffer: Tensor, tables: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each group its columns of `buffer`, the content of its blocks, and the indices of those in `tables`."""
        parts = []
        start = 0
        for group, content in enumerate(self._contents):
            end = start + content.shape[1]
            parts.append((buffer[:, start:end], content, torch.tensor([table[group] for table in tables])))
            start = end
        return parts
