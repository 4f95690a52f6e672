"""What an answer of `meshwright plan` says, section by section, for its three renderers: text, HTML and JSON.

A section has tables, sentences or bars for people and a value for JSON. Renderers lay sections out and leave none out; each number has
one text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.cli.effective_time import effective_answer
from meshwright.cli.plan_answer import PlanAnswer
from meshwright.cli.plan_samples import HEADS, TITLE, sample_lines, samples_as_plain
from meshwright.cli.plan_words import (
    axes,
    axes_line,
    bytes_text,
    caution,
    chips_by_node,
    expense_sentences,
    facts,
    memory_by_rank,
    node_line,
    price_sentence,
    seconds_text,
    short_line,
    three_digits,
    two_digits,
)
from meshwright.costs.plan_costs import as_nodes, matmul_dtype
from meshwright.costs.sources import sources
from meshwright.launch.probe import Probe
from meshwright.observe import number_text
from meshwright.planner.candidate import Candidate, untrainable
from meshwright.planner.checkpoint_cost import checkpoint_cost, checkpoint_sentences
from meshwright.planner.chip_comparison import ChipPoint
from meshwright.planner.effective_time import effective_sentence, predict_effective_time
from meshwright.planner.explain import limits, parts_of
from meshwright.planner.finalists import same_layout
from meshwright.planner.money import price_of
from meshwright.planner.objectives import Point, Training
from meshwright.planner.rollout_time import rl_seconds
from meshwright.planner.sample_reasons import sample_reasons
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import to_plain
from meshwright.spec.plan_keys import plain_keys
from meshwright.spec.plan_name import plan_name

MOST_RUNNER_UPS = 5
"""Runner-ups that people are shown; --json has all of them."""
LONGEST_TABLE = 12
"""Longest table of trainings, in lines; --json has all of them."""
NODES_SHOWN = 4
MARKS = 8
"""Ranks of a node that have a mark."""
RANKS_SHOWN = 8
"""Pipeline ranks whose memory is shown: if there are more, the first, the last and the fullest."""
SMALLEST_SHARE = 0.001
"""Share of a rank's memory below which a part is not named."""
SMALLEST_PART = 0.0005
"""Share of the step below which a part of it is left out."""
SMALLEST_GAIN = 0.005
"""Gain below which a change counts as no gain."""
TOKENS_NEEDED = "days and GPU-hours need the tokens of the whole training: --tokens 1e12, or train.steps"
CAN_BE_TRAINED = "can be trained"
PLANNED_ONLY = "planned only"
DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True)
class AnswerTable:
    """Rows of cells; without heads, the first cell of a row names it. A row may be shorter than the heads."""

    rows: tuple[tuple[str, ...], ...]
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerList:
    """Sentences."""

    sentences: tuple[str, ...]


@dataclass(frozen=True)
class RankedPlan:
    """A plan in a list of plans: its number, the plan in one line with its figures, a mark, and a sentence about it."""

    number: int
    line: str
    mark: str
    about: str


@dataclass(frozen=True)
class RankedPlans:
    plans: tuple[RankedPlan, ...]


@dataclass(frozen=True)
class AnswerBar:
    """A bar: its label, its value as text, and its parts with their sizes; without parts, a line that says what is left out."""

    label: str
    value: str = ""
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class AnswerBars:
    """Bars on one scale; `limit` is a line across them. `key` are parts with their sizes as text, and `key_of` says whose."""

    bars: tuple[AnswerBar, ...]
    full: float
    limit: float | None = None
    key: tuple[tuple[str, str], ...] = ()
    key_of: str = ""


Block = AnswerTable | AnswerList | RankedPlans | AnswerBars


@dataclass(frozen=True)
class AnswerSection:
    """A titled part of an answer."""

    key: str
    """Its name in JSON."""
    title: str
    blocks: tuple[Block, ...]
    note: str = ""
    plain: Callable[[], Any] | None = None
    """Its value in JSON; None where JSON has its numbers inside other values, such as the plan."""


