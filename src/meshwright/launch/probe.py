"""Probes: the leading plans run for a few steps on this machine, and the fastest measured plan is chosen.

A probe is a normal run (the run's own model, batch and data) in a temporary folder, without checkpoints, validation or
initial weights. A plan that is much slower than predicted, or out of memory, is ended early.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.events.messages import FailureMessage, Message
from meshwright.launch.local import run_ranks
from meshwright.launch.machine import found_cluster, is_here, rank_threads
from meshwright.launch.prepare import Note, plan_yaml, prepare_run
from meshwright.observe.metrics import scan_metrics
from meshwright.observe.prediction_check import (
    COMPARED_STEPS,
    FEWEST_STEPS,
    WARM_UP,
    TypicalStep,
    comparable_memory,
    typical_step,
)
from meshwright.planner.candidate import Candidate, SearchResult
from meshwright.planner.finalists import plan_family, same_layout
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_RESOURCES,
    EXIT_PREEMPTED,
    BadInput,
    OutOfResources,
)
from meshwright.spec.job import ObserveSpec
from meshwright.spec.plan import Plan, Predicted
from meshwright.spec.plan_name import plan_name
from meshwright.spec.rank_environment import started_by_launcher
from meshwright.spec.run import RunSpec

STEPS = WARM_UP + COMPARED_STEPS
"""Steps of a probe, warm-up included."""
ENOUGH_STEPS = 5
"""Steps after warm-up that suffice if together they take `LONG_SECONDS`."""
LONG_SECONDS = 20.0
TOO_SLOW = 1.5
"""A probe ends early above this multiple of its predicted time, or above the 80% band if that is higher."""


@dataclass(frozen=True)
class Probe:
    """A plan and the measurements of its probe."""

    plan: Plan
    measured: TypicalStep | None = None
    """Typical step after warm-up; None if the probe ended before."""
    ended: str = ""
    """Reason why the probe ended before its last step; empty if it did not."""

    @property
    def predicted_seconds(self) -> float | None:
        return self.plan.predicted.step_seconds if self.plan.predicted else None

    @property
    def measured_seconds(self) -> float | None:
        return self.measured.seconds if self.measured else None

    @property
    def predicted_bytes(self) -> int | None:
        """Predicted bytes that are comparable with the measured memory."""
        predicted = self.plan.predicted
        if predicted is None or self.measured is None:
            return None
        return comparable_memory(predicted, resident=self.measured.resident)

    @property
    def error(self) -> float | None:
        """Measured ÷ predicted − 1."""
        measured = self.measured_seconds
        predicted = self.predicted_seconds
        return measured / predicted - 1 if measured and predicted else None


def measured_answer(
    run: RunSpec, answer: SearchResult, count: int, note: Note
) -> tuple[SearchResult, tuple[Probe, ...]]:
    """`answer` with the fastest measured of its `count` leading plans as the best, and every probe in order.

    Raises BadInput if the run's cluster is not this machine, and OutOfResources if no plan ran.
    """
    check_here(run.cluster)
    probes = []
    for number, candidate in enumerate(leading(answer, count), 1):
        note(f"probe {number}: {plan_name(candidate.plan)}, {STEPS} steps")
        probes.append(probe(run, candidate.plan, note))
    return with_fastest_probe(answer, probes), tuple(probes)


def check_here(cluster: ClusterSpec, detected: dict[str, object] | None = None) -> None:
    """Raise BadInput unless the ranks of `cluster` can start on this machine (`detected`, as returned by `found_cluster`)."""
    if started_by_launcher():
        raise BadInput("--probe starts the ranks of each plan itself; run it outside of the launcher, on one host")
    if cluster.nodes > 1:
        raise BadInput(
            f"--probe runs plans on this machine, and cluster.nodes is {cluster.nodes}; print the leading plans with --json and train each"
        )
    own_cluster = detected or found_cluster()
    if is_here(cluster, own_cluster):
        return
    raise BadInput(
        f"--probe runs plans on this machine, which is {own_cluster['gpus_per_node']} {own_cluster['gpu']}; the cluster says "
        f"{cluster.gpus_per_node} {cluster.gpu}; leave `cluster` out, or set cluster=auto, to plan for this machine"
    )


def leading(answer: SearchResult, count: int) -> list[Candidate]:
    """The best plan, the fastest simulated plan of each other family, then the next ones.
    A prediction may be wrong about a whole family."""
    first = [answer.best]
    families = {plan_family(answer.best.plan)}
    alternatives = [candidate for candidate in answer.others if candidate.simulated and candidate.fits]
    for candidate in alternatives:
        if plan_family(candidate.plan) not in families:
            families.add(plan_family(candidate.plan))
            first.append(candidate)
    return (first + [candidate for candidate in alternatives if candidate not in first])[:count]


def probe(run: RunSpec, plan: Plan, note: Note = lambda text: None) -> Probe:
    """Runs a few steps of `run` under `plan`. Raises KeyboardInterrupt if it is interrupted."""
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        file = Path(folder) / "plan.yaml"
        file.write_text(plan_yaml(plan), encoding="utf-8")
        prepared = prepare_run(_brief(run, file), Path(folder), profile=None, note=note)
        assert prepared is not None, "its folder is new"
        watch = Watch(prepared.folder / "metrics.jsonl", prepared.assignment.plan.predicted)
        failures: list[FailureMessage] = []

        def note_failure(rank: int, message: Message) -> None:
            if isinstance(message, FailureMessage):
                failures.append(message)

        code = run_ranks(
            "meshwright.training.rank",
            ["cpu" if run.cluster.is_cpu else "cuda"],
            cluster=run.cluster,
            logs=prepared.folder / "logs",
            threads=rank_threads(run.cluster),
            quiet=True,
            assignment=prepared.folder.absolute() / "assignment.json",
            enough=watch.enough,
            listener=note_failure,
        )
        if code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            raise KeyboardInterrupt
        failure = watch.why if code == EXIT_DONE else failure_text(code, failures)
        return Probe(prepared.assignment.plan, watch.measured if code == EXIT_DONE else None, failure)


def with_fastest_probe(answer: SearchResult, probes: Sequence[Probe]) -> SearchResult:
    """`answer` with the fastest probe's plan as the best. Raises OutOfResources if no probe was measured."""
    measured_probes = sorted(
        (probe for probe in probes if probe.measured_seconds), key=lambda probe: probe.measured_seconds or 0.0
    )
    if not measured_probes:
        raise OutOfResources("no probe ran: " + "; ".join(dict.fromkeys(probe.ended for probe in probes)))
    candidates = [answer.best, *answer.others]
    best = next(candidate for candidate in candidates if same_layout(candidate.plan, measured_probes[0].plan))
    reasons = (_measured(measured_probes), *(best.plan.why or answer.best.plan.why * (best is answer.best)))
    fastest = replace(best, plan=replace(best.plan, why=reasons))
    return replace(answer, best=fastest, others=tuple(candidate for candidate in candidates if candidate is not best))


