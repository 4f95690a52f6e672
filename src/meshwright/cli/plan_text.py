"""The answer of `meshwright plan` for a terminal: tables, bars and sentences that need 80 columns and use more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from meshwright.cli.plan_answer import Answer, sources_of
from meshwright.cli.plan_words import (
    axes,
    axes_line,
    bytes_text,
    caution,
    chips_by_node,
    facts,
    machines_line,
    memory_rows,
    node_line,
    seconds_text,
    short_line,
)
from meshwright.costs.plan_costs import as_nodes
from meshwright.launch.probe import Probe
from meshwright.observe import figures
from meshwright.planner.candidate import untrainable
from meshwright.planner.checkpoint_cost import checkpoint_cost, checkpoint_sentences
from meshwright.planner.explain import limits, parts_of
from meshwright.planner.finalists import same_layout
from meshwright.planner.objectives import Point
from meshwright.spec.model import parameter_count
from meshwright.spec.plan import Predicted
from meshwright.spec.plan_name import plan_name

SHOWN = 5
"""Runner-ups printed; --json has them all."""
LONGEST_TABLE = 12
"""Rows of a table of trainings."""
NODES_DRAWN = 4
RANKS_DRAWN = 8
"""Pipeline ranks whose memory is drawn; of more, the first, the last and the fullest."""
SMALLEST = 0.001
"""Share of a rank's memory below which a kind of it is not named."""
TOKENS_WANTED = "days and GPU-hours need the tokens of the whole training: --tokens 1e12, or train.steps"
WORTH_IT = 0.005
"""Gain below which a change buys nothing."""
LETTERS = {
    "weights": "W", "gradients": "G", "optimizer": "O", "gathered": "U", "activations": "A", "logits": "L", "transfers": "T",
    "experts": "E", "framework": "F",
}  # fmt: skip
"""Of the kinds of memory in a bar."""


def show(answer: Answer) -> None:
    """Print all of it."""
    console = Console(highlight=False)
    _head(console, answer)
    _probes(console, answer)
    _plan(console, answer)
    _mesh(console, answer)
    _memory(console, answer)
    _time(console, answer)
    cost = checkpoint_cost(answer.run, answer.plan)
    _sentences(console, "checkpoints", [] if cost is None else checkpoint_sentences(answer.run, cost))
    _sentences(console, "why this plan", answer.plan.why)
    _runner_ups(console, answer)
    _sentences(console, "what limits the step", [limit.text for limit in limits(answer.run, answer.plan)])
    _changes(console, answer)
    _scaling(console, answer)
    _trainings(console, answer)
    _sources(console, answer)


def _head(console: Console, answer: Answer) -> None:
    run, plan, cluster = answer.run, answer.plan, answer.run.cluster
    name, size = run.model.preset or run.model.family, f"{figures.short(parameter_count(run.model))} parameters"
    console.print(f"[bold]{name}[/bold], {size}, on {machines_line(answer.cluster)}")
    console.print(f"[bold]{plan_name(plan)}[/bold]")
    said = plan.predicted
    if said is not None:
        console.print(_figures(said, cluster.memory_bytes()))
        if warned := caution(run):
            console.print(f"  {'' if said.step_seconds else 'no step time: '}{warned}")
    if answer.given:
        console.print(f"the plan of {run.plan}, priced on this cluster")
    else:
        console.print(f"best of {answer.considered:,} layouts, found in {answer.search_seconds:.2f} s")
    if answer.idle:
        console.print(f"[bold]{answer.idle.sentence}[/bold]")
        console.print(f"  {answer.idle.start}")
    if over := answer.does_not_fit:
        console.print(f"[bold]does not fit[/bold]: {over}")
    if refused := answer.planned_only:
        console.print(f"[bold]planned only[/bold]: {refused}")
    if answer.wishes.include_untrainable:
        console.print(untrainable_note(answer))