@dataclass(frozen=True)
class Remark:
    """A sentence below the head of an answer, behind a word such as "planned only"; `more` are lines that follow it."""

    text: str
    mark: str = ""
    more: tuple[str, ...] = ()


def status_of(answer: PlanAnswer) -> str:
    """Whether the plan can be trained, in words."""
    if answer.does_not_fit:
        return DOES_NOT_FIT
    return PLANNED_ONLY if answer.planned_only else CAN_BE_TRAINED


def remarks_of(answer: PlanAnswer) -> Iterator[Remark]:
    """What is to know before the plan is used."""
    run = answer.run
    predicted = answer.plan.predicted
    if predicted is not None and run.rl is not None:
        yield _rl_remark(answer)
    if predicted is not None and (warning := caution(run)):
        yield Remark(f"{'' if predicted.step_seconds else 'no step time: '}{warning}")
    if answer.plan_from_file:
        yield Remark(f"the plan of {run.plan}, priced on this cluster")
    else:
        found = f"best of {answer.considered:,} layouts and strategies, found in {answer.search_seconds:.2f} s"
        yield Remark(found)
    if answer.idle:
        yield Remark("", answer.idle.sentence, (answer.idle.start,))
    if over := answer.does_not_fit:
        yield Remark(over, DOES_NOT_FIT)
    if refused := answer.planned_only:
        yield Remark(refused, PLANNED_ONLY)
    if answer.question.include_untrainable:
        yield _untrainable_remark(answer.untrainable)


def sections_of(answer: PlanAnswer, *, explain: bool = True) -> Iterator[AnswerSection]:
    """The sections that the answer has, in their order; without `explain` those that take no further prices of plans."""
    for make in SECTIONS:
        if (explain or make not in EXPLAINED) and (section := make(answer)) is not None:
            yield section


def sources_of(answer: PlanAnswer) -> dict[str, str]:
    """The source of the predicted numbers: measured, fitted or guessed."""
    matmul_format = matmul_dtype(answer.plan.precision, answer.run.cluster)
    return sources(answer.run.cluster, matmul_format, answer.plan)


def _rl_remark(answer: PlanAnswer) -> Remark:
    """The step with `rl` by phases; what is above it is a step of `train.global_batch` rows."""
    run = answer.run
    assert run.rl is not None
    try:
        phases = rl_seconds(run, answer.plan)
    except BadInput as error:
        return Remark(f"a step trains on rows that its answers fill; the time of the answers is not predicted: {error}")
    many = run.train.global_batch * run.rl.samples
    return Remark(
        "the time of rewards, which your function takes, is not included",
        f"{seconds_text(phases.total)} a step with its answers",
        (
            f"hand-over {seconds_text(phases.handover)}, sampling {seconds_text(phases.rollout)} ({many:,} answers of "
            f"{phases.mean_tokens:,.0f} tokens in the mean, the longest {phases.longest:,}), training "
            f"{seconds_text(phases.training)} ({phases.rows:,} rows)",
            "lengths are presumed: rl.presumed_question and rl.presumed_answer tell others",
        ),
    )


def _untrainable_remark(other: Candidate | None) -> Remark:
    """The faster plan that this release cannot train, or that there is none."""
    if other is None:
        return Remark("no plan that this release cannot train is faster")
    text = f"{seconds_text(other.seconds)} a step: {short_line(other.plan)}; {untrainable(other.plan)}"
    return Remark(text, PLANNED_ONLY)


def _probes(answer: PlanAnswer) -> AnswerSection | None:
    if not answer.probes:
        return None
    plans = tuple(
        RankedPlan(
            number,
            short_line(probe.plan),
            "taken" if same_layout(probe.plan, answer.plan) else "",
            _measured_text(probe),
        )
        for number, probe in enumerate(answer.probes, 1)
    )
    profile = answer.run.cluster.profile
    hint = f"once trained, `meshwright profile --from-run runs/{answer.run.name}` corrects {profile} by it"
    return AnswerSection(
        "probes",
        "measured on this machine, next to the prediction",
        (RankedPlans(plans),),
        "" if profile is None else hint,
        lambda: [_plain_probe(probe) for probe in answer.probes],
    )


