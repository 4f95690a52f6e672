"""Event-driven simulation of a schedule: compute, P2P messages, parameter gathers and gradient reductions of each rank.

Each rank has one compute lane that runs its actions in order, one lane for each type of collective, and one channel for messages to
each other rank. A rank issues communication when the compute action before it ends. A compute action waits for its inputs.

Ranks depend on each other only through messages and the barrier of the gradient norm. So the simulator needs no global clock: it
advances one rank until a message is missing, and resumes that rank when the sender's part is simulated. The running time is
linear in the number of actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from meshwright.schedules.action import COMPUTE, FORWARD, Action
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.durations import Durations, SlowInterval, end_with_slowdown
from meshwright.simulator.timeline import AXES, Record, Timeline
from meshwright.simulator.timing import Timing
from meshwright.spec.errors import BadInput

Transfer = tuple[str, float, float]
"""A message or a collective: (axis, time when it was issued, time when it is complete)."""


def simulate(schedule: Schedule, timing: Timing, durations: Durations | None = None) -> Timeline:
    """Simulate one step of `schedule` with the durations of `timing`. If `durations` is given, compute seconds come from it instead.

    Raises BadInput if a table of `timing` does not fit the schedule, and if the schedule deadlocks.

    1F1B with 2 stages and 4 micro-batches: each rank computes 4 · 3 seconds and waits for 3 seconds (the bubble):

    >>> from meshwright.schedules.registry import build
    >>> from meshwright.simulator.timing import uniform_timing
    >>> simulate(build("1f1b", 2, 4), uniform_timing(2)).step_seconds
    15.0
    """
    timing.check(schedule)
    return _Simulation(schedule, timing, durations or Durations(timing)).run()


@dataclass(slots=True)
class _Channel:
    """The messages from one rank to another rank, in the order in which they are issued.

    `sends` and `receives` have (action, time of issue). The first send matches the first receive, and so on.
    """

    sends: list[tuple[Action, float]] = field(default_factory=list)
    receives: list[tuple[Action, float]] = field(default_factory=list)
    matched: int = 0
    """How many pairs of a send and its receive have been simulated."""
    free_at: float = 0.0
    """Time when the last simulated message is complete; the next message cannot begin earlier."""


@dataclass(slots=True)
class _RankState:
    """Simulation state of one pipeline rank."""

    number: int
    position: int = 0
    """Index of the next action in the rank's schedule."""
    compute_free_at: float = 0.0
    """Time from which the compute lane is free for the next action."""
    lane_free_at: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time when each lane of collectives becomes free."""
    compute_seconds: float = 0.0
    closing_seconds: float = 0.0
    """Seconds in the gradient norm and the optimizer."""
    compute_start: float = float("inf")
    """Start of the first compute action."""
    compute_end: float = 0.0
    """End of the last compute action."""
    gathers: dict[tuple[int, int], Transfer] = field(default_factory=dict)
    """By (stage, unit), the gathers of parameters that no compute action has used yet."""
    reductions: list[Transfer] = field(default_factory=list)
    """All reductions that the rank has issued in this step, over the shard and replicate axes."""
    accumulate_seconds: dict[int, float] = field(default_factory=dict)
    """By index of an action, seconds to add its gradients to earlier ones. An action without an entry adds to nothing."""
    slow_intervals: list[SlowInterval] = field(default_factory=list)
    """Times from now on in which collectives run at the same time as compute, and slow compute down."""
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AXES, 0.0))
    """By axis, seconds in which compute has waited for communication."""


class _Simulation:
    def __init__(self, schedule: Schedule, timing: Timing, durations: Durations) -> None:
        self.schedule = schedule
        self.timing = timing
        self.durations = durations
        self.rank_of = schedule.rank_of
        self.last_unit = [count - 1 for count in schedule.units or (1,) * schedule.stages]
        self.slowdowns = {
            "unshard": timing.gather_slowdown,
            "reduce": timing.reduce_slowdown,
            "replicate": timing.replicate_slowdown,
        }
        self.ranks = [_RankState(number) for number in range(schedule.ranks)]
        if timing.accumulate:
            for rank in self.ranks:
                rank.accumulate_seconds = accumulate_seconds_by_action(schedule, timing, rank.number)
        self.channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.messages: dict[tuple[bool, int, int], Transfer] = {}
        """Messages that were simulated. The key is (whether it is an activation or else a gradient, receiving stage, micro-batch)."""
        self.blocked_on_message: dict[tuple[bool, int, int], int] = {}
        """For messages that are missing (same key), the rank that waits for the message."""
        self.runnable = list(range(schedule.ranks))
        """Stack of the ranks that can advance."""
        self.barrier_arrivals: dict[int, float] = {}
        """By rank, the time when it reached the gradient norm."""
        self.unissued_reductions = Counter(
            (a.stage, a.unit or 0) for rank_actions in schedule.actions for a in rank_actions if a.op == "reduce_grad"
        )
        """By (stage, unit), how many reductions over shards the step still has. Replicas reduce gradients once, after the last of them."""
        self.records: list[Record] = []
        self.handlers = dict.fromkeys(COMPUTE, self._compute) | {
            "send": self._send,
            "recv": self._receive,
            "unshard": self._unshard,
            "reshard": lambda rank, action: True,
            "reduce_grad": self._reduce,
            "norm_barrier": self._barrier,
            "optim": self._optim,
        }

    def run(self) -> Timeline:
        while self.runnable:
            self._advance(self.ranks[self.runnable.pop()])
        actions = self.schedule.actions
        stuck = [
            f"rank {rank.number} at {actions[rank.number][rank.position]}"
            for rank in self.ranks
            if rank.position < len(actions[rank.number])
        ]
        if stuck:
            raise BadInput(f"schedule {self.schedule.name} deadlocks: {', '.join(stuck)}")
        window = max(rank.compute_end for rank in self.ranks) - min(rank.compute_start for rank in self.ranks)
        ends = [max(rank.compute_free_at, *rank.lane_free_at.values(), 0.0) for rank in self.ranks]
        return Timeline(
            schedule=self.schedule,
            step_seconds=max(ends),
            compute_seconds=tuple(rank.compute_seconds for rank in self.ranks),
            exposed_seconds=tuple(rank.exposed for rank in self.ranks),
            closing_seconds=tuple(rank.closing_seconds for rank in self.ranks),
            start_seconds=tuple(rank.compute_start for rank in self.ranks),
            window_seconds=window,
            records=tuple(self.records),
        )

    def _advance(self, rank: _RankState) -> None:
        actions = self.schedule.actions[rank.number]
        for action in actions[rank.position :]:
            if not self.handlers[action.op](rank, action):
                return
            rank.position += 1

    def _compute(self, rank: _RankState, action: Action) -> bool:
        transfers: list[Transfer] = []
        for part in action.pair or (action,):
            if not self._add_inputs(rank, part, transfers):
                return False
        start = self._wait_for(rank, transfers) if transfers else rank.compute_free_at
        work = self.durations.compute(action) + self._copy_seconds(rank, action)
        if rank.slow_intervals:
            rank.slow_intervals = [interval for interval in rank.slow_intervals if interval[1] > start]
        end = end_with_slowdown(start, work, rank.slow_intervals) if rank.slow_intervals else start + work
        rank.compute_seconds += end - start
        rank.compute_start = min(rank.compute_start, start)
        rank.compute_end = end
        rank.compute_free_at = end
        self.records.append((rank.number, "compute", action, start, end))
        return True

    def _add_inputs(self, rank: _RankState, part: Action, transfers: list[Transfer]) -> bool:
        """Append the communication that `part` waits for to `transfers`. Returns False if one of its messages is not simulated yet."""
        stage = part.stage
        unit = part.unit
        if part.op in FORWARD:
            sender = stage - 1 if not unit else -1
        elif part.op == "backward_weight":
            return True
        else:
            sender = stage + 1 if unit is None or unit == self.last_unit[stage] else -1
        if 0 <= sender < len(self.rank_of) and self.rank_of[sender] != rank.number:
            key = sender < stage, stage, part.micro_batch
            message = self.messages.get(key)
            if message is None:
                self.blocked_on_message[key] = rank.number
                return False
            transfers.append(message)
        if rank.gathers and (gather := rank.gathers.get((stage, unit or 0))):
            transfers.append(gather)
        return True

    def _copy_seconds(self, rank: _RankState, action: Action) -> float:
        """Return the seconds that an action needs to copy gathered weights out of the buffer and to accumulate gradients."""
        seconds = rank.accumulate_seconds.get(rank.position, 0.0)
        timing = self.timing
        if rank.gathers:
            for part in action.parts:
                used = part.op != "backward_weight" and rank.gathers.pop((part.stage, part.unit or 0), None)
                if used and timing.copy_out:
                    seconds += timing.copy_out[part.stage][part.unit or 0]
        return seconds

    def _wait_for(self, rank: _RankState, transfers: list[Transfer]) -> float:
        """Block the compute lane until all `transfers` are complete, and return that time.

        Time in which a transfer was issued but not complete counts as exposed on its axis, at most once: where several transfers are
        in progress, it counts for the one that ends last. A wait before any of them is issued counts as idle time.
        """
        begin = rank.compute_free_at
        uncounted_until = rank.compute_free_at = max(begin, *(end for _, _, end in transfers)) if transfers else begin
        if uncounted_until == begin:
            return begin
        for axis, issued, end in sorted(transfers, key=lambda transfer: transfer[2], reverse=True):
            low = max(begin, issued)
            high = min(uncounted_until, end)
            if high > low:
                rank.exposed[axis] += high - low
                uncounted_until = low
        return rank.compute_free_at

    def _send(self, rank: _RankState, action: Action) -> bool:
        target = self.rank_of[action.peer]
        self.channels[rank.number, target].sends.append((action, rank.compute_free_at))
        self._match_next(rank.number, target)
        return True

    def _receive(self, rank: _RankState, action: Action) -> bool:
        source = self.rank_of[action.peer]
        self.channels[source, rank.number].receives.append((action, rank.compute_free_at))
        self._match_next(source, rank.number)
        return True

    def _match_next(self, source: int, target: int) -> None:
        """Simulate the next message from rank `source` to rank `target`, if both have issued it."""
        channel = self.channels[source, target]
        if channel.matched >= min(len(channel.sends), len(channel.receives)):
            return
        (send, sent), (receive, posted) = channel.sends[channel.matched], channel.receives[channel.matched]
        if (send.stage, send.peer, send.micro_batch) != (receive.peer, receive.stage, receive.micro_batch):
            raise BadInput(f"rank {source} sends {send} where rank {target} expects {receive}")
        channel.matched += 1
        issued = max(sent, posted)
        start = max(issued, channel.free_at)
        sizes = self.timing.boundary_bytes
        size = sizes[min(send.stage, send.peer)] if sizes else 0.0
        channel.free_at = start + self.timing.between(source, target).seconds(size)
        key = send.peer > send.stage, send.peer, send.micro_batch
        self.messages[key] = "pipeline", issued, channel.free_at
        self.records.append((source, f"send {target}", send, start, channel.free_at))
        self.records.append((target, f"recv {source}", receive, start, channel.free_at))
        if key in self.blocked_on_message:
            self.runnable.append(self.blocked_on_message.pop(key))

    def _unshard(self, rank: _RankState, action: Action) -> bool:
        unit = action.stage, action.unit or 0
        if self.timing.unshard:
            rank.gathers[unit] = self._collective(
                rank, "unshard", "shard", action, self.timing.unshard[unit[0]][unit[1]]
            )
        elif self.timing.copy_out:  # an unsharded weight is copied too
            rank.gathers[unit] = "shard", rank.compute_free_at, rank.compute_free_at
        return True

    def _reduce(self, rank: _RankState, action: Action) -> bool:
        stage = action.stage
        unit = action.unit or 0
        if self.timing.single_reduce_buffer and rank.reductions:
            self._wait_for(rank, [transfer for transfer in rank.reductions[-2:] if transfer[0] == "shard"])
        if self.timing.copy_in:
            rank.compute_free_at += self.timing.copy_in[stage][unit]
            rank.compute_seconds += self.timing.copy_in[stage][unit]
            rank.compute_end = rank.compute_free_at
        issued = rank.compute_free_at
        if self.timing.reduce:
            seconds = self.timing.reduce[stage][unit]
            transfer = self._collective(
                rank, "reduce", "shard", action, seconds, shared_communicator=self.timing.shared_communicator
            )
            rank.reductions.append(transfer)
            issued = transfer[2]
        self.unissued_reductions[stage, unit] -= 1
        if self.timing.replicate and not self.unissued_reductions[stage, unit]:
            seconds = self.timing.replicate[stage][unit]
            rank.reductions.append(self._collective(rank, "replicate", "replicate", action, seconds, issued))
        return True

    def _collective(
        self,
        rank: _RankState,
        lane: str,
        axis: str,
        action: Action,
        seconds: float,
        issued: float | None = None,
        shared_communicator: bool = False,
    ) -> Transfer:
        """Run a collective in `lane` from time `issued` on, or when the lane is free. Without `issued`, it is issued when compute is free.

        With `shared_communicator`, it runs in the lane of the gathers.
        """
        issued = rank.compute_free_at if issued is None else issued
        queue = "unshard" if shared_communicator else lane
        start = max(issued, rank.lane_free_at[queue])
        rank.lane_free_at[queue] = start + seconds
        slowdown = self.slowdowns[lane]
        if slowdown != 1.0 and seconds:
            rank.slow_intervals.append((start, start + seconds, slowdown))
        self.records.append((rank.number, lane, action, start, start + seconds))
        return axis, issued, start + seconds

    def _barrier(self, rank: _RankState, action: Action) -> bool:
        """Wait for the rank's own reductions, then for all ranks. Returns False while other ranks have not reached the barrier."""
        if rank.number not in self.barrier_arrivals:
            self.barrier_arrivals[rank.number] = self._wait_for(rank, rank.reductions)
            if len(self.barrier_arrivals) == len(self.ranks):
                self.runnable += [number for number in self.barrier_arrivals if number != rank.number]
        if len(self.barrier_arrivals) < len(self.ranks):
            return False
        rank.compute_free_at = max(self.barrier_arrivals.values()) + self.timing.tied_gradient_seconds
        rank.exposed["pipeline"] += self.timing.tied_gradient_seconds
        self._run_closing(rank, action, self.timing.norm_seconds)
        return True

    def _optim(self, rank: _RankState, action: Action) -> bool:
        self._run_closing(rank, action, self.timing.optim_seconds[rank.number] if self.timing.optim_seconds else 0.0)
        return True

    def _run_closing(self, rank: _RankState, action: Action, seconds: float) -> None:
        self.records.append((rank.number, "compute", action, rank.compute_free_at, rank.compute_free_at + seconds))
        rank.compute_free_at += seconds
        rank.closing_seconds += seconds


