"""Time slots: the micro-batches of one rank in a step of samples of any length, from the balance of the step.

A slot has a fixed number of tokens, its capacity C, or with selective offload one of two, so that nothing recompiles; with
`RankPool.slot_unit` it ends behind its last sample. It holds whole samples and at most one part of a sample that several ranks divide; the
part comes first. The rest is padding: token 0 at position 0, without target, each token a document of its own.

A sample of s inputs has s + 1 tokens, as the last input's target is the token behind it.
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
"""Tokens [start, stop) of a sample, int64, by the sample's number in the step, start and stop."""


@dataclass(frozen=True)
class SamplePart:
    """A part of a sample in a slot; the whole sample if one rank has it."""

    sample: int
    """Number of the sample in the step."""
    length: int
    """Inputs of the whole sample."""
    ranks: tuple[int, ...]
    """Data ranks that divide the sample, in the order of their parts, which is the order of the ring."""
    part: int
    """Index of this part: `ranks[part]` has it."""
    by_heads: bool = False
    """Whether the ranks exchange tokens for heads in attention; otherwise keys and values go round a ring."""

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Inputs of the sample in the slot, in order: one range of a whole sample, else two blocks.

        Blocks of a divided sample may differ in length or be empty.
        """
        if len(self.ranks) == 1:
            return (range(self.length),)
        return block_ranges(self.length, len(self.ranks), self.part)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ranges))


class CommonNumber(NamedTuple):
    """Number of a slot in the common order of all ranks, and how many numbers there are."""

    number: int
    count: int


@dataclass(frozen=True)
class SampleSlot:
    """Content of a micro-batch of `capacity` tokens: `parts` in order, then padding. Empty without parts."""

    capacity: int
    parts: tuple[SamplePart, ...] = ()
    offloaded_layers: int = 0
    """Blocks of the model, from the first, whose activations are offloaded to host memory."""
    common: CommonNumber | None = None
    """Number in the common order of all ranks; None if each rank counts its own slots."""

    @property
    def divided(self) -> SamplePart | None:
        """The part of a sample that several ranks divide, if any: tokens [0, `divided.tokens`) of the slot."""
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
    """The slots of a data rank, in the order of the balance."""
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
    """A slot of the pool with these parts; one with offload where they have more tokens than the capacity."""
    tokens = sum(part.tokens for part in parts)
    capacity = int(pool.slot_tokens(np.array(tokens)))
    if tokens <= pool.capacity:
        return SampleSlot(capacity, parts)
    assert pool.offload is not None and tokens <= pool.offload.capacity, "the balance fills no slot beyond its size"
    return SampleSlot(capacity, parts, pool.offload.layers)


def slots_to_run(balance: Balance, rank: int, numbering: Numbering) -> list[SampleSlot]:
    """The micro-batches of a data rank in the order in which it runs them, at least one."""
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
    """Tokens, targets, positions and documents of a slot, `(capacity,)` int64 each; the slot's parts are documents 0, 1, ….

    Reads only the tokens of the slot's own ranges.
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
