"""State machine of a supervised job: which hosts train, and when attempts begin and end. It is driven by events.

An attempt is one start of all ranks. `decide` is a pure function of the state, an event and the time, in seconds of any monotonic clock.
The coordinator stores the state in a file and carries out the actions.

    gathering ──► preparing ──► running ──► ending ──► gathering …
                                                └────► finished

While an attempt is prepared, hosts that may have caused the failure before run the self-test. A host that fails the test is excluded from
the job. A test that does not end in time is repeated once, with a longer limit. If too few hosts are ready, the job continues on fewer
hosts, provided that there is a plan for their number. A host with bad health (`host_health`) is replaced after the current step, or
excluded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from meshwright.policies.host_health import HealthFinding, Moment, action_of
from meshwright.policies.host_tests import (
    Exclusion,
    Suspect,
    failed_host,
    machine_of,
    self_test_groups,
    suspects_after,
)
from meshwright.policies.job_events import (
    Action,
    AttemptPrepared,
    AttemptReported,
    BeginAttempt,
    Committed,
    Corrupted,
    EndAttempt,
    Event,
    Failed,
    Finish,
    HostEnded,
    Lost,
    Note,
    Prepare,
    Present,
    Ready,
    RecordIncident,
    SelfTestEnded,
    SkippedSamples,
    StepTrained,
    StopRequested,
    Test,
    Tick,
    Unhealthy,
    Unplannable,
    Unrecordable,
)
from meshwright.policies.restart import Incident, Restart, RestartPolicy, Stop, after_failure
from meshwright.policies.skipped_samples import SampleRange, merge_skips, skip_step
from meshwright.spec.batch_sizes import BatchSizes, BatchStage
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_NUMERICAL, EXIT_PREEMPTED

RETURN_SECONDS = 900.0
"""Seconds to wait for another host. Schedulers usually supply a host in less time (`planner.effective_time`)."""
SPARE_SECONDS = 30.0
"""Seconds within which the processes of a spare host should be ready."""
REJOIN_SECONDS = 5.0
"""Seconds to wait for a member that still answers, before a spare host replaces it.

It is preferred because its memory has the newest snapshot.
"""
FINAL_TEST_SECONDS = 30.0
"""If a job ends because of non-finite values, its hosts must be ready for a last self-test within these seconds."""
LISTED_CHECKPOINTS = 8
"""Checkpoints in the state, at most. Each stored state contains the whole list, and a decision needs only the newest two."""
Status = Literal["gathering", "preparing", "running", "ending", "finished"]


@dataclass(frozen=True)
class State:
    """Progress of a job. Hosts are named by their agents."""

    status: Status = "gathering"
    attempt: int = 0
    """Number of the current or last attempt, from 1."""
    newest_attempt: int = 0
    """The largest attempt number that an agent has reported. It exceeds `attempt` if the coordinator has lost a stored state."""
    job: str = ""
    """Identity of the job in the run's folder. Agents of an earlier, finished job have another identity."""
    members: tuple[str, ...] = ()
    """Hosts of the attempt, in the order of their ranks."""
    ended: tuple[str, ...] = ()
    """Members whose ranks have ended."""
    lost: tuple[str, ...] = ()
    """Members that no longer answer."""
    """Members that stopped to answer."""
    incidents: tuple[Incident, ...] = ()
    """Failures since the newest checkpoint was written, one for each failed attempt."""
    restart: Restart = field(default_factory=Restart)
    """How the next attempt starts: after which delay, from which checkpoint, and without which step."""
    stop: Stop | None = None
    """The reason why no further attempt follows; None while further attempts are possible."""
    stopping: int = 0
    """Exit code of a stop request that came while ranks were running; 0 without one. The ranks end by themselves."""
    not_before: float = 0.0
    """Time before which no attempt begins."""
    short_since: float | None = None
    """Time since when there are too few hosts to continue; None if there are enough."""
    trained: bool = False
    """Whether the job has finished a step."""
    checkpoints: tuple[int, ...] = ()
    """Steps of the newest committed checkpoints, ascending."""
    present: tuple[int, ...] = ()
    """Steps of the newest checkpoints that existed at the start or at the last failure, ascending.

    A committed checkpoint may be missing here: `keep` may have deleted it, or its files may be damaged.
    """
    skipped: tuple[SampleRange, ...] = ()
    """Samples that are left out of training."""
    ready: tuple[str, ...] = ()
    """Hosts whose processes wait for an attempt to begin."""
    suspects: tuple[Suspect, ...] = ()
    """Hosts that must pass the self-test before they train again."""
    corruptions: int = 0
    """Number of corruption reports that were handled in this attempt."""
    tests: tuple[tuple[str, ...], ...] = ()
    """Groups of members that run the self-test for the attempt in preparation. The first host of each group is a suspect."""
    testing: tuple[str, ...] = ()
    """Hosts of these groups whose results are still missing."""
    incomplete: tuple[str, ...] = ()
    """Hosts whose last self-test did not end in time."""
    prepared: bool = False
    """Whether the files of the attempt in preparation are written."""
    excluded: tuple[Exclusion, ...] = ()
    """Hosts that failed the self-test, or whose health is bad."""
    draining: tuple[Exclusion, ...] = ()
    """Members to leave out of the next attempt. The ranks save a checkpoint and end after the current step."""
    unplannable: tuple[int, ...] = ()
    """Numbers of hosts for which there is no plan."""


