"""Simulates a step whose samples have unequal lengths, for four ways to divide samples among data and context ranks.

- `static_seconds`: all groups of context ranks have the same size, and each divides sequences of packed samples.
- `arrival_parts`: in the order of arrival, each sample gets the fewest ranks that can hold it. Ranks with the fewest slots come first.
- `longest_first_parts`: the longest samples first, each gets the fewest ranks that can hold it. Ranks that are free first come first.
- `policies.sample_balance`: the ranks and slots that this project's balancer chooses.

A slot is one micro-batch of a rank. The last three ways are simulated slot by slot (`play_parts`). A sample on several ranks is divided
into parts, and its ranks compute it at the same time. Ring attention overlaps with its messages, so the longer of the two counts. The
work that all four have in common (optimizer, reduction of gradients) is left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.costs.layer_costs import exposed_seconds
from meshwright.policies.sample_balance import Balance
from meshwright.policies.sample_blocks import part_tokens
from meshwright.policies.sample_time import SampleTime

BACKWARD_SHARE = 2.5 / 3.5
"""The part of attention's compute time that its backward takes: 2.5 times as long as the forward (`costs.compute`)."""


@dataclass(frozen=True)
class RingTime:
    """Rates and sizes of the messages in ring attention.

    Each rank passes on what it received, so the keys and values of each token cross each link of the ring once.
    """

    bytes_per_token: float
    """Bytes of keys and values of one token in all layers, in bf16."""
    link: float
    """Bytes per second from one rank to another within a node."""
    port: float
    """Bytes per second from one node to another. Only one rank of a node sends to the next node in a ring."""
    ranks_per_node: int
    tax: float
    """Seconds by which attention becomes slower for each second in which it overlaps with messages."""
    backward: float = 2.0
    """Bytes around the ring in the backward, relative to the forward: 2 for keys and values, and their gradients in bf16."""

    def attention_seconds(self, attention: np.ndarray, lengths: np.ndarray, ranks: np.ndarray | int) -> np.ndarray:
        """Return the seconds of ring attention, where the arithmetic alone takes `attention` seconds on a rank.

        The messages of the forward overlap with the forward's arithmetic, and those of the backward with the backward's. A sample on a
        single rank needs no messages.
        """
        total = np.zeros(np.broadcast_shapes(np.shape(attention), np.shape(lengths)))
        for compute_share, passes in ((1 - BACKWARD_SHARE, 1.0), (BACKWARD_SHARE, self.backward)):
            compute = attention * compute_share
            traffic = self.seconds(lengths, ranks) * passes / (1 + self.backward)
            total = total + compute + exposed_seconds(traffic, compute, self.tax)
        return total

    def seconds(self, lengths: np.ndarray, ranks: np.ndarray | int) -> np.ndarray:
        """Return the seconds of all messages, forward and backward, for samples of `lengths` tokens on `ranks` ranks each."""
        rate = np.where(np.asarray(ranks) > self.ranks_per_node, self.port, self.link)
        return (1 + self.backward) * lengths * (1 - 1 / np.asarray(ranks)) * self.bytes_per_token / rate


class SampleParts(NamedTuple):
    """Placement of samples on ranks, as in `policies.sample_balance.Balance`. Each array has one entry for each part, `(P,)`.

    A sample on three ranks has three parts, each with the same `sample` and `parts` = 3.
    """

    sample: np.ndarray
    """Index of the sample."""
    parts: np.ndarray
    """Number of parts of the sample."""
    rank: np.ndarray
    """Rank that computes the part."""
    slot: np.ndarray
    """Index of the micro-batch in which the rank computes the part."""
    by_heads: np.ndarray | None = None
    """Whether the part's ranks exchange tokens for heads (Ulysses) instead of using a ring. None: all use rings."""


def static_seconds(
    lengths: np.ndarray, groups: int, ranks: int, capacity: int, time: SampleTime, ring: RingTime
) -> tuple[float, int]:
    """Return the seconds of a step with a static context axis, and how many tokens the step contains.

    There are `groups` groups of `ranks` context ranks, and each rank holds `capacity` tokens of a sequence. A sequence has
    `capacity * ranks` tokens, and contains whole samples. The number of sequences is a multiple of the number of groups, close to what
    the samples' tokens fill. A sample that fits in no sequence any more waits for a later step. Keys and values of every token pass
    around the whole group, even if the token's sample is short. The result is the time of the slowest group.
    """
    sequence = capacity * ranks
    count = groups * max(1, round(int(lengths.sum()) / (sequence * groups)))
    number = pack_sequences(lengths, count, sequence)
    packed = lengths[number >= 0]
    number = number[number >= 0]
    attention = np.bincount(number, time.quadratic * packed.astype(np.float64) ** 2, count) / ranks
    tokens = np.bincount(number, packed, count)
    seconds = ring.attention_seconds(attention, tokens, ranks) + time.linear * tokens / ranks + time.fixed
    return float(np.bincount(np.arange(count) % groups, seconds, groups).max()), int(packed.sum())


