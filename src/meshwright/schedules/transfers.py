"""Inserts sends and receives between compute actions, by the same rule for all schedules.

A pair of ranks has one channel for each direction. A channel transfers its messages in the order in which they are issued,
as an NCCL communicator does. So both ranks must issue them in the same order, the sender's:

- A send follows the compute action that produced its payload. Nothing waits for it; its buffer exists until it is
  complete.
- The receiver posts its receives in the order of the sends, each at least `AHEAD` compute actions before the action that
  needs it.

So transfers add no deadlock to a compute order that has none.

This assumes that a host can enqueue compute while a message is pending. In a run's first step it may not: when CUDA loads
a kernel, it can wait for the whole device. That step uses `in_turns`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from meshwright.schedules.action import COMPUTE, FORWARD, GRADIENT, Action

Input = tuple[bool, int, int]
"""The input of a compute action: (whether it is an activation, stage, micro-batch)."""

_CONSUMES = FORWARD | GRADIENT
_CLOSING = ("norm_barrier", "optim")
AHEAD = 1
"""Number of compute actions between a posted receive and the compute action that needs it.

A larger number would need more buffers, and a pending NCCL receive occupies multiprocessors.
"""


def with_transfers(rank_of: Sequence[int], compute: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's compute actions with its sends and receives among them."""
    sends = [[_sends(rank_of, rank, action) for action in rank_actions] for rank, rank_actions in enumerate(compute)]
    receives = _receives(rank_of, compute, sends)
    return tuple(
        tuple(
            step
            for index, action in enumerate(rank_actions)
            for step in (*receives[rank].get(index, ()), action, *sends[rank][index])
        )
        for rank, rank_actions in enumerate(compute)
    )


def in_turns(rank_of: Sequence[int], actions: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return the actions with each message exchanged only when its receiver needs it.

    The actions of all ranks follow one total order, in which the send and the receive of a message are adjacent. So there is
    no deadlock even if every action blocks its host until the device has finished all earlier work.
    """
    remaining = [deque(action for action in rank_actions if action.op not in _CLOSING) for rank_actions in actions]
    result: list[list[Action]] = [[] for _ in actions]
    expected: list[dict[Input, Action]] = [{} for _ in actions]
    sendable: set[Action] = set()

    def compute(rank: int, action: Action) -> bool:
        """Append the messages that the action needs, and then the action. Return False if a payload is not computed yet."""
        inputs = [_input(part) for part in action.parts if part.op in _CONSUMES]
        needed = [expected[rank][required] for required in inputs if required in expected[rank]]
        sends = [receive._replace(op="send", stage=receive.peer, peer=receive.stage) for receive in needed]
        if not sendable.issuperset(sends):
            return False
        for send, receive in zip(sends, needed, strict=True):
            result[rank_of[send.stage]].append(send)
            result[rank].append(receive)
            del expected[rank][_input(receive)]
        result[rank].append(action)
        return True

    while any(remaining):
        before = sum(map(len, remaining))
        for rank, queue in enumerate(remaining):
            while queue:
                action = queue[0]
                computes = action.op in COMPUTE
                if computes and not compute(rank, action):
                    break
                queue.popleft()
                if computes:
                    break  # continue with the next rank: devices compute in parallel
                if action.op == "send":
                    sendable.add(action)
                elif action.op == "recv":
                    expected[rank][_input(action)] = action
                else:
                    result[rank].append(action)
        assert sum(map(len, remaining)) < before, "the order of compute cannot run"
    # The closing actions synchronise all ranks, so they follow all messages.
    ends = [[action for action in rank_actions if action.op in _CLOSING] for rank_actions in actions]
    return tuple((*rank_actions, *end) for rank_actions, end in zip(result, ends, strict=True))


def _sends(rank_of: Sequence[int], rank: int, action: Action) -> tuple[Action, ...]:
    """Return the sends of the results of a compute action to other ranks."""
    sends = []
    for part in action.parts:
        if part.op in FORWARD and part.stage + 1 < len(rank_of) and rank_of[part.stage + 1] != rank:
            sends.append(Action("send", part.stage, part.micro_batch, None, part.stage + 1, "activation"))
        elif part.op in GRADIENT and part.stage > 0 and rank_of[part.stage - 1] != rank:
            sends.append(Action("send", part.stage, part.micro_batch, None, part.stage - 1, "gradient"))
    return tuple(sends)


def _receives(
    rank_of: Sequence[int], compute: Sequence[Sequence[Action]], sends: Sequence[Sequence[tuple[Action, ...]]]
) -> list[dict[int, list[Action]]]:
    """Return, for each rank, the receives to post before the compute action at each index."""
    needed = [_consumer_positions(rank_actions) for rank_actions in compute]
    channels: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, rank_actions in enumerate(sends):
        for sent in rank_actions:
            for send in sent:
                channels[rank, rank_of[send.peer]].append(send)
    posted: list[dict[int, list[Action]]] = [defaultdict(list) for _ in compute]
    for (_, receiver), queue in channels.items():
        # From the last message to the first: a receive is not posted later than the receives after it.
        latest = len(compute[receiver])
        for send in reversed(queue):
            need = needed[receiver][send.payload == "activation", send.peer, send.micro_batch]
            latest = min(latest, max(0, need - AHEAD))
            receive = Action("recv", send.peer, send.micro_batch, None, send.stage, send.payload)
            posted[receiver][latest].append(receive)
    return [{index: receives[::-1] for index, receives in by_index.items()} for by_index in posted]


def _consumer_positions(compute: Sequence[Action]) -> dict[Input, int]:
    """Return the index of the compute action that needs each input."""
    parts = ((part, index) for index, action in enumerate(compute) for part in action.parts)
    return {_input(part): index for part, index in parts if part.op in _CONSUMES}


def _input(action: Action) -> Input:
    """Return the input that a compute action needs, or that a receive delivers."""
    return action.op in FORWARD or action.payload == "activation", action.stage, action.micro_batch