@dataclass(frozen=True)
class Rules:
    """Settings of the job."""

    hosts: int
    """Hosts of an attempt, if none are missing."""
    global_batch: int
    policy: RestartPolicy
    wait_seconds: float | None = None
    """Seconds to wait for lost hosts before the job continues on the remaining ones; None waits without a limit."""
    test_at_end: bool = False
    """Whether non-finite values end the job only if they occur again. If so, the hosts are tested before the job ends."""
    batch_ramp: Sequence[BatchStage] = ()
    """Batch sizes of the first steps (`train.batch_ramp`)."""
    saves: bool = True
    """Whether ranks that are asked to end write a checkpoint from which other ranks can continue."""
    others_may_join: bool = True
    """Whether hosts can join the job later. A job of a single launcher has only the launcher's host."""

    @property
    def return_seconds(self) -> float:
        """Seconds to wait for hosts when the job cannot continue without them: hosts in place of excluded ones, or hosts a plan needs."""
        return max(RETURN_SECONDS, self.wait_seconds or 0.0) if self.others_may_join else 0.0


Answer = tuple[State, tuple[Action, ...]]


def decide(state: State, event: Event, now: float, rules: Rules) -> Answer:
    """The state after `event`, and the actions to carry out."""
    match event:
        case _ if state.status == "finished":
            return state, ()
        case Ready(host, True) if is_excluded(state, host):
            return state, ()
        case Ready(host, ready):
            return _gather(replace(state, ready=_with_host(state.ready, host, ready)), now, rules)
        case AttemptReported(attempt):
            return replace(state, newest_attempt=max(state.newest_attempt, attempt)), ()
        case Lost(host, cause):
            return _lose(state, host, cause, now, rules)
        case AttemptPrepared(attempt) if state.status == "preparing" and attempt == state.attempt:
            return _begin(replace(state, prepared=True))
        case Unplannable(attempt, cause) if state.status == "preparing" and attempt == state.attempt:
            return _fewer(state, cause, now, rules)
        case SelfTestEnded(attempt, host) if attempt == state.attempt and host in state.testing:
            return _take_test(state, event, now, rules)
        case StepTrained():
            return replace(state, trained=True), ()
        case Committed(step):
            newer = not state.checkpoints or step > state.checkpoints[-1]
            lists = (tuple(sorted({*steps, step})) for steps in (state.checkpoints, state.present))
            checkpoints, present = (steps[-LISTED_CHECKPOINTS:] for steps in lists)
            incidents = () if newer else state.incidents
            return _grow(replace(state, checkpoints=checkpoints, present=present, incidents=incidents), rules)
        case Present(steps):
            return replace(state, present=steps[-LISTED_CHECKPOINTS:]), ()
        case SkippedSamples(ranges):
            return replace(state, skipped=merge_skips(state.skipped, ranges)), ()
        case Corrupted(attempt, number, incident) if attempt == state.attempt and number > state.corruptions:
            return _take_corruption(replace(state, corruptions=number), incident, now, rules)
        case Unhealthy(host, finding) if not is_excluded(state, host):
            return _take_finding(state, host, finding, now, rules)
        case Failed(attempt, incident) if attempt == state.attempt:
            return _fail(state, incident, now, rules)
        case HostEnded(attempt, host) if attempt == state.attempt and host in state.members:
            return _end(replace(state, ended=_with_host(state.ended, host)), now, rules)
        case StopRequested(code):
            return _request_stop(state, code)
        case Unrecordable(code, cause):
            return _give_up(state, Stop(code, cause))
        case Tick():
            return _gather(state, now, rules)
    return state, ()


