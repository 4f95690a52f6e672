"""Stalls of whole jobs without processes: the schedule is played on every rank of a mesh until all ranks are blocked."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

from meshwright.diagnosis.culprit import Culprit, RankStatus, find_culprit
from meshwright.events.progress import PendingWait
from meshwright.schedules.action import COMPUTE, FORWARD, Action
from meshwright.schedules.expand import expand
from meshwright.schedules.play import Play
from meshwright.schedules.registry import SCHEDULES, build
from meshwright.schedules.schedule import Schedule
from meshwright.spec.layout import Layout
from tests.schedules.sizes import PIPELINES


class PipelinePlay(Play):
    """One pipeline of a job; the messages of a broken channel from some send on do not arrive."""

    def __init__(self, schedule: Schedule, sends_ahead: int | None) -> None:
        super().__init__(schedule, sends_ahead)
        self.lost: Action | None = None
        self.broken: set[tuple[int, int]] = set()

    def _match(self, source: int, target: int) -> None:
        sends = self.channels[source, target].sends
        if self.lost is not None and self.lost in sends:
            self.broken.add((source, target))
        if (source, target) not in self.broken:
            super()._match(source, target)

    def blocking_receive(self, rank: int, action: Action) -> Action | None:
        """The receive for which compute waits."""
        for part in action.parts:
            source = self._source(part)
            if source is not None and not self._arrived(rank, part):
                payload = "activation" if part.op in FORWARD else "gradient"
                return Action("recv", part.stage, part.micro_batch, None, source, payload)
        return None


@dataclass
class Stall:
    """A stalled job: what is known of its ranks, and the rank that caused it."""

    ranks: list[RankStatus]
    schedule: Schedule
    layout: Layout
    sends_ahead: int | None
    hosts_wait: bool
    culprit: int
    text: str

    def named(self) -> Culprit | None:
        """The answer of the function under test."""
        return find_culprit(
            self.ranks, self.schedule, self.layout, hosts_wait=self.hosts_wait, sends_ahead=self.sends_ahead
        )


class JobPlay:
    """All ranks of a job in one step. With `ahead` hosts issue that many actions before their device has run them."""

    def __init__(self, schedule: Schedule, layout: Layout, sends_ahead: int | None, ahead: list[int]) -> None:
        self.schedule, self.layout, self.ahead = schedule, layout, ahead
        groups = layout.groups("pipeline")
        self.plays = [PipelinePlay(schedule, sends_ahead) for _ in groups]
        self.location = {
            r: (play, place) for play, group in zip(self.plays, groups, strict=True) for place, r in enumerate(group)
        }
        self.device = [0] * layout.ranks
        self.stop_at: dict[int, int] = {}
        self.joined: dict[object, set[int]] = defaultdict(set)
        self.changed = [0] * layout.ranks
        self.axes = {
            "unshard": layout.groups("shard"),
            "reduce_grad": layout.groups("shard", "replicate"),
            "norm_barrier": (tuple(range(layout.ranks)),),
            "compute": layout.groups("tensor"),
        }
        self.group_of = {op: {r: group for group in found for r in group} for op, found in self.axes.items()}

    def actions(self, rank: int) -> tuple[Action, ...]:
        return self.schedule.actions[self.location[rank][1]]

    def run(self, source: random.Random) -> None:
        order, progressed, turn = list(range(self.layout.ranks)), True, 0
        while progressed:
            progressed = False
            source.shuffle(order)
            for rank in order:
                for _ in range(source.randint(1, 12)):
                    if not self._step(rank):
                        break
                    turn += 1
                    self.changed[rank], progressed = turn, True

    def _step(self, rank: int) -> bool:
        index, actions = self.device[rank], self.actions(rank)
        if index >= min(len(actions), self.stop_at.get(rank, len(actions))):
            return False
        action = actions[index]
        play, place = self.location[rank]
        op = "compute" if action.op in COMPUTE else action.op
        if op == "compute" and play.blocking_receive(place, action) is not None:
            return False
        if op in self.group_of:
            group = self.group_of[op][rank]
            joined = self.joined[op, group, index if op != "norm_barrier" else -1]
            joined.add(rank)
            if len(joined) < len(group):
                return False
        if not play._step(place, action):
            return False
        self.device[rank] += 1
        return True

    def statuses(self, *, pending: bool, stopped: int | None = None) -> list[RankStatus]:
        """The state of every rank; with `pending` the communication in which it waits is known."""
        end = max(self.changed) + 1
        found = []
        for rank in range(self.layout.ranks):
            actions = self.actions(rank)
            host = min(self.device[rank] + self.ahead[rank], self.stop_at.get(rank, len(actions)), len(actions) - 1)
            wait = self._pending(rank) if pending and rank not in self.stop_at else None
            seconds = float(end - self.changed[rank])
            node = f"host {self.layout.node(rank)}"
            found.append(RankStatus(rank, node, "train", 41, host, seconds, rank == stopped, pending=wait))
        return found

    def _pending(self, rank: int) -> PendingWait | None:
        """Return the wait on a rank's page in a run on CPUs: receives, gathers, reductions and sums around a step."""
        index, actions = self.device[rank], self.actions(rank)
        if index == len(actions):
            return PendingWait("all_reduce", -1, -1, -1, -1, 0)
        play, place = self.location[rank]
        action = actions[index]
        receive = play.blocking_receive(place, action) if action.op in COMPUTE else None
        if receive is not None:
            return PendingWait("recv", receive.stage, receive.micro_batch, -1, receive.peer, 0)
        if action.op in ("unshard", "reduce_grad"):
            return PendingWait(action.op, action.stage, -1, action.unit or 0, -1, 0)
        return None