def pack_sequences(lengths: np.ndarray, count: int, sequence: int) -> np.ndarray:
    """Pack samples into `count` sequences of `sequence` tokens. Returns the index of each sample's sequence, `(S,)`; -1: no room.

    The longest samples come first, and each goes to the sequence with the least room that is enough (best fit).

    Samples of 5, 3, 4 and 6 tokens in two sequences of 8: first 6 and 5 get a sequence each, then 4 finds no room, and 3 joins 5:

    >>> pack_sequences(np.array([5, 3, 4, 6]), count=2, sequence=8)
    array([ 1,  1, -1,  0])
    """
    rooms = [(sequence, index) for index in range(count)]
    number = np.full(len(lengths), -1)
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        best = bisect_left(rooms, (length, -1))
        if best < len(rooms):
            room, number[sample] = rooms.pop(best)
            insort(rooms, (room - length, int(number[sample])))
    return number


def arrival_parts(lengths: np.ndarray, needed: np.ndarray, ranks: int, capacity: int) -> SampleParts:
    """Place samples on ranks in the order of arrival; sample i gets `needed[i]` ranks, those with the fewest slots so far.

    Samples that need several ranks come first. Then the samples that need one rank go into the room that is left in slots, best fit,
    or into new slots. A slot holds `capacity` tokens.
    """
    slots = np.zeros(ranks, np.int64)
    parts = []
    rooms: list[tuple[int, int, int]] = []  # free tokens, rank, slot; sorted
    for sample in np.argsort(-(needed > 1).astype(np.int64), kind="stable").tolist():
        length = int(lengths[sample])
        number = int(needed[sample])
        best = bisect_left(rooms, (length, -1, -1))
        if number == 1 and best < len(rooms):
            room, rank, slot = rooms.pop(best)
            insort(rooms, (room - length, rank, slot))
            parts.append((sample, 1, rank, slot))
            continue
        chosen = np.argsort(slots, kind="stable")[:number]
        tokens = part_tokens(np.full(number, length), np.full(number, number), np.arange(number))
        for rank, part in zip(chosen.tolist(), tokens.tolist(), strict=True):
            parts.append((sample, number, rank, int(slots[rank])))
            insort(rooms, (max(capacity - part, 0), rank, int(slots[rank])))
        slots[chosen] += 1
    sample, number, rank, slot = np.array(parts, np.int64).T
    return SampleParts(sample, number, rank, slot)


def longest_first_parts(
    lengths: np.ndarray, needed: np.ndarray, ranks: int, capacity: int, seconds: np.ndarray
) -> SampleParts:
    """Place samples on ranks, the longest sample first; sample i gets `needed[i]` ranks, those that are free earliest.

    This is algorithm 2 of ByteScale. `seconds` `(S,)` is the time of each sample on its ranks. The samples that need one rank are packed
    into slots of `capacity` tokens. These slots are placed after the samples on several ranks, the slot that takes longest first.
    """
    busy = np.zeros(ranks)
    slots = np.zeros(ranks, np.int64)
    parts = []
    order = np.argsort(-lengths, kind="stable")
    for sample in order[needed[order] > 1].tolist():
        chosen = np.argsort(busy, kind="stable")[: needed[sample]]
        parts += [(sample, int(needed[sample]), rank, int(slots[rank])) for rank in chosen.tolist()]
        busy[chosen] = busy[chosen].max() + seconds[sample]
        slots[chosen] += 1
    short = np.flatnonzero(needed == 1)
    slot_of, count = _packed_slots(lengths[short], capacity)
    work = np.bincount(slot_of, seconds[short], count)
    rank_of = np.zeros((count, 2), np.int64)
    for number in np.argsort(-work, kind="stable").tolist():
        rank = int(busy.argmin())
        rank_of[number] = rank, slots[rank]
        busy[rank] += work[number]
        slots[rank] += 1
    parts += [
        (sample, 1, *rank_of[number].tolist()) for sample, number in zip(short.tolist(), slot_of.tolist(), strict=True)
    ]
    return SampleParts(*np.array(parts, np.int64).T)


