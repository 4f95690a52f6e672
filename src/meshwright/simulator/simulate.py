"""A schedule played in time: every rank's compute, its messages to its neighbours, its gathers and reductions.

Each rank has one compute lane that runs its actions in order, lanes for collectives, and a channel to and from each
neighbour. Communication is issued when the compute listed before it is through; compute waits for the bytes it needs.
Nothing else couples ranks, so each is followed as far as it gets, and one that waits for a message goes on once the
message's sender has been followed that far: there is no shared clock, and the work is linear in the number of actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from meshwright.schedules.action import COMPUTE, FORWARD, Action
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.durations import Busy, Durations, stretched
from meshwright.simulator.timeline import AXES, Record, Timeline
from meshwright.simulator.timing import Timing
from meshwright.spec.errors import BadInput

Way = tuple[str, float, float]
"""Bytes on their way: (axis, issued at, through at)."""


def simulate(schedule: Schedule, timing: Timing) -> Timeline:
    """The step that `schedule` makes when actions take as long as `timing` says.

    Raises BadInput when a table does not fit the schedule, or the schedule deadlocks.
    """
    timing.check(schedule)
    return _Simulation(schedule, timing).run()


@dataclass(slots=True)
class _Channel:
    """Messages from one rank to another: sends and receives issued, and how many have met."""

    sends: list[tuple[Action, float]] = field(default_factory=list)
    receives: list[tuple[Action, float]] = field(default_factory=list)
    met: int = 0
    free: float = 0.0


@dataclass(slots=True)
class _Rank:
    """How far one rank has come, and when each of its lanes is free."""

    number: int
    position: int = 0
    clock: float = 0.0
    """When the compute lane is free."""
    lanes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """When each lane of collectives is free."""
    computed: float = 0.0
    closing: float = 0.0
    """Time in the gradient norm and the optimizer."""
    first: float = float("inf")
    last: float = 0.0
    gathers: dict[tuple[int, int], Way] = field(default_factory=dict)
    """Gathers that compute has not waited for yet, by stage and unit."""
    reductions: list[Way] = field(default_factory=list)
    sums: dict[int, float] = field(default_factory=dict)
    """Seconds of accumulating an action's gradients, by its index; 0 if they are reduced before their unit computes more."""
    busy: list[Busy] = field(default_factory=list)
    """Collectives that may still slow compute down."""
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AXES, 0.0))


