"""The coordinator of a supervised job: turns reports of agents into events, and decisions into directives.

The coordinator never calls an agent. It answers each report with what the agent should do now. Its state (`policies.supervision`) is
appended to `RUN/supervision.jsonl` at each change, and is read from there when the coordinator is started again.

For each event, the next state is first written, then adopted, and then its actions are carried out. If a state cannot be written, it is not
adopted, and the event is applied again later: events follow from what reports and clocks say, not from changes of these, so they come
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.checkpoint.format.inventory import present_steps
from meshwright.diagnosis.culprit import Culprit
from meshwright.events.messages import Corruption, ProgressMessage
from meshwright.events.terminal import write_line
from meshwright.launch.incidents import IncidentWriter, JobSchedule, culprit_of_hang, is_recorded, statuses
from meshwright.launch.outcome import RankState, cause, exit_codes, outcome_lines, progress_text
from meshwright.launch.progress_file import JobProgress, rank_snapshot
from meshwright.launch.reports import Directive, Evidence, Report
from meshwright.launch.state_file import StateFile
from meshwright.policies.hang import GPU_SECONDS, HangWatch
from meshwright.policies.host_tests import machine_of, seconds_of_test
from meshwright.policies.job_end import GRACE_SECONDS, STOP_EXIT_CODES, culprit, next_action
from meshwright.policies.job_events import (
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
from meshwright.policies.restart import Incident, Stop
from meshwright.policies.supervision import Rules, State, decide, exclusion_of, is_excluded, is_unlisted
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_INTERRUPTED, EXIT_PREEMPTED, MeshwrightError
from meshwright.spec.failures import as_meshwright_error

SILENT_SECONDS = 8.0
"""An agent that has not reported for this many seconds counts as lost."""
UNHEARD_SECONDS = 4.0
"""While any agent has not reported for this many seconds, no rank counts as hung, because ranks may wait for that host.

Longer than any heartbeat.
"""
STOPPED_SECONDS = 2.0
"""If more seconds pass between two calls of `tick`, this process was stopped."""
IMPORTS = ProgressMessage("start", 0)
"""Progress of a rank that has not reported any yet."""
RETURN_SECONDS = 4.0
"""If a coordinator was lost, agents on its host must report to the next coordinator within these seconds, or they count as lost too."""
STANDBY_HOSTS = 4
"""Number of members that stand by to become the coordinator, in addition to spare hosts."""
RESTART_GRACE_SECONDS = 2.0
"""Seconds that ranks may take to end before a restart. Their reports are not needed then."""


class NoPlanForHosts(MeshwrightError):
    """There is no plan for the number of hosts that the attempt has."""


@dataclass
class AttemptState:
    """State of an attempt's ranks, as far as agents have reported it."""

    number: int = 0
    ranks: dict[int, RankState] = field(default_factory=dict)
    assignment: str = ""
    """Path of the file that says what the attempt's ranks run; empty until it is written."""
    address: str = ""
    port: int = 0
    """Address and port of the store through which the ranks find each other.

    They are empty and 0 for an attempt that an earlier coordinator began.
    """
    test_stores: dict[str, tuple[str, int]] = field(default_factory=dict)
    """For each host that runs the self-test before the attempt: address and port of its store."""
    failed: bool = False
    failed_at: float | None = None
    cause: str = ""
    culprit: Culprit | None = None
    """The rank that holds up a hung attempt; None if the attempt's schedule is not known."""


