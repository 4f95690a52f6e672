"""A fault-injection scenario: what it promises, how it disturbs a job, and how the promise is checked."""

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
"""(step, loss) of each step of a run."""
LOSS_TOLERANCE = 1e-2
"""Largest relative difference between the losses of one step in two attempts on a GPU."""
GPU_RECOVERY_FACTOR = 3.0
"""On a GPU, a recovery may take longer by this factor, because its context and kernels must be loaded again."""
SLOW_RANK_CAUSES = ("compute", "host")
"""Causes that the straggler analysis may give for a process that gets too little processor time.

Such a rank computes longer, or launches its work late.
"""
CALM_STEPS = 12
"""The straggler analysis reads this many steps before the disturbance. Earlier steps may be slow for other reasons."""
COMPUTE_SHARE = 0.5
"""Before the disturbance, the rank must have computed for this share of the step time; otherwise it need not be named.

With a smaller share, the stops mostly hit time in which the rank does not compute.
"""
ORPHAN_SECONDS = 3.0
"""Seconds that the last processes may take to end after their job has ended."""


@dataclass(frozen=True)
class Template:
    """The training command that scenarios disturb."""

    arguments: tuple[str, ...]
    """The run file and overrides."""
    name: str
    """Name of the run."""
    steps: int
    """Number of steps of the run."""
    ranks: int
    """Number of ranks of the run."""
    every: int
    """Number of steps between two checkpoints."""
    gpu: bool = False
    """Whether the ranks compute on GPUs. The last bits of their sums may differ between attempts."""


@dataclass(frozen=True)
class ExpectedCulprit:
    """The cause, rank and host that an incident must name. None allows any rank or host."""

    cause: str
    rank: int | None
    host: str | None

    def is_named_by(self, incident: Mapping[str, Any] | None) -> bool:
        """Whether an incident (a result of `Stage.first_incident`) names this cause, rank and host.

        Agents are named HOST/PID.
        """
        if incident is None or incident["cause"] != self.cause:
            return False
        same_host = self.host in (None, incident["host"].partition("/")[0])
        return same_host and self.rank in (None, incident["rank"])