@dataclass
class Watch:
    """Reads the metrics of a running probe, and decides when they suffice."""

    file: Path
    predicted: Predicted | None
    measured: TypicalStep | None = None
    why: str = ""
    read: int = field(default=0, repr=False)
    """Size of the file in bytes when it was last read."""

    def enough(self) -> bool:
        """Whether all steps are measured, or the plan is too slow."""
        size = self.file.stat().st_size if self.file.exists() else 0
        if size == self.read:
            return bool(self.why)
        self.read = size
        steps = [line for line in scan_metrics(self.file)[0] if line.get("kind") == "step"]
        counted_steps = [step for step in steps if WARM_UP < step["step"] <= STEPS]
        self.measured = typical_step(counted_steps) if len(counted_steps) >= FEWEST_STEPS else None
        if self.measured and (limit := too_slow(self.predicted)) and self.measured.seconds > limit:
            self.why = f"ended after {counted_steps[-1]['step']} steps: more than {limit:.3g} s a step"
        long = sum(step["step_seconds"] for step in counted_steps) >= LONG_SECONDS
        return bool(self.why) or len(counted_steps) >= (ENOUGH_STEPS if long else STEPS - WARM_UP)


def too_slow(predicted: Predicted | None) -> float | None:
    """Step seconds above which a plan is not measured further; None without a prediction."""
    if predicted is None or predicted.step_seconds is None:
        return None
    return max(TOO_SLOW * predicted.step_seconds, predicted.high_seconds or 0.0)


def _brief(run: RunSpec, plan: Path) -> RunSpec:
    """`run` with enough steps and only training steps; the learning rate's schedule is unchanged."""
    return replace(
        run,
        name="probe",
        plan=str(plan),
        model=replace(run.model, init="scratch"),
        train=replace(run.train, steps=max(run.train.steps, 2 * STEPS), validate_every=0, batch_ramp=()),
        checkpoint=replace(run.checkpoint, every=0, at_end=False),
        observe=ObserveSpec(),
    )


def _measured(measured_probes: Sequence[Probe]) -> str:
    best = measured_probes[0]
    slower = measured_probes[1:]
    assert best.measured is not None and best.measured_seconds is not None
    first, last = best.measured.steps
    other_times = f" (the others {', '.join(f'{probe.measured_seconds:.3g} s' for probe in slower)})" if slower else ""
    rank_text = f"the fastest of {len(measured_probes)} plans that ran" if slower else "the only plan that ran"
    return f"measured on this machine: {best.measured_seconds:.3g} s a step over steps {first} to {last}, {rank_text}{other_times}"


def failure_text(code: int, failures: Sequence[FailureMessage]) -> str:
    """The reason why a probe failed: the message of the first rank that failed with the job's exit code."""
    message = next((failure.message for failure in failures if failure.exit_code == code), None)
    if code == EXIT_NO_RESOURCES:
        return message or "out of memory"
    return f"failed with exit code {code}" + (f": {message}" if message else "")