def is_unlisted(state: State, step: int) -> bool:
    """Whether the checkpoint of `step` is missing in the state and new enough to be listed."""
    listed = state.checkpoints
    return step not in listed and (len(listed) < LISTED_CHECKPOINTS or step > listed[0])


def is_excluded(state: State, host: str) -> bool:
    """Whether the machine of `host` is excluded from the job."""
    return exclusion_of(state, host) is not None


def exclusion_of(state: State, host: str) -> Exclusion | None:
    """The exclusion of the machine of `host`; None if it is not excluded."""
    return next((each for each in state.excluded if machine_of(each.host) == machine_of(host)), None)


def _gather(state: State, now: float, rules: Rules) -> Answer:
    """If enough hosts are ready and the delay is over, choose the members of the next attempt and prepare it."""
    if state.status != "gathering" or now < state.not_before:
        return state, ()
    if state.stop is not None:
        return _gather_for_last_test(state, now)
    most = min(len(state.ready), rules.hosts)
    count = next((count for count in range(most, 0, -1) if count not in state.unplannable), 0)
    present = (*state.ready, *state.lost)
    absent = any(host not in present and not is_excluded(state, host) for host in state.members)
    if count < rules.hosts or absent:
        if not state.attempt:
            return state, ()
        since = now if state.short_since is None else state.short_since
        state = replace(state, short_since=since)
        patience = _patience(state, rules) if count < rules.hosts else 0.0
        if patience is None or now - since < (max(patience, REJOIN_SECONDS) if absent else patience):
            return state, ()
        if not count:
            return _without_hosts(state, now - since, rules)
    ready_members = [host for host in state.members if host in state.ready]
    other_hosts = [host for host in state.ready if host not in ready_members]
    members = tuple((ready_members + other_hosts)[:count])
    groups = self_test_groups(state.suspects, members)
    state = replace(
        state,
        status="preparing",
        attempt=_next_attempt(state),
        members=members,
        ended=(),
        lost=(),
        prepared=False,
        corruptions=0,
        short_since=None if count == rules.hosts else state.short_since,
        tests=groups,
        testing=tuple(host for group in groups for host in group),
        ready=tuple(host for host in state.ready if host not in members),
    )
    return state, (Prepare(),)


def _next_attempt(state: State) -> int:
    """A number that no agent has seen yet. Agents ignore smaller numbers."""
    return max(state.attempt, state.newest_attempt) + 1


def _patience(state: State, rules: Rules) -> float | None:
    """Seconds to wait for missing hosts before the job continues on fewer; None waits without a limit.

    An excluded host does not return by itself. In this case, the wait is only for a spare host that is not ready yet.
    """
    if not rules.others_may_join:
        return 0.0 if state.excluded else None
    if rules.wait_seconds is not None:
        return rules.wait_seconds
    return SPARE_SECONDS if state.excluded else None


def _without_hosts(state: State, waited: float, rules: Rules) -> Answer:
    """No attempt is possible now. If hosts are excluded or have no plan, wait for other hosts for a limited time, then end the job."""
    if not (state.excluded or state.unplannable) or waited < rules.return_seconds:
        return state, ()
    reasons = [f"host {exclusion.host} {exclusion.verdict}" for exclusion in state.excluded]
    if state.unplannable:
        reasons.append(
            f"there is no plan for {' or '.join(map(str, sorted(state.unplannable)))} of {rules.hosts} hosts"
        )
    waiting = f" after a wait of {waited:,.0f} s" if rules.return_seconds else ""
    return _finish(replace(state, stop=Stop(EXIT_COMMUNICATION, f"too few hosts{waiting}: {'; '.join(reasons)}")))


def _fewer(state: State, cause: str, now: float, rules: Rules) -> Answer:
    """There is no plan for the number of members. Try fewer members, or wait for more hosts."""
    count = len(state.members)
    state = replace(
        state,
        status="gathering",
        unplannable=(*state.unplannable, count),
        tests=(),
        testing=(),
        ready=tuple(sorted({*state.ready, *state.members})),
    )
    left = [number for number in range(1, count) if number not in state.unplannable]
    then = f"{left[-1]} are tried" if left else f"the job waits for others, at most {rules.return_seconds:,.0f} s"
    note = Note(f"there is no plan for {count} of {rules.hosts} hosts; {then} ({cause})")
    state, more = _gather(state, now, rules)
    return state, (note, *more)


