"""A scenario of fault injection: its promise, the disturbance of the job, and the check of the promise."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.chaos.hosts import Hosts, Links
from meshwright.chaos.job import LONGEST_GPU_SECONDS, LONGEST_SECONDS, POLL_SECONDS, ChaosJob, NotReached
from meshwright.chaos.processes import kill_all, processes_with, send, state
from meshwright.diagnosis.run_folder import compute_seconds, read_operations
from meshwright.diagnosis.stragglers import diagnose_run
from meshwright.events.span_ring import read_spans, starts_with_spans
from meshwright.observe.metrics import scan_metrics
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import CONTEXT_AXES

Losses = list[tuple[int, float | None]]
"""Step and loss of each step of a run."""
LOSS_TOLERANCE = 1e-2
"""Largest relative difference on a GPU between the losses of one step in two attempts."""
GPU_RECOVERY_FACTOR = 3.0
"""Factor for the limit of a recovery on a GPU, whose context and kernels have to be loaded again."""
SLOW_RANK_CAUSES = ("compute", "host")
"""Causes of a straggler whose process gets too little of its host's time: it computes longer, or launches late."""
CALM_STEPS = 12
"""Steps before the disturbance that the straggler analysis reads; those of the start may be slow for other reasons."""
COMPUTE_SHARE = 0.5
"""Share of the step time for which a rank has to compute, before it is disturbed, to be named: stops hit the rest, too."""
ORPHAN_SECONDS = 3.0
"""Seconds after the end of a job in which its last processes may end."""


@dataclass(frozen=True)
class Template:
    """The training command that scenarios disturb."""

    arguments: tuple[str, ...]
    """Run file and overrides."""
    name: str
    """Name of the run."""
    steps: int
    """Steps of the run."""
    ranks: int
    """Ranks of the run."""
    every: int
    """Steps between its checkpoints."""
    gpu: bool = False
    """Whether the ranks compute on GPUs, whose sums may differ from one attempt to the next in their last bits."""


@dataclass(frozen=True)
class ExpectedCulprit:
    """Cause, rank and host that an incident must name; None allows any."""

    cause: str
    rank: int | None
    host: str | None

    def is_named_by(self, incident: Mapping[str, Any] | None) -> bool:
        """Whether an incident (`Stage.first_incident`) names this cause, rank and host. Agents are named HOST/PID."""
        if incident is None or incident["cause"] != self.cause:
            return False
        same_host = self.host in (None, incident["host"].partition("/")[0])
        return same_host and self.rank in (None, incident["rank"])