class Coordinator:
    """Drives the state machine of one job. All times are in seconds of `clock`."""

    def __init__(
        self,
        folder: Path,
        rules: Rules,
        ranks_per_host: int,
        prepare: Callable[[State], Path],
        *,
        state: State | None = None,
        finished: State | None = None,
        lost_machine: str = "",
        hang_seconds: float = GPU_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prepare` writes the files of the state's attempt, in a thread, and returns the path of the assignment.

        The assignment is the file that says what the ranks of an attempt run. A training rank counts as hung after at least `hang_seconds`
        without progress; the limit depends on its usual step time (policies/hang.py). `finished` is the state of the earlier job in this
        folder: agents of that job that ask late are told that it is over. `lost_machine` is the machine of an earlier coordinator, if it
        was lost.
        """
        self.state = state or State()
        self._finished = finished
        self._folder = folder
        self._rules = rules
        self._per_host = ranks_per_host
        self._prepare = prepare
        self._clock = clock
        self._hang_seconds = hang_seconds
        self._watch = HangWatch(hang_seconds)
        self._ticked = clock()
        self._informed: set[str] = set()
        self._noted: set[str] = set()
        self._positions: tuple[tuple[str, ...], dict[str, int]] = ((), {})
        self._stop = 0
        self._attempt = AttemptState(self.state.attempt)
        self._evidence = Evidence()
        self._reports: dict[str, Report] = {}
        self._newest: dict[str, int] = {}
        """The number of the newest report from each host that answers."""
        self._seen: dict[str, float] = {}
        if state is not None:
            silent = SILENT_SECONDS - RETURN_SECONDS
            self._seen = {
                host: clock() - (silent if machine_of(host) == lost_machine else 0.0) for host in self.state.members
            }
        self._file = StateFile(folder)
        self._preparation: Future[Path] | None = None
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._incidents = IncidentWriter(folder)

    @property
    def code(self) -> int | None:
        """The job's exit code once it is over."""
        return self.state.stop.code if self.state.status == "finished" and self.state.stop else None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Agents that currently answer."""
        return tuple(self._seen)

    @property
    def uninformed(self) -> bool:
        """Whether any agent has not been told yet that the job is over."""
        return bool(set(self._seen) - self._informed)

    def progress(self) -> JobProgress:
        """Progress of the ranks in the attempt."""
        seconds = self._watch.seconds(self._clock())
        state = self.state
        ranks = [self._attempt.ranks[rank] for rank in sorted(self._attempt.ranks)]
        found = tuple(rank_snapshot(rank, self._host_of(rank.rank), seconds.get(rank.rank, 0.0)) for rank in ranks)
        return JobProgress(state.job, state.attempt, state.status, found)

    def request_stop(self, number: int) -> None:
        """Handle a stop signal to the coordinator's own process: the ranks end after the current step."""
        self._stop = number

    def receive(self, report: Report) -> Directive:
        """Process an agent's report and return the agent's directive."""
        if self._finished is not None and report.job == self._finished.job:
            return exit_directive(self._finished)
        if report.number and report.number <= self._newest.get(report.host, 0):
            return Directive("wait", self.state.attempt)  # this report is late: its agent has sent a newer one
        self._newest[report.host] = report.number
        now = self._clock()
        self._reports[report.host] = report
        self._seen[report.host] = now
        for event in self._events_of(report, now):
            self._apply(event, now)
        position = self._position(report.host)
        standby = position is None or position < STANDBY_HOSTS
        return replace(self._directive(report.host), job=self.state.job, evidence=self._evidence, standby=standby)

    def tick(self) -> None:
        """Apply events that are caused by the passing of time. Call this several times a second."""
        now = self._clock()
        if now - self._ticked > STOPPED_SECONDS:  # this process was stopped, and reports could not arrive meanwhile
            self._watch.resume(now)
            self._seen = dict.fromkeys(self._seen, now)
        self._ticked = now
        for host in [host for host, seen in self._seen.items() if now - seen > SILENT_SECONDS]:
            text = f"host {host} has not answered for {SILENT_SECONDS:g} s"
            peers_failed_first = self.state.status == "ending" and host in self.state.members
            if not self._apply(Lost(host, text), now):
                continue
            del self._seen[host]
            self._reports.pop(host, None)
            self._newest.pop(host, None)  # a new agent may have the same name: in containers, pids repeat
            if peers_failed_first:
                write_line(f"meshwright: {text}; it is lost")
                self._incidents.blame_host(host, text)
        if now - min(self._seen.values(), default=now) > UNHEARD_SECONDS:
            self._watch.resume(now)  # if the host does not come back, it will soon count as lost
        if self._stop:
            self._apply(StopRequested(STOP_EXIT_CODES[self._stop]), now)
        if self._preparation is not None and self._preparation.done():
            self._take_preparation(self._preparation, now)
        for event in self._events_of_ranks(now):
            self._apply(event, now)
        self._apply(Tick(), now)
        if (failure := self._file.failure(now)) is not None:
            self._apply(Unrecordable(failure.exit_code, str(failure)), now)

    def close(self) -> None:
        """Wait until the preparation of an attempt that is still running has ended."""
        self._thread.shutdown()
        self._incidents.close()

    def _events_of(self, report: Report, now: float) -> Iterable[Event]:
        """The new events in a report."""
        state = self.state
        if report.attempt > max(state.attempt, state.newest_attempt):
            yield AttemptReported(report.attempt)
        stale = (
            self._position(report.host) is not None and state.status == "running" and report.attempt != state.attempt
        )
        # This coordinator may not know the address of the attempt's store, because an earlier coordinator began the attempt and the stored
        # state does not contain the address. Then it cannot tell this host where to join.
        if stale and not self._attempt.address:
            yield Lost(report.host, f"host {report.host} had not begun when the coordinator was started again")
        for finding in report.findings:
            yield Unhealthy(report.host, finding)
        # Processes that wait for an attempt to begin report the port of their store.
        ready = report.port != 0 and not stale and not is_excluded(self.state, report.host)
        if ready != (report.host in state.ready):
            yield Ready(report.host, ready)
            if ready and state.status == "running" and report.host not in state.members:
                write_line(
                    f"meshwright: host {report.host} is ready and waits beside the {len(state.members)} that train"
                )
        if state.status == "ending" and self._position(report.host) is not None and report.attempt != state.attempt:
            yield HostEnded(state.attempt, report.host)  # it has not begun the attempt, and now never will
        if report.stop:
            yield StopRequested(report.stop)
        if report.test is not None and report.test.attempt == state.attempt and report.host in state.testing:
            test = report.test
            yield SelfTestEnded(state.attempt, report.host, test.failure, test.exchange, test.complete)
        state = self.state  # the events above may have begun the preparation of another attempt
        if report.attempt != state.attempt or self._position(report.host) is None:
            return
        for rank in report.ranks:
            self._attempt.ranks[rank.rank] = rank
            self._attempt.failed |= rank.failed
            self._follow(rank, now)
        if not state.trained and any(rank.last_step for rank in report.ranks):
            yield StepTrained()  # the first finished step of the job
        for step in report.checkpoints:
            if is_unlisted(self.state, step):
                yield Committed(step)
        if not set(report.skipped) <= set(state.skipped):
            yield SkippedSamples(report.skipped)
        for number, corruption in enumerate(report.corruptions[state.corruptions :], state.corruptions + 1):
            yield Corrupted(state.attempt, number, self._corruption(corruption))

    def _events_of_ranks(self, now: float) -> Iterable[Event]:
        """Events from failures and ends of the attempt's ranks."""
        state = self.state
        attempt = self._attempt
        reports = [self._reports.get(host) for host in state.members]
        ended = [
            report.host for report in reports if report is not None and report.ended and report.attempt == state.attempt
        ]
        if state.status == "running" and attempt.failed:
            ranks = [attempt.ranks[rank] for rank in sorted(attempt.ranks)]
            attempt.failed_at = attempt.failed_at or now
            codes = exit_codes(ranks)
            all_ended = len(ended) == len(state.members)
            # Wait a moment before the end is requested, so that other ranks can report too: the first one that failed may not be the cause.
            if all_ended or next_action(codes, now - attempt.failed_at, since_request=None) == "request end":
                first = culprit(codes)
                assert first is not None, "a rank has failed"
                yield Failed(state.attempt, self._incident(ranks[first]))
        elif state.status == "running" and (hung := self._watch.hung(now)) is not None:
            yield Failed(state.attempt, self._hang(*hung, now))
        status = self.state.status  # if a failure could not be applied, the end of ranks must not look like success
        if status == "ending" or (status == "running" and not attempt.failed):
            for host in ended:
                if host not in state.ended:
                    yield HostEnded(state.attempt, host)

    def _follow(self, rank: RankState, now: float) -> None:
        """Watch the progress of a rank while it runs."""
        if rank.code is not None:
            self._watch.forget(rank.rank)
        else:
            progress = rank.progress or IMPORTS
            phase = progress.phase
            step = progress.step
            action = progress.action
            self._watch.update(rank.rank, phase, step, action, rank.progress_count, now, stopped=rank.stopped)

    def _hang(self, rank: int, seconds: float, now: float) -> Incident:
        """The incident for a hang that the watch noticed on `rank`. The schedule may show that another rank is the cause."""
        ranks = [self._attempt.ranks[number] for number in sorted(self._attempt.ranks)]
        unchanged = self._watch.seconds(now)
        job = JobSchedule.read(Path(self._attempt.assignment or self._folder / "assignment.json"))
        culprit = culprit_of_hang(job, statuses(ranks, self._hosts(), unchanged))
        if culprit is not None:
            rank = culprit.rank
            seconds = unchanged.get(culprit.rank, seconds)
        self._attempt.culprit = culprit
        progress = self._attempt.ranks[rank].progress or IMPORTS
        action = culprit.action if culprit else f"action {progress.action}"
        text = (
            f"rank {rank} has made no progress for {seconds:.0f} s in step {progress.step} ({progress.phase}, {action})"
        )
        host = self._host_of(rank)
        phase = progress.phase
        return Incident(EXIT_COMMUNICATION, text, rank, host, progress.step, phase, hang=True)

    def _position(self, host: str) -> int | None:
        """The position of a host among the members of the attempt; None if it is not a member."""
        members = self.state.members
        if self._positions[0] is not members:
            self._positions = members, {member: position for position, member in enumerate(members)}
        return self._positions[1].get(host)

    def _hosts(self) -> dict[int, str]:
        """The host of each rank of the attempt."""
        return {rank: self._host_of(rank) for rank in self._attempt.ranks}

    def _host_of(self, rank: int) -> str:
        return self.state.members[rank // self._per_host]

    def _incident(self, rank: RankState) -> Incident:
        code = rank.exit_code
        assert code is not None, "the rank has ended"
        step, phase = (rank.progress.step or None, rank.progress.phase) if rank.progress else (None, "start")
        return Incident(code, cause(rank), rank.rank, self._host_of(rank.rank), step, phase)

    def _corruption(self, report: Corruption) -> Incident:
        host = self._host_of(report.rank)
        return Incident(EXIT_COMMUNICATION, report.cause, report.rank, host, report.step, corrupt=True)

    def _take_preparation(self, preparation: Future[Path], now: float) -> None:
        attempt = self.state.attempt
        try:
            self._attempt.assignment = str(preparation.result())
            event: Event = AttemptPrepared(attempt)
        except NoPlanForHosts as error:
            event = Unplannable(attempt, str(error))
        except Exception as error:
            failure = as_meshwright_error(error)
            event = Failed(attempt, Incident(failure.exit_code, str(failure)))
        if self._apply(event, now) and self._preparation is preparation:
            self._preparation = None

    def _apply(self, event: Event, now: float) -> bool:
        """Apply an event: write the next state, adopt it, and carry out the actions. Returns whether the event was applied.

        If the state cannot be written, it is not adopted, and the event comes again with the next report or `tick`. The exception is a job
        that begins nothing more: it continues without the record, because it only has to end.
        """
        before = self.state
        if isinstance(event, Failed | Lost | Corrupted):
            before = decide(before, Present(self._present_steps()), now, self._rules)[0]
        state, actions = decide(before, event, now, self._rules)
        # Every report says which hosts are ready and which have ended, so a state in which only these differ need not be stored.
        changed = state is not before and state != replace(before, ready=state.ready, ended=state.ended)
        if changed and not self._file.append(state, now) and state.stop is None and not state.stopping:
            waits = before.status != "running" or state.status != "running"
            if waits and not isinstance(event, Committed):  # after a commit, ranks continue to train
                self._file.hold(now)
            return False
        self.state = state
        for action in actions:
            match action:
                case Prepare() | Test():
                    first = self._reports[state.members[0]]
                    hosts = [group[0] for group in state.tests]
                    stores = {host: (self._reports[host].address, self._reports[host].port) for host in hosts}
                    self._attempt = AttemptState(
                        state.attempt, address=first.address, port=first.port, test_stores=stores
                    )
                    self._preparation = None  # it belongs to an earlier attempt
                    if isinstance(action, Test):
                        continue
                    self._watch = HangWatch(self._hang_seconds)
                    if len(state.members) < self._rules.hosts:
                        count = f"{len(state.members)} of {self._rules.hosts} hosts"
                        write_line(f"meshwright: the run continues on {count}, with a new plan")
                    self._preparation = self._thread.submit(self._prepare, state)
                case EndAttempt(reason, incident):
                    self._attempt.cause = reason
                    self._record(incident)
                    self._report_end(reason, incident)
                case RecordIncident(incident):
                    self._record(incident, ends=False)
                case Note(text, key):
                    if key not in self._noted:
                        write_line(f"meshwright: {text}")
                    self._noted |= {key} if key else set()
                case BeginAttempt() | Finish():
                    pass  # directives follow from the state
        return True

    def _present_steps(self) -> tuple[int, ...]:
        """The steps of the checkpoints in the run's folder. If it cannot be read, those that were known before."""
        try:
            return present_steps(self._folder)
        except (OSError, MeshwrightError):
            return self.state.present

    def _directive(self, host: str) -> Directive:
        """The directive for the agent of `host` in the current state."""
        state = self.state
        attempt = self._attempt
        if state.status == "finished":
            assert state.stop is not None
            self._informed.add(host)
            return exit_directive(state)
        position = self._position(host)
        exclusion = exclusion_of(state, host)
        if exclusion is not None and (state.status != "ending" or position is None):
            return Directive("idle", state.attempt, cause=f"{exclusion.verdict}: {exclusion.cause}")
        if state.status == "preparing" and host in state.testing:
            return self._self_test(host)
        if position is None or state.status not in ("running", "ending"):
            # While an attempt runs and a spare host is ready, a quick report of this host is not needed.
            spare_is_ready = state.status in ("running", "ending") and len(state.ready) > 0
            return Directive("wait", state.attempt, heartbeat=1.0 if spare_is_ready else 0.2)
        if state.status == "ending":
            grace = GRACE_SECONDS if state.stop else RESTART_GRACE_SECONDS
            return Directive("end", state.attempt, cause=attempt.cause, grace=grace, heartbeat=0.2)
        if (
            not attempt.address and self._reports[host].attempt != state.attempt
        ):  # the host counts as lost once that state is written
            return Directive("wait", state.attempt, heartbeat=0.2)
        return Directive(
            "run",
            state.attempt,
            first_rank=position * self._per_host,
            ranks=len(state.members) * self._per_host,
            address=attempt.address,
            port=attempt.port,
            assignment=attempt.assignment,
            stop=self._stop,
            drain=bool(state.draining),
        )

    def _self_test(self, host: str) -> Directive:
        """Let a host run the self-test, together with the other host of its group."""
        group = next(group for group in self.state.tests if host in group)
        address, port = self._attempt.test_stores[group[0]]
        first_rank = group.index(host) * self._per_host
        ranks = len(group) * self._per_host
        grace = seconds_of_test(group, self.state.incomplete)
        return Directive("test", self.state.attempt, first_rank, ranks, address, port, grace=grace, heartbeat=0.2)

    def _record(self, incident: Incident | None, *, ends: bool = True) -> None:
        """Write an incident to the run's folder, in a thread. If the incident ends the attempt, agents add their evidence there."""
        attempt = self._attempt
        state = self.state
        if incident is None or not is_recorded(incident, tuple(STOP_EXIT_CODES.values())):
            return
        if ends:
            answer = f"the job ended with code {state.stop.code}" if state.stop else self._restart_text()
        else:
            answer = "the ranks go back to a checkpoint" + (
                f"; host {incident.host} runs the self-test before the next attempt" if state.suspects else ""
            )
        ranks = [replace(attempt.ranks[rank]) for rank in sorted(attempt.ranks)]
        hosts = self._hosts()
        assignment = Path(attempt.assignment or self._folder / "assignment.json")
        folder = self._incidents.record(incident, state.attempt, answer, ranks, hosts, assignment, attempt.culprit)
        if ends:
            self._evidence = Evidence(state.attempt, str(folder), incident.hang)

    def _restart_text(self) -> str:
        return f"restart {len(self.state.incidents)} of {self._rules.policy.restarts} {self._source()}"

    def _source(self) -> str:
        """From where the next attempt takes its state, as text."""
        state = self.state
        # `resume_at_most` is set if the newest checkpoint must not be used, because the same failure has occurred twice after it.
        newest = state.restart.resume_at_most or max(state.present, default=0)
        source = f"from the checkpoint of step {newest}" if newest else "from the start, as there is no checkpoint yet"
        if state.restart.skip_step is not None:
            source += f", without the samples of step {state.restart.skip_step}"
        return source

    def _report_end(self, reason: str, incident: Incident | None) -> None:
        """Print one line about an attempt that ends and is followed by another: why it ended, and from where the next one resumes."""
        state = self.state
        if state.stop is not None:
            return
        if incident is None:  # `reason` is, for example, "4 hosts are ready again"
            write_line(f"meshwright: {reason}; the run continues on ready hosts {self._source()}")
            return
        rank = None if incident.rank is None else self._attempt.ranks.get(incident.rank)
        parts = [reason + (f" (host {incident.host})" if len(state.members) > 1 else "")]
        parts += [progress_text(rank)] if rank is not None else []
        parts.append(self._restart_text())
        write_line(f"meshwright: {'; '.join(parts)}")

    def outcome(self, logs: Path) -> list[str]:
        """Lines for people about the end of the job: why it failed, and which hosts were excluded."""
        stop: Stop | None = self.state.stop
        lines = list(outcome_lines([self._attempt.ranks[rank] for rank in sorted(self._attempt.ranks)], logs))
        if not lines and stop is not None and stop.code and self.state.incidents:
            lines = [self.state.incidents[-1].cause]
        if not lines and stop is not None and stop.code in (EXIT_INTERRUPTED, EXIT_PREEMPTED) and not stop.diagnosis:
            lines = ["ended on request before training began"]
        excluded = [
            f"host {each.host} was excluded, as it {each.verdict}: {each.cause}" for each in self.state.excluded
        ]
        return [*lines, *([stop.diagnosis] if stop is not None and stop.diagnosis else []), *excluded]


def exit_directive(state: State) -> Directive:
    """The directive for agents of a job that is over."""
    assert state.stop is not None, "a finished job has a code"
    return Directive("exit", state.attempt, cause=state.stop.diagnosis, code=state.stop.code, job=state.job)
