"""Builds the sections of an answer of `meshwright plan`, for its three renderers: text, HTML and JSON.

A section has tables, sentences or bars for people, and a value for JSON. Renderers arrange the sections and leave none
out. A number is turned into text here, so it reads the same everywhere.
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
"""Maximum number of runner-ups that people see; --json has all of them."""
LONGEST_TABLE = 12
"""Maximum number of lines of the table of trainings; --json has all of them."""
NODES_SHOWN = 4
"""Maximum number of nodes that the section about the mesh shows."""
MARKS = 8
"""Maximum number of ranks of a node that are drawn, one square each."""
RANKS_SHOWN = 8
"""Maximum number of pipeline ranks whose memory is shown. If there are more: the first three, the fullest and the last two."""
SMALLEST_SHARE = 0.001
"""A part of the memory with a smaller fraction of its rank's memory is not named in the legend."""
SMALLEST_PART = 0.0005
"""A part of the step with a smaller fraction of its time is left out."""
SMALLEST_GAIN = 0.005
"""A change with a smaller relative gain is shown as no gain."""
TOKENS_NEEDED = "days and GPU-hours need the tokens of the whole training: --tokens 1e12, or train.steps"
"""Remark if the number of tokens of the training is not known."""
CAN_BE_TRAINED = "can be trained"
"""Status of a plan that this release can train."""
PLANNED_ONLY = "planned only"
"""Status of a plan that this release cannot train."""
DOES_NOT_FIT = "does not fit"
"""Status of a plan that needs more memory than there is."""


@dataclass(frozen=True)
class AnswerTable:
    """A table. If it has no heads, the first cell of each row is the row's name. A row may have fewer cells than there are heads."""

    rows: tuple[tuple[str, ...], ...]
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerList:
    """A list of sentences."""

    sentences: tuple[str, ...]


@dataclass(frozen=True)
class RankedPlan:
    """A plan in a list of plans."""

    number: int
    """Its place in the list, from 1."""
    line: str
    """The plan and its figures in one line."""
    mark: str
    """A word that marks the plan, such as "planned only". Empty for most plans."""
    about: str
    """A sentence about the plan."""


@dataclass(frozen=True)
class RankedPlans:
    """A list of plans."""

    plans: tuple[RankedPlan, ...]


@dataclass(frozen=True)
class AnswerBar:
    """A bar. A bar without parts is a line of text that says what is left out."""

    label: str
    """Text before the bar."""
    value: str = ""
    """Length of the bar as text."""
    parts: tuple[tuple[str, float], ...] = ()
    """Name and size of each part, in the unit of `AnswerBars.full`."""


@dataclass(frozen=True)
class AnswerBars:
    """Several bars with the same scale."""

    bars: tuple[AnswerBar, ...]
    full: float
    """Size of a bar over the full width."""
    limit: float | None = None
    """Size at which a line crosses all bars. None: no line."""
    key: tuple[tuple[str, str], ...] = ()
    """Parts in the legend, each with its size as text."""
    key_of: str = ""
    """Words that say to which bar the sizes in the legend belong."""


Block = AnswerTable | AnswerList | RankedPlans | AnswerBars
"""A part of a section's content."""


@dataclass(frozen=True)
class AnswerSection:
    """A section of an answer, with a title."""

    key: str
    """Its name in JSON."""
    title: str
    blocks: tuple[Block, ...]
    """Its content, from top to bottom."""
    note: str = ""
    """Lines below the content, in small type."""
    plain: Callable[[], Any] | None = None
    """Makes its value in JSON. None if JSON has the numbers of the section elsewhere, such as in the plan."""


@dataclass(frozen=True)
class Remark:
    """A remark below the title of an answer."""

    text: str
    """The remark."""
    mark: str = ""
    """A word before the remark, such as "planned only"."""
    more: tuple[str, ...] = ()
    """Lines that follow the remark."""


def status_of(answer: PlanAnswer) -> str:
    """Return whether the plan can be trained: one of CAN_BE_TRAINED, PLANNED_ONLY and DOES_NOT_FIT."""
    if answer.does_not_fit:
        return DOES_NOT_FIT
    return PLANNED_ONLY if answer.planned_only else CAN_BE_TRAINED