def untrainable_note(answer: Answer) -> str:
    """The faster plan that this release cannot train, or that there is none."""
    other = answer.untrainable
    if other is None:
        return "no plan that this release cannot train is faster"
    return f"[bold]planned only[/bold], {seconds_text(other.seconds)} a step: {short_line(other.plan)}; {untrainable(other.plan)}"


def _figures(said: Predicted, memory: int | None) -> str:
    """Speed and memory in two lines, or memory alone where no step time is known."""
    whole = f" of {memory / 1e9:.0f} GB" if memory else ""
    filled = f"{bytes_text(said.memory_peak_bytes)}{whole} on the fullest rank"
    if not (said.step_seconds and said.low_seconds and said.high_seconds):
        return filled
    band = f"{seconds_text(said.low_seconds)} to {seconds_text(said.high_seconds)}"
    mfu = f", MFU {said.mfu:.1%}" if said.mfu else ""
    speed = f"{said.tokens_per_second:,.0f} tokens/s, {said.tokens_per_second_per_gpu:,.0f} a GPU{mfu}"
    return f"[bold]{seconds_text(said.step_seconds)} a step[/bold] (80%: {band}), {filled}\n{speed}"


def _probes(console: Console, answer: Answer) -> None:
    if not answer.probes:
        return
    _heading(console, "measured on this machine, beside what was predicted")
    table = Table.grid(padding=(0, 2, 0, 0))
    for number, probe in enumerate(answer.probes, 1):
        mark = "[bold]taken[/bold]: " if same_layout(probe.plan, answer.plan) else ""
        table.add_row(f"{number}.", f"{short_line(probe.plan)}\n{mark}{_beside(probe)}")
    console.print(Padding(table, (0, 0, 0, 2)))
    if (kept := answer.run.cluster.profile) is not None:
        told = f"once trained, `meshwright profile --from-run runs/{answer.run.name}` corrects {kept} by it"
        console.print(f"  {told}", style="dim")


def _beside(probe: Probe) -> str:
    """What one probe measured, and what was predicted."""
    said = [f"predicted {seconds_text(probe.predicted_seconds)}"] if probe.predicted_seconds else []
    if probe.found is not None:
        off = f" ({probe.error:+.0%})" if probe.error is not None else ""
        said.append(f"measured {seconds_text(probe.found.seconds)}{off}")
        expected = f" of {bytes_text(probe.predicted_bytes)} predicted" if probe.predicted_bytes else ""
        said.append(f"{bytes_text(probe.found.memory_bytes)}{expected}")
    return ", ".join([*said, *([probe.ended] if probe.ended else [])])


def _plan(console: Console, answer: Answer) -> None:
    _heading(console, "plan")
    table = Table.grid(padding=(0, 2, 0, 0))
    for key, value in facts(answer.run, answer.plan):
        table.add_row(key, value)
    console.print(Padding(table, (0, 0, 0, 2)))


def _mesh(console: Console, answer: Answer) -> None:
    _heading(console, "mesh, outermost axis first")
    table = Table.grid(padding=(0, 2, 0, 0))
    for axis, link, moved in axes(answer.run, answer.plan):
        table.add_row(axis, f"{'═══' if 'between' in link else '───'} {link}", moved)
    console.print(Padding(table, (0, 0, 0, 2)))
    picture = Table.grid(padding=(0, 2, 0, 0))
    last = as_nodes(answer.run.cluster).nodes - 1
    chips = chips_by_node(answer.run.cluster)
    for node in range(last + 1) if last < NODES_DRAWN else (*range(NODES_DRAWN - 1), last):
        if node == last >= NODES_DRAWN:
            picture.add_row("…", "", f"{last + 1 - NODES_DRAWN:,} more")
        held, ranks = node_line(answer.run, answer.plan, node)
        picture.add_row(
            f"node {node:,}{f' {chips[node]}' if chips else ''}", "▣" * min(ranks, 8) + ("…" if ranks > 8 else ""), held
        )
    console.print(Padding(picture, (0, 0, 0, 2)))