def _take_test(state: State, ended: SelfTestEnded, now: float, rules: Rules) -> Answer:
    """Handle the result of a self-test: exclude a host that failed, and begin the attempt once all hosts have passed."""
    group = next(group for group in state.tests if ended.host in group)
    if not ended.complete and not ended.failure and not set(group) & set(state.incomplete):
        return _repeat_test(state, ended, group, now, rules)
    failed = failed_host(ended.host, group, ended.failure, ended.exchange)
    if failed is not None:
        return _exclude(state, Exclusion(*failed), now, rules)
    left = tuple(host for host in state.testing if host != ended.host)
    passed = [group[0] for group in state.tests if not set(group) & set(left)]
    incomplete = tuple(host for host in state.incomplete if host not in group or set(group) & set(left))
    return _begin(
        replace(state, testing=left, suspects=_without_machines(state.suspects, passed), incomplete=incomplete)
    )


def _repeat_test(state: State, ended: SelfTestEnded, group: tuple[str, ...], now: float, rules: Rules) -> Answer:
    """Repeat the test of a group once, with a longer limit, in the preparation of a new attempt. Its hosts may only have been busy."""
    state = replace(
        state, status="gathering", tests=(), testing=(), incomplete=(*state.incomplete, *group), short_since=None
    )
    note = Note(f"host {ended.host} did not end the self-test ({ended.exchange}); it is repeated with a longer limit")
    state, more = _gather(state, now, rules)
    return state, (note, *more)


def _take_corruption(state: State, incident: Incident, now: float, rules: Rules) -> Answer:
    """Handle a report of corrupt state: its host runs the self-test before the next attempt.

    At the second report, the attempt fails at once.
    """
    if state.status != "running":
        return state, ()
    suspects = suspects_after((incident,), state.members) if rules.policy.restarts else ()
    if any(suspect in state.suspects for suspect in suspects):
        return _fail(state, incident, now, rules)
    return replace(state, suspects=(*state.suspects, *suspects)), (RecordIncident(incident),)


def _exclude(state: State, exclusion: Exclusion, now: float, rules: Rules) -> Answer:
    """Continue without a host. This also applies to a job that was about to end, because this host may have been the reason."""
    state = replace(
        _without_excluded(state, (exclusion,)),
        status="gathering",
        tests=(),
        testing=(),
        incomplete=(),
        stop=None,
        restart=Restart() if state.stop is not None else state.restart,
    )
    state, more = _gather(state, now, rules)
    return state, (_note_of(exclusion), *more)


def _without_excluded(state: State, exclusions: tuple[Exclusion, ...]) -> State:
    """The state with these hosts excluded. They are no longer ready, suspects, or to be drained."""
    hosts = [exclusion.host for exclusion in exclusions]
    machines = {machine_of(host) for host in hosts}
    return replace(
        state,
        excluded=(*state.excluded, *exclusions),
        draining=tuple(draining for draining in state.draining if machine_of(draining.host) not in machines),
        suspects=_without_machines(state.suspects, hosts),
        ready=tuple(host for host in state.ready if machine_of(host) not in machines),
    )


def _note_of(exclusion: Exclusion) -> Note:
    return Note(f"host {exclusion.host} {exclusion.verdict} and is excluded from the job: {exclusion.cause}")


def _take_finding(state: State, host: str, finding: HealthFinding, now: float, rules: Rules) -> Answer:
    """Do what the rules of host health say about a finding at this moment of the job."""
    moment = _moment(state, host)
    action = action_of(finding.rule, moment)
    key = f"{host} {finding.rule} {finding.part}"
    if action == "none" or state.stop is not None:
        return state, ()
    if action == "warn":
        return state, (Note(f"host {host}: {finding.description}", key),)
    exclusion = Exclusion(host, finding.description, "health")
    if action == "exclude":
        return _exclude_unhealthy(state, exclusion, now, rules)
    if any(draining.host == host for draining in state.draining) or state.stopping:
        return state, ()
    if not _is_replaceable(state, host, rules):
        return state, (_note_that_it_stays(exclusion, f"{key} stays"),)
    if state.status != "running" or host not in state.members:
        return _exclude_unhealthy(state, exclusion, now, rules)
    note = Note(f"host {host} is replaced after the running step: {finding.description}")
    return replace(state, draining=(*state.draining, exclusion)), (note,)


