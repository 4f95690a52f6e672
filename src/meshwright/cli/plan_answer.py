"""What `meshwright plan` was asked and what the planner answered, before it is printed, drawn or written as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.costs.plan_costs import products
from meshwright.costs.sources import sources
from meshwright.launch.machine import is_here
from meshwright.launch.prepare import (
    Note,
    device_memory,
    given_plan,
    misfit,
    on_this_host,
    refuse_untrainable,
    resolve_data,
)
from meshwright.launch.probe import Probe, check_here, probed
from meshwright.planner.candidate import Answer as Found
from meshwright.planner.candidate import Candidate, untrainable
from meshwright.planner.devices import Idle
from meshwright.planner.explain import limits, reason_against
from meshwright.planner.finalists import same_layout
from meshwright.planner.fixes import choose_or_suggest_fixes
from meshwright.planner.objectives import (
    Point,
    Training,
    cheapest,
    cluster_sizes,
    fastest,
    scaling,
    shortest_training,
)
from meshwright.planner.reprice import predict
from meshwright.planner.search import with_untrainable
from meshwright.planner.what_if import Change, what_if
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, nearest
from meshwright.spec.fields import to_plain
from meshwright.spec.plan import Plan
from meshwright.spec.plan_name import plan_name
from meshwright.spec.run import RunSpec

OBJECTIVES = ("time", "cost", "training")


@dataclass(frozen=True)
class Wishes:
    """The options of one question, checked against each other."""

    for_train: bool = False
    """Answer as `train` would on this machine."""
    gpus: tuple[int, int] | None = None
    objective: str = "time"
    critical_batch: float | None = None
    tokens: float | None = None
    price: float | None = None
    probe: int | None = None
    """Plans to run for a few steps on this machine."""
    include_untrainable: bool = False
    steps_assumed: bool = False
    """Nobody said how many steps the training has."""

    @classmethod
    def of(
        cls, for_: str | None, gpus: str | None, objective: str, critical_batch: float | None, tokens: float | None, price: float | None,
        probe: int | None = None, include_untrainable: bool = False, steps_assumed: bool = False,
    ) -> Wishes:  # fmt: skip
        """Raises BadInput for values that are none, and for options that do not go together."""
        if for_ not in (None, "train"):
            raise BadInput(f"--for {for_}: expected train, the one command that a plan can be for")
        if objective not in OBJECTIVES:
            near = f" (nearest: {found})" if (found := nearest(objective, OBJECTIVES)) else ""
            raise BadInput(f"--objective {objective}: expected {', '.join(OBJECTIVES)}{near}")
        if objective == "training" and critical_batch is None:
            raise BadInput(
                "--objective training needs --critical-batch TOKENS: batches well below it learn as much from every token"
            )
        for name, value, goes in (
            ("--critical-batch", critical_batch, objective == "training"),
            ("--tokens", tokens, objective != "time" or gpus is not None),
            ("--price", price, objective != "time" or gpus is not None),
        ):
            if value is not None and not goes:
                wanted = (
                    "--objective training"
                    if name == "--critical-batch"
                    else "--gpus, --objective cost or --objective training"
                )
                raise BadInput(f"{name} says nothing about the time of a step; it goes with {wanted}")
            if value is not None and not value > 0:
                raise BadInput(f"{name} {value:g}: expected a number above 0")
        if probe and (gpus or objective != "time"):
            raise BadInput("--probe measures seconds of a step on this machine; it goes without --gpus and --objective")
        if include_untrainable and (probe or gpus or objective != "time"):
            raise BadInput(
                "--include-untrainable adds a note to one plan; it goes without --probe, --gpus and --objective"
            )
        if objective == "training" and tokens is None and steps_assumed:
            raise BadInput(
                "--objective training needs --tokens N, or train.steps: how long the training is at the run's own batch"
            )
        return cls(
            for_ == "train",
            _range(gpus),
            objective,
            critical_batch,
            tokens,
            price,
            probe,
            include_untrainable,
            steps_assumed,
        )


@dataclass(frozen=True)
class Answer:
    """The plan and what stands beside it."""

    run: RunSpec
    """As it was planned: with the batch and the number of GPUs that the objective chose."""
    wishes: Wishes
    best: Candidate
    others: tuple[Candidate, ...] = ()
    considered: int = 0
    search_seconds: float = 0.0
    given: bool = False
    """The plan comes from a file."""
    points: tuple[Point, ...] = ()
    trainings: tuple[Training, ...] = ()
    probes: tuple[Probe, ...] = ()
    idle: Idle | None = None
    """What the plan leaves idle of the devices that were asked about; `run` has the others."""
    asked: ClusterSpec | None = None
    """The cluster with the idle devices, where there are any."""
    untrainable: Candidate | None = None
    """A faster plan that this release cannot train, where it was asked for."""

    @property
    def plan(self) -> Plan:
        return self.best.plan

    @property
    def cluster(self) -> ClusterSpec:
        """As it was asked about, idle devices included."""
        return self.asked or self.run.cluster

    @property
    def tokens(self) -> float | None:
        """Of the whole training: as asked, or those of the run's steps; None where the steps are only assumed."""
        if self.wishes.tokens or self.wishes.steps_assumed:
            return self.wishes.tokens
        return self.run.train.steps * self.run.train.global_batch * self.run.train.seq_len

    @property
    def priced_points(self) -> tuple[Point, ...]:
        """The numbers of GPUs asked about: the cluster's own where only the cost was asked."""
        if self.points or self.wishes.objective == "time":
            return self.points
        return (Point(self.plan.ranks, self.run, Found(self.best, (), self.considered, self.search_seconds)),)

    @property
    def planned_only(self) -> str | None:
        """Why this release cannot train the plan, or None."""
        return untrainable(self.plan)

    @property
    def does_not_fit(self) -> str | None:
        """What a plan that was given needs beyond the memory there is, or None."""
        return None if self.best.fits else misfit(self.run, self.plan)

    def changes(self) -> tuple[Change, ...]:
        return what_if(self.run, self.plan, search_seconds=self.search_seconds)

    def why_not(self, other: Candidate) -> str:
        ran = next((one for one in self.probes if same_layout(one.plan, other.plan)), None)
        if ran is None and self.probes:
            return "not measured"
        if ran is None:
            return reason_against(self.run, self.best, other)
        return f"measured: {ran.measured_seconds:.3g} s a step" if ran.measured_seconds else f"measured: {ran.ended}"


