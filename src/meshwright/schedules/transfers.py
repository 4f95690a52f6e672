"""Sends and receives, put between compute actions by one rule for every schedule.

A pair of ranks has one channel for each direction, and a channel moves its messages one after another in the order they
are issued, as an NCCL communicator does; so both ends must issue them in one order. Here the sender's order decides: a
send stands right after the compute that made its payload (and is waited for by nobody: its buffer lives until it is
through), and the receiver posts its receives in the same order, each early enough to be under way while the compute
before its consumer runs, and none before the compute of its own that the message is made of: a receive that waits on a
device may keep that compute from being launched, as CUDA may wait for the device when it loads a kernel for the first
time. The order of compute alone decides whether the whole can run; transfers add no deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from meshwright.schedules.action import FORWARD, GRADIENT, Action

AHEAD = 1
"""Compute actions a receive is posted before the one that consumes it. More would hold buffers, and on NCCL a waiting
receive occupies multiprocessors."""


def with_transfers(rank_of: Sequence[int], compute: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Each rank's compute actions with its sends and receives among them."""
    sends = [[_sends(rank_of, rank, action) for action in mine] for rank, mine in enumerate(compute)]
    receives = _receives(rank_of, compute, sends)
    return tuple(
        tuple(
            step
            for place, action in enumerate(mine)
            for step in (*receives[rank].get(place, ()), action, *sends[rank][place])
        )
        for rank, mine in enumerate(compute)
    )


def _sends(rank_of: Sequence[int], rank: int, action: Action) -> tuple[Action, ...]:
    found = []
    for part in action.parts:
        if part.kind in FORWARD and part.stage + 1 < len(rank_of) and rank_of[part.stage + 1] != rank:
            found.append(Action("send", part.stage, part.micro_batch, None, part.stage + 1, "activation"))
        elif part.kind in GRADIENT and part.stage > 0 and rank_of[part.stage - 1] != rank:
            found.append(Action("send", part.stage, part.micro_batch, None, part.stage - 1, "gradient"))
    return tuple(found)


def _receives(
    rank_of: Sequence[int], compute: Sequence[Sequence[Action]], sends: Sequence[Sequence[tuple[Action, ...]]]
) -> list[dict[int, list[Action]]]:
    """By rank: the receives to post before the compute action at each place."""
    needed = [_places(mine) for mine in compute]
    own = [_own_links(mine, len(rank_of)) for mine in compute]
    channels: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, mine in enumerate(sends):
        for sent in mine:
            for send in sent:
                channels[rank, rank_of[send.peer]].append(send)
    posted: list[dict[int, list[Action]]] = [defaultdict(list) for _ in compute]
    for (_, receiver), queue in channels.items():
        # What a message is made of must be under way before those behind it too.
        begun = accumulate((_begun(own[receiver], send, len(rank_of)) for send in queue), max)
        latest = len(compute[receiver])
        for send, earliest in zip(reversed(queue), reversed([*begun]), strict=True):
            need = needed[receiver][send.payload == "activation", send.peer, send.micro_batch]
            latest = min(latest, max(earliest, need - AHEAD))
            receive = Action("recv", send.peer, send.micro_batch, None, send.stage, send.payload)
            posted[receiver][latest].append(receive)
    return [{place: found[::-1] for place, found in mine.items()} for mine in posted]


def _own_links(compute: Sequence[Action], stages: int) -> dict[int, list[tuple[int, int]]]:
    """By micro-batch: the links of its chain, through all stages and back, that this rank computes, each with its place in the order."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, action in enumerate(compute):
        for part in action.parts:
            if part.kind in FORWARD or part.kind in GRADIENT:
                link = part.stage if part.kind in FORWARD else 2 * stages - 1 - part.stage
                found[part.micro_batch].append((link, place))
    return found


def _begun(own: dict[int, list[tuple[int, int]]], send: Action, stages: int) -> int:
    """The first place behind all of the receiver's own compute that the message is made of."""
    link = send.stage if send.payload == "activation" else 2 * stages - 1 - send.stage
    return max((place + 1 for one, place in own[send.micro_batch] if one < link), default=0)


def _places(compute: Sequence[Action]) -> dict[tuple[bool, int, int], int]:
    """Where each input is consumed: (is activation, stage, micro-batch) → place in the compute order."""
    return {
        (part.kind in FORWARD, part.stage, part.micro_batch): place
        for place, action in enumerate(compute)
        for part in action.parts
        if part.kind in FORWARD or part.kind in GRADIENT
    }