class _Simulation:
    def __init__(self, schedule: Schedule, timing: Timing) -> None:
        self.schedule, self.timing = schedule, timing
        self.rank_of = schedule.rank_of
        self.last_unit = [count - 1 for count in schedule.units or (1,) * schedule.stages]
        self.durations = Durations(timing)
        self.slowdowns = {
            "unshard": timing.gather_slowdown,
            "reduce": timing.reduce_slowdown,
            "replicate": timing.replicate_slowdown,
        }
        self.ranks = [_Rank(number) for number in range(schedule.ranks)]
        if timing.accumulate:
            for mine in self.ranks:
                mine.sums = sums_of(schedule, timing, mine.number)
        self.channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.messages: dict[tuple[bool, int, int], Way] = {}
        self.waiting: dict[tuple[bool, int, int], int] = {}
        self.todo = list(range(schedule.ranks))
        self.arrived: dict[int, float] = {}
        """When each rank came to the gradient norm."""
        self.reductions_left = Counter(
            (a.stage, a.unit or 0) for mine in schedule.actions for a in mine if a.op == "reduce_grad"
        )
        """Of each unit: replicas sum once a step, after the last."""
        self.records: list[Record] = []
        self.steps = dict.fromkeys(COMPUTE, self._compute) | {
            "send": self._send,
            "recv": self._receive,
            "unshard": self._unshard,
            "reshard": lambda mine, action: True,
            "reduce_grad": self._reduce,
            "norm_barrier": self._barrier,
            "optim": self._optim,
        }

    def run(self) -> Timeline:
        while self.todo:
            self._follow(self.ranks[self.todo.pop()])
        rows = self.schedule.actions
        stuck = [
            f"rank {r.number} at {rows[r.number][r.position]}" for r in self.ranks if r.position < len(rows[r.number])
        ]
        if stuck:
            raise BadInput(f"schedule {self.schedule.name} deadlocks: {', '.join(stuck)}")
        window = max(mine.last for mine in self.ranks) - min(mine.first for mine in self.ranks)
        ends = [max(mine.clock, *mine.lanes.values(), 0.0) for mine in self.ranks]
        return Timeline(
            schedule=self.schedule,
            step_seconds=max(ends),
            compute_seconds=tuple(mine.computed for mine in self.ranks),
            exposed_seconds=tuple(mine.exposed for mine in self.ranks),
            closing_seconds=tuple(mine.closing for mine in self.ranks),
            start_seconds=tuple(mine.first for mine in self.ranks),
            window_seconds=window,
            records=tuple(self.records),
        )

    def _follow(self, mine: _Rank) -> None:
        actions, steps = self.schedule.actions[mine.number], self.steps
        while mine.position < len(actions):
            action = actions[mine.position]
            if not steps[action.op](mine, action):
                return
            mine.position += 1

    def _compute(self, mine: _Rank, action: Action) -> bool:
        ways: list[Way] = []
        for part in action.parts:
            if not self._input(mine, part, ways):
                return False
        start = self._wait(mine, ways)
        work = self.durations.compute(action) + self._copies(mine, action)
        if mine.busy:
            mine.busy = [one for one in mine.busy if one[1] > start]
        end = stretched(start, work, mine.busy) if mine.busy else start + work
        mine.computed += end - start
        mine.first, mine.last, mine.clock = min(mine.first, start), end, end
        self.records.append((mine.number, "compute", action, start, end))
        return True

    def _input(self, mine: _Rank, part: Action, ways: list[Way]) -> bool:
        """Add to `ways` what `part` waits for; False when a message's time is not known yet."""
        stage, unit = part.stage, part.unit
        if part.op in FORWARD:
            other = stage - 1 if not unit else -1
        elif part.op == "backward_weight":
            return True
        else:
            other = stage + 1 if unit is None or unit == self.last_unit[stage] else -1
        if 0 <= other < len(self.rank_of) and self.rank_of[other] != mine.number:
            key = other < stage, stage, part.micro_batch
            message = self.messages.get(key)
            if message is None:
                self.waiting[key] = mine.number
                return False
            ways.append(message)
        if mine.gathers and (gather := mine.gathers.get((stage, unit or 0))):
            ways.append(gather)
        return True

    def _copies(self, mine: _Rank, action: Action) -> float:
        """Seconds in which compute copies gathered weights out, and adds new gradients to those before."""
        seconds, timing = mine.sums.get(mine.position, 0.0), self.timing
        if mine.gathers:
            for part in action.parts:
                used = part.op != "backward_weight" and mine.gathers.pop((part.stage, part.unit or 0), None)
                if used and timing.copy_out:
                    seconds += timing.copy_out[part.stage][part.unit or 0]
        return seconds

    def _wait(self, mine: _Rank, ways: list[Way]) -> float:
        """Let compute stand still until all of `ways` is through, and book the time in which bytes were on their way."""
        begin = mine.clock
        open_until = mine.clock = max(begin, *(through for _, _, through in ways)) if ways else begin
        if open_until == begin:
            return begin
        for axis, issued, through in sorted(ways, key=lambda way: way[2], reverse=True):
            low, high = max(begin, issued), min(open_until, through)
            if high > low:
                mine.exposed[axis] += high - low
                open_until = low
        return mine.clock

    def _send(self, mine: _Rank, action: Action) -> bool:
        target = self.rank_of[action.peer]
        self.channels[mine.number, target].sends.append((action, mine.clock))
        self._meet(mine.number, target)
        return True

    def _receive(self, mine: _Rank, action: Action) -> bool:
        source = self.rank_of[action.peer]
        self.channels[source, mine.number].receives.append((action, mine.clock))
        self._meet(source, mine.number)
        return True

    def _meet(self, source: int, target: int) -> None:
        """The next message of a channel, once both its ends are issued."""
        channel = self.channels[source, target]
        if channel.met >= min(len(channel.sends), len(channel.receives)):
            return
        (send, sent), (receive, posted) = channel.sends[channel.met], channel.receives[channel.met]
        if (send.stage, send.peer, send.micro_batch) != (receive.peer, receive.stage, receive.micro_batch):
            raise BadInput(f"rank {source} sends {send} where rank {target} expects {receive}")
        channel.met += 1
        issued = max(sent, posted)
        start = max(issued, channel.free)
        sizes = self.timing.boundary_bytes
        size = sizes[min(send.stage, send.peer)] if sizes else 0.0
        channel.free = start + self.timing.between(source, target).seconds(size)
        key = send.peer > send.stage, send.peer, send.micro_batch
        self.messages[key] = "pipeline", issued, channel.free
        self.records.append((source, f"send {target}", send, start, channel.free))
        self.records.append((target, f"recv {source}", receive, start, channel.free))
        if key in self.waiting:
            self.todo.append(self.waiting.pop(key))

    def _unshard(self, mine: _Rank, action: Action) -> bool:
        unit = action.stage, action.unit or 0
        if self.timing.unshard:
            mine.gathers[unit] = self._collective(
                mine, "unshard", "shard", action, self.timing.unshard[unit[0]][unit[1]]
            )
        elif self.timing.copy_out:  # weights that nobody else has a part of are copied all the same
            mine.gathers[unit] = "shard", mine.clock, mine.clock
        return True

    def _reduce(self, mine: _Rank, action: Action) -> bool:
        stage, unit = action.stage, action.unit or 0
        if self.timing.one_reduction and mine.reductions:
            self._wait(mine, [way for way in mine.reductions[-2:] if way[0] == "shard"])
        if self.timing.copy_in:
            mine.clock += self.timing.copy_in[stage][unit]
            mine.computed += self.timing.copy_in[stage][unit]
            mine.last = mine.clock
        issued = mine.clock
        if self.timing.reduce:
            seconds = self.timing.reduce[stage][unit]
            way = self._collective(mine, "reduce", "shard", action, seconds, shares=self.timing.one_communicator)
            mine.reductions.append(way)
            issued = way[2]
        self.reductions_left[stage, unit] -= 1
        if self.timing.replicate and not self.reductions_left[stage, unit]:
            seconds = self.timing.replicate[stage][unit]
            mine.reductions.append(self._collective(mine, "replicate", "replicate", action, seconds, issued))
        return True

    def _collective(
        self,
        mine: _Rank,
        lane: str,
        axis: str,
        action: Action,
        seconds: float,
        issued: float | None = None,
        shares: bool = False,
    ) -> Way:
        """Run a collective in its lane, or, where it `shares` the gathers' communicator, when that is free too."""
        issued = mine.clock if issued is None else issued
        waits_for = "unshard" if shares else lane
        start = max(issued, mine.lanes[waits_for])
        mine.lanes[waits_for] = start + seconds
        slowdown = self.slowdowns[lane]
        if slowdown != 1.0 and seconds:
            mine.busy.append((start, start + seconds, slowdown))
        self.records.append((mine.number, lane, action, start, start + seconds))
        return axis, issued, start + seconds

    def _barrier(self, mine: _Rank, action: Action) -> bool:
        """Wait for one's own reductions, then for every rank."""
        if mine.number not in self.arrived:
            self.arrived[mine.number] = self._wait(mine, mine.reductions)
            if len(self.arrived) == len(self.ranks):
                self.todo += [other for other in self.arrived if other != mine.number]
        if len(self.arrived) < len(self.ranks):
            return False
        mine.clock = max(self.arrived.values()) + self.timing.tied_seconds
        mine.exposed["pipeline"] += self.timing.tied_seconds
        self._run(mine, action, self.timing.norm_seconds)
        return True

    def _optim(self, mine: _Rank, action: Action) -> bool:
        self._run(mine, action, self.timing.optim_seconds[mine.number] if self.timing.optim_seconds else 0.0)
        return True

    def _run(self, mine: _Rank, action: Action, seconds: float) -> None:
        self.records.append((mine.number, "compute", action, mine.clock, mine.clock + seconds))
        mine.clock += seconds
        mine.closing += seconds