def answer_of(run: RunSpec, wishes: Wishes, note: Note = lambda text: None) -> Answer:
    """The planner's answer to one question; `note` hears what takes time.

    Raises BadInput for options that do not fit the run and for a plan that cannot be, and OutOfResources when nothing fits, with
    what would make it fit.
    """
    if wishes.probe:
        return _probed(run, wishes, note)
    if wishes.for_train:
        run = _as_trained(run)
    if isinstance(run.plan, str) and run.plan != "auto":
        return _of_file(run, wishes)
    if wishes.objective == "training":
        return _of_training(run, wishes)
    if wishes.gpus:
        return _of_scaling(run, wishes)
    return _searched(run, wishes)


def as_plain(answer: Answer, *, explain: bool) -> dict[str, Any]:
    """The answer as `--json` prints it."""
    others = [
        {
            "name": plan_name(other.plan),
            "fits": other.fits,
            "trainable": untrainable(other.plan) is None,
            "why_not": answer.why_not(other),
            "plan": to_plain(other.plan),
        }
        for other in answer.others
    ]
    plan = to_plain(answer.plan)
    body = {
        "name": plan_name(answer.plan),
        "plan": plan,
        "predicted": plan["predicted"],
        "alternatives": others,
        "search_seconds": answer.search_seconds,
    }
    if over := answer.does_not_fit:
        body["does_not_fit"] = over
    if answer.idle:
        body["idle"] = to_plain(answer.idle)
    if answer.wishes.include_untrainable:
        body["untrainable"] = _untrainable(answer.untrainable)
    body["sources"] = sources_of(answer)
    if answer.probes:
        body["probes"] = [_probe(one) for one in answer.probes]
    if answer.points or answer.trainings or answer.wishes.objective != "time":
        body["objective"] = _objective(answer)
    if explain:
        body["limits"] = to_plain(limits(answer.run, answer.plan))
        body["changes"] = to_plain(answer.changes())
    return body


def sources_of(answer: Answer) -> dict[str, str]:
    """Where the numbers come from: which are measured, which are fitted, which are guesses."""
    kind = products(answer.plan.precision, answer.run.cluster)
    return sources(answer.run.cluster, kind, answer.plan)


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dots, last = text.partition("..")
    if not first.isdigit() or (dots and not last.isdigit()):
        raise BadInput(f"--gpus {text}: expected A..B with 1 ≤ A ≤ B, such as --gpus 8..1024")
    return int(first), int(last or first)


def _as_trained(run: RunSpec) -> RunSpec:
    """The run with the host memory that `train` would find, where its cluster is this machine and does not say."""
    stated = run.cluster.is_cpu or run.cluster.host_memory_gib is not None
    return on_this_host(run) if not stated and is_here(run.cluster) else run


