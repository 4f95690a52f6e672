"""Time of a step whose samples have unequal lengths, under four layouts of data and context ranks.

- `static_seconds`: groups of ranks of one size divide every sequence of packed samples, as a static context axis does.
- `arrival_parts`: each sample takes the fewest ranks that hold it, in the order of arrival, with equal tokens on all ranks.
- `longest_first_parts`: the longest samples first, each on the fewest ranks that hold it, those that are free first.
- `policies.sample_balance`: the balancer's ranks and slots.

The last three are played slot by slot (`play_parts`). Attention of a divided sample overlaps the messages of its ring; the longer of the
two counts. What all layouts have in common (optimizer, reduction of gradients) is left out.
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
"""Share of attention's time that is backward (`costs.compute`)."""


@dataclass(frozen=True)
class RingTime:
    """Messages of ring attention. A rank sends what it received, so each of its tokens' keys and values pass each link once."""

    bytes_per_token: float
    """Keys and values of one token in all layers, in bf16."""
    link: float
    """Bytes per second between ranks of a node."""
    port: float
    """Bytes per second between nodes: a ring crosses from one rank to one rank."""
    ranks_per_node: int
    tax: float
    """Slow-down of attention per second of messages beside it."""
    backward: float = 2.0
    """Bytes that go round the ring in the backward, relative to the forward: keys and values, and their gradients in bf16."""

    def attention_seconds(self, attention: np.ndarray, lengths: np.ndarray, ranks: np.ndarray | int) -> np.ndarray:
        """Seconds of attention with its ring, where attention alone takes `attention` seconds on a rank.

        Forward and backward overlap their own messages. A single rank has none.
        """
        total = np.zeros(np.broadcast_shapes(np.shape(attention), np.shape(lengths)))
        for compute_share, passes in ((1 - BACKWARD_SHARE, 1.0), (BACKWARD_SHARE, self.backward)):
            compute = attention * compute_share
            traffic = self.seconds(lengths, ranks) * passes / (1 + self.backward)
            total = total + compute + exposed_seconds(traffic, compute, self.tax)
        return total

    def seconds(self, lengths: np.ndarray, ranks: np.ndarray | int) -> np.ndarray:
        """Seconds of the messages, forward and backward, of samples of `lengths` tokens on `ranks` ranks each."""
        rate = np.where(np.asarray(ranks) > self.ranks_per_node, self.port, self.link)
        return (1 + self.backward) * lengths * (1 - 1 / np.asarray(ranks)) * self.bytes_per_token / rate


class SampleParts(NamedTuple):
    """Parts of samples, `(P,)` each, as in `policies.sample_balance.Balance`."""

    sample: np.ndarray
    parts: np.ndarray
    rank: np.ndarray
    slot: np.ndarray
    by_heads: np.ndarray | None = None
    """Parts whose ranks exchange tokens for heads; None: all have rings."""


def static_seconds(
    lengths: np.ndarray, groups: int, ranks: int, capacity: int, time: SampleTime, ring: RingTime
) -> tuple[float, int]:
    """Seconds of the slowest of `groups` groups of `ranks` context ranks, and the tokens of the samples that they have.

    Each rank has `capacity` tokens of a sequence. Samples are packed whole into as many sequences as their tokens fill, rounded to whole
    turns of the groups; a sample that no sequence has room for waits for a later step. Keys and values of a sequence's tokens go round the
    whole group, whatever the length of their sample.
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
    """The sequence of each sample `(S,)`, of `count` sequences of `sequence` tokens, or −1: best-fit, longest samples first.

    Samples of 5, 3, 4 and 6 tokens in two sequences of 8: 6 and 5 first, then 4 has no room, 3 goes beside 5.

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
    """Places samples in the order of arrival on `needed` `(S,)` ranks each, those with the fewest slots.

    Samples on one rank come last, best-fit. A slot has room for `capacity` tokens, less the part of a sample on several ranks.
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
    """Places samples by falling length on `needed` `(S,)` ranks each, those that are free first (ByteScale's algorithm 2).

    `seconds` `(S,)` is the time of a sample on its ranks. Samples on one rank are packed into slots of `capacity` tokens, which follow by
    falling time.
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
    """The slot of each sample `(S,)` of at most `capacity` tokens, packed best-fit, and the number of slots."""
    slot_of = np.full(len(lengths), -1)
    count = 0
    while (left := np.flatnonzero(slot_of < 0)).size:
        more = -(-int(lengths[left].sum()) // capacity)
        number = pack_sequences(lengths[left], more, capacity)
        slot_of[left] = np.where(number < 0, -1, number + count)
        count += more
    return slot_of, count


def play_parts(parts: SampleParts, lengths: np.ndarray, ranks: int, time: SampleTime, ring: RingTime) -> np.ndarray:
    """Seconds `(ranks,)` at which ranks end; all ranks of a divided sample begin and end its slot together.

    Ranks of parts with `by_heads` exchange tokens for heads, in `time.exchange` seconds per token; others have a ring.
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
    """Seconds of a part of samples of `lengths` on `ranks` ranks each, with the messages that attention does not hide."""
    attention = time.quadratic * lengths.astype(np.float64) ** 2 / ranks
    return ring.attention_seconds(attention, lengths, ranks) + time.linear * lengths / ranks


def slot_times(balance: Balance) -> tuple[np.ndarray, np.ndarray]:
    """Seconds at which each slot of a balance begins, and seconds that it takes, `(ranks, slots)` each.

    A slot that a rank does not have takes none. The ranks of a divided sample begin its slot together; times are the balancer's own.
    """
    ranks = balance.pool.ranks
    width = int(balance.slots.max())
    durations = np.bincount(balance.rank * width + balance.slot, balance.seconds, ranks * width).reshape(ranks, width)
    durations += balance.pool.time.fixed * (durations > 0)
    parts = SampleParts(balance.sample, balance.parts, balance.rank, balance.slot)
    return _play(durations, _groups(parts))[1], durations


def _groups(parts: SampleParts) -> list[np.ndarray]:
    """The (rank, slot) pairs `(k, 2)` of each sample on several ranks."""
    together = parts.parts > 1
    order = np.argsort(parts.sample[together], kind="stable")
    _, first = np.unique(parts.sample[together][order], return_index=True)
    pairs = np.stack([parts.rank[together][order], parts.slot[together][order]], 1)
    return np.split(pairs, first[1:]) if len(first) else []


def _play(durations: np.ndarray, groups: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Ends `(ranks,)` and starts `(ranks, slots)` of slots of `durations` `(ranks, slots)`.

    The (rank, slot) pairs of a group run together.
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