def _measured_text(probe: Probe) -> str:
    """Predicted and measured values of a probe."""
    measured_parts = [f"predicted {seconds_text(probe.predicted_seconds)}"] if probe.predicted_seconds else []
    if probe.measured is not None:
        error_text = f" ({probe.error:+.0%})" if probe.error is not None else ""
        measured_parts.append(f"measured {seconds_text(probe.measured.seconds)}{error_text}")
        expected = f" of {bytes_text(probe.predicted_bytes)} predicted" if probe.predicted_bytes else ""
        measured_parts.append(f"{bytes_text(probe.measured.memory_bytes)}{expected}")
    return ", ".join([*measured_parts, *([probe.ended] if probe.ended else [])])


def _plain_probe(probe: Probe) -> dict[str, Any]:
    return {
        "plan": plain_keys(probe.plan),
        "predicted_seconds": probe.predicted_seconds,
        "measured_seconds": probe.measured_seconds,
        "predicted_bytes": probe.predicted_bytes,
        "measured_bytes": probe.measured.memory_bytes if probe.measured else None,
        "ended": probe.ended or None,
    }


def _facts(answer: PlanAnswer) -> AnswerSection:
    return AnswerSection("facts", "plan", (AnswerTable(tuple(facts(answer.run, answer.plan))),))


def _mesh(answer: PlanAnswer) -> AnswerSection:
    rows = tuple(
        (axis, f"{'═══' if 'between' in link else '───'} {link}", traffic)
        for axis, link, traffic in axes(answer.run, answer.plan)
    )
    return AnswerSection("mesh", "mesh, outermost axis first", (AnswerTable(rows), AnswerTable(tuple(_nodes(answer)))))


def _nodes(answer: PlanAnswer) -> Iterator[tuple[str, ...]]:
    """The first nodes and the last, with a mark for each rank and the mesh coordinates of their ranks."""
    last = as_nodes(answer.run.cluster).nodes - 1
    chips = chips_by_node(answer.run.cluster)
    for node in range(last + 1) if last < NODES_SHOWN else (*range(NODES_SHOWN - 1), last):
        if node == last >= NODES_SHOWN:
            yield "…", "", f"{last + 1 - NODES_SHOWN:,} more"
        coordinates, ranks = node_line(answer.run, answer.plan, node)
        chip = f" {chips[node]}" if chips else ""
        yield f"node {node:,}{chip}", "▣" * min(ranks, MARKS) + "…" * (ranks > MARKS), coordinates


def _memory(answer: PlanAnswer) -> AnswerSection:
    by_rank = memory_by_rank(answer.run, answer.plan)
    limit = answer.run.cluster.memory_bytes()
    full = max(limit or 0, *(sum(parts.values()) for _, parts in by_rank))
    fullest = max(by_rank, key=lambda entry: sum(entry[1].values()))[1]
    least = SMALLEST_SHARE * sum(fullest.values())
    key = tuple((name, bytes_text(size)) for name, size in fullest.items() if size >= least)
    bars = AnswerBars(tuple(_memory_bars(by_rank)), full, limit, key, "on the fullest rank" * (len(by_rank) > 1))
    whose = "each pipeline rank" if len(by_rank) > 1 else "a rank"
    title = f"memory of {whose}{f', a bar for {full / 1e9:.0f} GB' if limit else ''}"
    return AnswerSection("memory", title, (bars,))