class Stage:
    """Runs the jobs of one scenario in a folder of their own, and remembers when the disturbance began."""

    def __init__(
        self,
        template: Template,
        folder: Path,
        overrides: Sequence[str] = (),
        hosts: int = 1,
        show: Callable[[str], object] = lambda text: None,
        links: Links = Links(),
    ) -> None:
        """With several `hosts`, each host has an agent.

        Hosts beyond those of the run are spares. `links` connect the hosts.

        `overrides` are keys of the run. `show` receives lines of progress.
        """
        self._show = show
        self.links = links
        self.template = template
        self.folder = folder
        self.run = folder / template.name
        """Folder of the run."""
        self.jobs: list[ChaosJob] = []
        self.notes: list[str] = []
        """Further observations that the verdict mentions."""
        self.violations: list[str] = []
        """Parts of the promise that the scenario itself has seen broken."""
        self.injected: float | None = None
        """Monotonic time at which the disturbance began; None before."""
        self._ended: float | None = None
        """Time at which a process that the disturbance killed had ended; None if it has killed none.

        A process with a GPU ends only when the driver has freed the GPU's memory. Nothing can detect the end earlier.
        """
        self._attempt = 0
        """Number of the attempt that was disturbed."""
        self._closing: list[Callable[[], object]] = []
        """What `close` calls, in reverse order."""
        self._overrides = tuple(overrides)
        self.token = secrets.token_hex(8)
        """Value of the environment variable `processes.TOKEN` in all processes of the jobs."""
        self._host_count = hosts
        self.hosts: Hosts | None = None
        """The emulated hosts, if there are several."""
        self.culprit: ExpectedCulprit | None = None
        """What the first incident of the run must name; None if the disturbance causes no incident."""
        self.slow_rank: int | None = None
        """The rank that the straggler analysis must name; None if the disturbance slows no rank."""
        self._last_calm_step = 0

    def start(self, env: Mapping[str, str] = MappingProxyType({}), hosts: int | None = None) -> ChaosJob:
        """Start the training command with further environment variables, on all hosts or on the first `hosts` ones."""
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
        """Note that the disturbance begins now."""
        job = self.jobs[-1]
        job.poll()
        self.injected = time.monotonic()
        self._attempt = job.attempt
        self._ended = None
        self._show(f"the disturbance begins after step {job.last_step}")

    def signal(self, pid: int, number: int) -> None:
        """Disturb the job by sending a signal to one of its processes. After SIGKILL, wait until the process has ended."""
        self.mark()
        send(pid, number)
        if number == signal.SIGKILL:
            while state(pid) not in ("Z", "X", ""):
                self.pause(POLL_SECONDS)
            self._ended = time.monotonic()

    def expect(self, kept: bool, violation: str) -> None:
        """Record `violation`, a broken part of the promise, unless `kept` is true."""
        if not kept:
            self.violations.append(violation)

    def expect_incident(self, cause: str, rank: int | None = None, host: str | None = None) -> None:
        """Require that the first incident of the run names this cause, and this rank or host if given."""
        self.culprit = ExpectedCulprit(cause, rank, host)

    def expect_straggler(self, rank: int) -> None:
        """Require that the straggler analysis of the following steps names this rank, with one of `SLOW_RANK_CAUSES`.

        This is not required if the rank computed for less than `COMPUTE_SHARE` of the steps before, or if ranks wait
        for each other inside their computation.
        """
        self.slow_rank = rank
        self._last_calm_step = self.job.last_step

    def straggler(self) -> dict[str, Any] | None:
        """Return the cause and rank that the straggler analysis finds for the steps around the disturbance; None if it
        finds none.
        """
        try:
            found = diagnose_run(self.run, self._analysed_steps)
        except BadInput:
            return None
        return None if found.cause is None else {"cause": found.cause, "rank": found.rank}

    @property
    def _analysed_steps(self) -> int:
        """Number of steps, the last ones of the run, that the straggler analysis reads."""
        return self.template.steps - self._last_calm_step + CALM_STEPS

    def calm_compute_share(self) -> float:
        """Return the share of the undisturbed steps in which the slow rank computed; 0 if their spans are missing."""
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
        """Whether tensor or context ranks wait for each other inside their computation.

        A slow rank then slows the others equally.
        """
        starts = starts_with_spans(self.run)
        ranks = read_spans(starts[-1])[0] if starts else []
        return any(rank.header["coordinates"].get(axis, 0) for rank in ranks for axis in ("tensor", *CONTEXT_AXES))

    def first_incident(self) -> dict[str, Any] | None:
        """Return cause, rank and host of the run's first incident; None if there is none."""
        for path in sorted(self.run.glob("incidents/*/incident.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            return {name: record[name] for name in ("cause", "rank", "host")}
        return None

    def require(self, reached: bool, violation: str) -> None:
        """Raise NotReached with `violation` unless `reached` is true, because the scenario cannot go on."""
        if not reached:
            raise NotReached(violation)

    def on_close(self, action: Callable[[], object]) -> None:
        """Add an action that `close` calls, to undo a change of this machine. The last action added is called first."""
        self._closing.append(action)

    @property
    def job(self) -> ChaosJob:
        """The job that was started last."""
        return self.jobs[-1]

    def losses(self) -> Losses:
        """Return (step, loss) of each step in the run's metrics."""
        return losses(self.run)

    def repeated_steps(self) -> list[tuple[int, float, float]]:
        """Return (step, first loss, last loss) of each step that was trained more than once."""
        times_by_step: dict[int, list[float]] = {}
        for job in self.jobs:
            for step, loss in job.losses:
                times_by_step.setdefault(step, []).append(float("nan") if loss is None else loss)
        return [(step, values[0], values[-1]) for step, values in sorted(times_by_step.items()) if len(values) > 1]

    def orphans(self) -> list[int]:
        """Kill the processes that still run `ORPHAN_SECONDS` after their jobs have ended, and return their ids."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while processes_with(self.token) and time.monotonic() < deadline:
            time.sleep(0.05)
        return kill_all(self.token)

    def close(self) -> None:
        """Kill all processes that still run, and undo changes of this machine."""
        kill_all(self.token)
        for job in self.jobs:
            for process in job.processes:
                process.wait()
        while self._closing:
            self._closing.pop()()

    def detected_seconds(self, text: str | None = None) -> float | None:
        """Return the seconds until the disturbance was detected; None if it was not.

        Detection is a printed line that contains `text` or, without `text`, the coordinator's decision to end the
        attempt. The time counts from the disturbance, or from the end of the process that it has killed.
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
        """Return (seconds from the disturbance to the first step of a later attempt or job, number of steps trained
        again).

        None if no such step was trained.
        """
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
    """The promise of a scenario, whether it was kept (`ok`), and what was observed.

    Times are seconds from the disturbance; None if it was not detected, or training did not continue. `lost_steps` is
    the number of steps that were trained again.
    """

    scenario: str
    promise: str
    observed: str
    ok: bool
    detected_seconds: float | None = None
    recovered_seconds: float | None = None
    lost_steps: int | None = None
    incident: Mapping[str, Any] | None = None
    """Cause, rank and host of the run's first incident, if the scenario expects one."""
    straggler: Mapping[str, Any] | None = None
    """Cause and rank of the straggler, if the scenario expects one."""

    def as_plain(self) -> dict[str, Any]:
        """Return the verdict as JSON values, with seconds rounded to hundredths."""
        record = dict(self.__dict__)
        for name in ("detected_seconds", "recovered_seconds"):
            record[name] = None if record[name] is None else round(record[name], 2)
        return record


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A way to disturb a short run, and what must then happen. The defaults fit most scenarios."""

    name: str
    promise: str
    """The promise, in one sentence."""
    play: Callable[[Stage], None]
    """The play: starts the job, disturbs it at the right moment, and waits for its end."""
    hosts: int = 1
    """Number of hosts with an agent, including spares. With one host, only the launcher runs."""
    overrides: tuple[str, ...] = ()
    """Keys of the run that the disturbance needs."""
    code: int = 0
    """Exit code that the last job must have."""
    detected_by: str | None = None
    """Text of the printed line that counts as detection. None: the coordinator's decision to end the attempt counts."""
    detect_within: float | None = None
    """Most seconds between the disturbance and its detection; None for no limit."""
    recover_within: float | None = None
    """Most seconds between the disturbance and the first step of a later attempt or job; None for no limit."""
    restarts: bool = True
    """Whether the job may restart its ranks."""
    same_losses: bool = True
    """Whether every loss must equal the loss of an undisturbed run, bit for bit."""
    links: Links | None = None
    """Links of the hosts. None: the caller of the scenario chooses them."""
    unavailable: Callable[[], str | None] = field(default=lambda: None)
    """Returns why this machine cannot run the scenario; None if it can."""


def run_scenario(
    scenario: Scenario,
    template: Template,
    folder: Path,
    undisturbed: Callable[[], Losses],
    patience: float = 1.0,
    show: Callable[[str], object] = lambda text: None,
    links: Links = Links(),
) -> PromiseVerdict:
    """Run a scenario in `folder`, which is emptied first, and return the verdict.

    `undisturbed` returns the losses of an undisturbed run. It is not called for a run on GPUs: there, the losses of
    steps that were trained twice are compared with each other. All limits in seconds are multiplied by `patience`.
    `show` receives lines of progress. `links` connect the hosts, unless the scenario has links of its own.
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
    """Return sentences about the parts of the promise that were not kept."""
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
    """Return a sentence if the slow rank is not named. If that is not required, the reason is added to the stage's notes."""
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
    """Check the losses of a run on GPUs, and add their largest difference to the notes.

    Every step must have a loss. The losses of a step that was trained twice must be close.
    """
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
    """Return words about the measured times and the end of the run."""
    detected = stage.detected_seconds(scenario.detected_by)
    recovery = stage.recovery()
    texts = [] if detected is None else [f"detected after {detected:.2f} s"]
    if recovery is not None:
        texts.append(f"training again after {recovery[0]:.1f} s with {recovery[1]} steps repeated")
    last = stage.losses()[-1:]
    return [*texts, f"exit code {stage.job.code} after step {last[0][0] if last else 0}"]


def losses(run: Path) -> Losses:
    """Return (step, loss) of each step in the metrics of a run's folder; empty without metrics."""
    file = run / "metrics.jsonl"
    records = scan_metrics(file)[0] if os.path.exists(file) else []
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]
