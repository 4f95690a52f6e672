"""The state of a supervised job, and what follows each event: which hosts train, when attempts begin and end.

An attempt is one start of all ranks. `decide` is a pure function of the state, an event and the time in seconds of any
monotonic clock. The coordinator keeps the state in a file and carries out the actions.

    gathering ──► preparing ──► running ──► ending ──► gathering …
                                                └────► finished
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from meshwright.policies.restart import Incident, Restart, RestartPolicy, Stop, after_failure
from meshwright.policies.skipped_samples import SampleRange, merge_skips, skip_step
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE

Status = Literal["gathering", "preparing", "running", "ending", "finished"]


@dataclass(frozen=True)
class State:
    """Progress of a job. Hosts are named by their agents."""

    status: Status = "gathering"
    attempt: int = 0
    """Number of the current or last attempt, from 1."""
    members: tuple[str, ...] = ()
    """Hosts of the attempt, in the order of their ranks."""
    ended: tuple[str, ...] = ()
    """Members whose ranks have ended."""
    incidents: tuple[Incident, ...] = ()
    """Failures since the newest checkpoint was written, one for each failed attempt."""
    restart: Restart = field(default_factory=Restart)
    """How the next attempt resumes."""
    stop: Stop | None = None
    """Why no further attempt follows; None while one may."""
    not_before: float = 0.0
    """Time before which no attempt begins."""
    short_since: float | None = None
    """Time since which a job that is to continue has too few hosts; None if it has enough."""
    trained: bool = False
    """Whether the job has finished a step."""
    checkpoints: tuple[int, ...] = ()
    """Steps of committed checkpoints, ascending."""
    skipped: tuple[SampleRange, ...] = ()
    """Samples that are left out."""
    ready: tuple[str, ...] = ()
    """Hosts whose processes wait to begin."""


@dataclass(frozen=True)
class Ready:
    """The processes of `host` wait to begin an attempt; they no longer do if not `ready`."""

    host: str
    ready: bool = True


@dataclass(frozen=True)
class Lost:
    """`host` does not answer; its ranks have ended or cannot write."""

    host: str
    cause: str


@dataclass(frozen=True)
class Prepared:
    """The files of the attempt are written."""

    attempt: int


@dataclass(frozen=True)
class Trained:
    """A rank has finished a step."""


@dataclass(frozen=True)
class Committed:
    """The checkpoint of `step` is durable."""

    step: int


@dataclass(frozen=True)
class SkippedSamples:
    """Ranks of the attempt have begun to leave out `ranges` of samples, after a rollback."""

    ranges: tuple[SampleRange, ...]


@dataclass(frozen=True)
class Failed:
    """The attempt failed, or was stopped, for a reason that `incident` states."""

    attempt: int
    incident: Incident


@dataclass(frozen=True)
class Ended:
    """All ranks of the attempt on `host` have ended."""

    attempt: int
    host: str


@dataclass(frozen=True)
class StopRequested:
    """A stop signal arrived, which ends the job with `code`. Running ranks stop by themselves, with a checkpoint."""

    code: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Ready | Lost | Prepared | Trained | Committed | SkippedSamples | Failed | Ended | StopRequested | Tick


@dataclass(frozen=True)
class Prepare:
    """Write the files of the attempt that the state names: lease, Plan and assignment."""


@dataclass(frozen=True)
class Begin:
    """Let the ranks of the members begin the attempt."""


@dataclass(frozen=True)
class End:
    """End the ranks of the attempt for `reason`; `incident` is its failure, None if it has not failed."""

    reason: str
    incident: Incident | None = None


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    code: int


Action = Prepare | Begin | End | Finish


@dataclass(frozen=True)
class Rules:
    """Settings of the job."""

    hosts: int
    """Hosts of an attempt, unless some are lost."""
    global_batch: int
    policy: RestartPolicy
    wait_seconds: float | None = None
    """Seconds to wait for lost hosts before the job continues on the remaining ones; None waits without end."""


Answer = tuple[State, tuple[Action, ...]]


def decide(state: State, event: Event, now: float, rules: Rules) -> Answer:
    """The state after `event`, and what to do."""
    match event:
        case _ if state.status == "finished":
            return state, ()
        case Ready(host, ready):
            return _gather(replace(state, ready=_with_host(state.ready, host, ready)), now, rules)
        case Lost(host, cause):
            return _lose(state, host, cause, now, rules)
        case Prepared(attempt) if state.status == "preparing" and attempt == state.attempt:
            return replace(state, status="running"), (Begin(),)
        case Trained():
            return replace(state, trained=True), ()
        case Committed(step):
            newer = not state.checkpoints or step > state.checkpoints[-1]
            checkpoints = tuple(sorted({*state.checkpoints, step}))
            return _grow(replace(state, checkpoints=checkpoints, incidents=() if newer else state.incidents), rules)
        case SkippedSamples(ranges):
            return replace(state, skipped=merge_skips(state.skipped, ranges)), ()
        case Failed(attempt, incident) if attempt == state.attempt:
            return _fail(state, incident, now, rules)
        case Ended(attempt, host) if attempt == state.attempt and host in state.members:
            return _end(replace(state, ended=_with_host(state.ended, host)), now, rules)
        case StopRequested(code):
            return _request_stop(state, code)
        case Tick():
            return _gather(state, now, rules)
    return state, ()


def _gather(state: State, now: float, rules: Rules) -> Answer:
    """Choose the members of the next attempt if enough hosts are ready and its time has come."""
    if state.status != "gathering" or now < state.not_before:
        return state, ()
    if len(state.ready) < rules.hosts:
        if not state.attempt:
            return state, ()
        since = now if state.short_since is None else state.short_since
        state = replace(state, short_since=since)
        if not state.ready or rules.wait_seconds is None or now - since < rules.wait_seconds:
            return state, ()
    ready_members = [host for host in state.members if host in state.ready]
    other_hosts = [host for host in state.ready if host not in ready_members]
    members = tuple((ready_members + other_hosts)[: rules.hosts])
    state = replace(
        state, status="preparing", attempt=state.attempt + 1, members=members, ended=(), short_since=None,
        ready=tuple(host for host in state.ready if host not in members),
    )  # fmt: skip
    return state, (Prepare(),)


def _grow(state: State, rules: Rules) -> Answer:
    """After a checkpoint, end an attempt that has too few hosts if enough are ready now."""
    missing = len(state.members) < rules.hosts <= len({*state.members, *state.ready})
    if state.status != "running" or not missing:
        return state, ()
    return replace(state, status="ending", restart=Restart()), (End(f"{rules.hosts} hosts are ready again"),)


def _fail(state: State, incident: Incident, now: float, rules: Rules) -> Answer:
    """Decide once what follows a failed attempt, and end its ranks."""
    if state.status not in ("preparing", "running"):
        return state, ()
    was_running = state.status == "running"
    incidents = (*state.incidents, incident)
    state = replace(state, status="ending", incidents=incidents, ended=state.ended if was_running else state.members)
    decision = after_failure(incidents, rules.policy, state.checkpoints, trained=state.trained)
    if isinstance(decision, Stop):
        state = replace(state, stop=decision)
    else:
        skip, skipped = decision.skip_step, state.skipped
        skipped = skip_step(skip, rules.global_batch, skipped) if skip is not None else skipped
        state = replace(state, restart=decision, not_before=now + decision.delay, skipped=skipped)
    state, end_actions = _end(state, now, rules)
    return state, (End(incident.cause, incident), *end_actions)


def _end(state: State, now: float, rules: Rules) -> Answer:
    """Continue once the ranks of all members have ended."""
    if state.status not in ("running", "ending") or not set(state.members) <= set(state.ended):
        return state, ()
    if state.status == "running":  # all ranks ended without a failure
        return _finish(replace(state, stop=Stop(EXIT_DONE)))
    return _finish(state) if state.stop else _gather(replace(state, status="gathering"), now, rules)


def _finish(state: State) -> Answer:
    assert state.stop is not None, "a job finishes with a code"
    return replace(state, status="finished"), (Finish(state.stop.code),)


def _lose(state: State, host: str, cause: str, now: float, rules: Rules) -> Answer:
    """Count a lost member's ranks as ended; the attempt fails if that is its first failure."""
    state = replace(state, ready=_with_host(state.ready, host, False))
    if host not in state.members or state.status == "gathering":
        return state, ()
    state, actions = _fail(state, Incident(EXIT_COMMUNICATION, cause, host=host), now, rules)
    if state.status == "ending":
        state, end_actions = _end(replace(state, ended=_with_host(state.ended, host)), now, rules)
        actions = (*actions, *end_actions)
    return state, actions


def _request_stop(state: State, code: int) -> Answer:
    """No further attempt is prepared; ranks that run or are about to end by themselves, with a checkpoint."""
    if state.status in ("preparing", "running"):
        return state, ()
    state = replace(state, stop=state.stop or Stop(code))
    return (state, ()) if state.status == "ending" else _finish(state)


def _with_host(hosts: tuple[str, ...], host: str, present: bool = True) -> tuple[str, ...]:
    """`hosts` with or without `host`, in order of names."""
    return tuple(sorted({*hosts, host} if present else set(hosts) - {host}))
