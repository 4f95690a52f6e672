"""Failures that lead to self-tests, the hosts that run them, and the consequences of their results."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from meshwright.policies.host_tests import Suspect, seconds_of_test, self_test_groups, suspects_after
from meshwright.policies.job_events import (
    AttemptPrepared,
    BeginAttempt,
    Corrupted,
    EndAttempt,
    Event,
    Failed,
    Finish,
    HostEnded,
    Lost,
    Note,
    Prepare,
    Ready,
    RecordIncident,
    SelfTestEnded,
    StepTrained,
    StopRequested,
    Test,
    Tick,
    Unplannable,
)
from meshwright.policies.restart import Incident, RestartPolicy
from meshwright.policies.supervision import RETURN_SECONDS, Rules, State, decide, is_excluded

MEMBERS = ("a/1", "b/2")
RULES = Rules(hosts=2, global_batch=8, policy=RestartPolicy(3))


def incident(code: int, cause: str = "it failed", *, hang: bool = False, host: str = "b/2") -> Incident:
    return Incident(code, cause, 1, host, 4, hang=hang)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT])
def test_a_signal_of_the_processor_makes_its_host_a_suspect(number: int) -> None:
    assert suspects_after([incident(-number)], MEMBERS) == (Suspect("b/2"),)


def test_a_killed_process_makes_its_host_a_suspect_only_if_it_repeats_there() -> None:
    killed = incident(-signal.SIGKILL)
    assert suspects_after([killed], MEMBERS) == ()
    assert suspects_after([incident(-signal.SIGKILL, host="a/1"), killed], MEMBERS) == ()
    assert suspects_after([incident(5, hang=True, host="b/1"), killed], MEMBERS) == (Suspect("b/2"),)


def test_a_hang_leads_to_a_test_in_a_pair_and_a_lost_peer_only_if_it_repeats() -> None:
    assert suspects_after([incident(5, hang=True)], MEMBERS) == (Suspect("b/2", paired=True),)
    assert suspects_after([incident(5)], MEMBERS) == ()
    assert suspects_after([incident(5), incident(5)], MEMBERS) == (Suspect("b/2", paired=True),)


@pytest.mark.parametrize(
    ("code", "cause", "tested"),
    [
        (1, "internal error: AcceleratorError: CUDA error: an illegal memory access was encountered", ("b/2",)),
        (1, "internal error: KeyError: 'x'", ()),
        (2, "train.steps: CUDA error", ()),
        (3, "out of memory: CUDA error: out of memory", ()),
        (6, "the loss is not finite", MEMBERS),
    ],
)
def test_internal_errors_of_devices_and_lasting_non_finite_values_lead_to_tests(
    code: int, cause: str, tested: tuple[str, ...]
) -> None:
    assert tuple(suspect.host for suspect in suspects_after([incident(code, cause)], MEMBERS)) == tested


def test_a_paired_suspect_is_tested_with_the_next_host_that_is_in_no_other_group() -> None:
    hosts = ("a", "b", "c", "d")
    assert self_test_groups([Suspect("b", True)], hosts) == (("b", "c"),)
    assert self_test_groups([Suspect("d", True)], hosts) == (("d", "a"),)
    assert self_test_groups([Suspect("a", True), Suspect("b", True)], hosts) == (("a", "c"), ("b", "d"))
    assert self_test_groups([Suspect("a", True), Suspect("b", True)], hosts[:2]) == (("a",), ("b",))
    assert self_test_groups([Suspect("c"), Suspect("elsewhere")], hosts) == (("c",),)


class Job:
    """A job of hosts a and b that has trained, and the actions of its last event."""

    def __init__(self, rules: Rules = RULES, *spares: str) -> None:
        self.rules, self.state, self.now = rules, State(), 0.0
        self.take(*(Ready(host) for host in (*MEMBERS[: rules.hosts], *spares)), AttemptPrepared(1), StepTrained())

    def take(self, *events: Event, seconds: float = 0.0) -> list[object]:
        """The actions that follow events."""
        actions: list[object] = []
        for event in events:
            self.now += seconds
            self.state, more = decide(self.state, event, self.now, self.rules)
            actions += more
        return actions

    def fail(self, failure: Incident) -> list[object]:
        """End the attempt with a failure; all members are ready again."""
        attempt, members = self.state.attempt, self.state.members
        ends = [HostEnded(attempt, host) for host in members]
        return self.take(Failed(attempt, failure), *ends, *(Ready(host) for host in members))


def types(actions: list[object]) -> list[type]:
    return [type(action) for action in actions]


def test_an_attempt_begins_once_it_is_prepared_and_the_suspect_has_passed() -> None:
    job = Job()
    assert types(job.fail(incident(-signal.SIGBUS))) == [EndAttempt, Prepare]
    assert job.state.testing == ("b/2",) and job.take(AttemptPrepared(2)) == []
    assert types(job.take(SelfTestEnded(2, "b/2"))) == [BeginAttempt]
    assert job.state.suspects == () and job.state.status == "running"


def test_a_suspect_that_fails_is_excluded_and_a_spare_host_replaces_it() -> None:
    job = Job(RULES, "c/3")
    job.fail(incident(-signal.SIGBUS))
    job.take(AttemptPrepared(2), Ready("a/1"))  # as reports of a host that waits say again
    note, prepare = job.take(SelfTestEnded(2, "b/2", "wrong matmul"))
    assert isinstance(note, Note) and "b/2 failed the self-test" in note.text and isinstance(prepare, Prepare)
    assert job.state.members == ("a/1", "c/3") and job.state.excluded[0].cause == "wrong matmul"
    assert types(job.take(AttemptPrepared(2), AttemptPrepared(3))) == [BeginAttempt]
    assert job.take(Ready("b/7")) == [] and job.state.ready == () and is_excluded(job.state, "b/7")


def test_a_spare_host_takes_the_place_of_a_slow_member_only_after_some_seconds() -> None:
    for seconds, spare in ((1.0, False), (6.0, True)):
        job = Job(RULES, "c/3")
        job.take(Failed(1, incident(-9)), HostEnded(1, "a/1"), HostEnded(1, "b/2"), Ready("a/1"))
        job.take(Tick(), seconds=seconds)
        job.take(Ready("b/2"))
        assert job.state.members == (("a/1", "c/3") if spare else ("a/1", "b/2"))


def test_a_failed_exchange_excludes_the_suspect_and_not_its_partner() -> None:
    job = Job(RULES, "c/3")
    job.fail(incident(5, hang=True))
    assert job.state.tests == (("b/2", "a/1"),)
    job.take(AttemptPrepared(2), SelfTestEnded(2, "a/1", exchange="no answer"))
    assert [(exclusion.host, exclusion.cause) for exclusion in job.state.excluded] == [
        ("b/2", "exchange with a/1: no answer")
    ]


def test_a_test_that_does_not_end_is_repeated_once_with_a_longer_limit_before_it_excludes() -> None:
    for passes in (True, False):
        job = Job(Rules(1, 8, RestartPolicy(3), others_may_join=False))
        job.fail(incident(5, hang=True, host="a/1"))
        assert seconds_of_test(("a/1",), job.state.incomplete) == 60
        late = SelfTestEnded(2, "a/1", exchange="it did not answer in time", complete=False)
        assert types(job.take(AttemptPrepared(2), late)) == [Note] and not job.state.excluded
        assert types(job.take(Tick(), Ready("a/1"), AttemptPrepared(3), seconds=60)) == [Prepare]
        assert job.state.testing == ("a/1",) and seconds_of_test(("a/1",), job.state.incomplete) == 180
        if passes:
            assert types(job.take(SelfTestEnded(3, "a/1"))) == [BeginAttempt] and job.state.incomplete == ()
        else:
            assert job.take(SelfTestEnded(3, "a/1", exchange="late", complete=False))[-1] == Finish(5)
    job = Job()
    job.fail(incident(-signal.SIGBUS))
    job.take(SelfTestEnded(2, "b/2", "wrong matmul", "late", complete=False))
    assert [exclusion.host for exclusion in job.state.excluded] == ["b/2"]


def test_without_a_spare_the_job_continues_on_the_remaining_hosts_after_an_exclusion() -> None:
    job = Job()
    job.fail(incident(-signal.SIGBUS))
    assert types(job.take(SelfTestEnded(2, "b/2", "wrong"), Ready("a/1"), seconds=1)) == [Note]
    assert types(job.take(Tick(), Tick(), seconds=20)) == [Prepare]
    assert job.state.members == ("a/1",)


def test_a_job_whose_only_host_is_excluded_ends_with_5() -> None:
    job = Job(Rules(1, 8, RestartPolicy(3), others_may_join=False))
    job.fail(incident(-signal.SIGBUS, host="a/1"))
    assert job.take(SelfTestEnded(2, "a/1", "wrong"))[-1] == Finish(5) and job.state.stop is not None
    assert job.state.stop.diagnosis == "too few hosts: host a/1 failed the self-test"


def test_values_that_stay_non_finite_end_the_job_only_after_all_hosts_have_passed() -> None:
    rules = Rules(2, 8, RestartPolicy(3), test_at_end=True)
    job = Job(rules)
    assert types(job.fail(incident(6))) == [EndAttempt, Test]
    assert job.take(SelfTestEnded(2, "a/1"), SelfTestEnded(2, "b/2")) == [Finish(6)]
    job = Job(rules, "c/3")
    job.fail(incident(6))
    assert types(job.take(SelfTestEnded(2, "b/2", "wrong"), Ready("a/1"))) == [Note, Prepare]
    assert job.state.stop is None and job.state.members == ("a/1", "c/3")
    # the remaining member was not tested to the end, so it still has to pass
    assert job.state.testing == ("a/1",)
    assert types(Job(rules).fail(incident(6))[:1]) == [EndAttempt]


def test_without_persisting_values_or_without_ready_hosts_code_6_ends_the_job_untested() -> None:
    assert types(Job().fail(incident(6))) == [EndAttempt, Finish]
    job = Job(Rules(2, 8, RestartPolicy(3), test_at_end=True))
    job.take(Failed(1, incident(6)), HostEnded(1, "a/1"), HostEnded(1, "b/2"), Ready("a/1"))
    assert job.take(Tick(), Tick(), seconds=16) == [Finish(6)]
    job = Job(Rules(2, 8, RestartPolicy(3), test_at_end=True))
    job.take(Failed(1, incident(6)), HostEnded(1, "a/1"), HostEnded(1, "b/2"), Ready("a/1"))
    assert job.take(StopRequested(75)) == [Finish(6)]


def test_a_number_of_hosts_without_a_plan_is_not_tried_again_and_fewer_are() -> None:
    rules = Rules(4, 8, RestartPolicy(3), wait_seconds=5.0)
    job = Job(rules, "c/3", "d/4")
    job.take(Lost("d/4", "silent"), *(HostEnded(1, host) for host in job.state.members))
    job.take(Ready("a/1"), Ready("b/2"), Ready("c/3"), Tick())
    assert types(job.take(Tick(), seconds=6)) == [Prepare] and len(job.state.members) == 3
    note, prepare = job.take(Unplannable(2, "plan: no"))
    assert note == Note("there is no plan for 3 of 4 hosts; 2 are tried (plan: no)") and isinstance(prepare, Prepare)
    assert job.state.members == ("a/1", "b/2") and job.state.ready == ("c/3",)
    assert types(job.take(AttemptPrepared(3))) == [BeginAttempt] and job.state.short_since is None


def test_without_any_plan_the_job_waits_for_hosts_and_then_ends_with_5() -> None:
    rules = Rules(2, 8, RestartPolicy(3), wait_seconds=5.0)

    def short() -> Job:
        job = Job(rules)
        job.take(Lost("b/2", "silent"), HostEnded(1, "a/1"), Ready("a/1"))
        assert types(job.take(Tick(), seconds=6)) == [Prepare]
        (note,) = job.take(Unplannable(2, "plan.shard: no"))
        assert isinstance(note, Note) and "the job waits for others, at most 900 s" in note.text
        return job

    job = short()
    assert job.take(Tick(), seconds=800) == [] and job.take(Tick(), seconds=100) == [Finish(5)]
    assert job.state.stop is not None and job.state.stop.diagnosis.endswith("there is no plan for 1 of 2 hosts")
    job = short()
    assert types(job.take(Ready("c/3"), seconds=RETURN_SECONDS / 2)) == [Prepare]
    assert job.state.members == ("a/1", "c/3")


def test_the_host_of_a_rank_with_corrupt_state_is_tested_before_the_next_attempt_and_at_once_after_the_second_time() -> (
    None
):
    corrupt = replace(incident(5), corrupt=True)
    assert suspects_after([corrupt], MEMBERS) == (Suspect("b/2"),)
    state = State(status="running", attempt=1, members=MEMBERS)
    state, actions = decide(state, Corrupted(1, 1, corrupt), 0.0, RULES)
    assert actions == (RecordIncident(corrupt),) and state.status == "running" and not state.incidents
    assert decide(state, Corrupted(1, 1, corrupt), 0.0, RULES) == (state, ())  # an agent reports it again
    failed, _ = decide(state, Failed(1, incident(-signal.SIGKILL, host="a/1")), 0.0, RULES)
    assert failed.suspects == (Suspect("b/2"),)
    again, actions = decide(state, Corrupted(1, 2, corrupt), 0.0, RULES)
    assert again.status == "ending" and again.suspects == (Suspect("b/2"),)
    assert actions[0] == EndAttempt(corrupt.cause, corrupt)
    without = replace(RULES, policy=RestartPolicy(0))
    assert (
        decide(State(status="running", attempt=1, members=MEMBERS), Corrupted(1, 1, corrupt), 0.0, without)[0].suspects
        == ()
    )