def _memory_bars(by_rank: Sequence[tuple[str, dict[str, int]]]) -> Iterator[AnswerBar]:
    """All ranks; of many the first three, the fullest and the last two."""
    shown = list(range(len(by_rank)))
    if len(by_rank) > RANKS_SHOWN:
        fullest = max(shown, key=lambda rank: sum(by_rank[rank][1].values()))
        shown = sorted({0, 1, 2, fullest, len(by_rank) - 2, len(by_rank) - 1})
    for before, rank in zip([-1, *shown], shown, strict=False):
        if rank > before + 1:
            yield AnswerBar(f"… {rank - before - 1} more")
        label, parts = by_rank[rank]
        yield AnswerBar(label, bytes_text(sum(parts.values())), tuple(parts.items()))


def _step(answer: PlanAnswer) -> AnswerSection | None:
    predicted = answer.plan.predicted
    if predicted is None or not predicted.step_seconds:
        return None
    shown = {
        name: seconds
        for name, seconds in parts_of(predicted).items()
        if seconds >= SMALLEST_PART * predicted.step_seconds
    }
    bars = tuple(
        AnswerBar(name, f"{seconds:.3f} s  {seconds / predicted.step_seconds:.1%}", ((name, seconds),))
        for name, seconds in shown.items()
    )
    return AnswerSection(
        "step", "where the step goes", (AnswerBars(bars, predicted.step_seconds),), "(mean over ranks)"
    )


def _checkpoints(answer: PlanAnswer) -> AnswerSection | None:
    cost = checkpoint_cost(answer.run, answer.plan)
    return (
        None
        if cost is None
        else _listed("checkpoint", "checkpoints", checkpoint_sentences(answer.run, cost), lambda: to_plain(cost))
    )


def _effective_time(answer: PlanAnswer) -> AnswerSection | None:
    effective = predict_effective_time(answer.run, answer.plan)
    if effective is None:
        return None
    return _listed(
        "effective_time",
        "effective training time",
        [effective_sentence(effective)],
        lambda: effective_answer(effective, played=False),
    )


def _expense(answer: PlanAnswer) -> AnswerSection | None:
    spent = answer.expense
    return (
        None
        if spent is None
        else _listed("expense", "money and energy", expense_sentences(spent, answer.idle), lambda: to_plain(spent))
    )


def _chips(answer: PlanAnswer) -> AnswerSection | None:
    if not answer.question.chips:
        return None
    prices = {entry.chip: entry.expense.price_per_gpu_hour for entry in answer.chips if entry.expense}
    currencies = {price.currency for price in prices.values()}
    cost = (currencies.pop() if len(currencies) == 1 else "") or "cost"
    heads = ("chip", "plan", "step", "tokens/s a GPU", f"{cost} / M tokens", "kWh / M tokens")
    table = AnswerTable(
        tuple(_chip_row(answer, entry) for entry in answer.chips),
        (*heads, *(("days", "GPU-hours", cost) if answer.tokens else ())),
    )
    notes = [
        f"(days, GPU-hours and cost are those of {number_text.short(answer.tokens)} tokens)"
        if answer.tokens
        else f"({TOKENS_NEEDED})"
    ]
    return AnswerSection(
        "chips",
        "the same job on other chips, the cheapest first",
        (table,),
        "\n".join(
            [*notes, *(f"price of a GPU-hour, {chip}: {price_sentence(price)}" for chip, price in prices.items())]
        ),
        plain=lambda: [_plain_chip(entry) for entry in answer.chips],
    )


def _chip_row(answer: PlanAnswer, entry: ChipPoint) -> tuple[str, ...]:
    point = entry.point
    spent = entry.expense
    if spent is None or point.answer is None or point.tokens_per_second is None or point.seconds is None:
        return entry.chip, point.refused or "its rates are not known"
    totals = [spent.days, spent.gpu_hours, spent.money] if answer.tokens else []
    return (
        entry.chip,
        axes_line(point.answer.best.plan),
        seconds_text(point.seconds),
        f"{point.tokens_per_second / point.gpus:,.0f}",
        _known(spent.money_per_million_tokens, three_digits),
        _known(spent.kwh_per_million_tokens, three_digits),
        *(_known(value, two_digits) for value in totals),
    )


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return "not known" if value is None else text(value)


