"""Names the rank that holds up a job, from the position of every rank and the plan's schedule.

The step is replayed, where each rank may advance at most to the position that its host has reached. In the replay, a rank stops at its
first action that needs something another rank has not provided within its own limit. The culprit is a rank that reaches its limit with all
its inputs available and still does not continue. All other ranks wait for it.

A host may have issued work that its device has not done yet. This does not mislead the replay, because what the device still needs is an
earlier action. If a message was sent and has not arrived, its sender is named.

Ranks of one tensor or context group run the same action together. If they have the same position, and none is stopped or dead, they cannot
be told apart. Then one of them is named as likely.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.diagnosis.schedule_dependencies import BEFORE_STEP, ScheduleDependencies
from meshwright.events.progress import PendingWait
from meshwright.schedules.schedule import Schedule
from meshwright.spec.layout import Layout
from meshwright.spec.plan import CONTEXT_AXES, DATA_AXES, SHARD_AXES

Confidence = Literal["certain", "likely"]
TRAINING = ("compile", "train")
PHASE_ORDER = ("start", "compile", "train", "validate", "save", "end")
GROUP_AXES = {
    "gather": SHARD_AXES,
    "reduce": (*DATA_AXES, *CONTEXT_AXES),
    "compute": ("tensor", *CONTEXT_AXES),
}
GROUP_TEXT = {"gather": "all-gather", "reduce": "gradient reduction", "compute": "part of the computation"}
_PENDING_GROUP = {"unshard": "gather", "reduce_grad": "reduce"}
NAMED_RANKS = 6
"""Number of waiting ranks that a message lists."""


@dataclass(frozen=True)
class RankStatus:
    """State of a rank: its progress, its seconds without progress, and whether its process is stopped or has ended.

    `action` is the index of the action that the host has begun. All earlier actions have been issued.
    """

    rank: int
    host: str
    phase: str
    step: int
    action: int
    seconds: float
    stopped: bool = False
    dead: bool = False
    pending: PendingWait | None = None


@dataclass(frozen=True)
class Waiting:
    """A rank that waits for another rank."""

    rank: int
    for_rank: int
    needs: str
    """What is missing, e.g. `activation`."""


@dataclass(frozen=True)
class Culprit:
    """The rank that holds up the others, and the ranks that wait for it, directly or through other ranks."""

    rank: int
    host: str
    step: int
    action: str
    """Label of the action that the rank is in; outside of training, its phase."""
    seconds: float
    reason: str
    confidence: Confidence
    waiting: tuple[Waiting, ...] = ()


def find_culprit(
    ranks: Sequence[RankStatus],
    schedule: Schedule | None,
    layout: Layout,
    *,
    hosts_wait: bool = True,
    sends_ahead: int | None = None,
) -> Culprit | None:
    """The rank that holds up the job; None if `ranks` is empty.

    `schedule` is the schedule of a training step; None if it is unknown. Without it, stopped or dead ranks are named first, else the first
    rank in the order of step and action. `hosts_wait` says whether hosts wait in collectives, as on CPUs, or issue work ahead of their
    devices. `sends_ahead` is how many messages a host can send on one channel before it waits.
    """
    if not ranks:
        return None
    known = {status.rank for status in ranks} == set(range(layout.ranks))
    trains = any(status.phase in TRAINING for status in ranks) or len({status.step for status in ranks}) > 1
    if schedule is None or not known or not trains:
        return _first_in_order(ranks)
    # The first step of an attempt compiles, and exchanges each message only when it is needed.
    compiles = any(status.phase == "compile" for status in ranks)
    dependencies = ScheduleDependencies(schedule.in_turns() if compiles else schedule, sends_ahead)
    return _Replay(ranks, dependencies, layout, hosts_wait).culprit()


def _first_in_order(ranks: Sequence[RankStatus]) -> Culprit:
    """The first stopped or dead rank; if there is none, the first rank in the order of step, phase and action."""
    marked = [status for status in ranks if status.dead or status.stopped]
    first = min(marked or ranks, key=lambda s: (s.step, PHASE_ORDER.index(s.phase), s.action, -s.seconds, s.rank))
    later = tuple(Waiting(s.rank, first.rank, "progress") for s in ranks if s.rank != first.rank)
    return _answer(first, _phase_text(first), later, "certain" if len(marked) == 1 else "likely")


def _phase_text(status: RankStatus) -> str:
    return f"action {status.action}" if status.phase in TRAINING else status.phase


@dataclass
class _Replay:
    """The replay of one step. `position` is the position of each rank so far; `blocked` says which rank each blocked rank waits for."""

    ranks: Sequence[RankStatus]
    needs: ScheduleDependencies
    layout: Layout
    hosts_wait: bool
    position: dict[int, int] = field(default_factory=dict)
    blocked: dict[int, Waiting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.status = {status.rank: status for status in self.ranks}
        self.ranks_of_pipeline = dict(enumerate(self.layout.groups("pipeline")))
        self.pipeline_rank = {rank: self.layout.coordinates(rank).get("pipeline", 0) for rank in self.status}
        self.pipeline = {rank: group for group in self.ranks_of_pipeline.values() for rank in group}
        self.groups: dict[str, dict[int, tuple[int, ...]]] = {
            name: {rank: group for group in self.layout.groups(*axes) for rank in group if len(group) > 1}
            for name, axes in GROUP_AXES.items()
        }
        if self.layout.expert > 1:
            self.groups["compute"] = {rank: group for group in self.layout.expert_groups() for rank in group}
        self._set_limits()

    def culprit(self) -> Culprit:
        """Replay the step and choose the rank that holds up the others."""
        self._run()
        self._follow_pending_sends()
        candidates = [status for status in self.ranks if status.rank not in self.blocked]
        marked = [s for s in self.ranks if s.dead] or [s for s in self.ranks if s.stopped]
        chosen = [s for s in candidates if s in marked] or marked or candidates or list(self.ranks)
        waiting = self._waiting_by_rank({status.rank for status in chosen})
        chosen.sort(key=lambda s: (self._is_in_collective(s), -len(waiting[s.rank]), -s.seconds, s.rank))
        first = chosen[0]
        sender = None if marked else self._sender_of_lost_message(first)
        if sender is not None:
            lost = Waiting(first.rank, sender, "message")
            return _answer(
                self.status[sender],
                self._label(sender),
                (lost, *waiting[first.rank]),
                "likely",
                f"it sent a message in step {self.step} that has not arrived at rank {first.rank}",
            )
        alone = len(chosen) == 1 and (first in candidates)
        certain: Confidence = "certain" if alone and (waiting[first.rank] or marked) else "likely"
        return _answer(first, self._label(first.rank), waiting[first.rank], certain)

    def _set_limits(self) -> None:
        """Choose the step to replay, and set each rank's position in it to the limit that its host has reached."""
        first = min(status.step for status in self.ranks)
        behind = [status for status in self.ranks if status.step == first and status.phase in TRAINING]
        self.step = first if behind else first + 1
        for status in self.ranks:
            self.position[status.rank] = self._limit(status)

    def _limit(self, status: RankStatus) -> int:
        """The position that a rank's host has reached in the replayed step (see `schedule_dependencies`)."""
        end = self.needs.last[self.pipeline_rank[status.rank]]
        if status.step < self.step:
            return BEFORE_STEP
        if status.step > self.step or status.phase not in TRAINING:
            return 2 * end + 2
        index = min(status.action, end - 1)
        halted = status.stopped or status.dead  # the collective that it joined cannot complete
        if status.pending is not None and status.pending.op == "all_reduce":
            return (-1 if index == 0 else 2 * end + 1) - halted
        joins = self.hosts_wait and not halted and self._joins(status, index)
        return 2 * index + joins

    def _joins(self, status: RankStatus, index: int) -> bool:
        """Whether a rank that is at a collective has joined it: it waits there, or no member of its group is known to wait there."""
        pipeline_rank = self.pipeline_rank[status.rank]
        if index in self.needs.joint[pipeline_rank]:
            return True
        for name, groups in self.groups.items():
            group = groups.get(status.rank)
            if group is None or self.needs.first_collective(pipeline_rank, name, 2 * index) != index:
                continue
            known = any(self._is_pending_at(self.status[member], status, index, name) for member in group)
            return not known or self._is_pending_at(status, status, index, name)
        return False

    def _is_pending_at(self, member: RankStatus, status: RankStatus, index: int, group: str) -> bool:
        """Whether `member` waits in the collective of kind `group` at action `index` of the step of `status`."""
        pending = member.pending
        same = (member.step, member.action) == (status.step, index)
        return pending is not None and same and _PENDING_GROUP.get(pending.op, "compute") == group

    def _run(self) -> None:
        """Lower positions until every rank is blocked or at its limit."""
        queue = deque(self.status)
        queued = set(queue)
        self._check_joint()
        while queue:
            rank = queue.popleft()
            queued.discard(rank)
            for changed in (
                *self._check_messages(rank),
                *self._check_groups(rank),
                *(self._check_joint() if not queue else ()),
            ):
                if changed not in queued:
                    queued.add(changed)
                    queue.append(changed)

    def _check_messages(self, rank: int) -> Iterable[int]:
        """Block pipeline ranks that need a message which `rank` has not sent. Yields ranks whose position has changed."""
        peer = self.pipeline_rank[rank]
        for other in self.pipeline[rank]:
            number = self.pipeline_rank[other]
            needs = self.needs.needs.get(number, {}).get(peer)
            index = None if needs is None else needs.first_blocked(self.position[rank])
            if index is not None and self._block(other, 2 * index, rank, self.needs.message(number, index, peer)):
                yield other

    def _check_groups(self, rank: int) -> Iterable[int]:
        """Block members of the rank's groups at the first collective that `rank` has not joined.

        Yields ranks whose position has changed.
        """
        for name, groups in self.groups.items():
            group = groups.get(rank, ())
            index = self.needs.first_collective(self.pipeline_rank[rank], name, self.position[rank])
            if index is None:
                continue
            for other in group:
                if other != rank and self._block(other, 2 * index + 1, rank, GROUP_TEXT[name]):
                    yield other

    def _check_joint(self) -> list[int]:
        """Block all ranks at the first point where they wait for all others. Returns ranks whose position has changed."""
        changed: list[int] = []
        count = min(map(len, self.needs.joint))
        for number in range(count):
            at = {rank: 2 * self.needs.joint[self.pipeline_rank[rank]][number] + 1 for rank in self.status}
            behind = [rank for rank in self.status if self.position[rank] < at[rank]]
            if behind:
                last = min(behind, key=lambda rank: (rank in self.blocked, self.position[rank] - at[rank]))
                text = "gradient norm" if number < count - 1 else "end of the step"
                if number == 0:
                    text = "begin of the step"
                changed += [rank for rank in self.status if rank != last and self._block(rank, at[rank], last, text)]
                break
        return changed

    def _block(self, rank: int, position: int, by: int, needs: str) -> bool:
        """Lower the position of a rank to `position`, where it waits for rank `by`. Returns whether its position has changed."""
        now = self.position[rank]
        if position > now or (position == now and rank in self.blocked):
            return False
        self.position[rank] = position
        self.blocked[rank] = Waiting(rank, by, needs)
        return position < now

    def _follow_pending_sends(self) -> None:
        """If a rank waits until its own message is received, block it by the receiver."""
        for status in self.ranks:
            pending = status.pending
            if pending is not None and pending.op == "send" and pending.peer >= 0 and status.rank not in self.blocked:
                self.blocked[status.rank] = Waiting(status.rank, self._holder(status.rank, pending.peer), "receive")

    def _holder(self, rank: int, stage: int) -> int:
        """The rank of the same pipeline that has this stage."""
        number = self.needs.rank_of[stage]
        return next(other for other in self.pipeline[rank] if self.pipeline_rank[other] == number)

    def _sender_of_lost_message(self, status: RankStatus) -> int | None:
        """The sender of the message that a rank waits to receive; None if it does not wait for one."""
        pending = status.pending
        if pending is None or pending.op != "recv" or pending.peer < 0 or status.stopped:
            return None
        return self._holder(status.rank, pending.peer)

    def _is_in_collective(self, status: RankStatus) -> bool:
        return status.pending is not None and status.pending.op in (
            "all_reduce",
            "unshard",
            "reduce_grad",
            "norm_barrier",
        )

    def _waiting_by_rank(self, ends: set[int]) -> dict[int, tuple[Waiting, ...]]:
        """For each rank in `ends`, the ranks that wait for it, directly or through others. Those that wait directly come first."""
        waiting: dict[int, list[tuple[int, Waiting]]] = defaultdict(list)
        for rank, wait in self.blocked.items():
            if rank in ends:
                continue
            seen = {rank}
            blocker = wait.for_rank
            distance = 1
            while blocker not in ends and blocker in self.blocked and blocker not in seen:
                seen.add(blocker)
                blocker = self.blocked[blocker].for_rank
                distance = distance + 1
            waiting[blocker].append((distance, wait))
        return defaultdict(
            tuple,
            {
                rank: tuple(w for _, w in sorted(all_, key=lambda d: (d[0], d[1].rank)))
                for rank, all_ in waiting.items()
            },
        )

    def _label(self, rank: int) -> str:
        status = self.status[rank]
        if status.phase not in TRAINING:
            return status.phase
        number = self.pipeline_rank[rank]
        return self.needs.label(number, min(status.action, self.needs.last[number] - 1))


def _answer(
    status: RankStatus, action: str, waiting: tuple[Waiting, ...], confidence: Confidence, why: str = ""
) -> Culprit:
    state = " and is stopped" if status.stopped else ""
    if status.dead:
        state = " and has ended"
    reason = (
        f"rank {status.rank} on {status.host} is in {action} of step {status.step} since {status.seconds:.1f} s{state}"
    )
    direct = [wait for wait in waiting if wait.for_rank == status.rank]
    reason += f"; {why}" if why else ""
    if direct:
        numbers = ", ".join(str(wait.rank) for wait in direct[:NAMED_RANKS])
        more = f" and {len(direct) - NAMED_RANKS} more" if len(direct) > NAMED_RANKS else ""
        verb = "ranks {} wait" if len(direct) > 1 else "rank {} waits"
        needed = " and ".join(dict.fromkeys(wait.needs for wait in direct))
        reason += f"; {verb.format(numbers + more)} for its {needed}"
    return Culprit(status.rank, status.host, status.step, action, status.seconds, reason, confidence, waiting)
