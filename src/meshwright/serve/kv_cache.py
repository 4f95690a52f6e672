"""The paged key/value cache: its groups of layers, its size in blocks, and its memory.

All layers with the same attention form a group. The cache of a group is one tensor:

- `(blocks, layers, 2, kv_heads, tokens, head_dim)`: keys and values. A block is contiguous, and in a block the keys of one head are too.
- `(blocks, layers, tokens, kv_rank + rope_head_dim)` for latent attention: each token has its latent, then the rotated part of its key.

An fp8 (e4m3) cache has twice as many blocks as a bf16 cache of the same bytes. Its scales are 1, so values above 448 are stored as 448.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.serve.host_memory import zeros
from meshwright.spec.errors import OutOfResources
from meshwright.spec.model import ModelSpec
from meshwright.workload import cache_size
from meshwright.workload.cache_size import (
    HOST_SHARE,
    CacheRoom,
    LayerGroup,
    activation_bytes,
    block_shape,
    device_cache_bytes,
    layer_groups,
    most_blocks,
)

__all__ = ["CacheRoom", "KVCache", "bytes_per_block", "fitting_blocks", "layer_groups", "most_blocks"]


def bytes_per_block(group: LayerGroup, tokens_per_block: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block of a group's cache, for all its layers."""
    return cache_size.bytes_per_block(group, tokens_per_block, dtype.itemsize)


def fitting_blocks(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    room: CacheRoom,
    *,
    draft: ModelSpec | None = None,
    drafts: int = 0,
    predictions: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> int:
    """Return how many cache blocks fit into the memory of `device` after the weights, for each group that has no window.

    - `dtype`: dtype of activations, and of the cache unless `cache_dtype` is given.
    - `room`: context, sequences and other sizes that the cache must hold.
    - `draft`: the draft model. It has a cache of its own with the same number of blocks.
    - `drafts`: largest number of draft tokens of a request in a step.
    - `predictions`: number of the model's prediction modules that propose drafts.

    Raises OutOfResources if the cache of one request of `room.context` tokens does not fit.
    """
    groups = layer_groups(spec, predictions)
    size = room.tokens_per_block
    sizes = [bytes_per_block(group, size, cache_dtype or dtype) for group in groups]
    samples = room.sequences * (1 + drafts)
    if draft is not None or predictions:
        samples *= 2  # The distribution of each draft takes as much memory as the logits of a sample.
    if draft is not None:
        whole = next((number for number, group in enumerate(groups) if group.window is None), 0)
        sizes[whole] += sum(bytes_per_block(group, size, dtype) for group in layer_groups(draft))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available = device_cache_bytes(free, total, activation_bytes(spec, dtype.itemsize, samples, room.step_tokens))
    else:
        available = HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    blocks = room.blocks_within(available, groups, sizes)
    needed = most_blocks(room.context, 1, size)
    if blocks < needed:
        bytes_needed = sum(map(math.prod, zip(room.group_blocks(groups, needed), sizes, strict=True)))
        raise OutOfResources(
            f"the key/value cache of one request of {room.context} tokens takes {bytes_needed / 2**30:.2f} GiB, and "
            f"{max(available, 0) / 2**30:.2f} GiB of {device} are free for it; give a shorter context",
            key="context",
        )
    return blocks


class KVCache:
    """The cache tensors of all groups of layers, filled with zeros.

    - `blocks`: number of blocks of each group.
    - `predictions`: number of prediction modules. Each has a layer in the cache, after the layers of the model.
    - `one_layer`: whether all layers of a group share the memory of one layer. This is for steps whose keys and values no later step reads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: Sequence[int],
        *,
        tokens_per_block: int,
        device: torch.device,
        dtype: torch.dtype,
        predictions: int = 0,
        one_layer: bool = False,
    ) -> None:
        self.groups = layer_groups(spec, predictions)
        self.tokens_per_block = tokens_per_block
        self._one_layer = one_layer
        fp8 = dtype.itemsize == 1
        self.scales = torch.ones(2, spec.kv_heads, device=device) if fp8 else None
        """`(2, kv_heads)`: factors of the stored keys and values of each head. None for a cache that is not fp8."""
        self.tensors = [
            zeros((count, *self._shape(group)), dtype=dtype, device=device)
            for group, count in zip(self.groups, blocks, strict=True)
        ]

    def layer(self, layer: int) -> tuple[int, Tensor]:
        """Return the index of a layer's group, and a strided view of the layer's part of the cache.

        The view has the shape of the group's tensor without the dimension of layers: `(blocks, 2, kv_heads, tokens, head_dim)`.
        Raises KeyError for a layer that no group has.
        """
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number, self.tensors[number][:, 0 if self._one_layer else group.layers.index(layer)]
        raise KeyError(layer)

    def _shape(self, group: LayerGroup) -> tuple[int, ...]:
        """Return the shape of one block of a group's cache."""
        layers, *of_layer = block_shape(group, self.tokens_per_block)
        return 1 if self._one_layer else layers, *of_layer