def _plain_chip(point: ChipPoint) -> dict[str, Any]:
    body = {"chip": point.chip, **_plain_point(point.point, None, None)}
    return {**body, "expense": to_plain(point.expense) if point.expense else None}


def _software(answer: PlanAnswer) -> AnswerSection | None:
    if not answer.question.software:
        return None
    rows = []
    for entry in sorted(answer.software, key=lambda entry: entry.seconds or float("inf")):
        if entry.seconds is None or entry.low is None or entry.high is None or entry.memory_bytes is None:
            rows.append((entry.software, "", "", "", "", entry.refused))
            continue
        band = f"{seconds_text(entry.low)} to {seconds_text(entry.high)}"
        speed = f"{entry.tokens_per_second_per_gpu:,.0f}"
        step = f"{seconds_text(entry.seconds)} ({band})"
        rows.append((entry.software, entry.precision, step, speed, bytes_text(entry.memory_bytes), entry.layout))
    heads = ("software", "format", "step (80%)", "tokens/s a GPU", "memory", "layout")
    fitted = [
        f"{entry.software}: constants of {entry.constants_of:.0f}, {entry.runs:,} published runs; {entry.about}"
        for entry in answer.software
    ]
    return AnswerSection(
        "software",
        "as other software would run it, each with its best layout",
        (AnswerTable(tuple(rows), heads),),
        "\n".join(fitted),
        lambda: [to_plain(point) for point in answer.software],
    )


def _features(answer: PlanAnswer) -> AnswerSection | None:
    if not answer.question.features:
        return None
    title = "what features of other systems' expert parallelism would change"
    if not answer.features:
        return AnswerSection("features", title, (), "the model has no experts, or its step time is not known", list)
    rows = tuple(
        (step.feature, "in this plan" if step.present else seconds_text(step.alone), seconds_text(step.together))
        for step in answer.features
    )
    return AnswerSection(
        "features",
        title,
        (AnswerTable(rows, ("feature", "alone", "with those above")),),
        plain=lambda: to_plain(answer.features),
    )


def _formats(answer: PlanAnswer) -> AnswerSection | None:
    if answer.question.precision is None:
        return None
    title = "this plan with matmuls in other formats, the fastest first"
    if not answer.formats:
        return AnswerSection(
            "formats", title, (), "its step time is not known, or the chip has none of these formats", list
        )
    moe = answer.plan.experts is not None
    shown = [
        entry for entry in answer.formats if entry.dense == entry.experts or "bf16" in (entry.dense, entry.experts)
    ]
    rows = tuple(
        (
            *((entry.dense, entry.experts) if moe else (entry.dense,)),
            seconds_text(entry.seconds),
            entry.cannot_train or "yes",
        )
        for entry in shown
    )
    heads = (*(("dense layers", "experts") if moe else ("format",)), "step", "can be trained")
    return AnswerSection("formats", title, (AnswerTable(rows, heads),), plain=lambda: to_plain(answer.formats))


def _accuracy(answer: PlanAnswer) -> AnswerSection | None:
    """The accuracy of the formats in the table above it."""
    if not answer.formats:
        return None
    return _listed(
        "accuracy", "accuracy", [f"{one.dense}: {one.accuracy}" for one in answer.formats if one.dense == one.experts]
    )


def _why(answer: PlanAnswer) -> AnswerSection | None:
    return _listed("why", "why this plan", answer.plan.why) if answer.plan.why else None


def _runner_ups(answer: PlanAnswer) -> AnswerSection | None:
    plans = []
    for number, other in enumerate(answer.others[:MOST_RUNNER_UPS], 2):
        predicted = other.plan.predicted
        figures = [seconds_text(predicted.step_seconds)] if predicted and predicted.step_seconds else []
        figures += [bytes_text(predicted.memory_peak_bytes)] if predicted else []
        mark = PLANNED_ONLY if untrainable(other.plan) else ""
        plans.append(
            RankedPlan(number, f"{short_line(other.plan)} ({', '.join(figures)})", mark, answer.why_not(other))
        )
    return AnswerSection(
        "alternatives",
        "runner-ups, and why they were not chosen",
        (RankedPlans(tuple(plans)),),
        plain=lambda: [_plain_runner_up(answer, other) for other in answer.others],
    )