def _note_that_it_stays(exclusion: Exclusion, key: str = "") -> Note:
    then = "the host stays, as no other one is ready to take its place"
    return Note(f"host {exclusion.host}: {exclusion.cause}; {then}", key)


def _moment(state: State, host: str) -> Moment:
    """The moment at which a finding about `host` comes, for the rules of host health.

    Between two attempts of a job that has trained, the moment for a member is `run` if there was no failure, for example if the attempt
    ended to drain a host.
    """
    if host in state.members and state.status == "running":
        return "run"
    if host in state.members and state.incidents:
        return "failure"
    return "run" if host in state.members and state.trained else "start"


def _is_replaceable(state: State, host: str, rules: Rules) -> bool:
    """Whether the job can continue without `host`, from a checkpoint that its ranks write."""
    left_out = {machine_of(host), *(machine_of(draining.host) for draining in state.draining)}
    others = [
        other
        for other in {*state.ready, *state.members}
        if machine_of(other) not in left_out and other not in state.lost and not is_excluded(state, other)
    ]
    enough = len(others) >= (rules.hosts if rules.wait_seconds is None else 1)
    return enough and (rules.saves or state.status != "running")


def _leave_out_drained(state: State, rules: Rules) -> Answer:
    """Exclude the hosts that were drained. A host stays if no other can replace it any more, for example because a spare host was lost."""
    left = replace(state, draining=())
    notes = []
    for draining in state.draining:
        if _is_replaceable(left, draining.host, rules):
            left = _without_excluded(left, (draining,))
        else:
            notes.append(_note_that_it_stays(draining))
    return left, tuple(notes)


def _exclude_unhealthy(state: State, exclusion: Exclusion, now: float, rules: Rules) -> Answer:
    """Continue without a host at once. If it trains, its attempt fails. If its attempt has not begun, a new one is prepared."""
    host = exclusion.host
    note = _note_of(exclusion)
    if host in state.members and state.status == "preparing":
        return _exclude(state, exclusion, now, rules)
    state = _without_excluded(state, (exclusion,))
    if host not in state.members or state.status != "running":
        return state, (note,)
    state, actions = _fail(state, Incident(EXIT_COMMUNICATION, exclusion.cause, host=host), now, rules)
    return state, (note, *actions)


def _without_machines(suspects: tuple[Suspect, ...], hosts: Sequence[str]) -> tuple[Suspect, ...]:
    """The suspects whose machines have none of `hosts`."""
    machines = {machine_of(host) for host in hosts}
    return tuple(suspect for suspect in suspects if machine_of(suspect.host) not in machines)


def _begin(state: State) -> Answer:
    """Begin a prepared attempt once all tested hosts have passed. If the job was about to end after the tests, end it."""
    if not state.prepared or state.testing:
        return state, ()
    if state.stop is not None:
        return _finish(state)
    return replace(state, status="running", tests=(), short_since=None), (BeginAttempt(),)


def _gather_for_last_test(state: State, now: float) -> Answer:
    """The job is about to end because of non-finite values. Once its members are ready, let them run the self-test."""
    since = now if state.short_since is None else state.short_since
    groups = self_test_groups(state.suspects, state.members)
    if groups and set(state.members) <= set(state.ready):
        state = replace(
            state,
            status="preparing",
            attempt=_next_attempt(state),
            ended=(),
            prepared=True,
            short_since=None,
            tests=groups,
            testing=tuple(host for group in groups for host in group),
            ready=tuple(host for host in state.ready if host not in state.members),
        )
        return state, (Test(),)
    if now - since >= FINAL_TEST_SECONDS:
        return _finish(state)
    return replace(state, short_since=since), ()


def _grow(state: State, rules: Rules) -> Answer:
    """After a checkpoint: if the attempt has too few hosts and enough are ready now, end it, so that the next one has all hosts."""
    missing = len(state.members) < rules.hosts <= len({*state.members, *state.ready})
    if state.status != "running" or not missing or state.stopping:
        return state, ()
    return replace(state, status="ending", restart=Restart()), (EndAttempt(f"{rules.hosts} hosts are ready again"),)