def makes_gradients(schedule: Schedule, part: Action) -> bool:
    """Whether an action adds to its unit's weight gradients. The loss makes them in its forward (kernels.loss)."""
    units = schedule.units[part.stage] if schedule.units else 1
    if part.stage + 1 == schedule.stages and (part.unit or 0) + 1 == units and units > 1:
        return part.op == "forward"
    return part.op in ("backward", "backward_weight")


def sums_of(schedule: Schedule, timing: Timing, rank: int) -> dict[int, float]:
    """By index in a rank's schedule, seconds of accumulating an action's gradients onto earlier ones.

    All that are computed, except gradients that are reduced before their units compute more.
    """
    found: dict[int, float] = {}
    alone: set[int] = set()
    since: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position, action in enumerate(schedule.actions[rank]):
        if action.op == "reduce_grad":
            positions = since.pop((action.stage, action.unit or 0), [])
            alone.update(positions if len(positions) == 1 else ())
        elif action.op in COMPUTE:
            for part in action.parts:
                if makes_gradients(schedule, part):
                    row = timing.accumulate[part.stage]
                    found[position] = found.get(position, 0.0) + (sum(row) if part.unit is None else row[part.unit])
                    since[part.stage, part.unit or 0].append(position)
    return {position: seconds for position, seconds in found.items() if position not in alone}
