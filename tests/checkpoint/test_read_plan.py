from __future__ import annotations

import itertools
import math

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.format import digests
from meshwright.checkpoint.format.files import BLOCK_BYTES
from meshwright.checkpoint.format.header import TensorEntry
from meshwright.checkpoint.read.fill import Destination
from meshwright.checkpoint.read.read_plan import assign_header_readers, merge_ranges, plan_transfers
from tests.slow import examples

BLOCKS = 12
needs_of_ranks = st.lists(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.lists(
            st.tuples(st.integers(0, BLOCKS * BLOCK_BYTES - 1), st.integers(1, 3 * BLOCK_BYTES)), min_size=1, max_size=4
        ),
        max_size=3,
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(50, 200), deadline=None)
@given(needs_of_ranks)
def test_every_needed_block_is_read_once_by_a_rank_that_needs_it_and_reaches_all_that_do(drawn) -> None:
    needs = [
        {file: merge_ranges([(start, start + size) for start, size in ranges]) for file, ranges in rank_ranges.items()}
        for rank_ranges in drawn
    ]
    readers = assign_header_readers([sorted(files) for files in needs])
    plan = plan_transfers(needs, {file: (rank, 100) for file, rank in readers.items()})
    expected: dict[tuple[str, int], set[int]] = {(file, 0): {rank} for file, rank in readers.items()}
    for rank, rank_ranges in enumerate(drawn):
        for file, ranges in rank_ranges.items():
            for start, size in ranges:
                for index in range(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES)):
                    expected.setdefault((file, index), set()).add(rank)
    assert len(plan) == len({(block.file, block.index) for block in plan})
    assert {(block.file, block.index): {block.reader, *block.receivers} for block in plan} == expected
    for block in plan:
        assert len({block.reader, *block.receivers}) == 1 + len(block.receivers)
        assert block.index > 0 or block.reader == readers[block.file]
    for rank in range(len(needs)):
        for file in "abc":
            block_indices = [block.index for block in plan if (block.reader, block.file) == (rank, file)]
            assert block_indices == sorted(block_indices)


def test_replicas_share_the_blocks_of_a_file_in_equal_runs() -> None:
    needs = [{"a": [(0, BLOCKS * BLOCK_BYTES)]}] * 4
    plan = plan_transfers(needs, {"a": (2, 100)})
    assert {rank: sum(block.reader == rank for block in plan) for rank in range(4)} == pytest.approx(
        {0: 3, 1: 3, 2: 3, 3: 3}, abs=1
    )
    assert [block.reader for block in plan[:4]] == [0, 1, 2, 3]  # all read from the start


@settings(max_examples=examples(40, 150), deadline=None)
@given(st.data())
def test_any_cut_of_an_entry_fills_any_box_of_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    dtype, name = data.draw(st.sampled_from([(torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.int64, "I64")]))
    target_dtype = data.draw(st.sampled_from([dtype, torch.float64]))
    full = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)
    stored = full.reshape(-1).view(torch.uint8)
    start = data.draw(st.sampled_from([0, 8, 3]))  # 3: not aligned to its elements
    item = dtype.itemsize
    target = torch.full(sizes[::-1], -1, dtype=target_dtype).permute(
        tuple(range(len(sizes)))[::-1]
    )  # with strides of its own
    box = full
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        box = box.narrow(dim, offset, size)
    destination = Destination(TensorEntry(name, shape, start, start + len(stored)), offsets, target)
    cuts = sorted({0, len(stored), *(item * data.draw(st.integers(0, len(stored) // item)) for _ in range(3))})
    pieces = list(itertools.pairwise(cuts))
    for first, last in data.draw(st.permutations(pieces)):
        destination.fill(stored[first:last].clone(), start + first)
    assert torch.equal(target, box.to(target_dtype))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_block_digest_is_xxh3_64(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(digests, "_c_functions", lambda: None)
    for size in (0, 1, 240, 241, 100_001):
        data = bytearray(number % 251 for number in range(size))
        assert digests.block_digest(memoryview(data)) == xxhash.xxh3_64(data).hexdigest()
        filled, expected = bytearray(size), xxhash.xxh3_64(data).hexdigest()

        def fill(start: int, end: int, data: bytearray = data, filled: bytearray = filled) -> None:
            assert not any(filled[start:]), "parts are filled from front to back"
            filled[start:end] = data[start:end]

        assert digests.digest_while_filling(memoryview(filled), 777, fill) == expected and filled == data
    assert (digests._c_functions() is not None) == compiled
