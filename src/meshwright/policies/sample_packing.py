"""Packs samples that fit on one rank: assigns them to ranks by work, and within a rank to time slots by tokens.

A slot has as many tokens as a micro-batch. Free space in slots with parts of long samples is called a room, and is filled first. Each rank
opens new slots for about as many tokens as it should get beyond its rooms. If a rank would fill its last slot only a little, it does not
open this slot, and other ranks get these samples. This keeps padding low.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

LITTLE_FILL = 0.3
"""A rank does not open a slot for its last samples if they fill less than this share of it."""
FILL = 0.995
"""Share of a slot's tokens that samples of many different lengths are expected to fill."""
SLOT_BITS = 24
"""Bits for a slot's number in an entry of a heap.

An entry is −(room · 2**SLOT_BITS − slot), so the slot with the largest room comes first.
"""


@dataclass(frozen=True)
class Rooms:
    """Free tokens in slots that are partly filled; all arrays are `(P,)`."""

    rank: np.ndarray
    slot: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class SamplePacking:
    """Rank and slot of each sample, `(S,)`, and the number of slots of each rank, `(ranks,)`."""

    rank: np.ndarray
    slot: np.ndarray
    slots: np.ndarray
    delay: float = 0.0
    """Share by which ranks may end later than if all ended together."""


def level(busy: np.ndarray, work: float) -> float:
    """The time at which all ranks end, if they are `busy` `(ranks,)` until now and `work` seconds can be spread over them freely."""
    order = np.sort(busy)
    levels = (np.cumsum(order) + work) / np.arange(1, len(order) + 1)
    later = np.append(order[1:], np.inf)
    return float(levels[int((levels <= later).argmax())])


