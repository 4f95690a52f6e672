"""Questions of `meshwright plan` and the planner's answers, before `plan_sections` says what of them is shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.costs.software import TrainingSoftware
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
from meshwright.launch.probe import Probe, check_here, measured_answer
from meshwright.planner.batch_ramp import ramp_misfit
from meshwright.planner.candidate import Candidate, SearchResult, untrainable
from meshwright.planner.chip_comparison import ChipPoint, chips_named, compare_chips
from meshwright.planner.devices import Idle
from meshwright.planner.exchange_features import FeatureSeconds, feature_steps
from meshwright.planner.explain import reason_against
from meshwright.planner.finalists import same_layout
from meshwright.planner.fixes import choose_or_suggest_fixes
from meshwright.planner.money import Expense, expense
from meshwright.planner.objectives import (
    Point,
    Training,
    cheapest,
    cluster_sizes,
    fastest,
    scaling,
    shortest_training,
)
from meshwright.planner.precision_choice import FormatPrice, MatmulFormat, format_named, priced_formats
from meshwright.planner.reprice import predict
from meshwright.planner.sample_choice import SampleChoice, choose_sample_layout
from meshwright.planner.sample_lengths import expected_histogram
from meshwright.planner.search import with_untrainable
from meshwright.planner.software_plan import SoftwarePlan, best_with, software_listed
from meshwright.planner.what_if import Change, what_if
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, nearest
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

OBJECTIVES = ("time", "cost", "training")


@dataclass(frozen=True)
class PlanQuestion:
    """The options of a question, checked against each other."""

    for_train: bool = False
    """Answer as `train` would on this machine."""
    gpus: tuple[int, int] | None = None
    objective: str = "time"
    critical_batch: float | None = None
    tokens: float | None = None
    price: float | None = None
    probe: int | None = None
    """Number of plans to run for a few steps on this machine."""
    include_untrainable: bool = False
    steps_assumed: bool = False
    """Whether the number of training steps is a default."""
    chips: tuple[str, ...] = ()
    """Chips to compare for the job."""
    software: tuple[TrainingSoftware, ...] = ()
    """Software to compare for the job."""
    features: bool = False
    """Whether to show what features of other systems' expert parallelism would change."""
    precision: MatmulFormat | None = None
    """The narrowest format whose step is shown."""

    @classmethod
    def of(
        cls,
        for_: str | None,
        gpus: str | None,
        objective: str,
        critical_batch: float | None,
        tokens: float | None,
        price: float | None,
        probe: int | None = None,
        include_untrainable: bool = False,
        steps_assumed: bool = False,
        chips: str | None = None,
        software: str | None = None,
        features: bool = False,
        precision: str | None = None,
    ) -> PlanQuestion:
        """Raises BadInput for invalid values, and for options that cannot be combined."""
        if for_ not in (None, "train"):
            raise BadInput(f"--for {for_}: expected train, the only command that a plan can be for")
        if objective not in OBJECTIVES:
            hint = f" (nearest: {near})" if (near := nearest(objective, OBJECTIVES)) else ""
            raise BadInput(f"--objective {objective}: expected {', '.join(OBJECTIVES)}{hint}")
        if objective == "training" and critical_batch is None:
            raise BadInput(
                "--objective training needs --critical-batch TOKENS: batches well below it learn as much from every token"
            )
        if critical_batch is not None and objective != "training":
            raise BadInput("--critical-batch does not affect the time of a step; it needs --objective training")
        for name, value in (("--critical-batch", critical_batch), ("--tokens", tokens), ("--price", price)):
            if value is not None and not value > 0:
                raise BadInput(f"{name} {value:g}: expected a number above 0")
        if probe and (gpus or objective != "time"):
            raise BadInput(
                "--probe measures seconds of a step on this machine; it cannot be combined with --gpus or --objective"
            )
        if (chips or software) and (probe or gpus or objective != "time"):
            raise BadInput(
                "--chips and --software compare single plans; they cannot be combined with --probe, --gpus or --objective"
            )
        if include_untrainable and (probe or gpus or objective != "time"):
            raise BadInput(
                "--include-untrainable adds a note to a single plan; it cannot be combined with --probe, --gpus or --objective"
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
            chips_named(chips) if chips is not None else (),
            software_listed(software) if software is not None else (),
            features,
            None if precision is None else format_named(precision),
        )


