"""Properties of the state machine under random events."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.host_health import HealthFinding
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
    Prepare,
    Ready,
    SelfTestEnded,
    SkippedSamples,
    StepTrained,
    StopRequested,
    Tick,
    Unhealthy,
    Unplannable,
    Unrecordable,
)
from meshwright.policies.restart import Incident, RestartPolicy
from meshwright.policies.supervision import Rules, State, decide

HOSTS = ("a", "b", "c", "d")
RULES = Rules(hosts=2, global_batch=8, policy=RestartPolicy(3), test_at_end=True)
host, attempt = st.sampled_from(HOSTS), st.integers(1, 6)
incident = st.builds(
    Incident,
    st.sampled_from([1, 3, 5, 6, -9, -11, 75]),
    st.sampled_from(["it failed", "CUDA error: it failed"]),
    st.just(0),
    host,
    st.integers(1, 3),
    st.just("train"),
    st.booleans(),
)
finding = st.sampled_from(
    [HealthFinding(rule, "GPU 0", rule) for rule in ("xid-lost", "xid-memory", "xid-contained", "thermal")]
)
EVENTS: st.SearchStrategy[list[Event]] = st.lists(
    st.one_of(
        st.builds(Ready, host, st.booleans()),
        st.builds(Lost, host, st.just("silent")),
        st.builds(AttemptReported, attempt),
        st.builds(AttemptPrepared, attempt),
        st.builds(Unplannable, attempt, st.just("too large")),
        st.builds(SelfTestEnded, attempt, host, st.sampled_from(["", "wrong"]), st.sampled_from(["", "late"])),
        st.builds(StepTrained),
        st.builds(Committed, st.integers(1, 9)),
        st.builds(SkippedSamples, st.sampled_from([((8, 16),), ((16, 24), (32, 40))])),
        st.builds(Corrupted, attempt, st.integers(1, 3), st.builds(replace, incident, corrupt=st.just(True))),
        st.builds(Unhealthy, host, finding),
        st.builds(Failed, attempt, incident),
        st.builds(HostEnded, attempt, host),
        st.builds(StopRequested, st.sampled_from([75, 130])),
        st.builds(Unrecordable, st.just(3), st.just("the disk is full")),
        st.builds(Tick),
    ),
    max_size=80,
)


def run(events: list[Event], rules: Rules = RULES) -> list[tuple[Event, State, tuple[Action, ...]]]:
    """Each event with the state and the actions after it; ten seconds pass between events."""
    state, trace = State(), []
    for number, event in enumerate(events):
        state, actions = decide(state, event, 10.0 * number, rules)
        trace.append((event, state, actions))
    return trace


@given(EVENTS)
def test_attempts_never_overlap(events: list[Event]) -> None:
    running: set[str] = set()
    for event, state, actions in run(events):
        if isinstance(event, HostEnded) and event.attempt == state.attempt:
            running.discard(event.host)
        if isinstance(event, Lost):
            running.discard(event.host)
        for action in actions:
            if isinstance(action, Prepare):
                assert not running, "ranks of the attempt before still run"
                missing = bool(state.excluded or state.unplannable)
                assert len(state.members) == len(set(state.members)) <= RULES.hosts
                assert len(state.members) == RULES.hosts or missing
                assert not {exclusion.host for exclusion in state.excluded} & set(state.members)
            elif isinstance(action, BeginAttempt):
                assert state.prepared and not state.testing and not running
                running = set(state.members)


@given(EVENTS)
def test_no_excluded_host_is_ready_or_begins(events: list[Event]) -> None:
    for _, state, actions in begun(*events):
        excluded = {exclusion.host for exclusion in state.excluded}
        assert not excluded & set(state.ready)
        assert not excluded & {draining.host for draining in state.draining}
        assert not (
            excluded & set(state.members) and any(isinstance(action, Prepare | BeginAttempt) for action in actions)
        )


@given(EVENTS)
def test_each_attempt_is_decided_at_most_once_and_the_job_finishes_once(events: list[Event]) -> None:
    ended: list[int] = []
    finished = 0
    for _, state, actions in run(events):
        ended += [state.attempt for action in actions if isinstance(action, EndAttempt)]
        finished += sum(isinstance(action, Finish) for action in actions)
        assert len(state.incidents) <= RULES.policy.restarts + 1
        if finished:
            assert state.status == "finished" and state.stop is not None
    assert len(ended) == len(set(ended)) and finished <= 1


@given(EVENTS)
def test_a_failure_of_a_running_attempt_leads_to_exactly_one_decision(events: list[Event]) -> None:
    state = State()
    for number, event in enumerate(events):
        before, (state, actions) = state, decide(state, event, 10.0 * number, RULES)
        if isinstance(event, Failed) and event.attempt == before.attempt and before.status in ("preparing", "running"):
            if before.stop is not None:  # the self-test before the end
                assert state.status == "finished"
                continue
            assert sum(isinstance(action, EndAttempt) for action in actions) == 1
            assert (state.stop is not None) != (state.status in ("gathering", "preparing") or state.stop is None)


@given(EVENTS)
def test_a_state_survives_its_file(events: list[Event]) -> None:
    from meshwright.spec.fields import from_plain, to_plain

    for _, state, _ in run(events):
        assert from_plain(State, to_plain(state)) == state


def begun(*more: Event) -> list[tuple[Event, State, tuple[Action, ...]]]:
    return run([Ready("a"), Ready("b"), Ready("c"), AttemptPrepared(1), StepTrained(), *more])


def test_a_lost_host_is_replaced_by_a_spare() -> None:
    trace = begun(Lost("a", "silent"), Ready("b"), HostEnded(1, "b"), Tick())
    assert [type(action) for _, _, actions in trace for action in actions] == [
        Prepare,
        BeginAttempt,
        EndAttempt,
        Prepare,
    ]
    assert trace[-1][1].members == ("b", "c") and trace[-1][1].attempt == 2


def test_back_off_delays_the_second_restart() -> None:
    failed = [Failed(n, Incident(5, "lost", 0, "a", n)) for n in (1, 2)]
    again = [Ready("a"), Ready("b")]
    trace = begun(failed[0], HostEnded(1, "a"), HostEnded(1, "b"), *again, AttemptPrepared(2), failed[1])
    assert trace[-1][1].not_before == 10.0 * (len(trace) - 1) + 2.0


def test_samples_that_ranks_skip_after_a_rollback_count_when_a_failing_step_is_skipped() -> None:
    """With samples 16 to 23 left out by the ranks, step 5 reads 40 to 47."""
    rules = Rules(hosts=2, global_batch=8, policy=RestartPolicy(3, "skip_data"))
    killed = Incident(-9, "killed", 0, "a", 5)
    again: list[Event] = [HostEnded(1, "a"), HostEnded(1, "b"), Ready("a"), Ready("b"), Tick(), AttemptPrepared(2)]
    started: list[Event] = [Ready("a"), Ready("b"), AttemptPrepared(1), StepTrained()]
    trace = run([*started, SkippedSamples(((16, 24),)), Failed(1, killed), *again, Failed(2, killed)], rules)
    assert trace[-1][1].skipped == ((16, 24), (40, 48))


def test_a_done_job_ends_with_0_and_a_stop_request_between_attempts_with_its_own_code() -> None:
    assert begun(HostEnded(1, "a"), HostEnded(1, "b"))[-1][2] == (Finish(0),)
    failed = Failed(1, Incident(5, "lost", 0, "a", 1))
    assert begun(failed, StopRequested(75), HostEnded(1, "a"), HostEnded(1, "b"))[-1][2] == (Finish(75),)


def test_without_a_spare_the_job_continues_on_fewer_hosts_after_a_wait_and_grows_at_a_checkpoint() -> None:
    rules = Rules(hosts=2, global_batch=8, policy=RestartPolicy(3), wait_seconds=25.0)
    lost: list[Event] = [
        Ready("a"),
        Ready("b"),
        AttemptPrepared(1),
        StepTrained(),
        Lost("b", "silent"),
        HostEnded(1, "a"),
        Ready("a"),
    ]
    trace = run([*lost, Tick(), Tick(), Tick()], rules)
    assert [bool(actions) for _, _, actions in trace[5:]] == [False, False, False, True, False]
    assert trace[-1][1].members == ("a",) and trace[-1][1].attempt == 2
    back: list[Event] = [
        Tick(),
        Tick(),
        Tick(),
        AttemptPrepared(2),
        Ready("b"),
        Committed(4),
        HostEnded(2, "a"),
        Ready("a"),
    ]
    state = run([*lost, *back], rules)[-1][1]
    assert state.members == ("a", "b") and state.attempt == 3 and not state.incidents
