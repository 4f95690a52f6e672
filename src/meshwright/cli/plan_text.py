"""Shows the answer of `meshwright plan` in a terminal, which should have at least 80 columns: tables, bars and sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from meshwright.cli.plan_answer import PlanAnswer
from meshwright.cli.plan_sections import (
    AnswerBar,
    AnswerBars,
    AnswerList,
    AnswerSection,
    AnswerTable,
    Block,
    RankedPlans,
    Remark,
    remarks_of,
    sections_of,
)
from meshwright.cli.plan_words import bytes_text, machines_line, seconds_text
from meshwright.observe import number_text
from meshwright.spec.model import layer_order, parameter_count
from meshwright.spec.plan import Predicted
from meshwright.spec.plan_name import plan_name

MEMORY_LETTERS = {
    "weights": "W",
    "gradients": "G",
    "optimizer": "O",
    "gathered": "U",
    "activations": "A",
    "logits": "L",
    "transfers": "T",
    "experts": "E",
    "framework": "F",
    "ema": "M",
    "predictions": "P",
    "snapshot": "S",
    "rollouts": "R",
}
"""The letters that stand for the parts of memory in a bar."""

LAST_COLUMN = 20
"""Fewest characters of the last column of a table."""


def show(answer: PlanAnswer) -> None:
    """Print the whole answer."""
    console = Console(highlight=False)
    _head(console, answer)
    for section in sections_of(answer):
        _section(console, section)


def _head(console: Console, answer: PlanAnswer) -> None:
    """Print the model, the cluster, the plan, its figures and the remarks."""
    run = answer.run
    name = run.model.preset or run.model.family
    size = f"{number_text.short(parameter_count(run.model))} parameters"
    console.print(f"[bold]{name}[/bold], {size}, on {machines_line(answer.cluster)}")
    if order := layer_order(run.model):
        console.print(order, markup=False)
    console.print(f"[bold]{plan_name(answer.plan)}[/bold]")
    if answer.plan.predicted is not None:
        console.print(_figures(answer.plan.predicted, run.cluster.memory_bytes()))
    for remark in remarks_of(answer):
        console.print(_remark_text(remark))


def _remark_text(remark: Remark) -> str:
    parts = [f"[bold]{escape(remark.mark)}[/bold]"] if remark.mark else []
    parts += [escape(remark.text)] if remark.text else []
    return ": ".join(parts) + "".join(f"\n  {escape(line)}" for line in remark.more)


def _figures(predicted: Predicted, memory: int | None) -> str:
    """Return speed and memory in two lines. Only memory if the step time is not known."""
    capacity_text = f" of {memory / 1e9:.0f} GB" if memory else ""
    memory_text = f"{bytes_text(predicted.memory_peak_bytes)}{capacity_text} on the fullest rank"
    if not (predicted.step_seconds and predicted.low_seconds and predicted.high_seconds):
        return memory_text
    band = f"{seconds_text(predicted.low_seconds)} to {seconds_text(predicted.high_seconds)}"
    mfu = f", MFU {predicted.mfu:.1%}" if predicted.mfu else ""
    speed = f"{predicted.tokens_per_second:,.0f} tokens/s, {predicted.tokens_per_second_per_gpu:,.0f} a GPU{mfu}"
    return f"[bold]{seconds_text(predicted.step_seconds)} a step[/bold] (80%: {band}), {memory_text}\n{speed}"


def _section(console: Console, section: AnswerSection) -> None:
    """Print a section. Nothing is printed if it has no content."""
    shown = [block for block in section.blocks if not _is_empty(block)]
    if not shown and not section.note:
        return
    console.print(f"\n[bold]{escape(section.title)}[/bold]")
    for block in shown:
        _print_block(console, block)
    for line in section.note.splitlines():
        console.print(Padding(escape(line), (0, 0, 0, 2), style="dim", expand=False))


def _is_empty(block: Block) -> bool:
    """Return whether a block has no content."""
    match block:
        case AnswerTable():
            return not block.rows
        case AnswerList():
            return not block.sentences
        case RankedPlans():
            return not block.plans
        case AnswerBars():
            return not block.bars


def _print_block(console: Console, block: Block) -> None:
    """Print one block of a section."""
    match block:
        case AnswerTable(rows, heads) if heads:
            columns = (Column(head, min_width=max(map(len, head.split()), default=0)) for head in heads)
            table = Table(*columns, box=None, padding=(0, 2, 0, 0))
            _print_rows(console, table, rows, 1)
        case AnswerTable(rows):
            _print_rows(console, _grid(rows, console.width), rows, 2)
        case AnswerList(sentences):
            _print_rows(console, Table.grid(padding=(0, 1, 0, 0)), [("·", sentence) for sentence in sentences], 2)
        case RankedPlans(plans):
            table = Table.grid(padding=(0, 2, 0, 0))
            for plan in plans:
                mark = f"  [bold]{escape(plan.mark)}[/bold]" if plan.mark else ""
                table.add_row(f"{plan.number}.", f"{escape(plan.line)}{mark}\n[dim]{escape(plan.about)}[/dim]")
            console.print(Padding(table, (0, 0, 0, 2)))
        case AnswerBars():
            _print_bars(console, block)


def _grid(rows: Sequence[tuple[str, ...]], width: int) -> Table:
    """A table without heads. Only its last column is broken, if the others leave `LAST_COLUMN` characters for it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    widths = [max(map(len, cells)) for cells in zip_longest(*rows, fillvalue="")]
    fits = sum(widths[:-1]) + 2 * len(widths) + LAST_COLUMN <= width
    for number in range(len(widths)):
        table.add_column(no_wrap=fits and number < len(widths) - 1)
    return table


def packed(texts: Iterable[str], width: int) -> Iterator[str]:
    """The texts in lines of at most `width`, two spaces between them; none is broken."""
    line = ""
    for text in texts:
        longer = f"{line}  {text}" if line else text
        if line and len(longer) > width:
            yield line
            longer = text
        line = longer
    if line:
        yield line


def _print_rows(console: Console, table: Table, rows: Iterable[tuple[str, ...]], indent: int) -> None:
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(Padding(table, (0, 0, 0, indent)))


def _print_bars(console: Console, block: AnswerBars) -> None:
    """Print bars, and their legend if they have several parts."""
    table = Table.grid(padding=(0, 2, 0, 0))
    width = max(20, min(60, console.width - 44))
    for bar in block.bars:
        cells = (_bar(bar, block, width), bar.value)
        table.add_row(escape(bar.label), *(cells if block.key else reversed(cells)))
    console.print(Padding(table, (0, 0, 0, 2)))
    if block.key:
        texts = [f"{_letter(name)} {name} {size}" for name, size in block.key]
        for line in packed([*texts, *([block.key_of] if block.key_of else [])], console.width - 2):
            console.print(f"  {line}", no_wrap=True)


def _bar(bar: AnswerBar, block: AnswerBars, width: int) -> str:
    """Return a bar of `width` characters.

    If bars have several parts, each part is drawn with its letter, and dots fill the rest of the scale.
    """
    if not block.key:
        return "█" * round(sum(size for _, size in bar.parts) / block.full * width)
    text = ""
    before = 0.0
    for part, size in bar.parts:
        text += _letter(part) * (round((before + size) / block.full * width) - round(before / block.full * width))
        before += size
    return text.ljust(width, "·") if bar.parts else ""


def _letter(part: str) -> str:
    return MEMORY_LETTERS.get(part, part[0].upper())
