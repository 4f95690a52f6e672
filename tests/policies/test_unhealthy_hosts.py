"""What a supervised job does about hosts whose health is bad."""

from __future__ import annotations

from dataclasses import replace

from meshwright.policies.host_health import HealthFinding
from meshwright.policies.job_events import (
    Action,
    AttemptPrepared,
    BeginAttempt,
    Committed,
    EndAttempt,
    Event,
    Failed,
    Finish,
    HostEnded,
    Lost,
    Note,
    Prepare,
    Ready,
    StepTrained,
    StopRequested,
    Tick,
    Unhealthy,
)
from meshwright.policies.restart import Incident, RestartPolicy
from meshwright.policies.supervision import Rules, State, decide

RULES = Rules(hosts=2, global_batch=8, policy=RestartPolicy(3))
LOST_GPU = HealthFinding("xid-lost", "GPU 3", "XID 79, the GPU has fallen off the bus")
HOT = HealthFinding("thermal", "GPU 3", "too hot")
REMAP = HealthFinding("remap-pending", "GPU 3", "a memory row is replaced at the next reset")
CONTAINED = HealthFinding("xid-contained", "GPU 3", "XID 94")
SAVED = Incident(75, "ended on request after step 7", 0, "a", 7)


def after(*events: Event, rules: Rules = RULES, state: State | None = None) -> tuple[State, list[Action]]:
    """The state after events, a second apart, and all actions."""
    state, actions = state or State(), []
    for number, event in enumerate(events):
        state, more = decide(state, event, float(number), rules)
        actions += more
    return state, actions


def running(*hosts: str, rules: Rules = RULES) -> State:
    """A job that trains on a and b; further hosts are spares."""
    state, _ = after(Ready("a"), Ready("b"), AttemptPrepared(1), StepTrained(), *map(Ready, hosts), rules=rules)
    assert state.status == "running" and state.members == ("a", "b")
    return state


def test_a_broken_gpu_fails_the_attempt_at_once_and_a_spare_takes_its_place() -> None:
    state, actions = after(Unhealthy("b", LOST_GPU), Unhealthy("b", LOST_GPU), state=running("c"))
    assert state.status == "ending" and [type(action) for action in actions] == [Note, EndAttempt]
    assert actions[0] == Note(f"host b is not healthy and is excluded from the job: {LOST_GPU.description}")
    assert state.incidents[-1].host == "b" and [each.host for each in state.excluded] == ["b"]
    state, actions = after(HostEnded(1, "a"), HostEnded(1, "b"), Ready("a"), Ready("b"), state=state)
    assert state.members == ("a", "c") and [type(action) for action in actions] == [Prepare]


def test_a_broken_gpu_without_a_spare_leaves_fewer_hosts_as_a_failed_self_test_does() -> None:
    state, _ = after(Unhealthy("b", LOST_GPU), HostEnded(1, "a"), HostEnded(1, "b"), Ready("a"), state=running())
    assert state.status == "gathering"
    state, actions = decide(state, Tick(), 40.0, RULES)
    assert state.members == ("a",) and [type(action) for action in actions] == [Prepare]


def test_the_only_host_ends_the_job_and_says_why() -> None:
    alone = replace(RULES, hosts=1, others_may_join=False)
    state, _ = after(
        Ready("a"), AttemptPrepared(1), StepTrained(), Unhealthy("a", LOST_GPU), HostEnded(1, "a"), rules=alone
    )
    assert state.status == "finished" and state.stop is not None
    assert (state.stop.code, state.stop.diagnosis) == (5, "too few hosts: host a is not healthy")


def test_a_hot_host_is_replaced_after_the_running_step_without_a_failure() -> None:
    state, actions = after(Unhealthy("b", HOT), Unhealthy("b", HOT), state=running("c"))
    assert state.status == "running" and [each.host for each in state.draining] == ["b"]
    assert actions == [Note("host b is replaced after the running step: GPU 3: too hot")]
    state, actions = after(Committed(7), Failed(1, SAVED), state=state)
    assert state.status == "ending" and not state.incidents and state.stop is None
    assert actions == [EndAttempt("the next attempt is to leave out host b (GPU 3: too hot)")]
    state, actions = after(Ready("a"), Ready("b"), HostEnded(1, "a"), HostEnded(1, "b"), Ready("b"), state=state)
    assert state.members == ("a", "c") and not state.draining and state.restart.delay == 0
    state, actions = after(AttemptPrepared(2), state=state)
    assert [type(action) for action in actions] == [BeginAttempt]


def test_a_hot_host_stays_while_no_other_is_ready_and_is_replaced_once_one_is() -> None:
    state, actions = after(Unhealthy("b", HOT), state=running())
    assert not state.draining
    assert isinstance(actions[0], Note) and actions[0].text.endswith(
        "the host stays, as no other one is ready to take its place"
    )
    state, _ = after(Ready("c"), Unhealthy("b", HOT), state=state)
    assert [each.host for each in state.draining] == ["b"]
    state, _ = after(Unhealthy("a", HOT), state=state)  # one spare replaces one host
    assert [each.host for each in state.draining] == ["b"]


STAYS = "the host stays, as no other one is ready to take its place"
ENDED = (HostEnded(1, "a"), HostEnded(1, "b"), Ready("a"), Ready("b"))
WORN = HealthFinding("xid-memory", "GPU 3", "XID 48")