def _of_file(run: RunSpec, wishes: Wishes) -> Answer:
    if wishes.gpus or wishes.objective == "training":
        raise BadInput(
            f"plan: {run.plan} is one plan; --gpus and --objective training choose others, with plan=auto or pins"
        )
    plan = predict(run, given_plan(run))
    if wishes.for_train:
        refuse_untrainable(run, plan)
    return Answer(run, wishes, Candidate(plan, fits=misfit(run, plan) is None), considered=1, given=True)


def _searched(run: RunSpec, wishes: Wishes) -> Answer:
    chosen = choose_or_suggest_fixes(run, memory_bytes=device_memory(run))
    found, faster = chosen.answer, None
    if wishes.for_train:
        refuse_untrainable(chosen.run, found.best.plan)  # pins may ask for what is only planned
    if wishes.include_untrainable:
        found, faster = with_untrainable(chosen.run, found, memory_bytes=device_memory(chosen.run))
    return replace(_answer_with(chosen.run, found, wishes), idle=chosen.idle, asked=run.cluster, untrainable=faster)


def _probed(run: RunSpec, wishes: Wishes, note: Note) -> Answer:
    """What the search found, with the fastest measured of its leading plans as the best."""
    if isinstance(run.plan, str) and run.plan != "auto":
        raise BadInput(f"plan: {run.plan} is one plan; --probe chooses among several, with plan=auto or pins")
    assert wishes.probe is not None
    check_here(run.cluster)
    run = on_this_host(resolve_data(run, note))
    chosen = choose_or_suggest_fixes(run, memory_bytes=device_memory(run))
    found, probes = probed(chosen.run, chosen.answer, wishes.probe, note)
    return replace(_answer_with(chosen.run, found, wishes), probes=probes, idle=chosen.idle, asked=run.cluster)


def _of_scaling(run: RunSpec, wishes: Wishes) -> Answer:
    assert wishes.gpus is not None
    points = scaling(run, cluster_sizes(run, *wishes.gpus))
    best = cheapest(points) if wishes.objective == "cost" else fastest(points)
    return replace(_answer_with(best.run, best.answer, wishes), points=points)


def _of_training(run: RunSpec, wishes: Wishes) -> Answer:
    assert wishes.critical_batch is not None
    tokens = wishes.tokens or run.train.steps * run.train.global_batch * run.train.seq_len
    sizes = cluster_sizes(run, *wishes.gpus) if wishes.gpus else None
    trainings = shortest_training(run, wishes.critical_batch, tokens, sizes)
    return replace(_answer_with(trainings[0].point.run, trainings[0].point.answer, wishes), trainings=trainings)


def _answer_with(run: RunSpec, found: Found | None, wishes: Wishes) -> Answer:
    assert found is not None
    return Answer(run, wishes, found.best, found.others, found.considered, found.seconds)


def _objective(answer: Answer) -> dict[str, Any]:
    """What the objective was asked over, and what it chose."""
    price = answer.wishes.price
    body: dict[str, Any] = {"name": answer.wishes.objective, "gpus": answer.plan.ranks, "tokens": answer.tokens}
    if answer.trainings:
        return body | {"trainings": [_training(training, price) for training in answer.trainings]}
    return body | {"points": [_point(point, answer.tokens, price) for point in answer.priced_points]}


def _untrainable(candidate: Candidate | None) -> dict[str, Any] | None:
    if candidate is None:
        return None
    return {"plan": to_plain(candidate.plan), "cannot_train": untrainable(candidate.plan)}


def _probe(probe: Probe) -> dict[str, Any]:
    return {
        "plan": to_plain(probe.plan),
        "predicted_seconds": probe.predicted_seconds,
        "measured_seconds": probe.measured_seconds,
        "predicted_bytes": probe.predicted_bytes,
        "measured_bytes": probe.found.memory_bytes if probe.found else None,
        "ended": probe.ended or None,
    }


def _point(point: Point, tokens: float | None, price: float | None) -> dict[str, Any]:
    hours = point.gpu_hours(tokens) if tokens else None
    return {
        "gpus": point.gpus,
        "plan": to_plain(point.answer.best.plan) if point.answer else None,
        "step_seconds": point.seconds,
        "tokens_per_second": point.tokens_per_second,
        "days": hours / point.gpus / 24 if hours else None,
        "mfu": point.mfu,
        "gpu_hours": hours,
        "cost": hours * price if hours and price else None,
        "refused": point.refused or None,
    }


def _training(training: Training, price: float | None) -> dict[str, Any]:
    return {
        "gpus": training.point.gpus,
        "global_batch": training.batch,
        "steps": training.steps,
        "step_seconds": training.point.seconds,
        "seconds": training.seconds,
        "gpu_hours": training.gpu_hours,
        "cost": training.gpu_hours * price if price else None,
    }
