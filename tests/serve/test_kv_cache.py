"""Sizes of the cache, and the rows of the tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.policies.batch_request import CacheGroup
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.serve import kv_cache
from meshwright.serve.kv_cache import CacheRoom, KVCache, bytes_per_block, fitting_blocks, layer_groups
from meshwright.serve.request_rows import RequestRows
from meshwright.spec.errors import OutOfResources
from tests.models.tiny import LLAMA, LOCAL_GLOBAL, SLIDING

CPU = torch.device("cpu")


def test_bytes_of_a_block_are_those_allocated() -> None:
    (group,) = layer_groups(LLAMA)
    cache = KVCache(LLAMA, [7], tokens_per_block=4, device=CPU, dtype=torch.bfloat16)
    assert cache.tensors[0].nbytes == 7 * bytes_per_block(group, 4, torch.bfloat16)
    assert cache.layer(1)[1].shape == (7, 2, 2, 4, 16)


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert layer_groups(SLIDING)[0].window == 9
    assert layer_groups(replace(SLIDING, sliding_window=512))[0].window is None


def test_the_cache_fills_a_share_of_memory_up_to_what_the_batch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    block = bytes_per_block(layer_groups(LLAMA)[0], 4, torch.float32)
    blocks = 100
    monkeypatch.setattr(kv_cache.os, "sysconf", lambda name: 4 * blocks * block if name == "SC_PHYS_PAGES" else 1)

    def fitting(context: int) -> int:
        return fitting_blocks(LLAMA, CPU, torch.float32, CacheRoom(context, 3, 16, 4))

    assert fitting(200) == blocks
    assert fitting(41) == 1 + 3 * 11
    with pytest.raises(OutOfResources, match="one request of 400 tokens"):
        fitting(400)


def test_groups_with_windows_have_fewer_blocks_beside_a_group_of_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that windows leave goes to whole texts."""
    room, groups = CacheRoom(context=400, sequences=2, step_tokens=16, tokens_per_block=4), layer_groups(LOCAL_GLOBAL)
    windowed = 1 + 2 * (2 * (3 + 2) + 4)  # twice what two requests and a step hold, and the block that is never used
    assert [group.window for group in groups] == [None, 9, None]
    assert room.group_blocks(groups, 1000) == [1000, windowed, 1000] and room.group_blocks(groups, 7) == [7, 7, 7]
    assert room.group_blocks([groups[1]], 1000) == [1000], "prefixes may fill a cache of windows alone"
    sizes = [bytes_per_block(group, 4, torch.float32) for group in groups]
    for blocks in (20, 150):
        available = sum(count * size for count, size in zip(room.group_blocks(groups, blocks), sizes, strict=True))
        assert room.blocks_within(available, groups, sizes) == blocks
        assert room.blocks_within(available - 1, groups, sizes) == blocks - 1
    assert room.blocks_within(1e12, groups, sizes) == room.most_blocks == 1 + 2 * 100
    tables = CacheBlocks([CacheGroup(windowed, 9)], 4)
    assert tables.most_held(0, 400, 16) * 2 <= windowed


def test_a_row_is_taken_from_a_request_that_the_step_does_not_need() -> None:
    rows = RequestRows(2)
    assert {rows.take(5, ()), rows.take(6, ())} == {0, 1}
    first = rows.row_of[6]
    assert rows.take(7, {5, 7}) == first
    assert rows.row_of.keys() == {5, 7}
    rows.release(5)
    rows.release(5)
    assert rows.take(8, {7, 8}) == 1 - first
