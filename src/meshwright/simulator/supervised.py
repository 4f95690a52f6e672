"""Simulates a run with random failures, where the real supervisor (`policies.supervision`) makes the decisions; no time really passes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import floor
from random import Random

from meshwright.policies.effective_time import FailureClass, FailureModel
from meshwright.policies.job_events import (
    Action,
    AttemptPrepared,
    BeginAttempt,
    Committed,
    Event,
    Failed,
    Finish,
    HostEnded,
    Lost,
    Prepare,
    Ready,
    StepTrained,
    Tick,
)
from meshwright.policies.restart import Incident, RestartPolicy
from meshwright.policies.supervision import Rules, State, decide
from meshwright.spec.errors import EXIT_COMMUNICATION

MOST_HOSTS = 8
"""Maximum number of hosts that are simulated. The failure rate is that of the whole job, so more hosts would not change the result."""
REQUEUE_SECONDS = 600.0
"""Seconds from the end of a job whose restarts are exhausted until a scheduler starts it again."""


@dataclass(frozen=True)
class SupervisedTime:
    """The result of a simulation."""

    effective: float
    """Effective training time: the share of the time that contributed to the final state."""
    requeues: int
    """How often the job ended because its restarts were exhausted."""


def simulate_supervised(model: FailureModel, restarts: int = 3, failures: int = 5_000, seed: int = 0) -> SupervisedTime:
    """Simulate `failures` failures of a run that waits until lost hosts return.

    A failure occurs every 10,000 seconds on average. It costs 100 seconds of recovery and on average 500 seconds of lost training, half
    the time between two checkpoints. Together this is 6% of the time:

    >>> from meshwright.policies.effective_time import FailureClass
    >>> killed = FailureClass("killed", share=1.0, detect_seconds=10, restart_seconds=50, load_seconds=40)
    >>> model = FailureModel(8, mttf_seconds=10_000, interval_seconds=1_000, cost_seconds=0, classes=(killed,))
    >>> round(simulate_supervised(model).effective, 2)
    0.94
    """
    job = _Job(model, Rules(min(model.hosts, MOST_HOSTS), 1, RestartPolicy(restarts)), Random(seed))
    job.gather(job.alive)
    for _ in range(failures):
        job.play_until_failure()
    return SupervisedTime(job.trained / job.now, job.requeues)


@dataclass
class _Job:
    model: FailureModel
    rules: Rules
    random: Random
    now: float = 0.0
    trained: float = 0.0
    requeues: int = 0
    state: State = field(default_factory=State)
    alive: set[str] = field(default_factory=set)
    failed: FailureClass | None = None
    """The failure with the longest recovery since the run last trained; None if it has trained since the last failure."""
    training_from: float = 0.0
    """Time when the current attempt begins to train, or has begun."""
    failing: bool = False
    """Whether the current attempt has failed, even if the failure is not detected yet."""
    steps: int = 0
    """A counter that grows with each commit and each timer. It numbers the steps of commits and orders timers of equal time."""
    timers: list[tuple[float, int, Event]] = field(default_factory=list)
    """Future events as a heap: (time, value of `steps`, event)."""

    def __post_init__(self) -> None:
        self.alive = {f"host-{index}" for index in range(self.rules.hosts + self.model.spares)}

    def after(self, seconds: float, event: Event) -> None:
        """Schedule `event` to happen `seconds` from now."""
        self.steps += 1
        heapq.heappush(self.timers, (self.now + seconds, self.steps, event))

    def gather(self, hosts: set[str]) -> None:
        """Tell the supervisor that these hosts are ready to begin an attempt."""
        for host in sorted(hosts):
            self.take(Ready(host))

    def take(self, event: Event) -> None:
        """Let the supervisor decide about `event`, and carry out its actions."""
        self.state, actions = decide(self.state, event, self.now, self.rules)
        for action in actions:
            self.follow(action)

    def follow(self, action: Action) -> None:
        if isinstance(action, Prepare):
            self.take(AttemptPrepared(self.state.attempt))
        elif isinstance(action, BeginAttempt):
            recovery = self.failed.restart_seconds + self.failed.load_seconds if self.failed else 0.0
            self.training_from = self.now + recovery
            self.failing = False
            if not self.alive.issuperset(self.state.members):  # a member died before its loss was detected
                self.failing = True
        elif isinstance(action, Finish):
            self.requeues += 1
            self.state = State()
            for host in sorted(self.alive):
                self.after(REQUEUE_SECONDS, Ready(host))

    def play_until_failure(self) -> None:
        """Simulate events until the next failure, and then that failure."""
        strike = self.now + self.random.expovariate(1 / self.model.mttf_seconds)
        while self.timers and self.timers[0][0] <= strike:
            self.now, _, event = heapq.heappop(self.timers)
            self.happen(event)
        self.now = strike
        self.strike(self.random.choices(self.model.classes, [c.share for c in self.model.classes])[0])

    def happen(self, event: Event) -> None:
        """Handle a scheduled event: a host returns, a failure is detected, or a waiting time has passed.

        When a failure is detected, the ranks on all hosts of the attempt end, and their hosts are ready again.
        """
        if isinstance(event, Ready):
            self.alive.add(event.host)
        self.take(event)
        if isinstance(event, Failed | Lost) and self.state.status == "ending":
            attempt = self.state.attempt
            members = self.state.members
            requeues = self.requeues
            for host in members:
                if host in self.alive:
                    self.take(HostEnded(attempt, host))
            if self.requeues == requeues:
                self.gather(self.alive - set(self.state.ready) - self._running())
        if self.state.status == "gathering" and self.state.not_before > self.now:
            self.after(self.state.not_before - self.now, Tick())

    def _running(self) -> set[str]:
        return set(self.state.members) if self.state.status in ("preparing", "running") else set()

    def strike(self, failure: FailureClass) -> None:
        """Let a failure occur now: count the training that survives it, and schedule its detection and the return of a lost host."""
        running = self.state.status == "running"
        if running and not self.failing and self.now > self.training_from:
            self._count(failure)
            self.failed = None
        if running and (self.failed is None or failure.recovery_seconds > self.failed.recovery_seconds):
            self.failed = failure
        if failure.loses_host:
            candidates = sorted(self.alive & set(self.state.members if running else self.state.ready))
            if candidates:
                host = self.random.choice(candidates)
                self.alive.discard(host)
                self.after(failure.detect_seconds, Lost(host, failure.name))
                returns = self.random.expovariate(1 / self.model.replace_seconds) if self.model.replace_seconds else 0.0
                self.after(max(returns, failure.detect_seconds), Ready(host))
        elif running and not self.failing:
            incident = Incident(EXIT_COMMUNICATION, failure.name, step=self.steps)
            self.after(failure.detect_seconds, Failed(self.state.attempt, incident))
        self.failing = self.failing or running

    def _count(self, failure: FailureClass) -> None:
        segment = self.model.interval_seconds + self.model.cost_seconds
        saved = max(0, floor((self.now - self.training_from - failure.lag_seconds) / segment))
        self.trained += saved * self.model.interval_seconds
        self.take(StepTrained())
        if saved:
            self.steps += 1
            self.take(Committed(self.steps))
