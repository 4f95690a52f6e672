"""Dependencies of a schedule's actions on other ranks, indexed so that bisection finds the first one that is not met.

A position of a pipeline rank in its list of actions is counted in half actions:

    -2         the rank has not begun the step
    -1         it waits in the all-reduce over all ranks that begins the step
    2·i        it is before action i
    2·i + 1    it has joined the collective of action i and waits in it
    2·i + 2    it has completed action i
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from meshwright.schedules.action import COMPUTE, FORWARD, GRADIENT, Action
from meshwright.schedules.schedule import Schedule

BEFORE_STEP = -2
"""Position of a rank that has not begun the step."""
Need = tuple[int, int]
"""(index of an action of this rank, index of the peer's action that it needs)."""


class PeerNeeds:
    """Dependencies of one pipeline rank on one peer. From the peer's position follows the first action that cannot complete."""

    def __init__(self, needs: Sequence[Need]) -> None:
        by_provider = sorted((provider, index) for index, provider in needs)
        self._providers = [provider for provider, _ in by_provider]
        self._first = [index for _, index in by_provider]
        for place in range(len(by_provider) - 2, -1, -1):
            self._first[place] = min(self._first[place], self._first[place + 1])

    def first_blocked(self, peer_position: int) -> int | None:
        """Index of the first action that must wait while the peer is at this position; None if no action must wait."""
        place = bisect_left(self._providers, peer_position // 2)
        return self._first[place] if place < len(self._first) else None


class ScheduleDependencies:
    """The dependencies of every pipeline rank, and the indices of its actions with collectives."""

    def __init__(self, schedule: Schedule, sends_ahead: int | None = None) -> None:
        """`sends_ahead`: how many messages a host can send on one channel before it waits for the receiver; None for any number."""
        self.schedule = schedule
        self.rank_of = schedule.rank_of
        self.last = [len(actions) for actions in schedule.actions]
        self.joint = [_joint_indices(actions) for actions in schedule.actions]
        """For each pipeline rank, the indices at which all ranks wait for each other: begin, gradient norm and end of the step."""
        self.collectives = [_collective_indices(actions) for actions in schedule.actions]
        """For each pipeline rank and kind (`gather`, `reduce`, `compute`), the indices of the actions with such a collective."""
        self.needs: dict[int, dict[int, PeerNeeds]] = {}
        collected = _message_needs(schedule, sends_ahead)
        for (rank, peer), needs in collected.items():
            self.needs.setdefault(rank, {})[peer] = PeerNeeds(needs)

    def first_collective(self, pipeline_rank: int, group: str, position: int) -> int | None:
        """Index of the first collective of kind `group` that a rank at `position` has not joined yet; None if there is none."""
        indices = self.collectives[pipeline_rank][group]
        place = bisect_left(indices, (position + 1) // 2)
        return indices[place] if place < len(indices) else None

    def label(self, pipeline_rank: int, index: int) -> str:
        """The label of an action. Indices outside of the schedule are the begin and the end of the step."""
        actions = self.schedule.actions[pipeline_rank]
        if index < 0:
            return "begin of step"
        return actions[index].label if index < len(actions) else "end of step"

    def message(self, pipeline_rank: int, index: int, peer: int) -> str:
        """What action `index` needs from pipeline rank `peer`: an activation, a gradient, or that the peer receives its message."""
        action = self.schedule.actions[pipeline_rank][index]
        if action.op == "send":
            return "receive"
        sources = {part: source_stage(part, len(self.rank_of)) for part in action.parts}
        for part, stage in sources.items():
            if stage is not None and self.rank_of[stage] == peer:
                return "activation" if part.op in FORWARD else "gradient"
        return "message"


def source_stage(part: Action, stages: int) -> int | None:
    """The stage whose output or gradient a compute action consumes; None if it consumes none."""
    if part.op in FORWARD:
        return part.stage - 1 if part.stage > 0 else None
    if part.op in GRADIENT:
        return part.stage + 1 if part.stage + 1 < stages else None
    return None


def _joint_indices(actions: Sequence[Action]) -> tuple[int, ...]:
    """Indices at which all ranks wait for each other. -1 is the begin of the step, and the number of actions is its end."""
    norm = [index for index, action in enumerate(actions) if action.op == "norm_barrier"]
    return (-1, *norm, len(actions))


def _collective_indices(actions: Sequence[Action]) -> dict[str, list[int]]:
    """The indices of the actions with a collective, by kind of collective."""
    groups = {"gather": ("unshard",), "reduce": ("reduce_grad",), "compute": tuple(COMPUTE)}
    return {name: [index for index, a in enumerate(actions) if a.op in ops] for name, ops in groups.items()}


def _message_needs(schedule: Schedule, sends_ahead: int | None) -> dict[tuple[int, int], list[Need]]:
    """For each (rank, peer): which actions of the rank wait for which actions of the peer."""
    rank_of = schedule.rank_of
    needs = defaultdict[tuple[int, int], list[Need]](list)
    sends: dict[tuple[int, int, int], int] = {}
    channels: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.op == "send":
                sends[action.stage, action.peer, action.micro_batch] = index
                channels[rank, rank_of[action.peer]][0].append(index)
            elif action.op == "recv":
                channels[rank_of[action.peer], rank][1].append(index)
    for rank, actions in enumerate(schedule.actions):
        consumed: set[tuple[int, int, int]] = set()
        for index, action in enumerate(actions):
            if action.op not in COMPUTE:
                continue
            for part in action.parts:
                stage = source_stage(part, len(rank_of))
                if stage is None or rank_of[stage] == rank:
                    continue
                message = stage, part.stage, part.micro_batch
                if message not in consumed:  # only the first action that consumes a message depends on it
                    consumed.add(message)
                    needs[rank, rank_of[stage]].append((index, sends[message]))
    if sends_ahead is not None:
        for (sender, receiver), (sent, received) in channels.items():
            needs[sender, receiver] += list(zip(sent[sends_ahead:], received, strict=False))
    return needs