class Stage:
    """The jobs of one scenario in a folder of their own, and the moment of the injection."""

    def __init__(
        self,
        template: Template,
        folder: Path,
        overrides: Sequence[str] = (),
        hosts: int = 1,
        show: Callable[[str], object] = lambda text: None,
        links: Links = Links(),
    ) -> None:
        """With several `hosts` each has an agent; those beyond the hosts of the run are spares, and `links` are theirs.

        `show` receives lines of progress.
        """
        self._show = show
        self.links = links
        self.template = template
        self.folder = folder
        self.run = folder / template.name
        """Folder of the run."""
        self.jobs: list[ChaosJob] = []
        self.notes: list[str] = []
        """Further observations for the verdict."""
        self.violations: list[str] = []
        """Parts of the promise that the injection itself saw broken."""
        self.injected: float | None = None
        self._ended: float | None = None
        """Time when the process killed by the injection had ended; None if it kills none.

        A process with a GPU ends only after the driver has freed its memory, and nothing can detect its end earlier.
        """
        self._attempt = 0
        self._closing: list[Callable[[], object]] = []
        self._overrides = tuple(overrides)
        self.token = secrets.token_hex(8)
        """Value of the variable `processes.TOKEN` of all processes of the jobs."""
        self._host_count = hosts
        self.hosts: Hosts | None = None
        """The emulated hosts, if there are several."""
        self.culprit: ExpectedCulprit | None = None
        """Culprit that the first incident of the run must name; None if the disturbance makes no incident."""
        self.slow_rank: int | None = None
        """The rank that the straggler analysis has to name; None if the disturbance slows none."""
        self._last_calm_step = 0

    def start(self, env: Mapping[str, str] = MappingProxyType({}), hosts: int | None = None) -> ChaosJob:
        """Start the training command, on all hosts or on the first ones, with further environment variables."""
        arguments = ["train", *self.template.arguments, *self._overrides, "--runs", str(self.folder)]
        if self._host_count > 1:
            arguments.append("--agent")
            if self.hosts is None:
                self.hosts = Hosts(self._host_count, self.folder, self.links)
                self.on_close(self.hosts.close)
                self.notes.append(f"{self._host_count} hosts as {self.hosts.emulation}")
        longest = LONGEST_GPU_SECONDS if self.template.gpu else LONGEST_SECONDS
        output = self.folder / f"output-{len(self.jobs) + 1}.txt"
        self._show(f"start of meshwright {' '.join(arguments)}")
        job = ChaosJob(arguments, self.run, output, self.token, longest_seconds=longest, show=self._show)
        self.jobs.append(job)
        for host in range(self._host_count if hosts is None else hosts):
            self.launch(host, env)
        return job

    def launch(self, host: int, env: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the command of the last job on one host."""
        hosts = self.hosts
        self.job.launch(hosts.prefix(host) if hosts else (), {**(hosts.environment(host) if hosts else {}), **env})

    def pause(self, seconds: float) -> None:
        """Observe the last job for some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.job.poll()
            time.sleep(POLL_SECONDS)

    def mark(self) -> None:
        """The disturbance begins now."""
        job = self.jobs[-1]
        job.poll()
        self.injected = time.monotonic()
        self._attempt = job.attempt
        self._ended = None
        self._show(f"the disturbance begins after step {job.last_step}")

    def signal(self, pid: int, number: int) -> None:
        """Disturb the job by a signal to one of its processes; wait for the end of a process that it kills."""
        self.mark()
        send(pid, number)
        if number == signal.SIGKILL:
            while state(pid) not in ("Z", "X", ""):
                self.pause(POLL_SECONDS)
            self._ended = time.monotonic()

    def expect(self, kept: bool, violation: str) -> None:
        """Record a part of the promise that is broken unless `kept`."""
        if not kept:
            self.violations.append(violation)

    def expect_incident(self, cause: str, rank: int | None = None, host: str | None = None) -> None:
        """The first incident of the run has to name this cause, and the rank or host, where given."""
        self.culprit = ExpectedCulprit(cause, rank, host)

    def expect_straggler(self, rank: int) -> None:
        """Expect that the straggler analysis of the following steps names this rank, with one of `SLOW_RANK_CAUSES`.

        It need not if the rank computed for less than `COMPUTE_SHARE` of the steps before, or if ranks wait for each other inside
        compute.
        """
        self.slow_rank = rank
        self._last_calm_step = self.job.last_step

    def straggler(self) -> dict[str, Any] | None:
        """Return cause and rank by the straggler analysis of the steps around the disturbance; None without a cause."""
        try:
            found = diagnose_run(self.run, self._analysed_steps)
        except BadInput:
            return None
        return None if found.cause is None else {"cause": found.cause, "rank": found.rank}

    @property
    def _analysed_steps(self) -> int:
        """The number of the run's last steps that the straggler analysis reads."""
        return self.template.steps - self._last_calm_step + CALM_STEPS

    def calm_compute_share(self) -> float:
        """The share of the undisturbed steps for which the slow rank computed; 0 without spans of them."""
        try:
            ranks, steps, seconds = compute_seconds(read_operations(self.run, self._analysed_steps)[0])
        except BadInput:
            return 0.0
        calm = steps <= self._last_calm_step
        records = scan_metrics(self.run / "metrics.jsonl")[0]
        lengths = {record["step"]: record["step_seconds"] for record in records if record["kind"] == "step"}
        total = sum(lengths.get(step, 0.0) for step in steps[calm].tolist())
        return float(seconds[ranks == self.slow_rank][:, calm].sum()) / total if total else 0.0

    def waits_inside_compute(self) -> bool:
        """Whether tensor or context ranks wait for each other inside compute, so that the slow one cannot be told from the others."""
        starts = starts_with_spans(self.run)
        ranks = read_spans(starts[-1])[0] if starts else []
        return any(rank.header["coordinates"].get(axis, 0) for rank in ranks for axis in ("tensor", *CONTEXT_AXES))

    def first_incident(self) -> dict[str, Any] | None:
        """The first incident of the run: cause, rank and host; None without one."""
        for path in sorted(self.run.glob("incidents/*/incident.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            return {name: record[name] for name in ("cause", "rank", "host")}
        return None

    def require(self, reached: bool, violation: str) -> None:
        """Raise NotReached unless the scenario can go on."""
        if not reached:
            raise NotReached(violation)

    def on_close(self, action: Callable[[], object]) -> None:
        """Undo a change of this machine when the stage closes; the last one added is undone first."""
        self._closing.append(action)

    @property
    def job(self) -> ChaosJob:
        """The job that was started last."""
        return self.jobs[-1]

    def losses(self) -> Losses:
        """Step and loss of each step in the run's metrics."""
        return losses(self.run)

    def repeated_steps(self) -> list[tuple[int, float, float]]:
        """Each step that was trained again: its number, its first loss and its last one."""
        times_by_step: dict[int, list[float]] = {}
        for job in self.jobs:
            for step, loss in job.losses:
                times_by_step.setdefault(step, []).append(float("nan") if loss is None else loss)
        return [(step, values[0], values[-1]) for step, values in sorted(times_by_step.items()) if len(values) > 1]

    def orphans(self) -> list[int]:
        """Processes of the jobs that still run a few seconds after the jobs ended; they are killed."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while processes_with(self.token) and time.monotonic() < deadline:
            time.sleep(0.05)
        return kill_all(self.token)

    def close(self) -> None:
        """Kill what still runs, and undo changes of this machine."""
        kill_all(self.token)
        for job in self.jobs:
            for process in job.processes:
                process.wait()
        while self._closing:
            self._closing.pop()()

    def detected_seconds(self, text: str | None = None) -> float | None:
        """Seconds to the coordinator's decision, or to a printed line with `text`; None without either.

        They count from the injection, or from the end of the process that it killed.
        """
        if self.injected is None:
            return None
        for job in self.jobs:
            times = [moment for moment, line in job.lines if text is not None and text in line]
            if text is None:
                times = [moment for moment, state in job.states if state["status"] == "ending"]
            for moment in times:
                if moment >= self.injected:
                    return max(0.0, moment - (self._ended or self.injected))
        return None

    def recovery(self) -> tuple[float, int] | None:
        """Seconds from the injection to the first step of a later attempt or job, and the steps trained again; None without one."""
        if self.injected is None:
            return None
        attempts_before = 0
        for job in self.jobs:
            steps_begun = [
                moment
                for moment, state in job.states
                if state["status"] == "running" and state["attempt"] > self._attempt
            ]
            later = (
                job.started
                if job.started > self.injected
                else min((m for m in steps_begun if m > self.injected), default=None)
            )
            for moment, step in job.steps:
                if later is not None and moment > later:
                    return moment - self.injected, max(0, attempts_before - step + 1)
                attempts_before = max(attempts_before, step)
        return None


@dataclass(frozen=True)
class PromiseVerdict:
    """Promise of a scenario, and the observations that confirm or break it."""

    scenario: str
    promise: str
    observed: str
    ok: bool
    detected_seconds: float | None = None
    recovered_seconds: float | None = None
    lost_steps: int | None = None
    incident: Mapping[str, Any] | None = None
    """Cause, rank and host in the first incident of the run, where the scenario expects one."""
    straggler: Mapping[str, Any] | None = None
    """Cause and rank of the straggler, where the scenario expects one."""

    def as_plain(self) -> dict[str, Any]:
        """The verdict as values of JSON, seconds rounded to hundredths."""
        record = dict(self.__dict__)
        for name in ("detected_seconds", "recovered_seconds"):
            record[name] = None if record[name] is None else round(record[name], 2)
        return record


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Disturbance of a short run. The defaults check what most scenarios promise."""

    name: str
    promise: str
    """Promise of the scenario, in one sentence."""
    play: Callable[[Stage], None]
    """Starts the job, disturbs it at its trigger, and waits for its end."""
    hosts: int = 1
    """Hosts with an agent, spares included; with one there is no agent besides the launcher."""
    overrides: tuple[str, ...] = ()
    """Keys of the run that the disturbance needs."""
    code: int = 0
    """Exit code of the last job."""
    detected_by: str | None = None
    """Text of the printed line that counts as detection; None takes the coordinator's decision."""
    detect_within: float | None = None
    """Most seconds from the injection to its detection; None requires none."""
    recover_within: float | None = None
    """Most seconds from the injection to the first step of a later attempt or job; None requires none."""
    restarts: bool = True
    """Whether the job may restart its ranks."""
    same_losses: bool = True
    """Whether every loss equals that of an undisturbed run bit for bit."""
    links: Links | None = None
    """Links of the hosts; None leaves the choice to whoever runs the scenario."""
    unavailable: Callable[[], str | None] = field(default=lambda: None)
    """Reason why this machine cannot run the scenario; None if it can."""


def run_scenario(
    scenario: Scenario,
    template: Template,
    folder: Path,
    undisturbed: Callable[[], Losses],
    patience: float = 1.0,
    show: Callable[[str], object] = lambda text: None,
    links: Links = Links(),
) -> PromiseVerdict:
    """Run a scenario in an empty `folder`. `undisturbed` returns the losses of an undisturbed run.

    It is not called for a run on GPUs: there the losses of steps that were trained twice are compared with each other.
    All limits in seconds are multiplied by `patience`. `show` receives lines of progress. `links` are those of hosts.
    """
    stage = Stage(template, folder, scenario.overrides, scenario.hosts, show, scenario.links or links)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        scenario.play(stage)
        orphans = stage.orphans()
    finally:
        stage.close()
    violations = [*stage.violations, *_violations(scenario, stage, orphans, undisturbed, patience)]
    recovery = stage.recovery()
    observed = "; ".join([*_observations(scenario, stage), *stage.notes, *(f"BROKEN: {text}" for text in violations)])
    return PromiseVerdict(
        scenario.name,
        scenario.promise,
        observed,
        not violations,
        stage.detected_seconds(scenario.detected_by),
        recovery and recovery[0],
        recovery and recovery[1],
        stage.first_incident() if stage.culprit else None,
        None if stage.slow_rank is None else stage.straggler(),
    )


def _violations(
    scenario: Scenario, stage: Stage, orphans: Sequence[int], undisturbed: Callable[[], Losses], patience: float = 1.0
) -> list[str]:
    """Sentences about the parts of the promise that were not kept."""
    gpu = stage.template.gpu
    violations: list[str] = []
    code = stage.job.code
    if code != scenario.code:
        violations.append(f"exit code {code} instead of {scenario.code}")
    detected = stage.detected_seconds(scenario.detected_by)
    recovery = stage.recovery()
    recovered = recovery and recovery[0]
    for description, seconds, limit, factor in (
        ("detected", detected, scenario.detect_within, 1.0),
        ("training again", recovered, scenario.recover_within, GPU_RECOVERY_FACTOR if gpu else 1.0),
    ):
        allowed = None if limit is None else patience * factor * limit
        if allowed is not None and (seconds is None or seconds > allowed):
            duration = "never" if seconds is None else f"after {seconds:.1f} s"
            violations.append(f"{description} {duration}, allowed are {allowed:g} s")
    if not scenario.restarts and any(state["attempt"] > 1 for job in stage.jobs for _, state in job.states):
        violations.append("the job restarted its ranks")
    if stage.culprit is not None and not stage.culprit.is_named_by(incident := stage.first_incident()):
        violations.append(f"the incident says {incident or 'nothing'}, expected is {stage.culprit}")
    if stage.slow_rank is not None:
        violations += _straggler_violations(stage)
    if orphans:
        violations.append(f"{len(orphans)} processes still ran after the end")
    if scenario.same_losses and gpu:
        violations += _gpu_loss_violations(stage)
    elif scenario.same_losses and stage.losses() != undisturbed():
        violations.append("losses differ from those of the undisturbed run")
    return violations


def _straggler_violations(stage: Stage) -> list[str]:
    """Whether the slow rank is named; why that is not required becomes a note."""
    if stage.waits_inside_compute():
        stage.notes.append("the straggler is not checked: the ranks wait for each other inside compute")
        return []
    share = stage.calm_compute_share()
    if share < COMPUTE_SHARE:
        stage.notes.append(f"the straggler is not checked: the rank computed for {share:.0%} of the step time")
        return []
    straggler = stage.straggler() or {"cause": None, "rank": None}
    if straggler["rank"] == stage.slow_rank and straggler["cause"] in SLOW_RANK_CAUSES:
        return []
    return [f"the straggler is {straggler}, expected is rank {stage.slow_rank}"]


def _gpu_loss_violations(stage: Stage) -> list[str]:
    """Whether every step has a loss, and steps that were trained twice have close ones; their difference becomes a note."""
    steps = [step for step, _ in stage.losses()]
    repeated = stage.repeated_steps()
    violations = [] if steps == list(range(1, stage.template.steps + 1)) else ["steps are missing in the metrics"]
    if repeated:
        largest = max(abs(last / first - 1) for _, first, last in repeated)
        stage.notes.append(f"losses of {len(repeated)} repeated steps differ by at most {largest:.1e}")
        if not largest <= LOSS_TOLERANCE:
            violations.append(f"losses of repeated steps differ by more than {LOSS_TOLERANCE:g}")
    return violations


def _observations(scenario: Scenario, stage: Stage) -> list[str]:
    """Return the measured times and the end of the run, in words."""
    detected = stage.detected_seconds(scenario.detected_by)
    recovery = stage.recovery()
    texts = [] if detected is None else [f"detected after {detected:.2f} s"]
    if recovery is not None:
        texts.append(f"training again after {recovery[0]:.1f} s with {recovery[1]} steps repeated")
    last = stage.losses()[-1:]
    return [*texts, f"exit code {stage.job.code} after step {last[0][0] if last else 0}"]


def losses(run: Path) -> Losses:
    """Step and loss of each step in the metrics of a run's folder; empty without metrics."""
    file = run / "metrics.jsonl"
    records = scan_metrics(file)[0] if os.path.exists(file) else []
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]