def test_a_drained_host_stays_if_the_spare_is_lost_before_its_ranks_have_ended() -> None:
    for moment in range(3):
        events = [Committed(7), Failed(1, SAVED), HostEnded(1, "a")]
        events.insert(moment, Lost("c", "silent"))
        state, actions = after(Unhealthy("b", HOT), *events, *ENDED, state=running("c"))
        assert state.members == ("a", "b") and not state.excluded and not state.draining
        assert [action for action in actions if isinstance(action, Note)][-1] == Note(
            f"host b: {HOT.description}; {STAYS}"
        )
        state, _ = after(AttemptPrepared(2), state=state)
        assert state.status == "running"


def test_of_two_drained_hosts_one_stays_if_one_spare_is_left() -> None:
    draining = (Unhealthy("a", HOT), Unhealthy("b", HOT))
    state, _ = after(*draining, Committed(7), Failed(1, SAVED), Lost("d", "silent"), *ENDED, state=running("c", "d"))
    assert [each.host for each in state.excluded] == ["a"] and state.members == ("b", "c")


def test_what_drains_a_host_that_trains_does_not_exclude_it_between_two_attempts() -> None:
    """Before the first attempt XID 48 excludes a host; a host that stays keeps its place, however often it reports it."""
    events = (Unhealthy("b", WORN), Committed(7), Failed(1, SAVED), Lost("c", "silent"), *ENDED)
    repeated = [new for event in events for new in (event, Unhealthy("b", WORN))]
    state, _ = after(*repeated, state=running("c"))
    assert state.members == ("a", "b") and not state.excluded
    state, _ = after(Ready("c"), Unhealthy("b", WORN), state=state)  # while the attempt is prepared
    assert [each.host for each in state.excluded] == ["b"]
    state, _ = after(Ready("a"), state=state)
    assert state.members == ("a", "c") and state.status == "preparing"


def test_fewer_hosts_go_on_if_wait_seconds_allows_them() -> None:
    rules = replace(RULES, wait_seconds=0.0)
    state, _ = after(
        Unhealthy("b", HOT),
        Failed(1, SAVED),
        HostEnded(1, "a"),
        HostEnded(1, "b"),
        Ready("a"),
        rules=rules,
        state=running(rules=rules),
    )
    assert state.status == "preparing" and state.members == ("a",)
    state, _ = after(Unhealthy("a", HOT), rules=rules, state=state)
    assert state.members == ("a",)  # the last one stays


def test_a_run_that_writes_no_checkpoint_drains_nobody() -> None:
    rules = replace(RULES, saves=False)
    assert not after(Unhealthy("b", HOT), rules=rules, state=running("c", rules=rules))[0].draining


def test_a_stop_request_during_a_drain_ends_the_job() -> None:
    state, actions = after(Unhealthy("b", HOT), StopRequested(75), Failed(1, SAVED), state=running("c"))
    state, actions = after(HostEnded(1, "a"), HostEnded(1, "b"), state=state)
    assert actions == [Finish(75)]


def test_a_host_that_is_drained_and_fails_is_left_out_too() -> None:
    for failure in (Failed(1, Incident(5, "rank 1 hangs", 1, "b", 4, hang=True)), Lost("b", "silent")):
        events = (failure, Ready("a"), Ready("b"), HostEnded(1, "a"), HostEnded(1, "b"))
        state, _ = after(Unhealthy("b", HOT), *events, state=running("c"))
        assert state.members == ("a", "c") and len(state.incidents) == 1


def test_a_warning_changes_nothing_until_a_failure() -> None:
    before = running("c")
    state, actions = after(Unhealthy("b", CONTAINED), Unhealthy("c", CONTAINED), state=before)
    assert state == before and all(isinstance(action, Note) for action in actions)
    state, _ = after(Failed(1, Incident(-6, "killed", 1, "b", 4)), Unhealthy("b", CONTAINED), state=state)
    assert [each.host for each in state.excluded] == ["b"]


def test_before_the_start_a_host_is_left_out_if_there_are_others() -> None:
    state, _ = after(Unhealthy("a", REMAP), Ready("a"), Ready("b"))
    assert state.members == ("a", "b") and not state.excluded
    state, _ = after(Unhealthy("a", REMAP), state=state)
    assert state.members == ("a", "b")
    state, actions = after(Ready("c"), Unhealthy("a", REMAP), Ready("b"), state=state)
    assert state.members == ("b", "c") and state.status == "preparing" and state.attempt == 2
    assert [type(action) for action in actions] == [Note, Prepare]


def test_a_broken_spare_is_excluded_and_the_job_trains_on() -> None:
    before = running("c")
    state, actions = after(Unhealthy("c", LOST_GPU), Ready("c"), state=before)
    assert state.ready == () and [type(action) for action in actions] == [Note]
    assert (state.status, state.members, state.attempt) == (before.status, before.members, before.attempt)


def test_health_changes_nothing_about_a_job_that_ends() -> None:
    state, _ = after(Failed(1, Incident(2, "bad input", 0, "a", 4)), state=running("c"))
    assert after(Unhealthy("a", LOST_GPU), state=state) == (state, [])