def _plain_runner_up(answer: PlanAnswer, other: Candidate) -> dict[str, Any]:
    return {
        "name": plan_name(other.plan),
        "fits": other.fits,
        "trainable": untrainable(other.plan) is None,
        "why_not": answer.why_not(other),
        "plan": plain_keys(other.plan),
    }


def _samples(answer: PlanAnswer) -> AnswerSection | None:
    choice = answer.samples
    if choice is None:
        return None
    note = "(capacity: tokens of a micro-batch on a rank, and of one with offload; seconds of a step, its mean and quantiles)"
    reasons = AnswerList(tuple(sample_reasons(answer.run, choice)))
    layouts = AnswerTable(tuple(sample_lines(choice)), HEADS)
    blocks = (reasons, layouts) if choice.layouts else (reasons,)
    return AnswerSection(
        "samples", TITLE, blocks, note if choice.layouts else "", lambda: samples_as_plain(answer.run, choice)
    )


def _limits(answer: PlanAnswer) -> AnswerSection | None:
    found = limits(answer.run, answer.plan)
    return _listed("limits", "what limits the step", [limit.text for limit in found], lambda: to_plain(found))


def _changes(answer: PlanAnswer) -> AnswerSection:
    rows = tuple(
        (
            change.name,
            seconds_text(change.seconds),
            f"{change.gain:+.1%}" if abs(change.gain) >= SMALLEST_GAIN else "nothing",
            change.note,
        )
        for change in answer.changes
    )
    note = "(seconds of a step; change in tokens per second)" if rows else ""
    return AnswerSection(
        "changes", "what a change would gain", (AnswerTable(rows),), note, lambda: to_plain(answer.changes)
    )


def _plain_objective(answer: PlanAnswer) -> dict[str, Any]:
    """The range of the objective and its choice."""
    price = answer.question.price
    body: dict[str, Any] = {"name": answer.question.objective, "gpus": answer.plan.ranks, "tokens": answer.tokens}
    if answer.trainings:
        return body | {"trainings": [_plain_training(training, price) for training in answer.trainings]}
    return body | {"points": [_plain_point(point, answer.tokens, price) for point in answer.priced_points]}


def _sizes(answer: PlanAnswer) -> AnswerSection | None:
    """The sizes of --gpus, or the cluster's own where the objective is the cost."""
    tokens = answer.tokens
    points = answer.priced_points
    if not points:
        return None
    rate = price_of(answer.run.cluster, answer.question.price)
    price = rate.value
    totals: tuple[str, ...] = ()
    if tokens:
        totals = ("days", "GPU-hours", rate.currency or "cost") if price else ("days", "GPU-hours")
    rows: list[tuple[str, ...]] = []
    for point in points:
        if not (point.seconds and point.tokens_per_second and point.answer):
            rows.append((f"{point.gpus:,}", point.refused))
            continue
        hours = point.gpu_hours(tokens) if tokens else None
        whole_training = [two_digits(hours / point.gpus / 24), two_digits(hours)] if hours else []
        cost = [two_digits((hours or 0.0) * price)] if price and tokens else []
        chosen = point.gpus == answer.plan.ranks and len(points) > 1
        rows.append(
            (
                f"{point.gpus:,}",
                axes_line(point.answer.best.plan),
                seconds_text(point.seconds),
                f"{point.tokens_per_second / point.gpus:,.0f}",
                f"{point.mfu:.1%}" if point.mfu else "",
                *whole_training,
                *cost,
                "◀" if chosen else "",
            )
        )
    title = "the same job on other numbers of GPUs" if answer.points else "cost"
    note = f"(days and GPU-hours for {number_text.short(tokens)} tokens)" if tokens else f"({TOKENS_NEEDED})"
    heads = ("GPUs", "plan", "step", "tokens/s a GPU", "MFU", *totals, "")
    plain = None if answer.trainings else lambda: _plain_objective(answer)
    return AnswerSection("objective", title, (AnswerTable(tuple(rows), heads),), note, plain)