def pack_samples(
    tokens: np.ndarray, seconds: np.ndarray, busy: np.ndarray, rooms: Rooms, capacity: int, delay: float = 0.0
) -> SamplePacking:
    """Pack samples of `tokens` tokens and `seconds` seconds each, `(S,)`, longest first, on ranks that are `busy` `(ranks,)` until now.

    `rooms` are free tokens in slots that ranks have already; the slots of each rank are numbered from 0. New slots have `capacity` tokens.
    If rooms would stay free otherwise, ranks may end later by the share `delay` than if all ended together.
    """
    ranks = len(busy)
    slots = np.bincount(rooms.rank, minlength=ranks)
    if not len(tokens):
        return SamplePacking(np.zeros(0, np.int64), np.zeros(0, np.int64), slots)
    work = float(np.cumsum(seconds)[-1])
    per_token = FILL * work / int(tokens.sum())
    open_tokens = np.bincount(rooms.rank, rooms.tokens, ranks)
    filled = _room_work(busy, work, open_tokens * per_token)
    if (filled < open_tokens * per_token).any():
        filled = _room_work(busy, work, open_tokens * per_token, delay)
    else:
        delay = 0.0
    busy = busy + filled
    work = work - float(np.cumsum(filled)[-1])
    wanted = (filled + np.maximum(level(busy, work) - busy, 0.0)) / per_token - open_tokens
    excess = delay * level(busy, work)
    for added in _new_slots(np.maximum(wanted, 0.0) / capacity):
        budgets = _within(busy, work, (open_tokens + added * capacity) * per_token - filled)
        if float((busy + budgets).max()) <= level(busy, work) + excess:
            break
    new_rank = np.repeat(np.arange(ranks), added)
    new_slot = np.arange(len(new_rank)) - np.repeat(np.cumsum(added) - added, added) + slots[new_rank]
    slots = slots + added
    entries = np.concatenate(
        [(-rooms.tokens << SLOT_BITS) + rooms.slot, np.full(len(new_rank), -capacity << SLOT_BITS) + new_slot]
    )
    owner = np.concatenate([rooms.rank, new_rank])
    ordered = entries[np.lexsort((entries, owner))].tolist()
    stops = np.cumsum(slots).tolist()
    heaps = [ordered[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    packing = _deal(tokens, seconds, filled + budgets, heaps, slots.tolist(), capacity, excess)
    return replace(packing, delay=delay)


def _new_slots(wanted: np.ndarray) -> Iterator[np.ndarray]:
    """Two roundings of the `wanted` numbers of slots `(ranks,)`: first by largest remainder, the sum rounded up; then each rounded up."""
    slots = np.floor(wanted).astype(np.int64)
    further = math.ceil(float(np.cumsum(wanted)[-1])) - int(slots.sum())
    slots[np.argsort(slots - wanted, kind="stable")[:further]] += 1
    yield slots
    yield np.ceil(wanted - LITTLE_FILL).astype(np.int64)


def _room_work(busy: np.ndarray, work: float, rooms: np.ndarray, delay: float = 0.0) -> np.ndarray:
    """The part of `work` that each rank does in its rooms, `(ranks,)` seconds, before new slots are opened.

    `rooms` `(ranks,)` is the work that rooms can take, in seconds. For this work, a rank may end later by the share `delay`.
    """
    filled = np.clip(level(busy, work) * (1 + delay) - busy, 0.0, rooms)
    total = float(np.cumsum(filled)[-1])
    return filled * (work / total) if total > work else filled


def _within(busy: np.ndarray, work: float, most: np.ndarray) -> np.ndarray:
    """Work for each rank, `(ranks,)` seconds, so that all end together, while no rank gets more than `most` `(ranks,)`.

    If the slots of all ranks together are too few, the results exceed `most`, and `_deal` opens more slots.
    """
    budgets = np.zeros_like(busy)
    free = np.ones(len(busy), dtype=bool)
    while free.any():
        budgets[free] = np.maximum(level(busy[free], work) - busy[free], 0.0)
        full = free & (budgets > most)
        if not full.any():
            return budgets
        budgets[full] = most[full]
        work -= float(np.cumsum(most[full])[-1])
        free &= ~full
    return budgets + work / len(busy)


def _deal(
    tokens: np.ndarray,
    seconds: np.ndarray,
    budgets: np.ndarray,
    heaps: list[list[int]],
    slots: list[int],
    capacity: int,
    excess: float,
) -> SamplePacking:
    """Give each sample to the rank that has done the smallest share of its work so far, and there to the slot with the most room.

    Shares are compared, not seconds, so that each rank gets long and short samples alike. A rank is set aside, until samples are smaller,
    if it lacks less than half of a sample's work or has no room for it. If all ranks are set aside, the rank with the least room opens a
    slot, so that ranks open similar numbers of slots.
    """
    chosen_rank = []
    chosen_slot = []
    missing = budgets.tolist()
    scale = [-1 / budget if budget > 0 else 0.0 for budget in missing]
    ranks = [(-1.0 if budget > 0 else 0.0, rank) for rank, budget in enumerate(missing)]
    heapify(ranks)
    little_work: list[tuple[float, int]] = []
    little_room: list[tuple[int, int]] = []
    least_room: list[tuple[int, int]] = []  # every rank that was ever put into `little_room`, the least room first
    waits = [False] * len(missing)  # whether a rank is in `little_room` now
    for length, work in zip(tokens.tolist(), seconds.tolist(), strict=True):
        half = work / 2
        needed = -length << SLOT_BITS
        while little_work and -little_work[0][0] >= half:
            rank = heappop(little_work)[1]
            heappush(ranks, (missing[rank] * scale[rank], rank))
        while little_room and little_room[0][0] < needed + (1 << SLOT_BITS):
            rank = heappop(little_room)[1]
            if waits[rank]:
                waits[rank] = False
                heappush(ranks, (missing[rank] * scale[rank], rank))
        while ranks:
            rank = ranks[0][1]
            if missing[rank] < half:
                heappush(little_work, (-missing[rank], heappop(ranks)[1]))
            elif not (heap := heaps[rank]) or heap[0] >= needed + (1 << SLOT_BITS):
                room = heap[0] if heap else 0
                heappush(little_room, (room, heappop(ranks)[1]))
                heappush(least_room, (-room, rank))
                waits[rank] = True
            else:
                break
        else:
            while least_room and not waits[least_room[0][1]]:
                heappop(least_room)
            rank = little_work[0][1] if little_work else -1
            has_room = rank >= 0 and heaps[rank] and heaps[rank][0] < needed + (1 << SLOT_BITS)
            if least_room and not (has_room and missing[rank] >= work - excess):
                rank = heappop(least_room)[1]
            else:
                heappop(little_work)
            waits[rank] = False
            if not heaps[rank] or heaps[rank][0] >= needed + (1 << SLOT_BITS):
                heappush(heaps[rank], (-capacity << SLOT_BITS) + slots[rank])
                slots[rank] += 1
            heappush(ranks, (missing[rank] * scale[rank], rank))
        missing[rank] = left = missing[rank] - work
        heapreplace(ranks, (left * scale[rank], rank))
        heap = heaps[rank]
        entry = heapreplace(heap, heap[0] - needed)
        chosen_rank.append(rank)
        chosen_slot.append(entry & ((1 << SLOT_BITS) - 1))
    return SamplePacking(np.array(chosen_rank, np.int64), np.array(chosen_slot, np.int64), np.array(slots, np.int64))