@dataclass(frozen=True)
class PlanAnswer:
    """The chosen plan, its alternatives and the details of the answer."""

    run: RunSpec
    """The run as planned: with the batch and the number of GPUs that the objective chose."""
    question: PlanQuestion
    best: Candidate
    others: tuple[Candidate, ...] = ()
    considered: int = 0
    search_seconds: float = 0.0
    plan_from_file: bool = False
    """Whether the plan comes from a file."""
    points: tuple[Point, ...] = ()
    trainings: tuple[Training, ...] = ()
    probes: tuple[Probe, ...] = ()
    idle: Idle | None = None
    """Devices of the question that the plan leaves idle; `run` has the others."""
    asked_cluster: ClusterSpec | None = None
    """The cluster with the idle devices, if there are any."""
    untrainable: Candidate | None = None
    """A faster plan that this release cannot train, with --include-untrainable."""

    @property
    def plan(self) -> Plan:
        return self.best.plan

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster of the question, idle devices included."""
        return self.asked_cluster or self.run.cluster

    @property
    def tokens(self) -> float | None:
        """Tokens of the whole training: the option, or those of the run's steps; None if the steps are a default."""
        if self.question.tokens or self.question.steps_assumed:
            return self.question.tokens
        return self.run.train.tokens

    @property
    def expense(self) -> Expense | None:
        """Money, energy and time of training with the plan; None without a step time."""
        return expense(self.run, self.plan, self.tokens, self.question.price)

    @cached_property
    def chips(self) -> tuple[ChipPoint, ...]:
        """The job on the chips of --chips."""
        return compare_chips(self.asked_run, self.question.chips, self.tokens, self.question.price)

    @cached_property
    def software(self) -> tuple[SoftwarePlan, ...]:
        """The job with the software of --software."""
        return tuple(
            best_with(self.asked_run, software, self.question.precision) for software in self.question.software
        )

    @cached_property
    def features(self) -> tuple[FeatureSeconds, ...]:
        """The plan's step with features of other systems, of --features."""
        return feature_steps(self.run, self.plan)

    @cached_property
    def formats(self) -> tuple[FormatPrice, ...]:
        """The plan's step in other formats, of --precision."""
        return () if self.question.precision is None else priced_formats(self.run, self.plan, self.question.precision)

    @property
    def asked_run(self) -> RunSpec:
        """The run on the cluster of the question."""
        return replace(self.run, cluster=self.cluster)

    @property
    def priced_points(self) -> tuple[Point, ...]:
        """The sizes of --gpus; the cluster's own size if only the cost is wanted."""
        if self.points or self.question.objective == "time":
            return self.points
        return (Point(self.plan.ranks, self.run, SearchResult(self.best, (), self.considered, self.search_seconds)),)

    @property
    def planned_only(self) -> str | None:
        """Reason why this release cannot train the plan, or None."""
        return untrainable(self.plan) or ramp_misfit(self.run, self.plan)

    @property
    def does_not_fit(self) -> str | None:
        """The missing memory of a plan from a file, in words, or None if it fits."""
        return None if self.best.fits else misfit(self.run, self.plan)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Changes of the run with their gain; each takes a search or a few prices."""
        return what_if(self.run, self.plan, search_seconds=self.search_seconds)

    @cached_property
    def samples(self) -> SampleChoice | None:
        """Layouts for samples of unequal lengths; None where these are not known (`planner.sample_lengths`)."""
        histogram = expected_histogram(self.run)
        return None if histogram is None else choose_sample_layout(self.run, histogram, device_memory(self.run))

    def why_not(self, other: Candidate) -> str:
        probe = next((probe for probe in self.probes if same_layout(probe.plan, other.plan)), None)
        if probe is None and self.probes:
            return "not measured"
        if probe is None:
            return reason_against(self.run, self.best, other)
        return (
            f"measured: {probe.measured_seconds:.3g} s a step" if probe.measured_seconds else f"measured: {probe.ended}"
        )


def answer_question(run: RunSpec, question: PlanQuestion, note: Note = lambda text: None) -> PlanAnswer:
    """The planner's answer to a question; `note` receives a line for each slow operation.

    Raises BadInput for options that do not fit the run and for an impossible plan, and OutOfResources when no plan
    fits, with changes that would make one fit.
    """
    if question.probe:
        return _answer_by_probes(run, question, note)
    if question.for_train:
        run = _with_host_memory(run)
    if isinstance(run.plan, str) and run.plan != "auto":
        return _answer_for_file(run, question)
    if question.objective == "training":
        return _answer_training(run, question)
    if question.gpus:
        return _answer_scaling(run, question)
    return _answer_by_search(run, question)


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dots, last = text.partition("..")
    if not first.isdigit() or (dots and not last.isdigit()):
        raise BadInput(f"--gpus {text}: expected A..B with 1 ≤ A ≤ B, such as --gpus 8..1024")
    return int(first), int(last or first)


def _with_host_memory(run: RunSpec) -> RunSpec:
    """The run with this host's memory, as `train` would use it, if its cluster is this machine and gives none."""
    stated = run.cluster.is_cpu or run.cluster.host_memory_gib is not None
    return on_this_host(run) if not stated and is_here(run.cluster) else run