def _trainings(answer: PlanAnswer) -> AnswerSection | None:
    if not answer.trainings:
        return None
    rate = price_of(answer.run.cluster, answer.question.price)
    price = rate.value
    rows = tuple(
        (
            f"{training.point.gpus:,}",
            f"{training.batch:,}",
            f"{training.batch * answer.run.train.seq_len:.3g}",
            f"{training.steps:,.0f}",
            seconds_text(training.point.seconds or 0.0),
            f"{training.seconds / 86400:.3g}",
            two_digits(training.gpu_hours),
            *([two_digits(training.gpu_hours * price)] if price else []),
        )
        for training in answer.trainings[:LONGEST_TABLE]
    )
    heads = (
        "GPUs",
        "batch",
        "tokens a step",
        "steps",
        "step",
        "days",
        "GPU-hours",
        *((rate.currency or "cost",) if price else ()),
    )
    critical = number_text.short(answer.question.critical_batch or 0.0)
    note = (
        f"(steps by McCandlish et al. 2018 with a critical batch of {critical} tokens: a larger batch needs more tokens for the same "
        "loss. The days in other tables are those of the run's own batch and tokens.)"
    )
    title = f"shortest training to the loss of {number_text.short(answer.tokens)} tokens at the run's own batch"
    return AnswerSection("objective", title, (AnswerTable(rows, heads),), note, lambda: _plain_objective(answer))


def _sources(answer: PlanAnswer) -> AnswerSection:
    found = sources_of(answer)
    return AnswerSection(
        "sources", "where the numbers come from", (AnswerTable(tuple(found.items())),), plain=lambda: found
    )


def _listed(key: str, title: str, sentences: Iterable[str], plain: Callable[[], Any] | None = None) -> AnswerSection:
    return AnswerSection(key, title, (AnswerList(tuple(sentences)),), plain=plain)


def _plain_point(point: Point, tokens: float | None, price: float | None) -> dict[str, Any]:
    hours = point.gpu_hours(tokens) if tokens else None
    price = price_of(point.run.cluster, price).value
    return {
        "gpus": point.gpus,
        "plan": plain_keys(point.answer.best.plan) if point.answer else None,
        "step_seconds": point.seconds,
        "tokens_per_second": point.tokens_per_second,
        "training_share": point.training_share,
        "days": hours / point.gpus / 24 if hours else None,
        "mfu": point.mfu,
        "gpu_hours": hours,
        "cost": hours * price if hours and price else None,
        "refused": point.refused or None,
    }


def _plain_training(training: Training, price: float | None) -> dict[str, Any]:
    price = price_of(training.point.run.cluster, price).value
    return {
        "gpus": training.point.gpus,
        "global_batch": training.batch,
        "steps": training.steps,
        "step_seconds": training.point.seconds,
        "seconds": training.seconds,
        "gpu_hours": training.gpu_hours,
        "cost": training.gpu_hours * price if price else None,
    }


SECTIONS: tuple[Callable[[PlanAnswer], AnswerSection | None], ...] = (
    _probes,
    _facts,
    _mesh,
    _memory,
    _step,
    _checkpoints,
    _effective_time,
    _expense,
    _chips,
    _software,
    _features,
    _formats,
    _accuracy,
    _why,
    _runner_ups,
    _samples,
    _limits,
    _changes,
    _sizes,
    _trainings,
    _sources,
)
"""Sections of an answer in their order; one that the answer does not have is None."""
EXPLAINED = (_limits, _changes)
"""Sections that JSON has with --explain only, as they take further prices of plans."""
