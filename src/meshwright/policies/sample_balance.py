"""Assigns the samples of a global batch to ranks and time slots, so that all ranks have equal work.

The idea is from ByteScale (Ge et al. 2025, arXiv 2502.21231, algorithm 2).

Ranks form one pool. Each rank works through its time slots, which are micro-batches of at most `capacity` tokens. A sample that fits is put
whole into a slot of one rank. A longer sample is divided among as few ranks as can hold it, and takes a slot of each of them at the same
time. With selective offload, slots with parts of long samples may have more tokens.

A batch is balanced by the time of samples, not by their tokens. The result is a pure function of the arguments, bit for bit, so all ranks
compute the same balance.

Shapes: S samples, P parts of samples (one part for each sample and each rank that works on it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.policies.sample_blocks import part_tokens
from meshwright.policies.sample_packing import Rooms, level, pack_samples
from meshwright.policies.sample_spans import LongSample, SpanLimits, Spans, place_spans
from meshwright.policies.sample_time import SampleTime, least_ranks
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import SamplePlan, SlotOffload

STACK_LIMITS = (0.1, 0.3, 1.0)
"""How much later pipelines with long samples may end than pipelines with short samples only, as fractions of the longest slot.

All are tried.
"""

FINEST_PART = 4
"""A sample is divided into parts of at least capacity / FINEST_PART tokens, unless the fewest ranks that hold it have smaller parts."""
GOOD_END = 1.02
"""If the slowest rank ends before this multiple of the mean, no other numbers of ranks are tried."""
END_SHARES = (1.0, 0.97, 1.01)
"""Targets for the time at which ranks end, relative to the mean work. The next target is tried if the balance is not good."""
GOOD_PADDING = 0.03
"""With at most this share of padding, no other target is tried."""
MOST_RETRIED = 256
"""Largest pool for which other targets are tried. In a larger pool, single samples matter less and the search takes longer."""
REPACKS = 3
"""How often short samples are packed again, with less work for ranks that waited for the other ranks of a divided sample."""
DELAY = 0.03
"""Ranks may end later by this share than if all ended together, if that avoids padding."""

ROUNDING = 1e-9
"""Part of a token by which the product of tokens and a share may exceed a whole number, because of rounding."""


@dataclass(frozen=True)
class RankPool:
    """Ranks that share a batch."""

    ranks: int
    """Number of ranks in the pool; with pipeline parallelism, number of pipelines."""
    capacity: int
    """Tokens in a micro-batch of a rank, an even number."""
    time: SampleTime
    """Time of samples on a rank; with pipeline parallelism, on one stage."""
    stages: int = 1
    """Pipeline stages."""
    offload: SlotOffload | None = None
    """Slots with more tokens, for samples of at least `offload.shortest` tokens; None without offload."""
    heads: int = 1
    """Key/value heads on a rank. Ranks that exchange tokens for heads divide these heads among them."""
    slot_unit: int | None = None
    """If set, the size of a slot is a multiple of this number of tokens (`spec.plan.SamplePlan`). It divides the capacities."""

    def slot_tokens(self, filled: np.ndarray) -> np.ndarray:
        """Size of slots, padding included, whose samples have `filled` tokens; same shape."""
        if self.slot_unit is not None:
            return np.maximum(-(-filled // self.slot_unit), 1) * self.slot_unit
        longer = filled if self.offload is None else self.offload.capacity
        return np.where(filled > self.capacity, longer, self.capacity)

    def memory_shares(self, lengths: np.ndarray) -> np.ndarray:
        """Device memory of samples of `lengths` `(S,)` tokens in slots that they may take, relative to the memory without offload."""
        if self.offload is None:
            return np.ones(len(lengths))
        return np.where(lengths >= self.offload.shortest, self.capacity / self.offload.capacity, 1.0)


def rank_pool(samples: SamplePlan, ranks: int, stages: int = 1, heads: int = 1) -> RankPool:
    """The pool of `ranks` ranks (or pipelines of `stages` equal stages) with `heads` heads each, and with a plan's slots and times."""
    exchange = math.inf if samples.exchange is None else samples.exchange
    alpha, beta, gamma, ring, exchange = (
        seconds / stages for seconds in (samples.alpha, samples.beta, samples.gamma, samples.ring, exchange)
    )
    time = SampleTime(alpha, beta, gamma, ring, exchange, samples.always_exchange)
    # If the backward computes weight gradients later, all micro-batches of a pipeline must have one shape, so slots then have full size.
    unit = samples.slot_unit if stages == 1 else None
    return RankPool(ranks, samples.capacity, time, stages, samples.offload, heads, unit)


