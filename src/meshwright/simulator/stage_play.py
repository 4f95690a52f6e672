"""Simulates a step by whole stages, to rank many plans: some percent from the simulation by units, 30 times faster.

A stage action takes its units' compute, what their gathers and reductions show beside it, and the copies for them:
worked out once for a stage, since micro-batches are alike. Only the first forward gathers what is kept for the step,
and only the last backward reduces what is reduced once. The pipeline is then followed over flat lists that `program_of`
makes of a schedule, whatever the timing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from meshwright.schedules.action import FORWARD, Action
from meshwright.schedules.schedule import ComputeOrder, rank_of
from meshwright.schedules.transfers import AHEAD, Input
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


def program_of(order: ComputeOrder, micro_batches: int, units: Sequence[int] = ()) -> Program:
    """A schedule's order of compute as flat lists.

    With `units` of each stage, all consecutive micro-batches of a stage run through a unit before the next. Messages follow
    `schedules.transfers`. No schedule of the registry deadlocks.
    """
    return _Compiler(order, micro_batches, units).program()


def play_stages(program: Program, timing: Timing, units: Units, *, layered: bool) -> Totals:
    """The simulated step of the program, with the unit times of `timing` and the gathers and reductions of `units`."""
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
    """(end of each action; by rank its first start, its wait for messages in transfer, its wait for shard collectives)."""
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
        if reduces:  # the first waits for the last one before, behind what is sent where it is the only one
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
        self._alike = self._first_alike()

    def of(self, slot: Slot) -> Taken:
        """What an action of one part takes, or of two that overlap."""
        parts = [self._of(*part) for part in slot]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _first_alike(self) -> list[int]:
        """By stage, the first stage with equal action times: the same seconds of the same units, and the same model end if any."""
        timing = self.timing
        tables = [
            timing.forward, timing.backward_input, timing.backward_weight, timing.unshard, timing.reduce, timing.copy_out, timing.copy_in,
            timing.accumulate,
        ]  # fmt: skip
        first: dict[object, int] = {}
        found = []
        for stage, units in enumerate(self.units):
            seconds = tuple(tuple(table[stage]) if table else () for table in tables)
            found.append(first.setdefault((stage == 0, stage == self.stages - 1, tuple(units), seconds), stage))
        return found

    def late(self, stages: Sequence[int], ends: Sequence[float]) -> tuple[float, float]:
        """Seconds for which reductions over shards, and then sums over replicas, go on behind a rank's last action."""
        timing, shards, replicas = self.timing, 0.0, 0.0
        run = self.many if self.layered else 1
        for end, stage in sorted(zip(ends, stages, strict=True)):
            reduce = timing.reduce[stage] if timing.reduce else [0.0] * len(self.units[stage])
            halves = zip(timing.backward_input[stage], timing.backward_weight[stage], [*reduce[1:], 0.0], strict=True)
            seconds = [max(run * (inputs + weights), before) for inputs, weights, before in halves]
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

    def _of(self, op: str, stage: int, unit: int | None, turn: Turn) -> Taken:
        stage = self._alike[stage]
        key = op, stage, turn
        if key not in self._known:
            by_unit = self._walked(op, stage, turn)
            self._known[key] = by_unit, _joined(by_unit if op in FORWARD else by_unit[::-1])
        by_unit, whole = self._known[key]
        return whole if unit is None else by_unit[unit]

    def _walked(self, op: str, stage: int, turn: Turn) -> list[Taken]:
        """What a stage's units take, one after another."""
        timing, order = self.timing, range(len(self.units[stage]))
        forward, weights = op in FORWARD, op in ("backward", "backward_weight")
        times = {
            "backward_input": [timing.backward_input],
            "backward_weight": [timing.backward_weight],
            "backward": [timing.backward_input, timing.backward_weight],
        }.get(op, [timing.forward])
        units = order if forward else order[::-1]
        run = self.many if self.layered else 1
        edge = turn == ("first" if forward else "last")
        gathered = [op != "backward_weight" and self._gathers(stage, unit, forward, edge) for unit in units]
        if not forward and stage == self.stages - 1:  # a forward of the head is followed by its backward
            gathered[0] = False
        reduced = [weights and self._reduces(stage, unit, edge) for unit in units]
        found = [Taken()] * len(units)
        waits, early = [0.0] * len(units), [0.0] * len(units)
        pending = 0.0
        """Of the reduction that the unit before issued."""
        for at, unit in enumerate(units):
            own = sum(time[stage][unit] for time in times)
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

    def __init__(self, order: ComputeOrder, micro_batches: int, units: Sequence[int]) -> None:
        self.placement, by_rank = order
        self.micro_batches, self.units = micro_batches, units
        self.held = rank_of(self.placement)
        self.slots: dict[Slot, int] = {}
        self.closing: dict[int, int] = {}
        self.links: dict[tuple[int, int, int], int] = {}
        self.by_rank: list[list[tuple[int, int, tuple[Input, ...]]]] = []
        """By rank: (action, slot, inputs)."""
        self.made: dict[Input, int] = {}
        """Behind which action each input is sent to another rank."""
        first = 1
        for mine in by_rank:
            self.by_rank.append(self._numbered(_layered(mine, units) if units else mine, first))
            first += len(self.by_rank[-1])
        self.messages: dict[Input, Message] = {}
        self.queue_of: dict[Input, list[Message]] = {}
        self._connect()

    def program(self) -> Program:
        steps, places = [], [0] * len(self.by_rank)
        done = bytearray(sum(map(len, self.by_rank)) + 1)
        done[0] = 1
        waiting: dict[int, list[int]] = {}
        met: dict[int, int] = {}
        todo = list(range(len(self.by_rank)))
        while todo:
            rank = todo.pop()
            row, place = self.by_rank[rank], places[rank]
            while place < len(row):
                action, slot, inputs = row[place]
                if inputs:
                    needed = [self.messages[one] for one in inputs]
                    missing = [message[1] for message in needed if not done[message[1]]]
                    if missing:
                        waiting.setdefault(missing[0], []).append(rank)
                        break
                    meeting: list[Message] = []
                    for one, message in zip(inputs, needed, strict=True):
                        queue = self.queue_of[one]
                        start, upto = met.get(queue[0][0], 0), message[0] - queue[0][0] + 1
                        if upto > start:
                            meeting += queue[start:upto]
                            met[queue[0][0]] = upto
                    steps.append((rank, action, slot, tuple(meeting), tuple(message[0] for message in needed)))
                else:
                    steps.append((rank, action, slot, (), ()))
                done[action] = 1
                place += 1
                if action in waiting:
                    todo += waiting.pop(action)
            places[rank] = place
        return Program(
            steps=tuple(steps),
            slots=tuple(self.slots),
            counts=tuple(Counter(slot for _, slot, _ in row) for row in self.by_rank),
            links=tuple(self.links),
            messages=len(self.messages),
            placement=self.placement,
            closing=self.closing,
            micro_batches=self.micro_batches,
        )

    def _numbered(self, mine: Sequence[Action], first: int) -> list[tuple[int, int, tuple[Input, ...]]]:
        """A rank's actions with their numbers from `first` on, slots, and inputs from other ranks."""
        last = _last_weights(mine)
        row = []
        for number, action in enumerate(mine, first):
            slot: list[tuple[str, int, int | None, Turn]] = []
            inputs: list[Input] = []
            for op, stage, micro_batch, unit, *_ in action.parts:
                forward, turn = op in FORWARD, "middle"
                if forward:
                    # In layered order every unit of a stage has its own first micro-batch.
                    if micro_batch == 0:
                        turn = "first"
                elif last[stage] == micro_batch:
                    turn = "last"
                slot.append((op, stage, unit, turn))
                if op in ("backward", "backward_weight"):
                    self.closing[stage] = number
                if op != "backward_weight":
                    inputs += self._exchanged(forward, stage, micro_batch, unit, number)
            row.append((number, self.slots.setdefault(tuple(slot), len(self.slots)), tuple(inputs)))
        return row

    def _exchanged(self, forward: bool, stage: int, micro_batch: int, unit: int | None, number: int) -> list[Input]:
        """What an action takes from another rank; what it makes for one is noted."""
        held, rank = self.held, self.held[stage]
        before, behind = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        ends = (0, 0) if unit is None else (0, self.units[stage] - 1)
        entry, leaving = ends if forward else ends[::-1]
        if 0 <= behind < len(held) and held[behind] != rank and unit in (None, leaving):
            self.made[forward, behind, micro_batch] = number
        takes = 0 <= before < len(held) and held[before] != rank and unit in (None, entry)
        return [(forward, stage, micro_batch)] if takes else []

    def _connect(self) -> None:
        """Assign every message its position in its channel and the action after which it is received.

        Messages have the order in which they are sent. The action is the one before the consumer, or an earlier one so that no
        later message overtakes it.
        """
        consumers = {one: (number, row[0][0]) for row in self.by_rank for number, _, inputs in row for one in inputs}
        channels: dict[tuple[int, int], list[tuple[int, Input]]] = defaultdict(list)
        for one, number in self.made.items():
            forward, stage, _ = one
            source = self.held[stage - 1 if forward else stage + 1]
            channels[source, self.held[stage]].append((number, one))
        for (source, target), sent in channels.items():
            sent.sort(key=lambda pair: pair[0])
            posts, latest = [], 1 << 60
            for _, one in reversed(sent):
                consumer, first = consumers[one]
                latest = min(latest, max(0, consumer - first - AHEAD) + first)
                posts.append(0 if latest == first else latest - 1)
            queue: list[Message] = []
            for (number, one), posted in zip(sent, reversed(posts), strict=True):
                forward, stage, _ = one
                link = self.links.setdefault((source, target, stage - 1 if forward else stage), len(self.links))
                message = len(self.messages) + 1, number, posted, queue[-1][0] if queue else 0, link
                queue.append(message)
                self.messages[one], self.queue_of[one] = message, queue


def _last_weights(mine: Sequence[Action]) -> dict[int, int]:
    """By stage, the micro-batch whose weight gradients come last."""
    last: dict[int, int] = {}
    for action in mine:
        for part in action.parts:
            if part.op in ("backward", "backward_weight"):
                last[part.stage] = part.micro_batch
    return last


def _layered(mine: Sequence[Action], units: Sequence[int]) -> list[Action]:
    """Each run of one kind of action of one stage, unit by unit."""
    cut: list[Action] = []
    for (op, stage), run in groupby(mine, key=lambda action: action[:2]):
        together, order = list(run), range(units[stage])
        cut += [action._replace(unit=unit) for unit in (order if op in FORWARD else order[::-1]) for action in together]
    return cut
