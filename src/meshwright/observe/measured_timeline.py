"""Recorded steps as timelines of the simulator's type: the same actions, lanes and totals, with measured times.

The recording of a rank is matched with its actions of the schedule, which detects actions that did not run or ran out
of order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshwright.events.span import Span, StepSpans
from meshwright.schedules.action import COMPUTE, FORWARD, GRADIENT, Action
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.timeline import AXES, Record, Timeline

Interval = tuple[float, float]
SHARD_LANES = ("unshard", "reduce")
COLLECTIVES = (*SHARD_LANES, "replicate")


def measured_timeline(schedule: Schedule, ranks: Sequence[StepSpans]) -> tuple[Timeline, float]:
    """(timeline of one step of all pipeline ranks, time of its first action), from detailed recordings on one clock.

    The timeline's seconds count from the first action; its `step_seconds` run from the step's begin to its end, data
    and token count included. A message runs from when both ends had posted it and the channel was free, as in a
    simulated step. Exposed time is idle compute time before an action that waits for a transfer, while the transfer's
    lane moves bytes. Raises ValueError if the ranks did not follow the schedule.
    """
    if len(ranks) != schedule.ranks:
        raise ValueError(f"{len(ranks)} recorded ranks for a schedule of {schedule.ranks}")
    compute = [
        _compute(rank, actions, _lane(mine, "compute"))
        for rank, (actions, mine) in enumerate(_by_rank(schedule, ranks))
    ]
    others = [_collectives(rank, actions, mine) for rank, (actions, mine) in enumerate(_by_rank(schedule, ranks))]
    messages = _messages(schedule, ranks)
    records = [record for group in (*compute, *others, messages) for record in group]
    origin = min(record[3] for record in records)
    at_barrier = [_arrival(mine, other) for mine, other in zip(compute, others, strict=True)]
    tallies = [_Walk(schedule, rank, origin, records).over(compute[rank], at_barrier) for rank in range(schedule.ranks)]
    work = [
        (start, end) for rank_records in compute for _, _, action, start, end in rank_records if action.op in COMPUTE
    ]
    return Timeline(
        schedule=schedule,
        step_seconds=max(mine.seconds for mine in ranks),
        compute_seconds=tuple(tally.computed for tally in tallies),
        exposed_seconds=tuple(tally.exposed for tally in tallies),
        closing_seconds=tuple(tally.closing for tally in tallies),
        start_seconds=tuple(rank_records[0][3] - origin for rank_records in compute),
        window_seconds=max(end for _, end in work) - min(start for start, _ in work),
        records=tuple((rank, lane, act, start - origin, end - origin) for rank, lane, act, start, end in records),
    ), origin


def _by_rank(schedule: Schedule, ranks: Sequence[StepSpans]) -> Iterable[tuple[tuple[Action, ...], StepSpans]]:
    return zip(schedule.actions, ranks, strict=True)


def _lane(step: StepSpans, lane: str) -> list[Span]:
    return [span for span in step.spans if span.lane == lane]


def _end(span: Span) -> float:
    return span.start + span.duration


def _compute(rank: int, actions: Sequence[Action], spans: Sequence[Span]) -> list[Record]:
    """Each part of each action with its span.

    Neighbouring spans of one name, such as a backward and its gradient accumulation, are joined.
    """
    joined: list[tuple[str, float, float]] = []
    for span in spans:
        first = joined.pop()[1] if joined and joined[-1][0] == span.name else span.start
        joined.append((span.name, first, _end(span)))
    wanted = [part for act in actions for part in act.parts if act.op in COMPUTE or act.op in ("norm_barrier", "optim")]
    for index, part in enumerate(wanted):
        got = joined[index][0] if index < len(joined) else "nothing"
        if got != part.label:
            raise ValueError(f"pipeline rank {rank} ran {got} where its schedule says {part.label} (action {index})")
    if len(joined) > len(wanted):
        raise ValueError(f"pipeline rank {rank} ran {joined[len(wanted)][0]} after the end of its schedule")
    return [(rank, "compute", part, start, end) for part, (_, start, end) in zip(wanted, joined, strict=True)]


def _collectives(rank: int, actions: Sequence[Action], step: StepSpans) -> list[Record]:
    """The collectives that ran. Skipped ones, such as a gather of resident weights or over one rank, have no span."""
    named = {action.label: action for action in actions if action.op in ("unshard", "reduce_grad")}
    return [(rank, s.lane, named[s.name], s.start, _end(s)) for s in step.spans if s.lane in COLLECTIVES]


def _messages(schedule: Schedule, ranks: Sequence[StepSpans]) -> list[Record]:
    """Both ends of every message; the k-th send of a channel matches its k-th receive."""
    rank_of, records = schedule.rank_of, []
    for source, target in schedule.channels:
        sends = [a for a in schedule.actions[source] if a.op == "send" and rank_of[a.peer] == target]
        receives = [a for a in schedule.actions[target] if a.op == "recv" and rank_of[a.peer] == source]
        sent, received = _lane(ranks[source], f"send {target}"), _lane(ranks[target], f"recv {source}")
        free = float("-inf")
        for send, s, receive, r in zip(sends, sent, receives, received, strict=True):
            start = max(s.start, r.start, free)
            free = max(start, _end(r))
            left = max(start, _end(s)) if s.duration else free  # under Gloo only the receiver measures it
            records.append((source, f"send {target}", send, start, left))
            records.append((target, f"recv {source}", receive, start, free))
    return records


def _arrival(compute: Sequence[Record], collectives: Sequence[Record]) -> float:
    """The time at which a rank had finished its own reductions, inside norm_barrier."""
    _, _, _, start, end = next(record for record in compute if record[2].op == "norm_barrier")
    last = max((record[4] for record in collectives if record[2].op == "reduce_grad"), default=start)
    return min(max(start, last), end)


@dataclass
class _Tally:
    computed: float = 0.0
    closing: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AXES, 0.0))


@dataclass(frozen=True)
class _Transfer:
    """A transfer for which an action waits, from `since` to `through`, on `lanes` that it shares with earlier transfers."""

    axis: str
    lanes: tuple[str, ...]
    through: float
    since: float = float("-inf")


class _Walk:
    """Follows one rank's compute lane in order, and sums the waiting time of each action."""

    def __init__(self, schedule: Schedule, rank: int, origin: float, records: Iterable[Record]) -> None:
        self._schedule, self._rank, self._clock = schedule, rank, origin
        self._lanes: dict[str, list[Interval]] = defaultdict(list)
        self._arrived: dict[tuple[str | None, int, int], _Transfer] = {}
        self._gathers: dict[tuple[int, int | None], list[Interval]] = defaultdict(list)
        self._reductions: list[_Transfer] = []
        for mine, lane, action, start, end in records:
            if mine != rank:
                continue
            self._lanes[lane].append((start, end))
            if action.op == "recv":
                self._arrived[action.payload, action.stage, action.micro_batch] = _Transfer("pipeline", (lane,), end)
            elif action.op == "unshard":
                self._gathers[action.stage, action.unit].append((start, end))
            elif action.op == "reduce_grad":
                self._reductions.append(_Transfer("replicate" if lane == "replicate" else "shard", (lane,), end, start))
        self._tally = _Tally()

    def over(self, compute: Sequence[Record], at_barrier: Sequence[float]) -> _Tally:
        tally = self._tally
        for _, _, action, start, end in compute:
            if action.op in COMPUTE:
                self._wait(start, self._waited_for(action, start))
                tally.computed += end - start
            elif action.op == "norm_barrier":
                mine = at_barrier[self._rank]
                self._wait(mine, _latest_first(self._reductions))
                tally.closing += end - min(max(at_barrier), end)
            else:
                tally.closing += end - start
            self._clock = max(self._clock, end)
        return tally

    def _waited_for(self, action: Action, start: float) -> list[_Transfer]:
        """The transfers that the action needs, the last to finish first."""
        stage, unit, units = action.stage, action.unit, self._schedule.units
        transfers: list[_Transfer] = []
        payload = None
        if action.op in FORWARD and not unit:
            payload = "activation"
        elif action.op in GRADIENT and (unit is None or (units is not None and unit + 1 == units[stage])):
            payload = "gradient"
        if message := self._arrived.get((payload, stage, action.micro_batch)):
            transfers.append(message)
        if gathered := [end for begin, end in self._gathers[stage, unit] if begin < start]:
            transfers.append(_Transfer("shard", SHARD_LANES, gathered[-1]))
        return _latest_first(transfers)

    def _wait(self, until: float, transfers: Iterable[_Transfer]) -> None:
        """Count idle time before `until` in which the lanes of `transfers` were busy as exposed, each moment once."""
        idle = [(self._clock, until)] if until > self._clock else []
        for transfer in transfers:
            for lane in transfer.lanes:
                before = sum(end - start for start, end in idle)
                idle = [remaining for gap in idle for remaining in self._subtract_busy(gap, lane, transfer)]
                self._tally.exposed[transfer.axis] += before - sum(end - start for start, end in idle)

    def _subtract_busy(self, gap: Interval, lane: str, transfer: _Transfer) -> list[Interval]:
        """The parts of `gap` without the time in which `lane` was busy with the transfer."""
        first, last = max(gap[0], transfer.since), min(gap[1], transfer.through)
        if first >= last:
            return [gap]
        busy, left, at = self._lanes[lane], [], gap[0]
        low = bisect_right(busy, first, key=lambda interval: interval[1])  # the intervals of a lane do not overlap
        high = bisect_left(busy, last, key=lambda interval: interval[0])
        for start, end in busy[low:high]:
            if max(start, first) > at:
                left.append((at, max(start, first)))
            at = max(at, min(end, last))
        return [*left, (at, gap[1])] if at < gap[1] else left


def _latest_first(transfers: Iterable[_Transfer]) -> list[_Transfer]:
    return sorted(transfers, key=lambda transfer: transfer.through, reverse=True)
