"""A step played by whole stages, for ranking many plans: some percent from the play of every unit, in a thirtieth of its time.

A stage action takes its units' compute, what their gathers and reductions show beside it, and the copies for them: worked out once for a
stage, since micro-batches are alike. Only the first forward gathers what is kept for the step, and only the last backward reduces what is
reduced once. The pipeline is then followed over flat lists that `program_of` makes of a schedule, whatever the timing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.schedules.action import COMPUTE, FORWARD, GRADIENT, Action
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.timing import Timing
from meshwright.spec.plan import LayerStrategy

Turn = Literal["first", "middle", "last"]
"""Of a stage's actions of one kind: the first forward of a step, the last that makes weight gradients, or neither."""
Slot = tuple[tuple[str, int, int | None, Turn], ...]
"""What takes an action's time: (kind, stage, unit, turn), two of them for an overlap."""
Message = tuple[int, int, int, int, int]
"""Its number, the actions behind which it is sent and its receive posted, the message before it on its channel, its link."""


Units = Sequence[Sequence[LayerStrategy]]
"""By stage and unit."""


class Taken(NamedTuple):
    """Seconds of one action."""

    compute: float = 0.0
    """Of arithmetic and copies."""
    waiting: float = 0.0
    """For which it stands still for collectives before it ends."""
    early: float = 0.0
    """The part of that which waiting for a message hides: for gathers that are issued before it."""
    after: float = 0.0
    """For which its rank stands still behind what the action sends."""
    reduces: float = 0.0
    """From its start to its first reduction; 0 where it has none."""
    alone: bool = True
    """Whether that is its only one."""
    reduction: float = 0.0
    """Of its last reduction."""


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule's stage actions in an order in which each finds what it needs; actions and messages are numbered from 1."""

    steps: tuple[tuple[int, int, int, tuple[Message, ...], tuple[int, ...]], ...]
    """(rank, action, slot, messages that meet before it, messages that it needs)."""
    slots: tuple[Slot, ...]
    counts: tuple[Counter[int], ...]
    """By rank, how many actions each slot has."""
    links: tuple[tuple[int, int, int], ...]
    """(sender, receiver, boundary)."""
    messages: int
    placement: tuple[tuple[int, ...], ...]
    closing: dict[int, int]
    """By stage, its last action that makes weight gradients."""
    micro_batches: int


@dataclass(frozen=True)
class Totals:
    """What `Timeline` says of a step, without its records."""

    breakdown: dict[str, float]
    start_seconds: tuple[float, ...]
    own_seconds: tuple[float, ...]


def program_of(schedule: Schedule) -> Program:
    """The schedule, in stage actions or in units without collectives, as flat lists. It must not deadlock: none of the registry does."""
    return _Compiler(schedule).program()


def play_stages(program: Program, timing: Timing, units: Units, *, layered: bool) -> Totals:
    """The step that the program makes when units take as long as `timing` says, gathered and reduced as the strategies of `units` ask."""
    costs = _Costs(timing, units, program.micro_batches, layered)
    taken = [costs.of(slot) for slot in program.slots]
    sizes = timing.boundary_bytes
    links = [timing.between(*ends).seconds(sizes[at] if sizes else 0.0) for *ends, at in program.links]
    ends, starts, messages, shown = _followed(program, taken, links)

    ranks = range(len(program.placement))
    compute = [sum(count * taken[slot].compute for slot, count in program.counts[r].items()) for r in ranks]
    late = [costs.late(stages, [ends[program.closing[stage]] for stage in stages]) for stages in program.placement]
    clocks = [max(ends[program.closing[stage]] for stage in stages) for stages in program.placement]
    # Lanes that are busier than all of a rank's compute hold it up at the end at the latest.
    over = [max(0.0, costs.travelling(program.placement[r]) - compute[r] - shown[r]) for r in ranks]
    shard = [max(over[r], late[r][0]) for r in ranks]
    replicate = [late[r][1] for r in ranks]
    closing = [timing.norm_seconds + (timing.optim_seconds[r] if timing.optim_seconds else 0.0) for r in ranks]
    norm = max(clocks[r] + shard[r] + replicate[r] for r in ranks) + timing.tied_seconds
    own = [
        compute[r] + shown[r] + messages[r] + shard[r] + replicate[r] + timing.tied_seconds + closing[r] for r in ranks
    ]
    count = len(ranks)
    parts = {
        "compute": sum(compute) / count,
        "shard": (sum(shown) + sum(shard)) / count,
        "replicate": sum(replicate) / count,
        "pipeline": sum(messages) / count + timing.tied_seconds,
        "closing": sum(closing) / count,
    }
    step = norm + max(closing)
    return Totals({**parts, "idle": max(0.0, step - sum(parts.values()))}, tuple(starts), tuple(own))


