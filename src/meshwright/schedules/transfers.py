"""Sends and receives, put between compute actions by one rule for every schedule.

A pair of ranks has one channel for each direction, and a channel moves its messages one after another in the order they
are issued, as an NCCL communicator does; so both ends must issue them in one order. Here the sender's order decides: a
send stands right after the compute that made its payload (and is waited for by nobody: its buffer lives until it is
through), and the receiver posts its receives in the same order, each early enough to be under way while the compute
before its consumer runs. The order of compute alone decides whether the whole can run; transfers add no deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
    channels: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, mine in enumerate(sends):
        for sent in mine:
            for send in sent:
                channels[rank, rank_of[send.peer]].append(send)
    posted: list[dict[int, list[Action]]] = [defaultdict(list) for _ in compute]
    for (_, receiver), queue in channels.items():
        latest = len(compute[receiver])
        for send in reversed(queue):
            need = needed[receiver][send.payload == "activation", send.peer, send.micro_batch]
            latest = min(latest, max(0, need - AHEAD))
            receive = Action("recv", send.peer, send.micro_batch, None, send.stage, send.payload)
            posted[receiver][latest].append(receive)
    return [{place: found[::-1] for place, found in mine.items()} for mine in posted]


def _places(compute: Sequence[Action]) -> dict[tuple[bool, int, int], int]:
    """Where each input is consumed: (is activation, stage, micro-batch) → place in the compute order."""
    return {
        (part.kind in FORWARD, part.stage, part.micro_batch): place
        for place, action in enumerate(compute)
        for part in action.parts
        if part.kind in FORWARD or part.kind in GRADIENT
    }
