"""Shows the answer of `meshwright plan` as one self-contained page without scripts, in the style of the report.

In addition to the sections of the answer, it draws what a terminal cannot: the ranks of the mesh, the timeline of a
step, and charts over the numbers of GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from math import log2

from meshwright.cli.plan_answer import PlanAnswer
from meshwright.cli.plan_sections import (
    CAN_BE_TRAINED,
    AnswerBars,
    AnswerList,
    AnswerSection,
    AnswerTable,
    Block,
    RankedPlans,
    Remark,
    remarks_of,
    sections_of,
    status_of,
)
from meshwright.cli.plan_words import bytes_text, facts, machines_line, seconds_text, three_digits
from meshwright.costs.plan_costs import as_nodes
from meshwright.observe import number_text
from meshwright.observe.page import card, document, items, rows, tile_list
from meshwright.observe.report_parts import plan_section
from meshwright.observe.svg import Axis, Chart, Series, draw
from meshwright.observe.timeline_svg import draw_timeline
from meshwright.planner.objectives import Point
from meshwright.simulator.step_simulation import simulate_plan
from meshwright.spec.model import layer_order, parameter_count
from meshwright.spec.plan_name import plan_name

MICRO_BATCHES_DRAWN = 4
"""Maximum number of micro-batches per pipeline rank that the timeline draws. A step may have more."""
BOXES_DRAWN = 32
"""Maximum number of boxes for ranks that the picture of the mesh draws."""
DRAWN = "facts"
"""Key of the section that is placed beside the picture of the mesh."""
SIDE_BY_SIDE = {"memory", "step", "limits", "changes"}
"""Keys of sections that are placed side by side if they follow each other."""


def page(answer: PlanAnswer) -> str:
    """Return the HTML of the page."""
    parts = [
        _header(answer),
        _tiles(answer),
        _scaling(answer),
        plan_section(
            replace(answer.plan, why=()),
            as_nodes(answer.run.cluster).gpus_per_node,
            BOXES_DRAWN,
            facts(answer.run, answer.plan),
        ),
        f'<div class="grid">{_timeline(answer)}</div>',
    ]
    others = (section for section in sections_of(answer) if section.key != DRAWN)
    for beside, sections in groupby(others, lambda section: section.key in SIDE_BY_SIDE):
        cards = "".join(map(_card, sections))
        parts.append(f'<div class="grid">{cards}</div>' if beside else cards)
    return document(f"plan · {_name(answer)}", parts)


def _name(answer: PlanAnswer) -> str:
    return answer.run.model.preset or answer.run.model.family


def _header(answer: PlanAnswer) -> str:
    """Return the name of the model, the plan, its status, and the remarks."""
    run = answer.run
    machines = machines_line(answer.cluster)
    parts = (f"{number_text.short(parameter_count(run.model))} parameters", layer_order(run.model), machines)
    line = " · ".join((*filter(None, parts), plan_name(answer.plan)))
    status = status_of(answer)
    notes = "".join(f'<p class="aside">{escape(_remark_text(remark))}</p>' for remark in remarks_of(answer))
    return f"""<header><p class="product">meshwright <span>plan</span></p><h1>{escape(_name(answer))}</h1>