def remarks_of(answer: PlanAnswer) -> Iterator[Remark]:
    """Yield what the user should know before using the plan."""
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
    """Yield the sections that the answer has, in their order.

    Without `explain`, the sections in EXPLAINED are left out, because they need the costs of further plans.
    """
    for make in SECTIONS:
        if (explain or make not in EXPLAINED) and (section := make(answer)) is not None:
            yield section


def sources_of(answer: PlanAnswer) -> dict[str, str]:
    """Return for each predicted number whether it is measured, fitted or guessed."""
    matmul_format = matmul_dtype(answer.plan.precision, answer.run.cluster)
    return sources(answer.run.cluster, matmul_format, answer.plan)


def _rl_remark(answer: PlanAnswer) -> Remark:
    """Return the time of a step of reinforcement learning by phases.

    The figures above it are for a step that trains on `train.global_batch` rows. Here the number of rows is the number
    that the answers fill.
    """
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
    """Describe the faster plan that this release cannot train, or say that there is none."""
    if other is None:
        return Remark("no plan that this release cannot train is faster")
    text = f"{seconds_text(other.seconds)} a step: {short_line(other.plan)}; {untrainable(other.plan)}"
    return Remark(text, PLANNED_ONLY)


def _probes(answer: PlanAnswer) -> AnswerSection | None:
    """Return the plans that --probe ran: predicted and measured time and memory."""
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
    """Return predicted and measured values of a probe, in words."""
    measured_parts = [f"predicted {seconds_text(probe.predicted_seconds)}"] if probe.predicted_seconds else []
    if probe.measured is not None:
        error_text = f" ({probe.error:+.0%})" if probe.error is not None else ""
        measured_parts.append(f"measured {seconds_text(probe.measured.seconds)}{error_text}")
        expected = f" of {bytes_text(probe.predicted_bytes)} predicted" if probe.predicted_bytes else ""
        measured_parts.append(f"{bytes_text(probe.measured.memory_bytes)}{expected}")
    return ", ".join([*measured_parts, *([probe.ended] if probe.ended else [])])


def _plain_probe(probe: Probe) -> dict[str, Any]:
    """Return a probe as JSON values."""
    return {
        "plan": plain_keys(probe.plan),
        "predicted_seconds": probe.predicted_seconds,
        "measured_seconds": probe.measured_seconds,
        "predicted_bytes": probe.predicted_bytes,
        "measured_bytes": probe.measured.memory_bytes if probe.measured else None,
        "ended": probe.ended or None,
    }


def _facts(answer: PlanAnswer) -> AnswerSection:
    """Return batch, schedule, strategies of the layers, and precision."""
    return AnswerSection("facts", "plan", (AnswerTable(tuple(facts(answer.run, answer.plan))),))


def _mesh(answer: PlanAnswer) -> AnswerSection:
    """Return the axes of the mesh with the links that they use, and the first nodes with their ranks."""
    rows = tuple(
        (axis, f"{'═══' if 'between' in link else '───'} {link}", traffic)
        for axis, link, traffic in axes(answer.run, answer.plan)
    )
    return AnswerSection("mesh", "mesh, outermost axis first", (AnswerTable(rows), AnswerTable(tuple(_nodes(answer)))))


def _nodes(answer: PlanAnswer) -> Iterator[tuple[str, ...]]:
    """Yield the first nodes and the last one: name, one mark for each rank, and the mesh coordinates of the ranks."""
    last = as_nodes(answer.run.cluster).nodes - 1
    chips = chips_by_node(answer.run.cluster)
    shown = range(last + 1) if last < NODES_SHOWN else (*range(NODES_SHOWN - 1), last)
    for node in shown:
        if node == last >= NODES_SHOWN:
            yield "…", "", f"{last + 1 - NODES_SHOWN:,} more"
        coordinates, ranks = node_line(answer.run, answer.plan, node)
        chip = f" {chips[node]}" if chips else ""
        yield f"node {node:,}{chip}", "▣" * min(ranks, MARKS) + "…" * (ranks > MARKS), coordinates


def _memory(answer: PlanAnswer) -> AnswerSection:
    """Return a bar for the memory of each pipeline rank, divided into its parts."""
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
    """Yield a bar for each rank. If there are more than RANKS_SHOWN: the first three, the fullest and the last two."""
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
    """Return a bar for each part of the step time."""
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
    """Return what checkpoints cost. None if the run writes only the last one."""
    cost = checkpoint_cost(answer.run, answer.plan)
    return (
        None
        if cost is None
        else _listed("checkpoint", "checkpoints", checkpoint_sentences(answer.run, cost), lambda: to_plain(cost))
    )