def _followed(
    program: Program, taken: Sequence[Taken], links: Sequence[float]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """When each action ends; by rank, when its first one starts, how long it only waits for messages on their way, and how long for
    collectives over shards."""
    ranks = len(program.placement)
    ends = [0.0] * (len(program.steps) + 1)
    issues, arrivals = [0.0] * (program.messages + 1), [0.0] * (program.messages + 1)
    clocks, shown, collectives, reduced, starts = ([0.0] * ranks for _ in range(5))
    begun = [False] * ranks
    for rank, action, slot, meeting, needed in program.steps:
        for message, sent, posted, before, link in meeting:
            issued = max(ends[sent], ends[posted])
            issues[message] = issued
            arrivals[message] = max(issued, arrivals[before]) + links[link]
        clock = start = clocks[rank]
        for message in needed:
            arrived = arrivals[message]
            if arrived > start:
                shown[rank] += arrived - max(start, issues[message])
                start = arrived
        compute, waiting, early, after, reduces, alone, reduction = taken[slot]
        if early:
            waiting -= min(early, start - clock)
        if not begun[rank]:
            begun[rank], starts[rank] = True, start
        end = start + compute + waiting
        if (
            reduces
        ):  # its first reduction waits for the last one before, behind what it sends where that is its only one
            late = reduced[rank] - start - reduces
            if late > 0 and alone:
                after += late
            elif late > 0:
                waiting, end = waiting + late, end + late
            reduced[rank] = end + after + reduction
        ends[action], clocks[rank] = end, end + after
        collectives[rank] += waiting + after
    return ends, starts, shown, collectives


class _Costs:
    """Seconds of stage actions, from those of their units."""

    def __init__(self, timing: Timing, units: Units, micro_batches: int, layered: bool) -> None:
        self.timing, self.units, self.layered = timing, units, layered
        self.many, self.stages = micro_batches, len(units)
        self._known: dict[tuple[str, int, Turn], tuple[list[Taken], Taken]] = {}

    def of(self, slot: Slot) -> Taken:
        """What an action of one part takes, or of two that overlap."""
        parts = [self._of(*part) for part in slot]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def late(self, stages: Sequence[int], ends: Sequence[float]) -> tuple[float, float]:
        """Seconds for which reductions over shards, and then sums over replicas, go on behind a rank's last action."""
        timing, shards, replicas = self.timing, 0.0, 0.0
        run = self.many if self.layered else 1
        for end, stage in sorted(zip(ends, stages, strict=True)):
            reduce = timing.reduce[stage] if timing.reduce else [0.0] * len(self.units[stage])
            rows = zip(timing.backward_input[stage], timing.backward_weight[stage], [*reduce[1:], 0.0], strict=True)
            seconds = [max(run * (inputs + weights), before) for inputs, weights, before in rows]
            now = end - sum(seconds)
            for unit in reversed(range(len(seconds))):
                now += seconds[unit]
                shards = max(shards, now) + reduce[unit]
                if timing.replicate:
                    replicas = max(replicas, shards) + timing.replicate[stage][unit]
        last = max(ends)
        return max(0.0, shards - last), max(0.0, replicas - max(last, shards))

    def travelling(self, stages: Sequence[int]) -> float:
        """Seconds of a rank's busiest lane of collectives over shards."""
        gathers = reductions = 0.0
        times = 1 if self.layered else self.many
        for stage in stages:
            for unit, strategy in enumerate(self.units[stage]):
                if self.timing.unshard:
                    gathers += self.timing.unshard[stage][unit] * (2 * times if strategy.reshard else 1)
                if self.timing.reduce:
                    reductions += self.timing.reduce[stage][unit] * (times if strategy.gradients == "shard" else 1)
        return gathers + reductions if self.timing.one_communicator else max(gathers, reductions)

    def _of(self, kind: str, stage: int, unit: int | None, turn: Turn) -> Taken:
        key = kind, stage, turn
        if key not in self._known:
            by_unit = self._walked(kind, stage, turn)
            self._known[key] = by_unit, _joined(by_unit if kind in FORWARD else by_unit[::-1])
        by_unit, whole = self._known[key]
        return whole if unit is None else by_unit[unit]

    def _walked(self, kind: str, stage: int, turn: Turn) -> list[Taken]:
        """What a stage's units take, one after another."""
        timing, order = self.timing, range(len(self.units[stage]))
        forward, weights = kind in FORWARD, kind in ("backward", "backward_weight")
        rows = {
            "backward_input": [timing.backward_input],
            "backward_weight": [timing.backward_weight],
            "backward": [timing.backward_input, timing.backward_weight],
        }.get(kind, [timing.forward])
        units = order if forward else order[::-1]
        run = self.many if self.layered else 1
        edge = turn == ("first" if forward else "last")
        gathered = [kind != "backward_weight" and self._gathers(stage, unit, forward, edge) for unit in units]
        if not forward and stage == self.stages - 1:  # a forward of the head is followed by its backward
            gathered[0] = False
        reduced = [weights and self._reduces(stage, unit, edge) for unit in units]
        found = [Taken()] * len(units)
        waits, early = [0.0] * len(units), [0.0] * len(units)
        pending = 0.0
        """Of the reduction that the unit before issued."""
        for at, unit in enumerate(units):
            own = sum(row[stage][unit] for row in rows)
            copies = timing.copy_out[stage][unit] if gathered[at] and timing.copy_out else 0.0
            if reduced[at]:
                copies += timing.copy_in[stage][unit] if timing.copy_in else 0.0
            if weights and timing.accumulate and self._accumulates(stage, unit):
                copies += timing.accumulate[stage][unit]
            following = (at + 1) % len(units)
            gather = timing.unshard[stage][units[following]] if gathered[following] and timing.unshard else 0.0
            if following == 0 and len(units) > 1 and edge and forward and not self.layered:
                gather = 0.0  # gathered before this stage's first forward
            span = run * own + copies
            lane = gather + pending if timing.one_communicator else max(gather, pending)
            slow = timing.gather_slowdown if gather > pending else timing.reduce_slowdown
            slowed = min(lane, span * slow) * (1 - 1 / slow)
            # The first two units' gathers are issued before the stage waits for its input.
            place = units[0] if following < 2 else unit
            waiting = min(gather, max(0.0, lane - span - slowed))
            waits[place] += waiting
            early[place] += waiting * (following < 2)
            pending = timing.reduce[stage][unit] if reduced[at] and timing.reduce else 0.0
            taken = own + copies + slowed
            found[unit] = Taken(taken, reduces=taken if reduced[at] else 0.0, reduction=pending)
        if forward and turn == "first" and stage == 0 and timing.unshard:
            waits[0] += timing.unshard[0][0]
        return [one._replace(waiting=waits[unit], early=early[unit]) for unit, one in enumerate(found)]

    def _gathers(self, stage: int, unit: int, forward: bool, edge: bool) -> bool:
        reshard = self.units[stage][unit].reshard
        if self.layered:
            return edge if forward else reshard and edge
        return reshard or (forward and edge)

    def _reduces(self, stage: int, unit: int, edge: bool) -> bool:
        return edge or (not self.layered and self.units[stage][unit].gradients == "shard")

    def _accumulates(self, stage: int, unit: int) -> bool:
        return self.many > 1 and (self.layered or self.units[stage][unit].gradients == "whole")


def _joined(parts: Sequence[Taken]) -> Taken:
    """One action of several, one after another: each waits for the reduction before it, as compute has one buffer for them."""
    now = compute = waiting = early = after = first = reduced = 0.0
    reducing = [part for part in parts if part.reduces]
    for part in parts:
        compute, waiting, early = compute + part.compute, waiting + part.waiting, early + part.early
        if part.reduces:
            late = max(0.0, reduced - now - part.reduces)
            first = first or now + part.reduces
            if part is parts[-1] and part.alone:
                after = late
            else:
                waiting, now = waiting + late, now + late
            reduced = now + part.compute + part.waiting + after + part.reduction
        now += part.compute + part.waiting
    alone = len(reducing) == 1 and reducing[0] is parts[-1] and reducing[0].alone
    last = reducing[-1].reduction if reducing else 0.0
    return Taken(compute, waiting, early, after, first, alone, last)


class _Compiler:
    """Follows each rank as far as it gets, as `simulate` does."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, held = schedule, schedule.rank_of
        self.slots: dict[Slot, int] = {}
        self.closing: dict[int, int] = {}
        self.rows: list[list[tuple[int, int, list[tuple[bool, int, int]]]]] = []
        """By rank: (action, slot, inputs)."""
        sends: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
        posts: dict[tuple[int, int], list[int]] = defaultdict(list)
        number = 0
        for rank, actions in enumerate(schedule.actions):
            row, before = [], 0
            turns = _turns(actions)
            for action in actions:
                if action.kind in COMPUTE:
                    number += 1
                    before = number
                    row.append((number, self._slot(action, turns), _inputs(action, schedule, held, rank)))
                    for part in action.parts:
                        if part.kind in ("backward", "backward_weight"):
                            self.closing[part.stage] = number
                elif action.kind == "send":
                    sends[rank, held[action.peer]].append((before, action))
                elif action.kind == "recv":
                    posts[held[action.peer], rank].append(before)
            self.rows.append(row)
        self.links: dict[tuple[int, int, int], int] = {}
        self.messages: dict[tuple[bool, int, int], int] = {}
        self.queues: list[list[Message]] = []
        self.queue_of: dict[int, int] = {}
        """By message, its channel."""
        for channel, queue in sends.items():
            made: list[Message] = []
            for (sent, action), posted in zip(queue, posts[channel], strict=True):
                message = len(self.messages) + 1
                self.messages[action.peer > action.stage, action.peer, action.micro_batch] = message
                link = self.links.setdefault((*channel, min(action.stage, action.peer)), len(self.links))
                made.append((message, sent, posted, made[-1][0] if made else 0, link))
                self.queue_of[message] = len(self.queues)
            self.queues.append(made)

    def program(self) -> Program:
        steps, places = [], [0] * len(self.rows)
        met = [0] * len(self.queues)
        done: set[int] = {0}
        waiting: dict[int, list[int]] = defaultdict(list)
        todo = list(range(len(self.rows)))
        while todo:
            rank = todo.pop()
            row = self.rows[rank]
            while places[rank] < len(row):
                action, slot, inputs = row[places[rank]]
                needed = tuple(self.messages[key] for key in inputs)
                missing = [sent for sent in map(self._sent, needed) if sent not in done]
                if missing:
                    waiting[missing[0]].append(rank)
                    break
                meeting: list[Message] = []
                for message in needed:
                    number = self.queue_of[message]
                    queue = self.queues[number]
                    upto = max(met[number], message - queue[0][0] + 1)
                    meeting += queue[met[number] : upto]
                    met[number] = upto
                steps.append((rank, action, slot, tuple(meeting), needed))
                done.add(action)
                places[rank] += 1
                todo += waiting.pop(action, [])
        return Program(
            steps=tuple(steps),
            slots=tuple(self.slots),
            counts=tuple(Counter(slot for _, slot, _ in row) for row in self.rows),
            links=tuple(self.links),
            messages=len(self.messages),
            placement=self.schedule.placement,
            closing=self.closing,
            micro_batches=self.schedule.micro_batches,
        )

    def _sent(self, message: int) -> int:
        """The action behind which it is sent."""
        queue = self.queues[self.queue_of[message]]
        return queue[message - queue[0][0]][1]

    def _slot(self, action: Action, turns: Callable[[Action], Turn]) -> int:
        slot = tuple((part.kind, part.stage, part.unit, turns(part)) for part in action.parts)
        return self.slots.setdefault(slot, len(self.slots))


def _turns(actions: Sequence[Action]) -> Callable[[Action], Turn]:
    """Says which turn of its stage a part of one of `actions` is."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for action in actions:
        for part in action.parts:
            if part.kind in FORWARD:
                first.setdefault(part.stage, part.micro_batch)
            elif part.kind in ("backward", "backward_weight"):
                last[part.stage] = part.micro_batch

    def turn(part: Action) -> Turn:
        if part.kind in FORWARD:
            return "first" if first[part.stage] == part.micro_batch else "middle"
        return "last" if last.get(part.stage) == part.micro_batch else "middle"

    return turn


def _inputs(action: Action, schedule: Schedule, held: Sequence[int], rank: int) -> list[tuple[bool, int, int]]:
    """What a compute action takes from other ranks: (is activation, stage, micro-batch)."""
    found = []
    for part in action.parts:
        forward = part.kind in FORWARD
        if not forward and part.kind not in GRADIENT:
            continue
        border = 0 if forward or not schedule.units else schedule.units[part.stage] - 1
        if part.unit not in (None, border):
            continue
        other = part.stage - 1 if forward else part.stage + 1
        if 0 <= other < len(held) and held[other] != rank:
            found.append((forward, part.stage, part.micro_batch))
    return found