@dataclass(frozen=True)
class Balance:
    """The samples of a batch on ranks and time slots. Arrays of shape `(P,)` are sorted by rank, slot and sample."""

    pool: RankPool
    sample: np.ndarray
    part: np.ndarray
    """Index of the part in its sample, as in `sample_blocks.block_ranges`."""
    parts: np.ndarray
    """Number of parts of the sample."""
    rank: np.ndarray
    slot: np.ndarray
    tokens: np.ndarray
    by_heads: np.ndarray
    """Whether the ranks of this part's sample exchange tokens for heads."""
    seconds: np.ndarray
    """Seconds of each part, without the fixed time of its slot."""
    slots: np.ndarray
    """Number of slots of each rank, `(ranks,)`."""
    shares: np.ndarray
    """Device memory of each sample's activations relative to the memory without offload, `(S,)`; 1 if its parts fit without offload."""
    end_seconds: np.ndarray
    """Time at which each rank ends, including waits for other ranks of its samples and pipeline bubbles, `(ranks,)`."""
    ideal_seconds: float
    """Time if all work were divided evenly, without rings, waits and bubbles. No placement can be faster."""

    @cached_property
    def work_seconds(self) -> np.ndarray:
        """Seconds of work of each rank, `(ranks,)`, without waits and bubbles."""
        return np.bincount(self.rank, self.seconds, self.pool.ranks) + self.slots * self.pool.time.fixed

    @property
    def slowest_seconds(self) -> float:
        return float(self.end_seconds.max())

    @property
    def imbalance(self) -> float:
        """Time of the slowest rank divided by the mean work of a rank; at least 1."""
        return self.slowest_seconds * self.pool.ranks / float(np.cumsum(self.work_seconds)[-1])

    @property
    def efficiency(self) -> float:
        """Ideal time divided by the time of the slowest rank; at most 1."""
        return self.ideal_seconds / self.slowest_seconds

    @property
    def cost(self) -> float:
        """Time of the slowest rank, increased by the share of padding. Of several balances, the one with the least cost is used."""
        return self.slowest_seconds * (1 + self.padding)

    @cached_property
    def slot_sizes(self) -> np.ndarray:
        """Size of each slot with its padding, sorted by rank and slot."""
        first = np.cumsum(self.slots) - self.slots
        filled = np.bincount(first[self.rank] + self.slot, self.tokens, int(self.slots.sum())).astype(np.int64)
        return self.pool.slot_tokens(filled)

    @property
    def padding(self) -> float:
        """Share of all slots' tokens that are padding."""
        return 1.0 - int(self.tokens.sum()) / int(self.slot_sizes.sum())


class _Batch(NamedTuple):
    """Samples of a batch; all arrays are `(S,)`."""

    lengths: np.ndarray
    shares: np.ndarray
    """Device memory of each sample relative to the memory without offload."""
    memory_tokens: np.ndarray
    """Device memory of each sample, as the number of tokens that need this memory without offload."""
    least: np.ndarray
    """Fewest ranks that hold each sample."""
    shared: np.ndarray
    """Seconds of work of each sample on one rank; if it is divided, its ranks share this work."""


class _Parts(NamedTuple):
    """The fields of `Balance` with the same names, `(P,)` each."""

    sample: np.ndarray
    part: np.ndarray
    parts: np.ndarray
    rank: np.ndarray
    slot: np.ndarray
    tokens: np.ndarray