def _effective_time(answer: PlanAnswer) -> AnswerSection | None:
    """Return the effective training time. None if the run writes no periodic checkpoints, or if its step time is not known."""
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
    """Return money, energy and days. None if the step time is not known."""
    spent = answer.expense
    return (
        None
        if spent is None
        else _listed("expense", "money and energy", expense_sentences(spent, answer.idle), lambda: to_plain(spent))
    )


def _chips(answer: PlanAnswer) -> AnswerSection | None:
    """Return a table of the same job on other chips, for --chips."""
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
    """Return a row of the table of chips. A chip that cannot do the job has the reason instead of figures."""
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
    """Return a chip's result as JSON values."""
    body = {"chip": point.chip, **_plain_point(point.point, None, None)}
    return {**body, "expense": to_plain(point.expense) if point.expense else None}


def _software(answer: PlanAnswer) -> AnswerSection | None:
    """Return a table of the same job with other software, for --software."""
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
    """Return a table of what features of other systems would change, for --features."""
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
    """Return a table of the step time with matmuls in other formats, for --precision."""
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
    """Return the accuracy of the formats in the table above it. Formats that differ between dense layers and experts are left out."""
    if not answer.formats:
        return None
    return _listed(
        "accuracy", "accuracy", [f"{one.dense}: {one.accuracy}" for one in answer.formats if one.dense == one.experts]
    )


def _why(answer: PlanAnswer) -> AnswerSection | None:
    """Return the reasons for the plan."""
    return _listed("why", "why this plan", answer.plan.why) if answer.plan.why else None


def _runner_ups(answer: PlanAnswer) -> AnswerSection | None:
    """Return the next best plans, and why they were not chosen."""
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
    """Return a runner-up as JSON values."""
    return {
        "name": plan_name(other.plan),
        "fits": other.fits,
        "trainable": untrainable(other.plan) is None,
        "why_not": answer.why_not(other),
        "plan": plain_keys(other.plan),
    }


def _samples(answer: PlanAnswer) -> AnswerSection | None:
    """Return layouts for samples of unequal lengths. None if all sequences are equally long."""
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
    """Return what limits the step."""
    found = limits(answer.run, answer.plan)
    return _listed("limits", "what limits the step", [limit.text for limit in found], lambda: to_plain(found))


def _changes(answer: PlanAnswer) -> AnswerSection:
    """Return a table of what single changes would gain."""
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
    """Return the sizes or trainings that the objective compared, as JSON values."""
    price = answer.question.price
    body: dict[str, Any] = {"name": answer.question.objective, "gpus": answer.plan.ranks, "tokens": answer.tokens}
    if answer.trainings:
        return body | {"trainings": [_plain_training(training, price) for training in answer.trainings]}
    return body | {"points": [_plain_point(point, answer.tokens, price) for point in answer.priced_points]}


def _sizes(answer: PlanAnswer) -> AnswerSection | None:
    """Return a table of the numbers of GPUs in --gpus. With --objective cost and no --gpus, it has the cluster's own number only."""
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
    """Return a table of the batches and numbers of GPUs that reach one loss soonest, for --objective training."""
    if not answer.trainings or answer.tokens is None:
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
    """Return whether each predicted number is measured, fitted or guessed."""
    found = sources_of(answer)
    return AnswerSection(
        "sources", "where the numbers come from", (AnswerTable(tuple(found.items())),), plain=lambda: found
    )


def _listed(key: str, title: str, sentences: Iterable[str], plain: Callable[[], Any] | None = None) -> AnswerSection:
    """Return a section with a list of sentences."""
    return AnswerSection(key, title, (AnswerList(tuple(sentences)),), plain=plain)


def _plain_point(point: Point, tokens: float | None, price: float | None) -> dict[str, Any]:
    """Return the result for one number of GPUs as JSON values. `tokens` is the length of the training, `price` that of a GPU-hour."""
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
    """Return one training of the table of `_trainings` as JSON values."""
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
"""Functions that make the sections, in the order of the answer. A function returns None if the answer has no such section."""
EXPLAINED = (_limits, _changes)
"""Sections that JSON has only with --explain, because they need the costs of further plans."""