def _packed_slots(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack samples of at most `capacity` tokens into slots, best fit. Returns the slot of each sample `(S,)`, and the number of slots."""
    slot_of = np.full(len(lengths), -1)
    count = 0
    while (left := np.flatnonzero(slot_of < 0)).size:
        more = -(-int(lengths[left].sum()) // capacity)
        number = pack_sequences(lengths[left], more, capacity)
        slot_of[left] = np.where(number < 0, -1, number + count)
        count += more
    return slot_of, count


def play_parts(parts: SampleParts, lengths: np.ndarray, ranks: int, time: SampleTime, ring: RingTime) -> np.ndarray:
    """Simulate the slots of all ranks, and return the time at which each rank ends, `(ranks,)`.

    All ranks of a divided sample begin and end its slot together. Where `parts.by_heads` is true, they exchange tokens for heads, which
    takes `time.exchange` seconds per token; elsewhere they use a ring.
    """
    size = lengths[parts.sample].astype(np.float64)
    seconds = part_seconds(size, parts.parts, time, ring)
    if parts.by_heads is not None and parts.by_heads.any():
        exchanged = (time.shared(size) + time.exchange * size) / parts.parts
        seconds = np.where(parts.by_heads, exchanged, seconds)
    width = int(parts.slot.max()) + 1
    durations = np.bincount(parts.rank * width + parts.slot, seconds, ranks * width).reshape(ranks, width)
    durations += time.fixed * (durations > 0)
    return _play(durations, _groups(parts))[0]


def part_seconds(lengths: np.ndarray, ranks: np.ndarray, time: SampleTime, ring: RingTime) -> np.ndarray:
    """Return the seconds that a rank needs for its part of samples of `lengths` tokens that are divided among `ranks` ranks by a ring."""
    attention = time.quadratic * lengths.astype(np.float64) ** 2 / ranks
    return ring.attention_seconds(attention, lengths, ranks) + time.linear * lengths / ranks


def slot_times(balance: Balance) -> tuple[np.ndarray, np.ndarray]:
    """Return the time at which each slot of `balance` begins, and its duration in seconds, each `(ranks, slots)`.

    Durations are the balancer's own estimates. Where a rank has fewer slots than others, the missing ones have duration 0. The ranks of
    a divided sample begin its slot together.
    """
    ranks = balance.pool.ranks
    width = int(balance.slots.max())
    durations = np.bincount(balance.rank * width + balance.slot, balance.seconds, ranks * width).reshape(ranks, width)
    durations += balance.pool.time.fixed * (durations > 0)
    parts = SampleParts(balance.sample, balance.parts, balance.rank, balance.slot)
    return _play(durations, _groups(parts))[1], durations


def _groups(parts: SampleParts) -> list[np.ndarray]:
    """Return one array `(k, 2)` of (rank, slot) pairs for each sample that is divided among k > 1 ranks."""
    together = parts.parts > 1
    order = np.argsort(parts.sample[together], kind="stable")
    _, first = np.unique(parts.sample[together][order], return_index=True)
    pairs = np.stack([parts.rank[together][order], parts.slot[together][order]], 1)
    return np.split(pairs, first[1:]) if len(first) else []


def _play(durations: np.ndarray, groups: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Simulate slots of `durations` `(ranks, slots)`. Returns the end of each rank `(ranks,)` and the start of each slot `(ranks, slots)`.

    Each array in `groups` lists (rank, slot) pairs that begin and end together: they begin when the last of their ranks is ready.
    """
    ranks, width = durations.shape
    starts = np.zeros((ranks, width))
    group_of = np.full((ranks, width), -1)
    for number, pairs in enumerate(groups):
        group_of[pairs[:, 0], pairs[:, 1]] = number
    missing = [len(pairs) for pairs in groups]
    ready = np.zeros(ranks)
    at = np.zeros(ranks, np.int64)
    runnable = list(range(ranks))
    while runnable:
        rank = runnable.pop()
        while at[rank] < width:
            group = group_of[rank, at[rank]]
            if group < 0:
                starts[rank, at[rank]] = ready[rank]
                ready[rank] += durations[rank, at[rank]]
                at[rank] += 1
                continue
            missing[group] -= 1
            if missing[group]:
                break
            members = groups[group][:, 0]
            longest = durations[members, groups[group][:, 1]].max()
            starts[members, groups[group][:, 1]] = ready[members].max()
            ready[members] = ready[members].max() + longest
            at[members] += 1
            runnable += [member for member in members.tolist() if member != rank]
    assert (at == width).all(), "samples on several ranks are in one order on all of them"
    return ready, starts
