"""Plays a schedule without times, to find deadlocks and wrong orders under the rules of real sends and receives.

The host of each rank issues its actions in order. A channel is an ordered pair of ranks. It matches its k-th send with its
k-th receive, whatever they carry, as an NCCL communicator does. Compute waits until its input has arrived. A host
blocks if `sends_ahead` sends of a channel have no matching receive. Inputs from the same rank must have been computed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NoReturn

from meshwright.schedules.action import COMPUTE, FORWARD, Action
from meshwright.schedules.schedule import Schedule
from meshwright.spec.errors import BadInput


@dataclass
class RankChannel:
    """Messages from one rank to another: the sends and receives that are issued and not yet matched, oldest first."""

    sends: deque[Action] = field(default_factory=deque)
    receives: deque[Action] = field(default_factory=deque)


class Play:
    """Runs all ranks, each until it blocks, and again until all have ended.

    Results in `done` are ("forward" or "gradient", stage, micro-batch, unit). `arrived` has (stage, source stage,
    micro-batch) of each message. `gathered` and `unreduced` have (stage, unit).
    """

    def __init__(self, schedule: Schedule, sends_ahead: int | None) -> None:
        self.schedule = schedule
        self.sends_ahead = sends_ahead
        self.rank_of = schedule.rank_of
        self.last_unit = [count - 1 for count in schedule.units or (1,) * schedule.stages]
        self.next_index = [0] * schedule.ranks
        self.done: set[tuple[str, int, int, int]] = set()
        self.arrived: set[tuple[int, int, int]] = set()
        self.channels: dict[tuple[int, int], RankChannel] = defaultdict(RankChannel)
        self.gathered: set[tuple[int, int]] = set()
        self.unreduced: set[tuple[int, int]] = set()
        ops = {action.op for actions in schedule.actions for action in actions}
        self.gathers = "unshard" in ops
        self.reduces = "reduce_grad" in ops

    def run(self) -> None:
        """Run to the end. Raises BadInput for a deadlock, for messages that do not match, or for a missing input."""
        progressed = True
        while progressed:
            progressed = False
            for rank, actions in enumerate(self.schedule.actions):
                while self.next_index[rank] < len(actions) and self._step(rank, actions[self.next_index[rank]]):
                    self.next_index[rank] += 1
                    progressed = True
        positions = enumerate(zip(self.next_index, self.schedule.actions, strict=True))
        stuck = [f"rank {rank} at {actions[index]}" for rank, (index, actions) in positions if index < len(actions)]
        if stuck:
            self._fail(f"deadlock: {', '.join(stuck)}")
        for (source, target), channel in self.channels.items():
            for unmatched in (*channel.sends, *channel.receives):
                self._fail(f"{unmatched} between ranks {source} and {target} has no counterpart")

    def _step(self, rank: int, action: Action) -> bool:
        """Issue `action`. Return False if the rank has to wait."""
        if action.op in COMPUTE:
            return self._compute(rank, action)
        if action.op == "send":
            return self._send(rank, action)
        if action.op == "recv":
            self._receive(rank, action)
        elif action.op == "norm_barrier":
            self._close(rank)
        elif action.op != "optim":
            self._unit(rank, action)
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        """Compute `action`. Return False if a message that it needs has not arrived."""
        if not all(self._arrived(rank, part) for part in action.parts):
            return False
        for part in action.parts:
            self._check_inputs(rank, part)
        for part in action.parts:
            location = part.stage, part.micro_batch, part.unit or 0
            if part.op in FORWARD:
                self.done.add(("forward", *location))
            if part.op in ("backward", "backward_input"):
                self.done.add(("gradient", *location))
            if part.op in ("backward", "backward_weight"):
                self.unreduced.add((part.stage, part.unit or 0))
        return True

    def _arrived(self, rank: int, part: Action) -> bool:
        """Return whether the message that `part` needs has arrived, or whether it needs none."""
        source = self._source(part)
        return source is None or self.rank_of[source] == rank or (part.stage, source, part.micro_batch) in self.arrived

    def _source(self, part: Action) -> int | None:
        """Return the other stage whose output or gradient `part` needs, or None."""
        unit = part.unit or 0
        if part.op in FORWARD and unit == 0 and part.stage > 0:
            return part.stage - 1
        if part.op in ("backward", "backward_input") and unit == self.last_unit[part.stage]:
            return part.stage + 1 if part.stage + 1 < len(self.rank_of) else None
        return None

    def _check_inputs(self, rank: int, part: Action) -> None:
        """Raise BadInput unless the inputs of `part` that its own rank computes have been computed."""
        stage = part.stage
        micro_batch = part.micro_batch
        unit = part.unit or 0
        source = self._source(part)
        needs: list[tuple[str, int, int, int]] = []
        if part.op in FORWARD:
            if unit > 0:
                needs.append(("forward", stage, micro_batch, unit - 1))
            elif source is not None and self.rank_of[source] == rank:
                needs.append(("forward", source, micro_batch, self.last_unit[source]))
        elif part.op == "backward_weight":
            needs.append(("gradient", stage, micro_batch, unit))
        else:
            needs.append(("forward", stage, micro_batch, unit))
            if unit < self.last_unit[stage]:
                needs.append(("gradient", stage, micro_batch, unit + 1))
            elif source is not None and self.rank_of[source] == rank:
                needs.append(("gradient", source, micro_batch, 0))
        for result, needed_stage, needed_micro_batch, needed_unit in needs:
            if (result, needed_stage, needed_micro_batch, needed_unit) not in self.done:
                name = "input gradient" if result == "gradient" else result
                of = f"stage {needed_stage}, unit {needed_unit}, micro-batch {needed_micro_batch}"
                self._fail(f"rank {rank} runs {part} before the {name} of {of}")
        if self.gathers and part.op != "backward_weight" and (stage, unit) not in self.gathered:
            self._fail(f"rank {rank} runs {part} while its parameters are not gathered")

    def _send(self, rank: int, action: Action) -> bool:
        """Issue a send. Return False if its channel has no space."""
        channel = self.channels[rank, self.rank_of[action.peer]]
        full = self.sends_ahead is not None and len(channel.sends) >= self.sends_ahead
        if full and not channel.receives:
            return False
        result, unit = ("forward", self.last_unit[action.stage]) if action.payload == "activation" else ("gradient", 0)
        if (result, action.stage, action.micro_batch, unit) not in self.done:
            self._fail(f"rank {rank} issues {action} before its payload is computed")
        channel.sends.append(action)
        self._match(rank, self.rank_of[action.peer])
        return True

    def _receive(self, rank: int, action: Action) -> None:
        source = self.rank_of[action.peer]
        self.channels[source, rank].receives.append(action)
        self._match(source, rank)

    def _match(self, source: int, target: int) -> None:
        """Match the sends of a channel with its receives, in order. Raises BadInput if a pair does not fit."""
        channel = self.channels[source, target]
        while channel.sends and channel.receives:
            send = channel.sends.popleft()
            receive = channel.receives.popleft()
            # The receive that fits a send has the same payload, with stage and peer exchanged.
            expected = send._replace(op="recv", stage=send.peer, peer=send.stage)
            if receive != expected:
                self._fail(f"rank {source} sends {send} where rank {target} expects {receive}")
            self.arrived.add((receive.stage, receive.peer, receive.micro_batch))

    def _unit(self, rank: int, action: Action) -> None:
        """Gather, free or reduce one unit of the rank."""
        unit = action.stage, action.unit or 0
        if action.op == "reduce_grad":
            self.unreduced.discard(unit)
        elif (action.op == "unshard") == (unit in self.gathered):
            self._fail(
                f"rank {rank} issues {action} while the unit is {'' if unit in self.gathered else 'not '}gathered"
            )
        self.gathered ^= {unit} if action.op in ("unshard", "reshard") else set()

    def _close(self, rank: int) -> None:
        """Raise BadInput if units of the rank are still gathered, or not reduced, when it reaches the optimizer."""
        own_stages = set(self.schedule.placement[rank])
        for stage, unit in sorted(self.gathered):
            if stage in own_stages:
                self._fail(
                    f"rank {rank} reaches the optimizer with the parameters of stage {stage}, unit {unit} gathered"
                )
        for stage, unit in sorted(self.unreduced):
            if stage in own_stages and self.reduces:
                self._fail(
                    f"rank {rank} reaches the optimizer with gradients of stage {stage}, unit {unit} not reduced"
                )

    def _fail(self, problem: str) -> NoReturn:
        raise BadInput(f"schedule {self.schedule.name}: {problem}")
