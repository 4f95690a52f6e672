"""The answer of `meshwright plan` as a self-contained page in the report's style, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from math import log2

from meshwright.cli.plan_answer import PlanAnswer, sources_of
from meshwright.cli.plan_samples import HEADS, TITLE, sample_lines
from meshwright.cli.plan_text import (
    CHIP_HEADS,
    LONGEST_TABLE,
    SOFTWARE_HEADS,
    chip_lines,
    efficiencies,
    money,
    software_lines,
)
from meshwright.cli.plan_words import (
    axes,
    bytes_text,
    caution,
    facts,
    machines_line,
    memory_by_rank,
    seconds_text,
    short_line,
    three_digits,
    two_digits,
)
from meshwright.costs.plan_costs import as_nodes
from meshwright.observe import number_text
from meshwright.observe.page import document, listing, table, tile_list
from meshwright.observe.report_parts import plan_section
from meshwright.observe.svg import Axis, Chart, Series, draw
from meshwright.observe.timeline_svg import draw_timeline
from meshwright.planner.candidate import untrainable
from meshwright.planner.explain import limits, parts_of
from meshwright.planner.money import price_of
from meshwright.planner.sample_reasons import sample_reasons
from meshwright.simulator.step_simulation import simulate_plan
from meshwright.spec.model import layer_order, parameter_count
from meshwright.spec.plan_name import plan_name

MICRO_BATCHES_DRAWN = 4
"""Micro-batches per pipeline rank in the drawn timeline, if the step has more."""
RANKS_DRAWN = 16
BOXES_DRAWN = 32


def page(answer: PlanAnswer) -> str:
    """The HTML of the page."""
    run, plan = answer.run, answer.plan
    parts = [
        _header(answer),
        _tiles(answer),
        _scaling(answer),
        _trainings(answer),
        plan_section(plan, as_nodes(run.cluster).gpus_per_node, BOXES_DRAWN),
        f'<div class="grid">{_links(answer)}{_facts(answer)}</div>',
        f'<div class="grid">{_step(answer)}{_memory(answer)}</div>',
        f'<div class="grid">{_timeline(answer)}</div>',
        f'<div class="grid">{listing("What limits the step", [limit.text for limit in limits(run, plan)])}{_changes(answer)}</div>',
        _money(answer),
        _runner_ups(answer),
        _samples(answer),
        table("Where the numbers come from", (), sources_of(answer).items()),
    ]
    return document(f"plan · {_name(answer)}", parts)


def _name(answer: PlanAnswer) -> str:
    return answer.run.model.preset or answer.run.model.family


def _header(answer: PlanAnswer) -> str:
    run = answer.run
    machines = machines_line(answer.cluster)
    parts = (f"{number_text.short(parameter_count(run.model))} parameters", escape(layer_order(run.model)), machines)
    line = " · ".join((*filter(None, parts), plan_name(answer.plan)))
    refused, over = answer.planned_only, answer.does_not_fit
    word = "planned only" if refused else "can be trained"
    word = "does not fit" if over else word
    status = f'<span class="status {"part" if over or refused else "done"}">{word}</span>'
    idle = answer.idle.sentence if answer.idle else None
    note = ". ".join(text for text in (over, refused, idle, caution(run)) if text)
    return f"""<header><p class="product">meshwright <span>plan</span></p><h1>{escape(_name(answer))}</h1>