def accumulate_seconds_by_action(schedule: Schedule, timing: Timing, rank: int) -> dict[int, float]:
    """Return the seconds in which actions of `rank` add their gradients to those of earlier micro-batches, by index of the action.

    If a reduction covers the gradients of a single action, that action adds nothing, and has no entry.
    """
    # The forward of the last unit computes its weight gradients together with the loss (kernels.loss).
    last_stage = schedule.stages - 1
    last_unit = schedule.units[-1] - 1 if schedule.units else 0
    seconds: dict[int, float] = {}
    not_accumulated: set[int] = set()
    unreduced: dict[tuple[int, int], list[int]] = defaultdict(list)
    """By (stage, unit), the indices of the actions whose gradients no reduction has covered yet."""
    for position, action in enumerate(schedule.actions[rank]):
        if action.op == "reduce_grad":
            positions = unreduced.pop((action.stage, action.unit or 0), [])
            not_accumulated.update(positions if len(positions) == 1 else ())
        elif action.op in COMPUTE:
            for part in action.pair or (action,):
                in_forward = last_unit and part.unit == last_unit and part.stage == last_stage
                if part.op == "forward" if in_forward else part.op in ("backward", "backward_weight"):
                    by_unit = timing.accumulate[part.stage]
                    added = sum(by_unit) if part.unit is None else by_unit[part.unit]
                    seconds[position] = seconds.get(position, 0.0) + added
                    unreduced[part.stage, part.unit or 0].append(position)
    return {position: time for position, time in seconds.items() if position not in not_accumulated}