def stalls(count: int, seed: int) -> list[Stall]:
    """`count` stalls over all schedules, and pipelines with shards, replicas and tensor ranks."""
    source = random.Random(seed)
    names = sorted(PIPELINES)
    return [_stall(names[number % len(names)], source) for number in range(count)]


def _stall(name: str, source: random.Random) -> Stall:
    pipeline = source.choice((2, 3, 4))
    sizes = {
        "replicate": source.choice((1, 1, 2)),
        "shard": source.choice((1, 2, 3)),
        "tensor": source.choice((1, 1, 2)),
    }
    micro_batches = pipeline * source.choice((2, 3))
    entry = SCHEDULES[name]
    stages = entry.stages_per_rank.start if len(entry.stages_per_rank) < 3 else source.choice((2, 3))
    whole = build(name, pipeline, micro_batches, stages)
    order = source.choice(("depth_first", "depth_first", "layered"))
    schedule = expand(whole, source.choice((1, 2, 3)), order=order, reduce=source.choice(("once", "stretch")))
    axes = [
        ("replicate", sizes["replicate"]),
        ("pipeline", pipeline),
        ("shard", sizes["shard"]),
        ("tensor", sizes["tensor"]),
    ]
    if source.random() < 0.5:
        axes[0], axes[1] = axes[1], axes[0]
    layout = Layout(tuple((axis, size) for axis, size in axes), 4)
    asynchronous = source.random() < 0.5
    stops_rank = source.random() < 0.25
    if sizes["tensor"] > 1 and not asynchronous:
        stops_rank = True  # else nothing tells the ranks of one tensor group apart
    sends_ahead = source.choice((None, None, 1, 2)) if not asynchronous else None
    ahead = [source.randint(1, 12) if asynchronous else 0 for _ in range(layout.ranks)]
    job = JobPlay(schedule, layout, sends_ahead, ahead)
    lost = not asynchronous and sizes["tensor"] == 1 and source.random() < 0.4
    culprit = source.randrange(layout.ranks)
    sends = [action for action in job.actions(culprit) if action.op == "send"]
    if lost:
        play, _ = job.location[culprit]
        play.lost = source.choice(sends)
        text = f"loses {play.lost}"
    else:
        job.stop_at[culprit] = source.randrange(len(job.actions(culprit)))
        text = f"stops at {job.actions(culprit)[job.stop_at[culprit]]}"
    job.run(source)
    stopped = culprit if stops_rank and not lost else None
    ranks = job.statuses(pending=not asynchronous, stopped=stopped)
    mode = "issues ahead" if asynchronous else "waits"
    return Stall(
        ranks,
        schedule,
        layout,
        sends_ahead,
        not asynchronous,
        culprit,
        f"{name} {dict(layout.axes)} {mode}: rank {culprit} {text}",
    )