def _answer_for_file(run: RunSpec, question: PlanQuestion) -> PlanAnswer:
    if question.gpus or question.objective == "training":
        raise BadInput(
            f"plan: {run.plan} is a single plan; --gpus and --objective training choose others, with plan=auto or pins"
        )
    if question.chips:
        raise BadInput(
            f"plan: {run.plan} is a plan of one cluster; --chips chooses one for each chip, with plan=auto or pins"
        )
    plan = predict(run, given_plan(run))
    if question.for_train:
        refuse_untrainable(run, plan)
    return PlanAnswer(run, question, Candidate(plan, fits=misfit(run, plan) is None), considered=1, plan_from_file=True)


def _answer_by_search(run: RunSpec, question: PlanQuestion) -> PlanAnswer:
    chosen = choose_or_suggest_fixes(run, memory_bytes=device_memory(run))
    result = chosen.answer
    faster = None
    if question.for_train:
        refuse_untrainable(chosen.run, result.best.plan)  # pins may select a plan that this release cannot train
    if question.include_untrainable:
        result, faster = with_untrainable(chosen.run, result, memory_bytes=device_memory(chosen.run))
    return replace(
        _answer_with(chosen.run, result, question), idle=chosen.idle, asked_cluster=run.cluster, untrainable=faster
    )


def _answer_by_probes(run: RunSpec, question: PlanQuestion, note: Note) -> PlanAnswer:
    """The search's answer, with the fastest of the leading plans by measurement as the best."""
    if isinstance(run.plan, str) and run.plan != "auto":
        raise BadInput(f"plan: {run.plan} is a single plan; --probe chooses among several, with plan=auto or pins")
    assert question.probe is not None
    check_here(run.cluster)
    run = on_this_host(resolve_data(run, note))
    chosen = choose_or_suggest_fixes(run, memory_bytes=device_memory(run))
    result, probes = measured_answer(chosen.run, chosen.answer, question.probe, note)
    return replace(
        _answer_with(chosen.run, result, question), probes=probes, idle=chosen.idle, asked_cluster=run.cluster
    )


def _answer_scaling(run: RunSpec, question: PlanQuestion) -> PlanAnswer:
    assert question.gpus is not None
    points = scaling(run, cluster_sizes(run, *question.gpus))
    best = cheapest(points) if question.objective == "cost" else fastest(points)
    return replace(_answer_with(best.run, best.answer, question), points=points)


def _answer_training(run: RunSpec, question: PlanQuestion) -> PlanAnswer:
    assert question.critical_batch is not None
    tokens = question.tokens or run.train.tokens
    sizes = cluster_sizes(run, *question.gpus) if question.gpus else None
    trainings = shortest_training(run, question.critical_batch, tokens, sizes)
    return replace(_answer_with(trainings[0].point.run, trainings[0].point.answer, question), trainings=trainings)


def _answer_with(run: RunSpec, result: SearchResult | None, question: PlanQuestion) -> PlanAnswer:
    assert result is not None
    return PlanAnswer(run, question, result.best, result.others, result.considered, result.seconds)
