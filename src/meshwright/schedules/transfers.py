"""Sends and receives, put between compute actions by one rule for every schedule.

A pair of ranks has one channel for each direction, and a channel moves its messages one after another in the order they
are issued, as an NCCL communicator does; so both ends must issue them in one order. Here the sender's order decides: a
send stands right after the compute that made its payload (and is waited for by nobody: its buffer lives until it is
through), and the receiver posts its receives in the same order, each early enough to be under way while the compute
before its consumer runs. The order of compute alone decides whether the whole can run; transfers add no deadlock.

That holds while a rank can give its device more compute behind a message that it waits for. What runs for the first time
may not be given: to load a kernel CUDA can wait for the whole device. There messages go `in_turns`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from meshwright.schedules.action import COMPUTE, FORWARD, GRADIENT, Action

Input = tuple[bool, int, int]
"""What a stage is given: (is activation, stage, micro-batch)."""

_CONSUMES = FORWARD | GRADIENT
_CLOSING = ("norm_barrier", "optim")
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


def in_turns(rank_of: Sequence[int], actions: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """The same actions with each message sent and received when its receiver needs it, and no sooner.

    They are cut from one order of everything, in which both ends of a message stand at one place. So they run to their end
    even if each action holds its host until all that was given to its device is through.
    """
    left = [deque(action for action in rank_actions if action.op not in _CLOSING) for rank_actions in actions]
    cut: list[list[Action]] = [[] for _ in actions]
    expected: list[dict[Input, Action]] = [{} for _ in actions]
    sendable: set[Action] = set()

    def compute(rank: int, action: Action) -> bool:
        """Put in what the action needs of other ranks and then itself, or nothing where some of it is still to be made."""
        inputs = [_input(part) for part in action.parts if part.op in _CONSUMES]
        needed = [expected[rank][one] for one in inputs if one in expected[rank]]
        sends = [one._replace(op="send", stage=one.peer, peer=one.stage) for one in needed]
        if not sendable.issuperset(sends):
            return False
        for send, receive in zip(sends, needed, strict=True):
            cut[rank_of[send.stage]].append(send)
            cut[rank].append(receive)
            del expected[rank][_input(receive)]
        cut[rank].append(action)
        return True

    while any(left):
        before = sum(map(len, left))
        for rank, queue in enumerate(left):
            while queue:
                action = queue[0]
                computes = action.op in COMPUTE
                if computes and not compute(rank, action):
                    break
                queue.popleft()
                if computes:
                    break  # the next rank's turn, as devices compute beside each other
                if action.op == "send":
                    sendable.add(action)
                elif action.op == "recv":
                    expected[rank][_input(action)] = action
                else:
                    cut[rank].append(action)
        assert sum(map(len, left)) < before, "the order of compute cannot run"
    # All ranks meet in the closing, so it comes behind all messages.
    ends = [[action for action in rank_actions if action.op in _CLOSING] for rank_actions in actions]
    return tuple((*mine, *end) for mine, end in zip(cut, ends, strict=True))


def _sends(rank_of: Sequence[int], rank: int, action: Action) -> tuple[Action, ...]:
    found = []
    for part in action.parts:
        if part.op in FORWARD and part.stage + 1 < len(rank_of) and rank_of[part.stage + 1] != rank:
            found.append(Action("send", part.stage, part.micro_batch, None, part.stage + 1, "activation"))
        elif part.op in GRADIENT and part.stage > 0 and rank_of[part.stage - 1] != rank:
            found.append(Action("send", part.stage, part.micro_batch, None, part.stage - 1, "gradient"))
    return tuple(found)


def _receives(
    rank_of: Sequence[int], compute: Sequence[Sequence[Action]], sends: Sequence[Sequence[tuple[Action, ...]]]
) -> list[dict[int, list[Action]]]:
    """By rank: the receives to post before the compute action at each place."""
    needed = [_consumer_positions(mine) for mine in compute]
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


def _consumer_positions(compute: Sequence[Action]) -> dict[Input, int]:
    """Where each input is consumed in the order of compute."""
    parts = ((part, place) for place, action in enumerate(compute) for part in action.parts)
    return {_input(part): place for part, place in parts if part.op in _CONSUMES}


def _input(action: Action) -> Input:
    """What a compute action consumes, or a receive brings."""
    return action.op in FORWARD or action.payload == "activation", action.stage, action.micro_batch