def _memory(console: Console, answer: Answer) -> None:
    limit = answer.run.cluster.memory_bytes()
    rows = memory_rows(answer.run, answer.plan)
    full = max(limit or 0, *(sum(kinds.values()) for _, kinds in rows))
    _heading(console, f"memory of each pipeline rank{f', a bar for {full / 1e9:.0f} GB' if limit else ''}")
    names = list(dict.fromkeys(kind for _, kinds in rows for kind in kinds))
    table = Table.grid(padding=(0, 2, 0, 0))
    width = max(20, min(60, console.width - 44))
    for label, kinds in _few(rows):
        table.add_row(label, _bar(kinds, full, width), bytes_text(sum(kinds.values())) if kinds else "")
    console.print(Padding(table, (0, 0, 0, 2)))
    fullest = max(rows, key=lambda row: sum(row[1].values()))[1]
    held = [name for name in names if fullest.get(name, 0) >= SMALLEST * sum(fullest.values())]
    key = "  ".join(f"{_letter(name)} {name} {bytes_text(fullest[name])}".replace(" ", "\u00a0") for name in held)
    console.print(Padding(key + (" on the fullest" if len(rows) > 1 else ""), (0, 0, 0, 2)))


def _few(rows: Sequence[tuple[str, dict[str, int]]]) -> list[tuple[str, dict[str, int]]]:
    if len(rows) <= RANKS_DRAWN:
        return list(rows)
    fullest = max(range(len(rows)), key=lambda at: sum(rows[at][1].values()))
    shown = sorted({0, 1, 2, fullest, len(rows) - 2, len(rows) - 1})
    found: list[tuple[str, dict[str, int]]] = []
    for before, at in zip([-1, *shown], shown, strict=False):
        if at > before + 1:
            found.append((f"… {at - before - 1} more", {}))
        found.append(rows[at])
    return found


def _bar(kinds: Mapping[str, int], full: float, width: int) -> str:
    """A letter for each part of the bar, dots for what stays free."""
    text, before = "", 0.0
    for kind, size in kinds.items():
        text += _letter(kind) * (round((before + size) / full * width) - round(before / full * width))
        before += size
    return text.ljust(width, "·") if kinds else ""


def _letter(kind: str) -> str:
    return LETTERS.get(kind, kind[0].upper())


def _time(console: Console, answer: Answer) -> None:
    said = answer.plan.predicted
    if said is None or said.step_seconds is None:
        return
    _heading(console, "where the step goes")
    table = Table.grid(padding=(0, 2, 0, 0))
    width = max(20, min(60, console.width - 44))
    for name, seconds in _worth(said):
        share = seconds / said.step_seconds
        table.add_row(name, f"{seconds:.3f} s", f"{share:.1%}", "█" * round(width * share))
    console.print(Padding(table, (0, 0, 0, 2)))


def _worth(said: Predicted) -> Iterable[tuple[str, float]]:
    assert said.step_seconds is not None
    return [(name, seconds) for name, seconds in parts_of(said).items() if seconds >= 0.0005 * said.step_seconds]


def _runner_ups(console: Console, answer: Answer) -> None:
    if not answer.others:
        return
    _heading(console, "runner-ups, and why they lost")
    table = Table.grid(padding=(0, 2, 0, 0))
    for number, other in enumerate(answer.others[:SHOWN], 2):
        said = other.plan.predicted
        mark = "  [bold]planned only[/bold]" if untrainable(other.plan) else ""
        seconds = f"{seconds_text(said.step_seconds)}, " if said and said.step_seconds else ""
        memory = bytes_text(said.memory_peak_bytes) if said else ""
        table.add_row(
            f"{number}.", f"{short_line(other.plan)} ({seconds}{memory}){mark}\n[dim]{answer.why_not(other)}[/dim]"
        )
    console.print(Padding(table, (0, 0, 0, 2)))


