"""Time slots: the micro-batches of one rank in a step whose samples differ in length. They follow from the balance of the step.

A slot has a fixed number of tokens, its capacity, so that nothing recompiles. With selective offload there are two possible capacities. If
`RankPool.slot_unit` is set, a slot ends shortly after its last sample instead.

A slot holds whole samples, and at most one part of a sample that is divided among several ranks. This part comes first. The rest of the
slot is padding: token 0 at position 0, without target, where each padding token is a document of its own.

A sample with s inputs has s + 1 tokens, because the target of the last input is the token after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.data.packing import IGNORED, PackedWindow
from meshwright.policies.sample_balance import Balance, RankPool
from meshwright.policies.sample_blocks import block_ranges
from meshwright.policies.slot_order import slot_order
from meshwright.spec.hybrid import Numbering

TokenReader = Callable[[int, int, int], np.ndarray]
"""A function (sample's number in the step, start, stop) that returns the tokens [start, stop) of that sample, int64."""


@dataclass(frozen=True)
class SamplePart:
    """A part of a sample in a slot. If one rank has the whole sample, the part is the whole sample."""

    sample: int
    """Number of the sample in the step."""
    length: int
    """Inputs of the whole sample."""
    ranks: tuple[int, ...]
    """Data ranks that divide the sample, in the order of their parts. Ring attention passes keys and values on in this order."""
    part: int
    """Index of this part. The rank `ranks[part]` has it."""
    by_heads: bool = False
    """How attention sees the other parts: True if the ranks exchange tokens for heads, False if keys and values go round a ring."""

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The sample's inputs that are in the slot, in order: one range for a whole sample, two blocks for a divided one.

        Blocks of a divided sample may differ in length, and may be empty.
        """
        if len(self.ranks) == 1:
            return (range(self.length),)
        return block_ranges(self.length, len(self.ranks), self.part)

    @property
    def tokens(self) -> int:
        """Inputs in this part."""
        return sum(map(len, self.ranges))


class CommonNumber(NamedTuple):
    """Number of a slot in the order that all ranks have in common, and the count of such numbers."""

    number: int
    count: int


@dataclass(frozen=True)
class SampleSlot:
    """Content of a micro-batch of `capacity` tokens: `parts` in order, then padding. Without parts it is padding only."""

    capacity: int
    parts: tuple[SamplePart, ...] = ()
    offloaded_layers: int = 0
    """Model blocks, counted from the first, whose activations are offloaded to host memory."""
    common: CommonNumber | None = None
    """Number in the order that all ranks have in common; None if each rank counts its own slots."""

    @property
    def divided(self) -> SamplePart | None:
        """The part of a sample that is divided among several ranks, if any. It takes tokens [0, `divided.tokens`) of the slot."""
        return self.parts[0] if self.parts and len(self.parts[0].ranks) > 1 else None

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """Start of each part in the slot, and the end of the last one: `(parts + 1,)` int32."""
        return np.cumsum([0, *(part.tokens for part in self.parts)], dtype=np.int32)

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.cu_seqlens[-1])


def rank_slots(balance: Balance, rank: int) -> list[SampleSlot]:
    """The slots that `balance` gives to a data rank, in their order in `balance`. May be empty."""
    first, last = np.searchsorted(balance.rank, [rank, rank + 1])
    lengths = np.bincount(balance.sample, balance.tokens).astype(np.int64)
    by_slot: list[list[SamplePart]] = [[] for _ in range(int(balance.slots[rank]))]
    for index in range(int(first), int(last)):
        sample = int(balance.sample[index])
        part = int(balance.part[index])
        ranks = (rank,)
        if balance.parts[index] > 1:
            of_sample = np.flatnonzero(balance.sample == sample)
            ranks = tuple(balance.rank[of_sample[np.argsort(balance.part[of_sample])]].tolist())
        by_heads = bool(balance.by_heads[index])
        by_slot[int(balance.slot[index])].append(SamplePart(sample, int(lengths[sample]), ranks, part, by_heads))
    ordered = (tuple(sorted(parts, key=lambda part: len(part.ranks) == 1)) for parts in by_slot)
    return [_slot(parts, balance.pool) for parts in ordered]


def _slot(parts: tuple[SamplePart, ...], pool: RankPool) -> SampleSlot:
    """A slot with these parts. If they have more tokens than the pool's capacity, it is a slot with offloaded activations."""
    tokens = sum(part.tokens for part in parts)
    capacity = int(pool.slot_tokens(np.array(tokens)))
    if tokens <= pool.capacity:
        return SampleSlot(capacity, parts)
    assert pool.offload is not None and tokens <= pool.offload.capacity, "the balance fills no slot beyond its size"
    return SampleSlot(capacity, parts, pool.offload.layers)


def slots_to_run(balance: Balance, rank: int, numbering: Numbering) -> list[SampleSlot]:
    """The micro-batches of a data rank, in the order in which the rank executes them. There is at least one.

    With `numbering` "own", a rank counts its own slots. With "equal", every rank gets the same number of slots: an empty slot is added for
    each number of the common order that the rank lacks. With any other numbering the slots have common numbers, and none is added.
    """
    empty = _slot((), balance.pool)
    slots = rank_slots(balance, rank) or [empty]
    if numbering == "own":
        return slots
    order = slot_order(balance)
    by_number = dict(zip(order.numbers[rank], slots, strict=True))
    if numbering == "equal":
        by_number |= {number: empty for number in range(order.count) if number not in by_number}
    return [
        replace(slot, common=CommonNumber(number, order.count))
        for number, slot in sorted(by_number.items(), key=lambda pair: pair[0])
    ]


def slot_arrays(slot: SampleSlot, read: TokenReader) -> PackedWindow:
    """Tokens, targets, positions and documents of a slot, `(capacity,)` int64 each. The parts of the slot are documents 0, 1, ….

    `read` is called only for tokens of ranges in this slot, and for the target after each range.
    """
    tokens, positions = np.zeros((2, slot.capacity), dtype=np.int64)
    targets = np.full(slot.capacity, IGNORED, dtype=np.int64)
    documents = len(slot.parts) - slot.tokens + np.arange(slot.capacity)
    begin = 0
    for number, part in enumerate(slot.parts):
        documents[begin : begin + part.tokens] = number
        for inputs in filter(None, part.ranges):
            end = begin + len(inputs)
            read_tokens = read(part.sample, inputs.start, inputs.stop + 1)
            tokens[begin:end] = read_tokens[:-1]
            targets[begin:end] = read_tokens[1:]
            positions[begin:end] = inputs
            begin = end
    return PackedWindow(tokens, targets, positions, documents)