<p class="facts-line"><span class="status {"done" if status == CAN_BE_TRAINED else "part"}">{status}</span>{escape(line)}</p>
{notes}</header>"""


def _remark_text(remark: Remark) -> str:
    return ". ".join((": ".join(filter(None, (remark.mark, remark.text))), *remark.more))


def _tiles(answer: PlanAnswer) -> str:
    """Return boxes with the most important figures."""
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


def _card(section: AnswerSection) -> str:
    """Return a section as HTML. Empty if it has no content."""
    title = section.title[0].upper() + section.title[1:]
    notes = "".join(f'<p class="aside">{escape(line)}</p>' for line in section.note.splitlines())
    return card(title, "".join(map(_block, section.blocks)) + notes)


def _block(block: Block) -> str:
    """Return one block of a section as HTML."""
    match block:
        case AnswerTable(lines, heads):
            return rows(heads, [line + ("",) * (len(heads) - len(line)) for line in lines])
        case AnswerList(sentences):
            return items(sentences)
        case RankedPlans(plans):
            return rows((), [(f"{plan.number}.", _with_mark(plan.line, plan.mark), plan.about) for plan in plans])
        case AnswerBars():
            return _bars(block)


def _with_mark(line: str, mark: str) -> str:
    return f"{line} ({mark})" if mark else line


def _bars(block: AnswerBars) -> str:
    """Return bars with a legend as HTML. The limit is drawn as a dashed line."""
    names = list(dict.fromkeys(name for bar in block.bars for name, _ in bar.parts))
    full = 1.04 * block.full if block.limit else block.full
    line = f'<span class="limit" style="left:{100 * block.limit / full:.2f}%"></span>' if block.limit else ""
    bars = []
    for bar in block.bars:
        inside = "".join(
            f'<i class="k{names.index(name) % 8}" style="width:{100 * size / full:.2f}%" title="{escape(name)}"></i>'
            for name, size in bar.parts
        )
        drawn = f'<div class="bar">{inside}{line}</div>' if bar.parts else ""
        bars.append(f'<p class="bar-label"><span>{escape(bar.label)}</span><b>{escape(bar.value)}</b></p>{drawn}')
    keys = "".join(
        f'<li class="k{names.index(name) % 8} column">{escape(name)} {escape(size)}</li>' for name, size in block.key
    )
    legend = (
        f'<ul class="legend">{keys}<li>{escape(block.key_of)}</li></ul>'
        if block.key_of
        else f'<ul class="legend">{keys}</ul>'
    )
    return f'<div class="bars">{"".join(bars)}</div>{legend if keys else ""}'


def _timeline(answer: PlanAnswer) -> str:
    """Return the simulated timeline of a step. Long steps are drawn with fewer micro-batches."""
    run = answer.run
    plan = answer.plan
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


def _scaling(answer: PlanAnswer) -> str:
    """Return charts over the numbers of GPUs in --gpus. Empty if no step time is known."""
    points = answer.points
    tokens = answer.tokens
    estimated = [point for point in points if point.tokens_per_second]
    if not estimated:
        return ""
    efficiency = dict(zip((point.gpus for point in points), _efficiencies(points), strict=True))
    gpus = [log2(point.gpus) for point in estimated]
    marks = tuple((log2(point.gpus), f"{point.gpus:,}") for point in estimated)
    low, high = (gpus[0], gpus[-1]) if len(gpus) > 1 else (gpus[0] - 1, gpus[0] + 1)
    axis = Axis("gpus", "GPUs", low, high, marks)
    tables = {"points": {"gpus": gpus}}
    mfus = [point.mfu for point in estimated]
    hours = [point.gpu_hours(tokens) for point in estimated] if tokens else []
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
            [
                Chart(
                    "hours",
                    "GPU-hours",
                    f"for {number_text.short(tokens)} tokens",
                    "short",
                    (_line("GPU-hours", hours),),
                )
            ]
            if tokens
            else []
        ),
    ]
    pictures = "".join(draw(chart, tables, axis) for chart in charts)
    return f'<div class="grid">{pictures}</div>'


def _line(label: str, values: Sequence[float | None]) -> Series:
    return Series(label, "c-loss", "points", list(values))


def _efficiencies(points: Sequence[Point]) -> list[float | None]:
    """Return the tokens per second per GPU, divided by the value for the fewest GPUs that can run the job. None where it is not known."""
    per_gpu = [point.tokens_per_second / point.gpus if point.tokens_per_second else None for point in points]
    first = next((value for value in per_gpu if value), None)
    return [value / first if value and first else None for value in per_gpu]