<p class="facts-line">{status}{escape(line)}</p><p class="aside">{escape(note)}</p></header>"""


def _tiles(answer: PlanAnswer) -> str:
    predicted = answer.plan.predicted
    if predicted is None:
        return ""
    memory = answer.run.cluster.memory_bytes()
    tiles = []
    if predicted.step_seconds and predicted.low_seconds and predicted.high_seconds and predicted.tokens_per_second:
        band = f"{seconds_text(predicted.low_seconds)} to {seconds_text(predicted.high_seconds)}"
        tiles += [
            ("Step", seconds_text(predicted.step_seconds), f"80%: {band}"),
            ("Throughput", number_text.short(predicted.tokens_per_second), "tokens/s"),
            ("Each GPU", number_text.short(predicted.tokens_per_second_per_gpu or 0.0), "tokens/s"),
        ]
    if predicted.mfu:
        tiles.append(("MFU", number_text.percent(predicted.mfu), "model FLOPs over peak"))
    tiles.append(
        (
            "Memory",
            bytes_text(predicted.memory_peak_bytes),
            f"of {memory / 1e9:.0f} GB, fullest rank" if memory else "fullest rank",
        )
    )
    if (spent := answer.expense) is not None and spent.money_per_million_tokens is not None:
        price = spent.price_per_gpu_hour
        cost = f"{price.unit}{three_digits(spent.money_per_million_tokens)}"
        tiles.append(("A million tokens", cost, f"{price.unit}{price.value:g} a GPU-hour"))
    if not answer.plan_from_file:
        tiles.append(("Considered", number_text.short(answer.considered), f"layouts in {answer.search_seconds:.2f} s"))
    return tile_list(tiles)


def _money(answer: PlanAnswer) -> str:
    """Money and energy, and the job on other chips and with other software where they were asked for."""
    parts = [listing("Money and energy", answer.expense_sentences)]
    if answer.question.chips:
        heads = (*CHIP_HEADS, *(("days", "GPU-hours") if answer.tokens else ()))
        lines = [line + ("",) * (len(heads) - len(line)) for line in chip_lines(answer)]
        parts.append(table("The same job on other chips", heads, lines))
    if answer.question.software:
        parts.append(table("As other software would run it", SOFTWARE_HEADS, software_lines(answer)))
    return "".join(parts)


def _links(answer: PlanAnswer) -> str:
    return table("What the axes run over", (), axes(answer.run, answer.plan))


def _facts(answer: PlanAnswer) -> str:
    return table("Batch, schedule, layers", (), facts(answer.run, answer.plan))


def _step(answer: PlanAnswer) -> str:
    predicted = answer.plan.predicted
    if predicted is None or not predicted.step_seconds:
        return ""
    shown = [
        (name, seconds) for name, seconds in parts_of(predicted).items() if seconds >= 0.0005 * predicted.step_seconds
    ]
    bars = [
        _bar(
            name,
            f"{seconds_text(seconds)}, {seconds / predicted.step_seconds:.1%}",
            [(at % 8, seconds / predicted.step_seconds, name)],
        )
        for at, (name, seconds) in enumerate(shown)
    ]
    return _figure("Where the step goes", "mean over ranks", "".join(bars))


def _memory(answer: PlanAnswer) -> str:
    by_rank = memory_by_rank(answer.run, answer.plan)
    limit = answer.run.cluster.memory_bytes()
    full = 1.04 * max(limit or 0, *(sum(parts_bytes.values()) for _, parts_bytes in by_rank))
    line = f'<span class="limit" style="left:{100 * limit / full:.2f}%"></span>' if limit else ""
    names = list(dict.fromkeys(part for _, parts_bytes in by_rank for part in parts_bytes))
    bars = []
    for label, parts_bytes in by_rank[:RANKS_DRAWN]:
        parts = [
            (names.index(part) % 8, size / full, f"{part} {bytes_text(size)}") for part, size in parts_bytes.items()
        ]
        bars.append(_bar(label, bytes_text(sum(parts_bytes.values())), parts, line))
    keys = "".join(f'<li class="k{at % 8} column">{escape(name)}</li>' for at, name in enumerate(names))
    more = f"{len(by_rank) - RANKS_DRAWN} more ranks hold the same. " if len(by_rank) > RANKS_DRAWN else ""
    note = f"The dashed line is the device's memory, {limit / 1e9:.0f} GB." if limit else ""
    return _figure(
        "Memory", "by pipeline rank", "".join(bars), f'<ul class="legend">{keys}</ul><p class="aside">{more}{note}</p>'
    )


def _bar(label: str, value: str, parts: Iterable[tuple[int, float, str]], more: str = "") -> str:
    inside = "".join(
        f'<i class="k{at}" style="width:{100 * share:.2f}%" title="{escape(name)}"></i>' for at, share, name in parts
    )
    return f'<p class="bar-label"><span>{escape(label)}</span><b>{escape(value)}</b></p><div class="bar">{inside}{more}</div>'


def _figure(title: str, unit: str, bars: str, after: str = "") -> str:
    return f"""<figure class="card memory"><figcaption><h3>{escape(title)}</h3><span class="unit">{escape(unit)}</span></figcaption>