def _changes(console: Console, answer: Answer) -> None:
    changes = answer.changes()
    if not changes:
        return
    _heading(console, "what a change would buy")
    table = Table.grid(padding=(0, 2, 0, 0))
    for change in changes:
        gain = f"{change.gain:+.1%}" if abs(change.gain) >= WORTH_IT else "nothing"
        table.add_row(change.name, seconds_text(change.seconds), gain, f"[dim]{change.note}[/dim]")
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print("  (seconds of a step; tokens per second against now)", style="dim")


def _scaling(console: Console, answer: Answer) -> None:
    points = answer.priced_points
    if not points:
        return
    _heading(console, "the same job on other numbers of GPUs" if answer.points else "cost")
    price, tokens = answer.wishes.price, answer.tokens
    whole = ["days", "GPU-hours", *(["cost"] if price else [])] if tokens else []
    table = Table("GPUs", "plan", "step", "tokens/s a GPU", "MFU", *whole, "", box=None, padding=(0, 2, 0, 0))
    for point in points:
        if not (point.seconds and point.tokens_per_second and point.answer):
            table.add_row(f"{point.gpus:,}", point.refused)
            continue
        hours = point.gpu_hours(tokens) if tokens else None
        training = [two_digits(hours / point.gpus / 24), two_digits(hours)] if hours else []
        table.add_row(
            f"{point.gpus:,}", axes_line(point.answer.best.plan), seconds_text(point.seconds),
            f"{point.tokens_per_second / point.gpus:,.0f}", f"{point.mfu:.1%}" if point.mfu else "", *training,
            *([money(hours or 0.0, price)] if price and tokens else []),
            "◀" if point.gpus == answer.plan.ranks and len(points) > 1 else "",
        )  # fmt: skip
    console.print(Padding(table, (0, 0, 0, 1)))
    said = f"days and GPU-hours for {tokens:.3g} tokens" if tokens else TOKENS_WANTED
    console.print(f"  ({said})", style="dim")


def two_digits(number: float) -> str:
    """A number with the two digits that a prediction is worth: 1,200, 35, 0.42."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def money(gpu_hours: float, price: float | None) -> str:
    return two_digits(gpu_hours * price) if price else ""


def efficiencies(points: Sequence[Point]) -> list[float | None]:
    """Tokens per second of one GPU, against those on the fewest GPUs that run the job."""
    each = [point.tokens_per_second / point.gpus if point.tokens_per_second else None for point in points]
    first = next((value for value in each if value), None)
    return [value / first if value and first else None for value in each]


def _trainings(console: Console, answer: Answer) -> None:
    if not answer.trainings:
        return
    _heading(console, f"shortest training to the loss of {answer.tokens:.3g} tokens at the run's own batch")
    price = answer.wishes.price
    heads = ["GPUs", "batch", "tokens a step", "steps", "step", "days", "GPU-hours", *(["cost"] if price else [])]
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for one in answer.trainings[:LONGEST_TABLE]:
        cost = [money(one.gpu_hours, price)] if price else []
        table.add_row(
            f"{one.point.gpus:,}", f"{one.batch:,}", f"{one.batch * answer.run.train.seq_len:.3g}", f"{one.steps:,.0f}",
            seconds_text(one.point.seconds or 0.0), f"{one.seconds / 86400:.3g}", f"{two_digits(one.gpu_hours)}", *cost,
        )  # fmt: skip
    console.print(Padding(table, (0, 0, 0, 1)))
    console.print(
        f"  (steps by McCandlish et al. 2018 with a critical batch of {answer.wishes.critical_batch:.3g} tokens)",
        style="dim",
    )


def _sources(console: Console, answer: Answer) -> None:
    _heading(console, "where the numbers come from")
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, source in sources_of(answer).items():
        table.add_row(name, source)
    console.print(Padding(table, (0, 0, 0, 2)))


def _sentences(console: Console, title: str, sentences: Iterable[str]) -> None:
    said = list(sentences)
    if not said:
        return
    _heading(console, title)
    table = Table.grid(padding=(0, 1, 0, 0))
    for sentence in said:
        table.add_row("·", sentence)
    console.print(Padding(table, (0, 0, 0, 2)))


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")