def _fail(state: State, incident: Incident, now: float, rules: Rules) -> Answer:
    """An attempt has failed: end its ranks, and decide whether to restart or to end the job. Later failures of the attempt are ignored."""
    if state.status not in ("preparing", "running"):
        return state, ()
    if state.stop is not None:  # during the self-test before the end
        return _finish(state)
    if state.draining and incident.code == EXIT_PREEMPTED and not state.stopping:
        hosts = " and ".join(f"host {draining.host} ({draining.cause})" for draining in state.draining)
        state, more = _end(replace(state, status="ending", restart=Restart()), now, rules)
        return state, (EndAttempt(f"the next attempt is to leave out {hosts}"), *more)
    was_running = state.status == "running"
    incidents = (*state.incidents, incident)
    suspects = suspects_after(incidents, state.members) if rules.policy.restarts else ()
    state = replace(
        state,
        status="ending",
        incidents=incidents,
        ended=state.ended if was_running else state.members,
        tests=(),
        testing=(),
        suspects=(*state.suspects, *(suspect for suspect in suspects if suspect not in state.suspects)),
    )
    decision = after_failure(incidents, rules.policy, state.present, trained=state.trained)
    if state.stopping and not isinstance(decision, Stop):
        decision = Stop(state.stopping)
    if isinstance(decision, Stop):
        state = replace(state, stop=decision)
    else:
        skip = decision.skip_step
        skipped = state.skipped
        batches = BatchSizes(rules.global_batch, rules.batch_ramp)
        skipped = skip_step(skip, batches, skipped) if skip is not None else skipped
        state = replace(state, restart=decision, not_before=now + decision.delay, skipped=skipped)
    state, end_actions = _end(state, now, rules)
    return state, (EndAttempt(incident.cause, incident), *end_actions)


def _end(state: State, now: float, rules: Rules) -> Answer:
    """If the ranks of all members have ended, finish the job or gather hosts for the next attempt."""
    if state.status not in ("running", "ending") or not set(state.members) <= set(state.ended):
        return state, ()
    if state.status == "running":  # all ranks ended without a failure
        return _finish(replace(state, stop=Stop(EXIT_DONE)))
    if state.stop is not None and not (rules.test_at_end and state.stop.code == EXIT_NUMERICAL):
        return _finish(state)
    state, notes = _leave_out_drained(state, rules)
    state, actions = _gather(replace(state, status="gathering"), now, rules)
    return state, (*notes, *actions)


def _finish(state: State) -> Answer:
    assert state.stop is not None, "a job finishes with a code"
    return replace(state, status="finished"), (Finish(state.stop.code),)


def _lose(state: State, host: str, cause: str, now: float, rules: Rules) -> Answer:
    """A host no longer answers. If it is a member, its ranks count as ended, and the attempt fails if it has not failed before."""
    state = replace(state, ready=_with_host(state.ready, host, False))
    if host not in state.members:
        return state, ()
    state = replace(state, lost=_with_host(state.lost, host))
    if state.status == "gathering":
        return _gather(state, now, rules)
    state, actions = _fail(state, Incident(EXIT_COMMUNICATION, cause, host=host), now, rules)
    if state.status == "ending":
        state, end_actions = _end(replace(state, ended=_with_host(state.ended, host)), now, rules)
        actions = (*actions, *end_actions)
    return state, actions


def _request_stop(state: State, code: int) -> Answer:
    """End the job on request. No further attempt begins. Running ranks write a checkpoint and end by themselves."""
    if state.status == "running":
        return replace(state, stopping=state.stopping or code), ()
    state = replace(state, stop=state.stop or Stop(code))
    return (state, ()) if state.status == "ending" else _finish(state)


def _give_up(state: State, stop: Stop) -> Answer:
    """End the job and its running ranks. If the state already has a reason to end, it is kept."""
    state = replace(state, stop=state.stop or stop)
    if state.status == "running":
        return replace(state, status="ending"), (EndAttempt(stop.diagnosis),)
    return (state, ()) if state.status == "ending" else _finish(state)


def _with_host(hosts: tuple[str, ...], host: str, present: bool = True) -> tuple[str, ...]:
    """`hosts` with `host` added or removed, sorted by name."""
    return tuple(sorted({*hosts, host} if present else set(hosts) - {host}))