<div class="bars">{bars}</div>{after}</figure>"""


def _timeline(answer: PlanAnswer) -> str:
    run, plan = answer.run, answer.plan
    if plan.predicted is None or plan.predicted.step_seconds is None:
        return ""
    drawn = min(plan.batch.accumulate, MICRO_BATCHES_DRAWN * plan.axis_size("pipeline"))
    shorter = replace(plan, batch=replace(plan.batch, accumulate=drawn))
    timeline = simulate_plan(run.model, run.train, shorter, run.cluster)
    cut = (
        f"The first {drawn} of {plan.batch.accumulate} micro-batches are drawn. "
        if drawn < plan.batch.accumulate
        else ""
    )
    return draw_timeline(timeline, "One step, by pipeline rank", f"{cut}Simulated; thin rows are transfers.")


def _samples(answer: PlanAnswer) -> str:
    choice = answer.samples
    if choice is None:
        return ""
    title = TITLE.capitalize()
    return listing(title, sample_reasons(answer.run, choice)) + table("Steps of these", HEADS, sample_lines(choice))


def _changes(answer: PlanAnswer) -> str:
    gains = [(change, f"{change.gain:+.1%}" + f" ({change.note})" * bool(change.note)) for change in answer.changes]
    lines = [(change.name, seconds_text(change.seconds), gain) for change, gain in gains]
    return table("What a change would gain", ("change", "step", "tokens/s"), lines)


def _runner_ups(answer: PlanAnswer) -> str:
    lines = []
    for number, other in enumerate(answer.others[:LONGEST_TABLE], 2):
        predicted = other.plan.predicted
        seconds = seconds_text(predicted.step_seconds) if predicted and predicted.step_seconds else ""
        mark = " (planned only)" if untrainable(other.plan) else ""
        lines.append((str(number), short_line(other.plan) + mark, seconds, answer.why_not(other)))
    return table("Runner-ups, and why they were not chosen", ("", "plan", "step", "reason"), lines)


def _scaling(answer: PlanAnswer) -> str:
    points, tokens = answer.points, answer.tokens
    estimated = [point for point in points if point.tokens_per_second]
    if not estimated:
        return ""
    efficiency = dict(zip((point.gpus for point in points), efficiencies(points), strict=True))
    gpus = [log2(point.gpus) for point in estimated]
    marks = tuple((log2(point.gpus), f"{point.gpus:,}") for point in estimated)
    low, high = (gpus[0], gpus[-1]) if len(gpus) > 1 else (gpus[0] - 1, gpus[0] + 1)
    axis, tables = Axis("gpus", "GPUs", low, high, marks), {"points": {"gpus": gpus}}
    mfus, hours = [point.mfu for point in estimated], [point.gpu_hours(tokens) for point in estimated] if tokens else []
    shares = [efficiency[point.gpus] for point in estimated]
    charts = [
        Chart(
            "speed",
            "Throughput",
            "tokens/s by GPUs",
            "short",
            (_line("tokens/s", [p.tokens_per_second for p in estimated]),),
        ),
        Chart(
            "efficiency", "Efficiency", "tokens/s a GPU, of the fewest GPUs'", "percent", (_line("efficiency", shares),)
        ),
        *([Chart("mfu", "MFU", "", "percent", (_line("MFU", mfus),))] if all(mfus) else []),
        *(
            [Chart("hours", "GPU-hours", f"for {tokens:.3g} tokens", "short", (_line("GPU-hours", hours),))]
            if tokens
            else []
        ),
    ]
    refused = [f"{point.gpus:,} GPUs: {point.refused}" for point in points if point.refused]
    pictures = "".join(draw(chart, tables, axis) for chart in charts)
    return f'<div class="grid">{pictures}</div>{listing("Sizes without a plan", refused)}'


def _line(label: str, values: Sequence[float | None]) -> Series:
    return Series(label, "c-loss", "points", list(values))


def _trainings(answer: PlanAnswer) -> str:
    price = price_of(answer.run.cluster, answer.question.price).value
    lines = []
    for training in answer.trainings[:LONGEST_TABLE]:
        took = (seconds_text(training.point.seconds or 0.0), number_text.duration(training.seconds))
        paid = (f"{two_digits(training.gpu_hours)}", money(training.gpu_hours, price))
        lines.append((f"{training.point.gpus:,}", f"{training.batch:,}", f"{training.steps:,.0f}", *took, *paid))
    heads = ("GPUs", "batch", "steps", "step", "training", "GPU-hours", "cost" if price else "")
    if not lines:
        return ""
    return table(f"Shortest training to the loss of {answer.tokens:.3g} tokens at the run's own batch", heads, lines)
