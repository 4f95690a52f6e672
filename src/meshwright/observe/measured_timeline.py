"""Turns recorded steps into timelines of the simulator's type, with the same actions, lanes and totals but measured
times.

The recording of each rank is compared with its actions in the schedule. An action that did not run, or ran out of
order, is an error.
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
"""(start, end) in seconds."""
SHARD_LANES = ("unshard", "reduce")
"""Names of the lanes for collectives over the shard axis: gathers of weights, and reductions of gradients."""
COLLECTIVES = (*SHARD_LANES, "replicate")
"""Names of the lanes for collectives."""


def measured_timeline(schedule: Schedule, ranks: Sequence[StepSpans]) -> tuple[Timeline, float]:
    """Return (timeline of one step of all pipeline ranks, time of its first action in seconds).

    `ranks` has the detailed recording of each pipeline rank, with times on one clock. In the timeline:

    - Times count from the first action. `step_seconds` is the duration of the whole step, including data and token
      count.
    - A message is in transfer from the time at which both ranks have issued it and the channel is free, as in a
      simulated step.
    - Exposed time is the time in which a rank computes nothing before an action that waits for a transfer, while bytes
      of that transfer are moving.

    Raises ValueError if the ranks did not follow the schedule.
    """
    if len(ranks) != schedule.ranks:
        raise ValueError(f"{len(ranks)} recorded ranks for a schedule of {schedule.ranks}")
    compute = [
        _compute(rank, actions, _lane(spans, "compute"))
        for rank, (actions, spans) in enumerate(_by_rank(schedule, ranks))
    ]
    collectives = [
        _collectives(rank, actions, spans) for rank, (actions, spans) in enumerate(_by_rank(schedule, ranks))
    ]
    messages = _messages(schedule, ranks)
    records = [record for group in (*compute, *collectives, messages) for record in group]
    origin = min(record[3] for record in records)
    at_barrier = [_barrier_arrival(*records) for records in zip(compute, collectives, strict=True)]
    rank_seconds = [
        _WaitCounter(schedule, rank, origin, records).count(compute[rank], at_barrier) for rank in range(schedule.ranks)
    ]
    intervals = [
        (start, end) for rank_records in compute for _, _, action, start, end in rank_records if action.op in COMPUTE
    ]
    return Timeline(
        schedule=schedule,
        step_seconds=max(step.seconds for step in ranks),
        compute_seconds=tuple(sums.computed for sums in rank_seconds),
        exposed_seconds=tuple(sums.exposed for sums in rank_seconds),
        closing_seconds=tuple(sums.closing for sums in rank_seconds),
        start_seconds=tuple(rank_records[0][3] - origin for rank_records in compute),
        window_seconds=max(end for _, end in intervals) - min(start for start, _ in intervals),
        records=tuple((rank, lane, act, start - origin, end - origin) for rank, lane, act, start, end in records),
    ), origin


def _by_rank(schedule: Schedule, ranks: Sequence[StepSpans]) -> Iterable[tuple[tuple[Action, ...], StepSpans]]:
    return zip(schedule.actions, ranks, strict=True)


def _lane(step: StepSpans, lane: str) -> list[Span]:
    return [span for span in step.spans if span.lane == lane]


def _end(span: Span) -> float:
    return span.start + span.duration


def _compute(rank: int, actions: Sequence[Action], spans: Sequence[Span]) -> list[Record]:
    """Return a record of each computing action, with the start and end of its span.

    Neighbouring spans of the same name, such as a backward pass and its gradient accumulation, are joined first.
    """
    joined: list[tuple[str, float, float]] = []
    for span in spans:
        first = joined.pop()[1] if joined and joined[-1][0] == span.name else span.start
        joined.append((span.name, first, _end(span)))
    scheduled = [act for act in actions if act.op in COMPUTE or act.op in ("norm_barrier", "optim")]
    for index, act in enumerate(scheduled):
        name = joined[index][0] if index < len(joined) else "nothing"
        if name != act.label:
            raise ValueError(f"pipeline rank {rank} ran {name} where its schedule says {act.label} (action {index})")
    if len(joined) > len(scheduled):
        raise ValueError(f"pipeline rank {rank} ran {joined[len(scheduled)][0]} after the end of its schedule")
    return [(rank, "compute", act, start, end) for act, (_, start, end) in zip(scheduled, joined, strict=True)]


def _collectives(rank: int, actions: Sequence[Action], step: StepSpans) -> list[Record]:
    """Return records of the collectives that ran.

    Some collectives of the schedule are skipped and have no span, for example a gather over one rank or of weights that
    are resident.
    """
    action_by_label = {action.label: action for action in actions if action.op in ("unshard", "reduce_grad")}
    return [
        (rank, span.lane, action_by_label[span.name], span.start, _end(span))
        for span in step.spans
        if span.lane in COLLECTIVES
    ]


def _messages(schedule: Schedule, ranks: Sequence[StepSpans]) -> list[Record]:
    """Return two records for every message, of its sender and its receiver.

    The k-th send in a channel belongs to its k-th receive.
    """
    rank_of = schedule.rank_of
    records = []
    for source, target in schedule.channels:
        sends = [
            action for action in schedule.actions[source] if action.op == "send" and rank_of[action.peer] == target
        ]
        receives = [
            action for action in schedule.actions[target] if action.op == "recv" and rank_of[action.peer] == source
        ]
        sent = _lane(ranks[source], f"send {target}")
        received = _lane(ranks[target], f"recv {source}")
        channel_free = float("-inf")
        for send, send_span, receive, receive_span in zip(sends, sent, receives, received, strict=True):
            start = max(send_span.start, receive_span.start, channel_free)
            channel_free = max(start, _end(receive_span))
            send_end = (
                # With Gloo only the receiver measures the duration.
                max(start, _end(send_span)) if send_span.duration else channel_free
            )
            records.append((source, f"send {target}", send, start, send_end))
            records.append((target, f"recv {source}", receive, start, channel_free))
    return records


def _barrier_arrival(compute: Sequence[Record], collectives: Sequence[Record]) -> float:
    """Return the time at which a rank had finished its own gradient reductions, after which it waits in norm_barrier."""
    _, _, _, start, end = next(record for record in compute if record[2].op == "norm_barrier")
    last = max((record[4] for record in collectives if record[2].op == "reduce_grad"), default=start)
    return min(max(start, last), end)


@dataclass
class _RankSeconds:
    """Seconds of one rank's step.

    `computed` is computation, `closing` is gradient norm and optimizer, and `exposed` is exposed time by mesh axis.
    """

    computed: float = 0.0
    closing: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AXES, 0.0))


@dataclass(frozen=True)
class _Transfer:
    """A transfer that an action waits for. It moves bytes between `start` and `end`, whenever one of `lanes` is busy."""

    axis: str
    lanes: tuple[str, ...]
    end: float
    start: float = float("-inf")


class _WaitCounter:
    """Goes through one rank's compute records in order of time, and adds up the exposed time before each action."""

    def __init__(self, schedule: Schedule, rank: int, origin: float, records: Iterable[Record]) -> None:
        self._schedule = schedule
        self._rank = rank
        self._clock = origin
        self._lanes: dict[str, list[Interval]] = defaultdict(list)
        self._arrived: dict[tuple[str | None, int, int], _Transfer] = {}
        self._gathers: dict[tuple[int, int | None], list[Interval]] = defaultdict(list)
        self._reductions: list[_Transfer] = []
        for record_rank, lane, action, start, end in records:
            if record_rank != rank:
                continue
            self._lanes[lane].append((start, end))
            if action.op == "recv":
                self._arrived[action.payload, action.stage, action.micro_batch] = _Transfer("pipeline", (lane,), end)
            elif action.op == "unshard":
                self._gathers[action.stage, action.unit].append((start, end))
            elif action.op == "reduce_grad":
                self._reductions.append(_Transfer("replicate" if lane == "replicate" else "shard", (lane,), end, start))
        self._sums = _RankSeconds()

    def count(self, compute: Sequence[Record], at_barrier: Sequence[float]) -> _RankSeconds:
        """Return the seconds of the step. `at_barrier` has the times at which each rank had finished its reductions."""
        sums = self._sums
        for _, _, action, start, end in compute:
            if action.op in COMPUTE:
                self._wait(start, self._waited_for(action, start))
                sums.computed += end - start
            elif action.op == "norm_barrier":
                barrier_arrival = at_barrier[self._rank]
                self._wait(barrier_arrival, _latest_first(self._reductions))
                sums.closing += end - min(max(at_barrier), end)
            else:
                sums.closing += end - start
            self._clock = max(self._clock, end)
        return sums

    def _waited_for(self, action: Action, start: float) -> list[_Transfer]:
        """Return the transfers that the action needs. The one that ends last comes first."""
        stage = action.stage
        unit = action.unit
        units = self._schedule.units
        transfers: list[_Transfer] = []
        payload = None
        if action.op in FORWARD and not unit:
            payload = "activation"
        elif action.op in GRADIENT and (unit is None or (units is not None and unit + 1 == units[stage])):
            payload = "gradient"
        if message := self._arrived.get((payload, stage, action.micro_batch)):
            transfers.append(message)
        if gather_ends := [end for gather_start, end in self._gathers[stage, unit] if gather_start < start]:
            transfers.append(_Transfer("shard", SHARD_LANES, gather_ends[-1]))
        return _latest_first(transfers)

    def _wait(self, until: float, transfers: Iterable[_Transfer]) -> None:
        """Count as exposed the idle time before `until` in which a lane of `transfers` was busy. Each moment counts once."""
        idle = [(self._clock, until)] if until > self._clock else []
        for transfer in transfers:
            for lane in transfer.lanes:
                idle_seconds = sum(end - start for start, end in idle)
                idle = [remaining for gap in idle for remaining in self._subtract_busy(gap, lane, transfer)]
                self._sums.exposed[transfer.axis] += idle_seconds - sum(end - start for start, end in idle)

    def _subtract_busy(self, gap: Interval, lane: str, transfer: _Transfer) -> list[Interval]:
        """Return the parts of `gap` in which `lane` was not busy with the transfer.

        Example: the gap (0, 10) without the busy time (2, 4) has the parts (0, 2) and (4, 10).
        """
        first = max(gap[0], transfer.start)
        last = min(gap[1], transfer.end)
        if first >= last:
            return [gap]
        intervals = self._lanes[lane]
        remaining = []
        position = gap[0]
        # Works because intervals of a lane do not overlap.
        low = bisect_right(intervals, first, key=lambda interval: interval[1])
        high = bisect_left(intervals, last, key=lambda interval: interval[0])
        for start, end in intervals[low:high]:
            if max(start, first) > position:
                remaining.append((position, max(start, first)))
            position = max(position, min(end, last))
        return [*remaining, (position, gap[1])] if position < gap[1] else remaining


def _latest_first(transfers: Iterable[_Transfer]) -> list[_Transfer]:
    return sorted(transfers, key=lambda transfer: transfer.end, reverse=True)