def balance_samples(lengths: np.ndarray, pool: RankPool, shares: np.ndarray | None = None) -> Balance:
    """Balance samples of `lengths` `(S,)` tokens over `pool`.

    `shares` `(S,)` is the device memory that each sample needs, relative to the memory without offload (`sample_time.memory_shares`). None
    means the memory in the pool's slots. It does not apply to samples that fit on a rank without offload. Raises BadInput if a length is
    below 1, and if a sample does not fit on all ranks together.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths) or int(lengths.min()) < 1:
        raise BadInput("lengths of samples: expected at least one sample, and at least one token in each")
    shares = np.where(lengths > pool.capacity, pool.memory_shares(lengths) if shares is None else shares, 1.0)
    least = least_ranks(lengths, shares, pool.capacity)
    _check_sizes(lengths, least, pool)
    batch = _Batch(lengths, shares, _memory_tokens(lengths, shares, pool), least, pool.time.shared(lengths))
    order = np.lexsort((-lengths, -least))
    long = order[least[order] > 1]
    short = order[least[order] == 1]
    best: Balance | None = None
    for share in END_SHARES if pool.stages == 1 and pool.ranks <= MOST_RETRIED else END_SHARES[:1]:
        balance = _with_repacks(short, _place_long(long, short, batch, pool, share), batch, pool)
        if best is None or balance.cost < best.cost:
            best = balance
        if best.imbalance <= GOOD_END and best.padding <= GOOD_PADDING:
            break
    assert best is not None
    return best


def _with_repacks(short: np.ndarray, spans: Spans, batch: _Batch, pool: RankPool) -> Balance:
    """Pack the `short` samples around these spans several times, and return the best balance."""
    delays = np.zeros(pool.ranks)
    best, delay = _assemble(short, spans, batch, pool, delays)
    balance = best
    for _ in range(REPACKS if pool.stages == 1 else 0):
        if best.imbalance <= GOOD_END + delay:
            break
        delays = delays + balance.end_seconds - balance.work_seconds
        balance, _ = _assemble(short, spans, batch, pool, delays)
        best = balance if balance.slowest_seconds < best.slowest_seconds else best
    return best


def _memory_tokens(tokens: np.ndarray, shares: np.ndarray, pool: RankPool) -> np.ndarray:
    """Device memory of parts of `tokens` `(P,)` tokens, in tokens without offload. Parts that fit into a slot are not offloaded."""
    return np.where(tokens > pool.capacity, np.ceil(tokens * shares - ROUNDING).astype(np.int64), tokens)


def _check_sizes(lengths: np.ndarray, least: np.ndarray, pool: RankPool) -> None:
    """Raise BadInput if a sample needs more ranks than the pool has."""
    longest = int(least.argmax())
    if least[longest] > pool.ranks:
        needs = f"sample of {lengths[longest]} tokens: needs {least[longest]} ranks of {pool.capacity} tokens"
        raise BadInput(f"{needs}, expected at most the pool's {pool.ranks}; cut samples or raise the capacity")


def _short_slot(short: np.ndarray, batch: _Batch, pool: RankPool) -> float:
    """Seconds of a full slot of short samples, at their mean work per token; 0 without short samples."""
    tokens = int(batch.memory_tokens[short].sum())
    return _total(batch.shared[short]) / tokens * pool.capacity + pool.time.fixed if tokens else 0.0


def _place_long(long: np.ndarray, short: np.ndarray, batch: _Batch, pool: RankPool, share: float) -> Spans:
    """Place the `long` samples so that all ranks can end as early as possible. The target for the end is `share` of the mean work."""
    fixed = pool.time.fixed
    bubbles = pool.stages - 1
    least = batch.least[long]
    shared = batch.shared[long]
    lengths = batch.lengths[long]
    finest = np.minimum(lengths * FINEST_PART // pool.capacity, lengths // 2)
    most = np.clip(finest, least, pool.ranks)
    attention = pool.time.attention(lengths)
    ring = pool.time.ring * lengths
    exchange = pool.time.exchange * lengths
    fewest_seconds = pool.time.parts(lengths, least, pool.heads)[0]
    short_slot = _short_slot(short, batch, pool)
    short_work = short_slot * int(batch.memory_tokens[short].sum()) / pool.capacity
    mean = (short_work + _total((fewest_seconds + fixed) * least)) / pool.ranks
    longest = float(fewest_seconds.max()) if len(long) else 0.0
    stacks = [mean + bubbles * (short_slot + share * max(longest - short_slot, 0.0)) for share in STACK_LIMITS]
    best = None
    best_end = np.inf
    for fewest in _allotments(least, pool.ranks):
        arrays = (long, fewest, most, shared, attention, ring, exchange)
        samples = [LongSample(*values) for values in zip(*(array.tolist() for array in arrays), strict=True)]
        ends = stacks if bubbles else [share * mean]
        for end in ends:
            limits = SpanLimits(pool.ranks, pool.heads, fixed, pool.stages, end, pool.time.always_exchange)
            spans = place_spans(samples, limits)
            ready = spans.busy + bubbles * np.maximum(spans.longest, short_slot)
            last = max(level(ready, short_work), float(ready.max()))
            if best is None or last < best_end:
                best = spans
                best_end = last
        if best_end <= mean * GOOD_END:
            break
        stacks = stacks[-1:]
    assert best is not None
    return best


def _allotments(least: np.ndarray, ranks: int) -> Iterator[np.ndarray]:
    """Three assignments of numbers of ranks to samples that need at least `least`, to be tried in turn.

    First the least numbers, then numbers that divide the pool into equal groups, then pool size / 1, 2, 4, ….
    """
    yield least
    yield np.maximum(least, ranks // (ranks // least))
    halves = ranks >> np.arange(ranks.bit_length())
    yield halves[np.searchsorted(-halves, -least, side="right") - 1]


def _assemble(
    short: np.ndarray, spans: Spans, batch: _Batch, pool: RankPool, delays: np.ndarray
) -> tuple[Balance, float]:
    """Pack the `short` samples around the spans, and compute the times of the result.

    `delays` `(ranks,)` are expected waits inside spans. Also returns the share by which the packing lets ranks end later.
    """
    parts = _span_parts(spans, batch.lengths, pool.ranks)
    memory_tokens = _memory_tokens(parts.tokens, batch.shares[parts.sample], pool)
    ready = spans.busy + (pool.stages - 1) * np.maximum(spans.longest, _short_slot(short, batch, pool)) + delays
    rooms = Rooms(parts.rank, parts.slot, pool.capacity - memory_tokens)
    seconds = batch.shared[short] + pool.time.fixed / pool.capacity * batch.memory_tokens[short]
    delay = DELAY if pool.time.linear > 0 and pool.slot_unit is None else 0.0  # else padding costs nothing
    packing = pack_samples(batch.memory_tokens[short], seconds, ready, rooms, pool.capacity, delay)
    whole = np.ones(len(short), np.int64)
    packed = _Parts(short, whole - 1, whole, packing.rank, packing.slot, batch.lengths[short])
    every = _Parts(*(np.concatenate(pair) for pair in zip(parts, packed, strict=True)))
    seconds, by_heads = pool.time.parts(batch.lengths[every.sample], every.parts, pool.heads)
    end = _end_seconds(every, seconds, packing.slots, spans, pool)
    order = np.lexsort((every.sample, every.slot, every.rank))
    slots = int(batch.memory_tokens.sum()) / pool.capacity
    ideal = (_total(batch.shared) + slots * pool.time.fixed) / pool.ranks
    sample, part, number, rank, slot, tokens = (values[order] for values in every)
    balance = Balance(
        pool,
        sample,
        part,
        number,
        rank,
        slot,
        tokens,
        by_heads[order],
        seconds[order],
        packing.slots,
        batch.shares,
        end,
        ideal,
    )
    return balance, packing.delay


def _span_parts(spans: Spans, lengths: np.ndarray, pool_ranks: int) -> _Parts:
    """The parts of the samples in `spans`, in the order of `spans`. They take the first slots of their ranks."""
    ranks = np.array(spans.ranks, np.int64)
    part = np.arange(int(ranks.sum())) - np.repeat(np.cumsum(ranks) - ranks, ranks)
    sample = np.repeat(np.array(spans.samples, np.int64), ranks)
    parts = np.repeat(ranks, ranks)
    rank = np.repeat(np.array(spans.first, np.int64), ranks) + part
    by_rank = np.argsort(rank, kind="stable")
    counts = np.bincount(rank, minlength=pool_ranks)
    slot = np.empty_like(rank)
    slot[by_rank] = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    return _Parts(sample, part, parts, rank, slot, part_tokens(lengths[sample], parts, part))


def _end_seconds(parts: _Parts, seconds: np.ndarray, slots: np.ndarray, spans: Spans, pool: RankPool) -> np.ndarray:
    """The time at which each rank ends, `(ranks,)`. The ranks of a span begin and end its slot together; bubbles come at the end.

    The parts of spans must come first in `parts`, in the order of `spans`. In a pipeline with equal stages, slots of any lengths take the
    sum of their times, plus (stages − 1) times the longest one (a proportionate flow shop).
    """
    first = np.cumsum(slots) - slots
    durations = np.bincount(first[parts.rank] + parts.slot, seconds, int(slots.sum())) + pool.time.fixed
    owner = np.repeat(np.arange(pool.ranks), slots)
    ready = [0.0] * pool.ranks
    count = sum(spans.ranks)
    entries = first[parts.rank[:count]] + parts.slot[:count]
    if count:
        numbers = np.array(spans.ranks, np.int64)
        together = np.maximum.reduceat(durations[entries], np.cumsum(numbers) - numbers)
        for start, number, duration in zip(spans.first, spans.ranks, together.tolist(), strict=True):
            stop = start + number
            ready[start:stop] = [max(ready[start:stop]) + duration] * number
        durations[entries] = np.repeat(together, spans.ranks)
    longest = np.zeros(pool.ranks)
    np.maximum.at(longest, owner, durations)
    durations[entries] = 0.0
    return np.array(ready) + np.bincount(owner, durations, pool.ranks) + (pool.stages - 1) * longest


def _total(values: np.ndarray) -> float:
    """The sum, added in order. (The result of `np.sum` depends on the vector width of the processor.)"""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0
