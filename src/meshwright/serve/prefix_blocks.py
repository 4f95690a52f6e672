"""Access of other processes to an engine's prefix cache: they find blocks by digests, and read and write their bytes.

The bytes of a block are the bytes of its part in each group of layers, one group after the other, as the cache of one device stores them.
Two engines can exchange blocks if they have equal `identity`: the same weights, dtype and block shapes. The number of tensor ranks may
differ.
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
    """Reserves, references, reads and writes blocks of one engine's cache. Its methods must be called between the steps of the engine."""

    def __init__(self, model: Decoder, policy: BatchPolicy[CacheBlocks], cache: KVCache) -> None:
        self._model = model
        self._policy = policy
        self._cache = policy.cache
        self.limits = policy.limits
        self._contents = [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in cache.tensors]
        """For each group of layers, a view of its cache as bytes, `(blocks, bytes)` uint8."""
        self._shapes = [tuple(tensor.shape[1:]) for tensor in cache.tensors]
        """For each group, the shape of a block. With tensor ranks it is the shape of the whole block, not of a rank's slice."""
        self._dtype = cache.tensors[0].dtype
        self.block_bytes = sum(content.shape[1] for content in self._contents)
        """Bytes of a block, added up over all groups."""
        self.own_blocks: OwnBlocks | None = OwnBlocks(self._contents)
        """The blocks in the form that other processes can map. None if several ranks have parts of each block."""

    def identity(self) -> str:
        """Return a digest of the current weights and of the dtype and shapes of blocks. Each call reads all weights."""
        content = repr((self._weight_sums().tolist(), str(self._dtype), self._shapes))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def digests(self, prompt: Sequence[int], salt: str, *, tail: bool = False) -> list[bytes]:
        """Return the digests of the full blocks of a prompt. With `tail`, the last tokens, which do not fill a block, get a digest too.

        Example: with 16 tokens a block, a prompt of 40 tokens has 2 digests, and 3 with `tail`.
        """
        return self._policy.prompt_digests(prompt, salt=salt, tail=tail)

    def keys(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        """Return names of the full blocks of a prompt that are equal in all engines of the same `identity`.

        Unlike `digests`, the names do not depend on how often an engine has replaced its weights.
        """
        return self._policy.prompt_digests(prompt, generation=0, salt=salt)

    def missing(self, digests: Sequence[bytes]) -> int:
        """Return how many blocks of a prompt are not in the cache; 0 if the cache is too small for the prompt."""
        return len(ReservedBlocks(self._cache, digests)) if self.can_hold(digests) else 0

    def can_hold(self, digests: Sequence[bytes]) -> bool:
        """Return whether the cache would have enough blocks for a prompt with these digests if it were empty."""
        return len(digests) <= min(pool.blocks for pool in self._cache.pools)

    def reserve(self, digests: Sequence[bytes], reserved: int, tokens: int | None = None) -> ReservedBlocks | None:
        """Reserve empty blocks for the blocks of a prompt that are not cached. Returns None while running requests leave no room for them.

        - `digests`: digests of the prompt. The caller must have checked `can_hold`.
        - `reserved`: number of reservations that are not released yet. Each counts as a running request, so that the request that
          will use the blocks can be admitted when the blocks are filled.
        - `tokens`: as in `ReservedBlocks`.
        """
        policy = self._policy
        blocks = ReservedBlocks(self._cache, digests, tokens)
        busy = policy.unfinished + reserved
        if busy >= policy.limits.sequences or not blocks.fit(policy.limits.reserve if busy else 0):
            return None
        blocks.take()
        return blocks

    def unsent(self, digests: Sequence[bytes], first: int) -> UnsentBlocks:
        """Return an object that references the blocks of a prompt, from block number `first` on, as soon as each is computed."""
        return UnsentBlocks(self._cache, digests, first)

    def read(self, tables: Sequence[Sequence[int]], out: memoryview) -> None:
        """Copy blocks into the host memory `out`, one after the other. `tables` has, for each block, its number in each group."""
        target = torch.frombuffer(out, dtype=torch.uint8).view(len(tables), self.block_bytes)
        for part, content, blocks in self._parts(target, tables):
            if content.is_cuda:
                # One kernel and one copy, instead of a copy per block.
                part.copy_(content.index_select(0, blocks.to(content.device)))
            else:
                torch.index_select(content, 0, blocks, out=part) if part.is_contiguous() else part.copy_(
                    content[blocks]
                )

    def write(self, tables: Sequence[Sequence[int]], content: memoryview) -> None:
        """Copy blocks from the host memory `content` into the cache, after the steps that were launched before.

        `tables` is as in `read`. When the call returns, the copy is complete, so the caller may change `content`.
        """
        source = torch.frombuffer(content, dtype=torch.uint8).view(len(tables), self.block_bytes)
        for part, cached, blocks in self._parts(source, tables):
            cached.index_copy_(0, blocks.to(cached.device), part.to(cached.device))
            if cached.is_cuda:
                torch.cuda.current_stream(cached.device).synchronize()

    def _weight_sums(self) -> Tensor:
        return weight_sums(self._model, self._model.spec, WHOLE)

    def _parts(self, buffer: Tensor, tables: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for each group of layers:

        - its columns of `buffer` `(blocks, bytes of all groups)`;
        - the bytes of all blocks of its cache, `(blocks of the cache, bytes)`;
        - the numbers of the blocks in `tables`, `(blocks,)`.
        """
        parts = []
        start = 0
        for group, content in enumerate(self._contents):
            end = start + content.shape[1]
            parts.append((buffer[:, start:end], content, torch.tensor([table[group] for table in tables])))
            start = end
        return parts
