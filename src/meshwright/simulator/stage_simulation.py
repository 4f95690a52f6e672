"""Fast approximate simulation of a step by whole stages, for ranking many plans: 30 times faster than `simulate`.

The step time differs by a few percent from that of `simulate`, which simulates every unit.

- Forward and backward of a micro-batch through a whole stage are one action. Its duration has three parts: the compute of its
  units, the exposed part of their gathers and reductions, and the copies for gathers and reductions.
- All micro-batches are equal, so the durations are computed once for each stage.
- Parameters that are gathered once a step count in the stage's first forward. Gradients that are reduced once a step count in
  its last backward.
- In layered order the gathers and reductions of each rank are simulated one by one, as a rank's waits hide many of them.
- `compile_program` turns a schedule into flat lists, without any timing. `simulate_stages` runs over these lists.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from meshwright.schedules.action import FORWARD, Action
from meshwright.schedules.schedule import ComputeOrder, rank_of
from meshwright.schedules.transfers import AHEAD, Input
from meshwright.simulator.timing import Timing
from meshwright.spec.plan import LayerStrategy

Turn = Literal["first", "middle", "opening", "last"]
"""Place of an action in the step, which decides about gathers and reductions that happen once a step.

- first: the first forward of a stage.
- opening: in layered order (all micro-batches of a stage run through a unit before the next unit), the first backward of a stage, if
  it is not the last as well.
- last: the stage's last action that computes weight gradients.
- middle: all other actions.
"""
DurationKey = tuple[tuple[str, int, int | None, Turn], ...]
"""What the duration of an action depends on: its (op, stage, unit, turn), where unit None stands for the whole stage.

An action that runs two micro-batches together has two such entries. Actions with equal keys take equal time.
"""
Message = tuple[int, int, int, int, int]
"""An activation or gradient that one rank sends to another rank:

(number of the message, action after which it is sent, action after which its receive is posted, previous message from the same sender
to the same receiver or 0, index in `Program.links`).
"""


Units = Sequence[Sequence[LayerStrategy]]
"""By stage, the layer strategy of each of its units."""


class ActionSeconds(NamedTuple):
    """Seconds of one action of a rank: its compute, its waits for collectives, and when it issues reductions."""

    compute: float = 0.0
    """Seconds of arithmetic and copies."""
    exposed: float = 0.0
    """Seconds in which the action waits for collectives before it ends."""
    hidden_by_message: float = 0.0
    """The part of `exposed` that costs nothing if the rank waits for the action's input message anyway.

    It is due to gathers that are issued before that wait.
    """
    exposed_after: float = 0.0
    """Seconds in which the rank waits for collectives after the action's output message is sent."""
    until_reduction: float = 0.0
    """Seconds from the start of the action until it issues its first reduction; 0 without a reduction."""
    single_reduction: bool = True
    """Whether the action issues at most one reduction, at its end."""
    last_reduction: float = 0.0
    """Duration of the last reduction."""
    gather: float | None = None
    """In layered order, seconds of the gather of a unit that must end before the unit's first action. None for its other actions."""
    copy_after: float = 0.0
    """In layered order, the part of `compute` that copies gradients for their reduction, after the output message is sent."""


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule as flat lists, without timing. Actions and messages have numbers from 1 on; 0 means none."""

    steps: tuple[tuple[int, int, int, tuple[Message, ...], tuple[int, ...]], ...]
    """The actions of all ranks in an order in which every message is sent before it is needed. Each entry is:

    (rank, number of the action, index in `duration_keys`, messages that are simulated before the action, numbers of the messages
    that the action waits for).
    """
    duration_keys: tuple[DurationKey, ...]
    """The different duration keys of the program."""
    counts: tuple[Counter[int], ...]
    """By rank, how many actions have each duration key (by its index)."""
    links: tuple[tuple[int, int, int], ...]
    """(sending rank, receiving rank, boundary): boundary i is between stages i and i + 1."""
    messages: int
    """Number of messages."""
    placement: tuple[tuple[int, ...], ...]
    """By rank, its stages."""
    last_backward: dict[int, int]
    """By stage, the number of its last action that computes weight gradients."""
    ends_with_weights: frozenset[int]
    """Stages for which that action computes weight gradients only."""
    micro_batches: int


@dataclass(frozen=True)
class Totals:
    """The totals of a simulated step; the fields have the meaning of those in `Timeline`, which also has all records."""

    breakdown: dict[str, float]
    start_seconds: tuple[float, ...]
    own_seconds: tuple[float, ...]


def compile_program(order: ComputeOrder, micro_batches: int, units: Sequence[int] = ()) -> Program:
    """Compile a schedule's order of compute actions into a Program.

    `units` is the number of units of each stage if the plan uses the layered order, else empty. In layered order, consecutive
    micro-batches of a stage all pass through one unit before the next unit begins. Sends and receives follow the rules of
    `schedules.transfers`. The schedule must not deadlock; no schedule of the registry does.
    """
    return _Compiler(order, micro_batches, units).program()


def simulate_stages(program: Program, durations: StageDurations) -> Totals:
    """Simulate one step of `program`, where `durations` gives the seconds of its actions, and return the totals.

    1F1B with 2 stages and 4 micro-batches, each with 1 second of forward and 2 seconds of backward per stage:

    >>> from meshwright.schedules.registry import order_of
    >>> from meshwright.simulator.timing import uniform_timing
    >>> program = compile_program(order_of("1f1b", 2, 4), 4)
    >>> durations = StageDurations(uniform_timing(2), 2, units=[[LayerStrategy()], [LayerStrategy()]], layered=False)
    >>> simulate_stages(program, durations).breakdown
    {'compute': 12.0, 'shard': 0.0, 'replicate': 0.0, 'pipeline': 0.0, 'closing': 0.0, 'idle': 3.0}
    """
    timing = durations.timing
    seconds = [durations.of(key) for key in program.duration_keys]
    sizes = timing.boundary_bytes
    links = [timing.between(*ends).seconds(sizes[at] if sizes else 0.0) for *ends, at in program.links]
    ranks = range(len(program.placement))
    lanes = [durations.busiest_lane(stages, program.micro_batches) for stages in program.placement]
    # A wait for a message can hide only the collectives of the next action: on average a rank's collectives divided by its actions. In
    # layered order it hides none, because the first micro-batch of a unit has issued the unit's collectives long before.
    most_hidden = [0.0 if durations.layered else lanes[r] / program.counts[r].total() for r in ranks]
    layered_timing = timing if durations.layered else None
    ends, starts, messages, exposed, hidden, slowed = _simulate_steps(
        program, seconds, links, most_hidden, layered_timing
    )

    compute = [sum(count * seconds[key].compute for key, count in program.counts[r].items()) + slowed[r] for r in ranks]
    backward_ends = [[ends[program.last_backward[stage]] for stage in stages] for stages in program.placement]
    tails = [
        durations.reduction_tail(*stages_and_ends, program.ends_with_weights)
        for stages_and_ends in zip(program.placement, backward_ends, strict=True)
    ]
    # If a rank's collectives take longer than the compute and the waits that can hide them, the rest is exposed at the end of the step.
    # In layered order each unit waits for its own gather.
    excess = [0.0 if durations.layered else max(0.0, lanes[r] - compute[r] - exposed[r] - hidden[r]) for r in ranks]
    shard = [max(excess[r], tails[r][0]) for r in ranks]
    replicate = [tails[r][1] for r in ranks]
    closing = [timing.norm_seconds + (timing.optim_seconds[r] if timing.optim_seconds else 0.0) for r in ranks]
    norm = max(max(backward_ends[r]) + shard[r] + replicate[r] for r in ranks) + timing.tied_gradient_seconds
    own_seconds = [
        compute[r] + exposed[r] + messages[r] + shard[r] + replicate[r] + timing.tied_gradient_seconds + closing[r]
        for r in ranks
    ]
    count = len(ranks)
    parts = {
        "compute": sum(compute) / count,
        "shard": (sum(exposed) + sum(shard)) / count,
        "replicate": sum(replicate) / count,
        "pipeline": sum(messages) / count + timing.tied_gradient_seconds,
        "closing": sum(closing) / count,
    }
    step = norm + max(closing)
    return Totals({**parts, "idle": max(0.0, step - sum(parts.values()))}, tuple(starts), tuple(own_seconds))


def _simulate_steps(
    program: Program,
    durations: Sequence[ActionSeconds],
    links: Sequence[float],
    most_hidden: Sequence[float],
    layered: Timing | None,
) -> tuple[list[float], list[float], list[float], list[float], list[float], list[float]]:
    """Run over the steps of `program`, where `durations` are by duration key, and `links` are the seconds of a message by link.

    `layered` is the timing in layered order, where gathers and reductions of whole units run beside the actions of many micro-batches.

    Returns six lists of seconds. The first is by number of the action, the others are by rank:

    - the time when each action ends;
    - the time when the rank begins its first action;
    - waits for messages in transfer;
    - waits for collectives of the shard axis;
    - collectives of the shard axis that waits for messages hide, at most `most_hidden[rank]` in each wait;
    - seconds by which collectives beside compute slow it down, which in another than the layered order are a part of the durations.
    """
    ranks = len(program.placement)
    ends = [0.0] * (len(program.steps) + 1)
    issues = [0.0] * (program.messages + 1)
    arrivals = [0.0] * (program.messages + 1)
    clocks, exposed_messages, exposed_collectives, reductions_end, starts = ([0.0] * ranks for _ in range(5))
    hidden_collectives = [0.0] * ranks
    gathers_end = [0.0] * ranks
    next_gathers: list[list[float]] = [[] for _ in range(ranks)]
    """By rank, the gathers that are not issued yet, the last first."""
    for rank, _, key, *_ in reversed(program.steps):
        if (gather := durations[key].gather) is not None:
            next_gathers[rank].append(gather)
    for rank, gathers in enumerate(next_gathers):
        gathers_end[rank] = gathers.pop() if gathers else 0.0
    gathered = gathers_end.copy()
    """By rank, when the gather of its next unit ends."""
    slowed = [0.0] * ranks
    started = [False] * ranks
    for rank, action, key, new_messages, needed in program.steps:
        for message, sent, posted, previous, link in new_messages:
            issued = max(ends[sent], ends[posted])
            issues[message] = issued
            arrivals[message] = max(issued, arrivals[previous]) + links[link]
        clock = start = clocks[rank]
        for message in needed:
            arrived = arrivals[message]
            if arrived > start:
                exposed_messages[rank] += arrived - max(start, issues[message])
                start = arrived
        if start > clock:
            hidden_collectives[rank] += min(start - clock, most_hidden[rank])
        seconds = durations[key]
        compute, exposed, hidden, exposed_after, until_reduction, single_reduction, last_reduction, *_ = seconds
        if (gather := seconds.gather) is not None:
            if gather:
                exposed += max(0.0, gathered[rank] - start)
            if next_gathers[rank] and (following := next_gathers[rank].pop()):
                gathered[rank] = gathers_end[rank] = max(gathers_end[rank], clock) + following
        if hidden:
            exposed -= min(hidden, start - clock)
        if not started[rank]:
            started[rank] = True
            starts[rank] = start
        end = start + compute + exposed
        if layered is not None:
            lane_end = max(gathers_end[rank], reductions_end[rank])
            slow = layered.gather_slowdown if gathers_end[rank] > reductions_end[rank] else layered.reduce_slowdown
            slower = min(max(0.0, lane_end - start - exposed), compute * slow) * (1 - 1 / slow)
            slowed[rank] += slower
            end += slower
        if until_reduction:
            # The action's first reduction begins after the rank's previous reduction has ended. If it is the only one, at the end of the
            # action, the rank sends the action's output before it waits.
            delay = reductions_end[rank] - start - until_reduction
            if delay > 0 and single_reduction:
                exposed_after += delay
            elif delay > 0:
                exposed = exposed + delay
                end = end + delay
            begin = end + exposed_after
            if layered is not None and layered.shared_communicator:
                reductions_end[rank] = gathers_end[rank] = max(begin, gathers_end[rank]) + last_reduction
            else:
                reductions_end[rank] = begin + last_reduction
        ends[action] = end - seconds.copy_after
        clocks[rank] = end + exposed_after
        exposed_collectives[rank] += exposed + exposed_after
    return ends, starts, exposed_messages, exposed_collectives, hidden_collectives, slowed


class StageDurations:
    """Computes the durations of stage actions from the seconds of their units.

    `timing` has the seconds of each unit, `units` the strategies that say when a unit gathers and reduces. In an order that is not
    `layered`, the durations are the same for any number of micro-batches above 1.
    """

    def __init__(self, timing: Timing, micro_batches: int, *, units: Units, layered: bool) -> None:
        self.timing = timing
        self.units = units
        self.layered = layered
        self.micro_batches = micro_batches
        self.stages = len(units)
        self._cache: dict[tuple[str, int, Turn], tuple[list[ActionSeconds], ActionSeconds]] = {}
        """By (op, stage, turn): the durations of each unit, and the duration of the whole stage."""
        self._equal_stage = self._first_equal_stages()

    def of(self, key: DurationKey) -> ActionSeconds:
        """Return the durations of an action with this key. Two micro-batches in one action run one after the other."""
        parts = [self._of(*part) for part in key]
        return parts[0] if len(parts) == 1 else _concatenated(parts)

    def _first_equal_stages(self) -> list[int]:
        """Return for each stage the first stage with equal durations, so that equal stages are computed once.

        Their units have equal strategies and equal seconds. The first and the last stage of the model differ from all others.
        """
        timing = self.timing
        tables = [
            timing.forward,
            timing.backward_input,
            timing.backward_weight,
            timing.unshard,
            timing.reduce,
            timing.copy_out,
            timing.copy_in,
            timing.accumulate,
        ]
        first: dict[object, int] = {}
        equal_stages = []
        for stage, units in enumerate(self.units):
            seconds = tuple(tuple(table[stage]) if table else () for table in tables)
            equal_stages.append(first.setdefault((stage == 0, stage == self.stages - 1, tuple(units), seconds), stage))
        return equal_stages

    def reduction_tail(
        self, stages: Sequence[int], ends: Sequence[float], ends_with_weights: Container[int]
    ) -> tuple[float, float]:
        """Return how long a rank's reductions take after its last action.

        The first result is the seconds until all reductions over the shard axis have ended, the second the further seconds until all
        reductions over replicas have ended. `stages` are the stages of the rank, `ends` the times at which their last backwards end;
        those of `ends_with_weights` compute weight gradients only.
        """
        timing = self.timing
        shards_end = 0.0
        replicas_end = 0.0
        micro_batches_per_turn = self.micro_batches if self.layered else 1
        for end, stage in sorted(zip(ends, stages, strict=True)):
            reduce = timing.reduce[stage] if timing.reduce else [0.0] * len(self.units[stage])
            inputs_too = stage not in ends_with_weights
            halves = zip(timing.backward_input[stage], timing.backward_weight[stage], [*reduce[1:], 0.0], strict=True)
            seconds = [
                max(micro_batches_per_turn * (inputs * inputs_too + weights), reduction)
                for inputs, weights, reduction in halves
            ]
            time = end - sum(seconds)
            for unit in reversed(range(len(seconds))):
                time += seconds[unit]
                shards_end = max(shards_end, time) + reduce[unit]
                if timing.replicate:
                    replicas_end = max(replicas_end, shards_end) + timing.replicate[stage][unit]
        last = max(ends)
        return max(0.0, shards_end - last), max(0.0, replicas_end - max(last, shards_end))

    def busiest_lane(self, stages: Sequence[int], micro_batches: int) -> float:
        """Return the seconds that a rank's gathers and reductions of the shard axis take in a step of `micro_batches`.

        If gathers and reductions share a communicator, it is the sum of both, else the larger of the two.
        """
        gathers = reductions = 0.0
        times = 1 if self.layered else micro_batches
        for stage in stages:
            for unit, strategy in enumerate(self.units[stage]):
                if self.timing.unshard:
                    gathers += self.timing.unshard[stage][unit] * (2 * times if strategy.reshard else 1)
                if self.timing.reduce:
                    reductions += self.timing.reduce[stage][unit] * (times if strategy.gradients == "shard" else 1)
        return gathers + reductions if self.timing.shared_communicator else max(gathers, reductions)

    def _of(self, op: str, stage: int, unit: int | None, turn: Turn) -> ActionSeconds:
        stage = self._equal_stage[stage]
        key = op, stage, turn
        if key not in self._cache:
            by_unit = self._by_unit(op, stage, turn)
            self._cache[key] = by_unit, _concatenated(by_unit if op in FORWARD else by_unit[::-1])
        by_unit, whole = self._cache[key]
        return whole if unit is None else by_unit[unit]

    def _by_unit(self, op: str, stage: int, turn: Turn) -> list[ActionSeconds]:
        """Return the durations of each unit of a stage. The units run one after another, in reverse order in the backward."""
        timing = self.timing
        order = range(len(self.units[stage]))
        forward = op in FORWARD
        weights = op in ("backward", "backward_weight")
        tables = {
            "backward_input": [timing.backward_input],
            "backward_weight": [timing.backward_weight],
            "backward": [timing.backward_input, timing.backward_weight],
        }.get(op, [timing.forward])
        units = order if forward else order[::-1]
        micro_batches_per_turn = self.micro_batches if self.layered else 1
        first_or_last = turn == ("first" if forward else "last")
        opens = self.layered and (turn in ("first", "opening") or (turn == "last" and self.micro_batches == 1))
        gathers_here = opens if self.layered else first_or_last
        gathered = [op != "backward_weight" and self._gathers(stage, unit, forward, gathers_here) for unit in units]
        if not forward and stage == self.stages - 1:  # parameters of the head stay gathered from its forward
            gathered[0] = False
        reduced = [weights and self._reduces(stage, unit, first_or_last) for unit in units]
        durations = [(0.0, 0.0, 0.0)] * len(units)
        """By unit: (seconds of compute, seconds until it issues its reduction or 0, seconds of that reduction or 0)."""
        exposed = [0.0] * len(units)
        hidden = [0.0] * len(units)
        pending = 0.0
        """Seconds of the reduction that the previous unit issued."""
        for index, unit in enumerate(units):
            own_seconds = sum(table[stage][unit] for table in tables)
            copies = timing.copy_out[stage][unit] if gathered[index] and timing.copy_out else 0.0
            if reduced[index]:
                copies += timing.copy_in[stage][unit] if timing.copy_in else 0.0
            if weights and timing.accumulate and self._accumulates(stage, unit):
                copies += timing.accumulate[stage][unit]
            following = (index + 1) % len(units)
            gather = timing.unshard[stage][units[following]] if gathered[following] and timing.unshard else 0.0
            if following == 0 and len(units) > 1 and first_or_last and forward and not self.layered:
                gather = 0.0  # gathered before the first forward of this stage
            span = micro_batches_per_turn * own_seconds + copies
            lane = gather + pending if timing.shared_communicator else max(gather, pending)
            slow = timing.gather_slowdown if gather > pending else timing.reduce_slowdown
            slowed = 0.0 if self.layered else min(lane, span * slow) * (1 - 1 / slow)
            # The first two units' gathers are issued before the stage waits for its input.
            waiting_unit = units[0] if following < 2 else unit
            wait = 0.0 if self.layered else min(gather, max(0.0, lane - span - slowed))
            exposed[waiting_unit] += wait
            hidden[waiting_unit] += wait * (following < 2)
            pending = timing.reduce[stage][unit] if reduced[index] and timing.reduce else 0.0
            compute = own_seconds + copies + slowed
            durations[unit] = compute, compute if reduced[index] else 0.0, pending
        if forward and turn == "first" and stage == 0 and timing.unshard and not self.layered:
            exposed[0] += timing.unshard[0][0]
        by_unit = [
            ActionSeconds(compute, exposed[unit], hidden[unit], 0.0, until_reduction, True, last_reduction)
            for unit, (compute, until_reduction, last_reduction) in enumerate(durations)
        ]
        if not self.layered:
            return by_unit
        for index, unit in enumerate(units):
            gather = timing.unshard[stage][unit] if gathered[index] and timing.unshard else 0.0
            by_unit[unit] = by_unit[unit]._replace(
                gather=gather if opens else None,
                copy_after=timing.copy_in[stage][unit] if reduced[index] and timing.copy_in else 0.0,
            )
        return by_unit

    def _gathers(self, stage: int, unit: int, forward: bool, first_or_last: bool) -> bool:
        reshard = self.units[stage][unit].reshard
        if self.layered:
            return first_or_last if forward else reshard and first_or_last
        return reshard or (forward and first_or_last)

    def _reduces(self, stage: int, unit: int, first_or_last: bool) -> bool:
        return first_or_last or (not self.layered and self.units[stage][unit].gradients == "shard")

    def _accumulates(self, stage: int, unit: int) -> bool:
        return self.micro_batches > 1 and (self.layered or self.units[stage][unit].gradients == "whole")


def _concatenated(parts: Sequence[ActionSeconds]) -> ActionSeconds:
    """Return the durations of several actions that run one after another, as one action.

    Each reduction waits for the reduction before it, because there is only one reduce-scatter buffer.
    """
    time = compute = exposed = hidden = exposed_after = until_reduction = reduction_end = 0.0
    reducing = [part for part in parts if part.until_reduction]
    for part in parts:
        compute = compute + part.compute
        exposed = exposed + part.exposed
        hidden = hidden + part.hidden_by_message
        if part.until_reduction:
            delay = max(0.0, reduction_end - time - part.until_reduction)
            until_reduction = until_reduction or time + part.until_reduction
            if part is parts[-1] and part.single_reduction:
                exposed_after = delay
            else:
                exposed = exposed + delay
                time = time + delay
            reduction_end = time + part.compute + part.exposed + exposed_after + part.last_reduction
        time += part.compute + part.exposed
    single_reduction = len(reducing) == 1 and reducing[0] is parts[-1] and reducing[0].single_reduction
    last_reduction = reducing[-1].last_reduction if reducing else 0.0
    return ActionSeconds(compute, exposed, hidden, exposed_after, until_reduction, single_reduction, last_reduction)


class _Compiler:
    """Builds a Program. To order the actions, it advances each rank until a message is missing, as `simulate` does."""

    def __init__(self, order: ComputeOrder, micro_batches: int, units: Sequence[int]) -> None:
        self.placement, by_rank = order
        self.micro_batches = micro_batches
        self.units = units
        self.rank_of = rank_of(self.placement)
        self.duration_keys: dict[DurationKey, int] = {}
        self.last_backward: dict[int, int] = {}
        self.ends_with_weights = set[int]()
        self.links: dict[tuple[int, int, int], int] = {}
        self.by_rank: list[list[tuple[int, int, tuple[Input, ...]]]] = []
        """By rank, its actions: (number of the action, index in `duration_keys`, inputs that come from other ranks)."""
        self.producers: dict[Input, int] = {}
        """For each input that one rank sends to another rank, the number of the action after which it is sent."""
        first = 1
        for actions in by_rank:
            self.by_rank.append(self._numbered(_layered(actions, units) if units else actions, first))
            first += len(self.by_rank[-1])
        self.messages: dict[Input, Message] = {}
        self.channel_of: dict[Input, list[Message]] = {}
        self._connect()

    def program(self) -> Program:
        steps = []
        positions = [0] * len(self.by_rank)
        done = bytearray(sum(map(len, self.by_rank)) + 1)
        done[0] = 1
        blocked_ranks: dict[int, list[int]] = {}
        """For actions that have not run, by number, the ranks that wait for the message of that action."""
        scheduled: dict[int, int] = {}
        """By number of a channel's first message, how many messages of that channel are in `steps` already."""
        runnable = list(range(len(self.by_rank)))
        while runnable:
            rank = runnable.pop()
            actions = self.by_rank[rank]
            position = positions[rank]
            while position < len(actions):
                action, key, inputs = actions[position]
                if inputs:
                    needed = [self.messages[required] for required in inputs]
                    missing = [message[1] for message in needed if not done[message[1]]]
                    if missing:
                        blocked_ranks.setdefault(missing[0], []).append(rank)
                        break
                    new_messages: list[Message] = []
                    for required, message in zip(inputs, needed, strict=True):
                        channel = self.channel_of[required]
                        start = scheduled.get(channel[0][0], 0)
                        stop = message[0] - channel[0][0] + 1
                        if stop > start:
                            new_messages += channel[start:stop]
                            scheduled[channel[0][0]] = stop
                    steps.append((rank, action, key, tuple(new_messages), tuple(message[0] for message in needed)))
                else:
                    steps.append((rank, action, key, (), ()))
                done[action] = 1
                position += 1
                if action in blocked_ranks:
                    runnable += blocked_ranks.pop(action)
            positions[rank] = position
        return Program(
            steps=tuple(steps),
            duration_keys=tuple(self.duration_keys),
            counts=tuple(Counter(key for _, key, _ in actions) for actions in self.by_rank),
            links=tuple(self.links),
            messages=len(self.messages),
            placement=self.placement,
            last_backward=self.last_backward,
            ends_with_weights=frozenset(self.ends_with_weights),
            micro_batches=self.micro_batches,
        )

    def _numbered(self, actions: Sequence[Action], first: int) -> list[tuple[int, int, tuple[Input, ...]]]:
        """Number a rank's actions from `first` on. Returns for each: (number, index in `duration_keys`, inputs from other ranks)."""
        last = _last_micro_batch(actions)
        opening: dict[int, int] = {}
        """By stage, the micro-batch whose backward is first."""
        numbered = []
        for number, action in enumerate(actions, first):
            key: list[tuple[str, int, int | None, Turn]] = []
            inputs: list[Input] = []
            for op, stage, micro_batch, unit, *_ in action.parts:
                forward = op in FORWARD
                turn: Turn = "middle"
                if forward:
                    # In layered order, the first micro-batch is "first" in every unit of its stage.
                    if micro_batch == 0:
                        turn = "first"
                elif last[stage] == micro_batch:
                    turn = "last"
                elif self.units and opening.setdefault(stage, micro_batch) == micro_batch:
                    turn = "opening"
                key.append((op, stage, unit, turn))
                if op in ("backward", "backward_weight"):
                    self.last_backward[stage] = number
                    (self.ends_with_weights.add if op == "backward_weight" else self.ends_with_weights.discard)(stage)
                if op != "backward_weight":
                    inputs += self._exchange(forward, stage, micro_batch, unit, number)
            index = self.duration_keys.setdefault(tuple(key), len(self.duration_keys))
            numbered.append((number, index, tuple(inputs)))
        return numbered

    def _exchange(self, forward: bool, stage: int, micro_batch: int, unit: int | None, number: int) -> list[Input]:
        """Return the inputs that the action receives from another rank. Also record which message the action produces for another rank."""
        rank_of = self.rank_of
        rank = self.rank_of[stage]
        source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        ends = (0, 0) if unit is None else (0, self.units[stage] - 1)
        first_unit, last_unit = ends if forward else ends[::-1]
        if 0 <= target < len(rank_of) and rank_of[target] != rank and unit in (None, last_unit):
            self.producers[forward, target, micro_batch] = number
        receives = 0 <= source < len(rank_of) and rank_of[source] != rank and unit in (None, first_unit)
        return [(forward, stage, micro_batch)] if receives else []

    def _connect(self) -> None:
        """Create all messages, with the order in their channels and the action after which each receive is posted.

        A channel carries messages in the order in which they are sent. A receive is posted one action before the action that needs
        it, or earlier if a later message of the same channel is needed earlier.
        """
        consumers = {
            required: (number, actions[0][0])
            for actions in self.by_rank
            for number, _, inputs in actions
            for required in inputs
        }
        channels: dict[tuple[int, int], list[tuple[int, Input]]] = defaultdict(list)
        for payload, number in self.producers.items():
            forward, stage, _ = payload
            source = self.rank_of[stage - 1 if forward else stage + 1]
            channels[source, self.rank_of[stage]].append((number, payload))
        for (source, target), sends in channels.items():
            sends.sort(key=lambda send: send[0])
            posts = []
            latest = 1 << 60
            for _, payload in reversed(sends):
                consumer, first = consumers[payload]
                latest = min(latest, max(0, consumer - first - AHEAD) + first)
                posts.append(0 if latest == first else latest - 1)
            channel: list[Message] = []
            for (number, payload), posted in zip(sends, reversed(posts), strict=True):
                forward, stage, _ = payload
                link = self.links.setdefault((source, target, stage - 1 if forward else stage), len(self.links))
                message = len(self.messages) + 1, number, posted, channel[-1][0] if channel else 0, link
                channel.append(message)
                self.messages[payload] = message
                self.channel_of[payload] = channel


def _last_micro_batch(actions: Sequence[Action]) -> dict[int, int]:
    """Return for each stage the micro-batch whose weight gradients are computed last."""
    last: dict[int, int] = {}
    for action in actions:
        for part in action.parts:
            if part.op in ("backward", "backward_weight"):
                last[part.stage] = part.micro_batch
    return last


def _layered(actions: Sequence[Action], units: Sequence[int]) -> list[Action]:
    """Return the actions in layered order: consecutive actions of one op and stage are divided into units, and sorted by unit.

    Forwards of micro-batches 0 and 1 in a stage of two units become: unit 0 of 0, unit 0 of 1, unit 1 of 0, unit 1 of 1.
    """
    layered: list[Action] = []
    for (op, stage), group in groupby(actions, key=lambda action: action[:2]):
        consecutive = list(group)
        order = range(units[stage])
        units_in_order = order if op in FORWARD else order[::-1]
        layered += [action._replace(unit=unit) for unit in units_in_order for action in consecutive]
    return layered
