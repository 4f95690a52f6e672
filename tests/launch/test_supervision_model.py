"""Model check of supervision: with failing writes, lost and repeated messages at every point, each job has a way to its end.

After the faults a job ends with the code of its work, of a stop request, or of the disk that failed. `make test-attack` tries
ten thousand random sequences and all short ones.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.launch.supervision_world import FOLDER, Ranks, World, world

from meshwright.launch.coordinator import Coordinator, NoPlanForHosts
from meshwright.launch.reports import Report
from meshwright.launch.state_file import UNWRITABLE_SECONDS
from meshwright.policies.job_events import Committed
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.supervision import LISTED_CHECKPOINTS, Rules, State, decide, is_unlisted

CODES = {0, 1, 3, 4, 5, 7, 75}
"""Codes of jobs whose ranks fail and whose disk may stay full or broken."""
Operation = Callable[[World, int], object]


def go_on(job: World, rounds: int, seconds: float = 0.1) -> None:
    """All agents report, and time passes, several times."""
    for _ in range(rounds):
        for host in range(len(job.agents)):
            job.report(host)
        job.tick(seconds)


OPERATIONS: dict[str, tuple[int, Operation]] = {
    "go on": (14, lambda job, host: go_on(job, 2)),
    "seconds": (6, lambda job, host: go_on(job, 4, 1.1)),
    "report": (8, lambda job, host: job.report(host)),
    "answer lost": (5, lambda job, host: job.report(host, lost=True)),
    "repeated": (5, lambda job, host: job.report(host, repeated=True)),
    "tick": (5, lambda job, host: job.tick()),
    "silence": (2, lambda job, host: [job.tick(1.5) for _ in range(6)]),
    "full disk": (6, lambda job, host: job.toggle_disk(errno.ENOSPC)),
    "broken disk": (2, lambda job, host: job.toggle_disk(errno.EIO)),
    "lost disk": (2, lambda job, host: job.toggle_disk(errno.ESTALE)),
    "slow": (4, lambda job, host: job.toggle_preparations()),
    "no space to prepare": (1, lambda job, host: job.fail_preparation(OSError(errno.ENOSPC, "full"))),
    "defect": (1, lambda job, host: job.fail_preparation(KeyError("x"))),
    "no plan": (2, lambda job, host: job.fail_preparation(NoPlanForHosts("too large"))),
    "coordinator": (5, lambda job, host: job.restart_coordinator()),
    "killed": (5, lambda job, host: job.end_rank(host)),
    "failed": (2, lambda job, host: job.end_rank(host, 1)),
    "out of memory": (1, lambda job, host: job.end_rank(host, 3)),
    "hung": (3, lambda job, host: job.hang_rank(host)),
    "agent": (4, lambda job, host: job.replace_agent(host)),
    "stop": (1, lambda job, host: job.stop_agent(host)),
}
"""What may happen to a job, with weights."""
CHOICES = [name for name, (weight, _) in OPERATIONS.items() for _ in range(weight)]
MOST_HOSTS = 3


def run(hosts: int, steps: Sequence[tuple[str, int]], *, disk_fails: bool) -> None:
    """Carry out the steps, operation and host; then nothing but the disk fails, and the job has to end."""
    try:
        with world(hosts) as job:
            for name, host in steps:
                OPERATIONS[name][1](job, host % hosts)
            code = job.end(disk_fails=disk_fails)
            assert code in CODES
            assert code != 75 or job.stop_code
    except Exception as error:
        raise AssertionError(f"run({hosts}, {steps}, disk_fails={disk_fails}): {error!r}") from error


def search(sequences: int, most_steps: int, part: int = 0) -> None:
    """Try random sequences, the same ones each time. One byte is a step: that is much quicker than rules of hypothesis."""
    assert len(CHOICES) * MOST_HOSTS <= 256

    @seed(part)
    @settings(
        max_examples=sequences,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from([1, 1, 2, 3]), st.binary(min_size=most_steps // 2, max_size=most_steps), st.booleans())
    def attempt(hosts: int, steps: bytes, disk_fails: bool) -> None:
        named = [(CHOICES[step % len(CHOICES)], step // len(CHOICES)) for step in steps]
        run(hosts, named, disk_fails=disk_fails)

    attempt()


FAULTS = ["answer lost", "repeated", "full disk", "slow", "coordinator", "killed", "hung", "agent", "stop"]


def exhaust(length: int, first: Sequence[str] = FAULTS) -> None:
    """All sequences of faults of a job of one host, which makes some progress between two of them."""
    for chosen in itertools.product(first, *[FAULTS] * (length - 1)):
        for disk_fails in (False, True):
            run(1, [(name, 0) for fault in chosen for name in (fault, "go on")], disk_fails=disk_fails)


def test_no_random_sequence_of_faults_leaves_a_job_without_a_way_forward() -> None:
    search(150, 40)


def test_no_short_sequence_of_faults_leaves_a_job_without_a_way_forward() -> None:
    exhaust(2)


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.parametrize("part", range(1, 11))
def test_ten_thousand_sequences(part: int) -> None:
    search(1000, 50, part)


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.parametrize("first", FAULTS)
def test_all_sequences_of_four_faults(first: str) -> None:
    exhaust(4, [first])


def test_a_state_that_cannot_be_written_is_not_adopted_and_its_event_is_applied_again() -> None:
    """The disk is full when the first report begins the preparation; the job hung there for ever."""
    with world(1) as job:
        job.toggle_disk()
        job.report(0)
        assert job.coordinator.state.status == "gathering" and not job.journal.states
        job.toggle_disk()
        job.tick(1.1)
        job.report(0)
        job.tick()
        job.report(0)
        assert job.coordinator.state.status == "running" and len(job.journal.states) > 1


@pytest.mark.parametrize("reports", [0, 1, 2, 4])
def test_a_stop_request_ends_a_job_whose_disk_is_full(reports: int) -> None:
    with world(1) as job:
        for _ in range(reports):
            job.report(0)
            job.tick()
        job.toggle_disk()
        job.report(0)
        job.stop_agent(0)
        for _ in range(30):
            job.report(0)
            job.tick()
        assert job.codes == {0: 75}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ESTALE, errno.ENOENT])
def test_a_job_that_needs_a_disk_that_fails_ends_with_code_3_after_five_minutes(error: int) -> None:
    """A network file system that does not find the file for a while is no folder that was deleted."""
    with world(1, unwritable_seconds=UNWRITABLE_SECONDS) as job:
        go_on(job, 4)
        job.toggle_disk(error)
        job.end_rank(0)
        go_on(job, 290, 1.0)
        assert job.coordinator.code is None
        go_on(job, 20, 1.0)
        assert job.codes == {0: 3}
        assert any("for 300 s" in line or "no longer exists" in line for line in job.coordinator.outcome(FOLDER))


def test_a_job_whose_folder_was_deleted_ends_with_code_3_after_ten_seconds() -> None:
    with world(1) as job:
        go_on(job, 4)
        job.toggle_disk(errno.ENOENT)
        job.journal.gone = True
        job.end_rank(0)
        go_on(job, 15, 1.0)
        assert job.codes == {0: 3}
        assert job.coordinator.outcome(FOLDER)[-1].startswith("run no longer exists")


def test_a_wait_for_the_disk_is_over_once_its_event_does_not_come_again() -> None:
    """A rank hangs and goes on, twice: the job trains on with a full disk."""
    with world(1, unwritable_seconds=UNWRITABLE_SECONDS) as job:
        go_on(job, 4)
        job.toggle_disk()
        ranks = job.agents[0]._running
        assert isinstance(ranks, Ranks)
        for second in range(700):
            ranks.hung = second < 200 or 400 <= second < 600
            ranks.states[0].last_step = 1  # it never ends
            go_on(job, 1, 1.0)
        assert job.coordinator.state.status == "running" and not job.codes


def test_a_commit_that_cannot_be_written_ends_no_job_in_which_it_would_let_a_spare_host_join() -> None:
    with world(2, unwritable_seconds=UNWRITABLE_SECONDS) as job:
        state = State(status="running", attempt=1, members=("a",), ready=("b",), trained=True)
        coordinator = Coordinator(FOLDER, job.rules, 1, lambda state: FOLDER, state=state, clock=job.clock)
        coordinator._file = job.journal
        job.toggle_disk()
        for _ in range(400):
            coordinator.receive(Report("a", attempt=1, ended=False, checkpoints=(4,)))
            coordinator.receive(Report("b", port=1))
            job.clock.now += 1.0
            coordinator.tick()
        assert coordinator.state.status == "running"
        job.toggle_disk()
        coordinator.receive(Report("a", attempt=1, ended=False, checkpoints=(4,)))
        assert coordinator.state.status == "ending"
        coordinator.close()


def test_an_older_checkpoint_that_is_reported_again_ends_no_attempt() -> None:
    """The state lists eight: the first one of ten is no new one."""
    with world(2) as job:
        steps = tuple(range(1, 11))
        state = State(status="running", attempt=1, members=("a",), checkpoints=steps[-8:], present=steps[-8:])
        coordinator = Coordinator(FOLDER, job.rules, 1, lambda state: FOLDER, state=state, clock=job.clock)
        coordinator._file = job.journal
        coordinator.receive(Report("b", port=1))
        coordinator.receive(Report("a", attempt=1, ended=False, checkpoints=steps))
        assert coordinator.state.status == "running"
        coordinator.receive(Report("a", attempt=1, ended=False, checkpoints=(*steps, 11)))
        assert coordinator.state.status == "ending"
        coordinator.close()


def test_records_do_not_grow_with_the_number_of_checkpoints() -> None:
    state, rules = State(status="running", attempt=1, members=("a",)), Rules(1, 8, RestartPolicy(3))
    for step in range(1, 1000):
        assert is_unlisted(state, step)
        state, _ = decide(state, Committed(step), 0.0, rules)
    assert state.checkpoints == state.present == tuple(range(1000 - LISTED_CHECKPOINTS, 1000))
    assert not is_unlisted(state, 3) and not is_unlisted(state, 999)
