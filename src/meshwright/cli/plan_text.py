"""The answer of `meshwright plan` for a terminal: tables, bars and sentences, at least 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from meshwright.cli.plan_answer import PlanAnswer, sources_of
from meshwright.cli.plan_samples import HEADS, TITLE, sample_lines
from meshwright.cli.plan_words import (
    axes,
    axes_line,
    bytes_text,
    caution,
    chips_by_node,
    facts,
    machines_line,
    memory_by_rank,
    node_line,
    seconds_text,
    short_line,
    three_digits,
    two_digits,
)
from meshwright.costs.plan_costs import as_nodes
from meshwright.launch.probe import Probe
from meshwright.observe import number_text
from meshwright.planner.candidate import untrainable
from meshwright.planner.checkpoint_cost import checkpoint_cost, checkpoint_sentences
from meshwright.planner.effective_time import effective_sentence, predict_effective_time
from meshwright.planner.explain import limits, parts_of
from meshwright.planner.finalists import same_layout
from meshwright.planner.money import price_of
from meshwright.planner.objectives import Point
from meshwright.planner.rollout_time import rl_seconds
from meshwright.planner.sample_reasons import sample_reasons
from meshwright.spec.errors import BadInput
from meshwright.spec.model import layer_order, parameter_count
from meshwright.spec.plan import Plan, Predicted
from meshwright.spec.plan_name import plan_name
from meshwright.spec.run import RunSpec

MAX_ALTERNATIVES = 5
"""Alternatives printed; --json has all of them."""
LONGEST_TABLE = 12
"""Longest table of trainings, in lines."""
NODES_DRAWN = 4
RANKS_DRAWN = 8
"""Pipeline ranks whose memory is drawn: if there are more, the first, the last and the fullest."""
SMALLEST_SHARE = 0.001
"""Share of a rank's memory below which a part is left out."""
TOKENS_NEEDED = "days and GPU-hours need the tokens of the whole training: --tokens 1e12, or train.steps"
SMALLEST_GAIN = 0.005
"""Gain below which a change counts as no gain."""
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
"""Letters of the parts of a memory bar."""


def show(answer: PlanAnswer) -> None:
    """Print the whole answer."""
    console = Console(highlight=False)
    _head(console, answer)
    _probes(console, answer)
    _plan(console, answer)
    _mesh(console, answer)
    _memory(console, answer)
    _time(console, answer)
    cost = checkpoint_cost(answer.run, answer.plan)
    _sentences(console, "checkpoints", [] if cost is None else checkpoint_sentences(answer.run, cost))
    effective = predict_effective_time(answer.run, answer.plan)
    _sentences(console, "effective training time", [] if effective is None else [effective_sentence(effective)])
    _sentences(console, "money and energy", answer.expense_sentences)
    _chips(console, answer)
    _software(console, answer)
    _features(console, answer)
    _formats(console, answer)
    _sentences(console, "why this plan", answer.plan.why)
    _runner_ups(console, answer)
    _samples(console, answer)
    _sentences(console, "what limits the step", [limit.text for limit in limits(answer.run, answer.plan)])
    _changes(console, answer)
    _scaling(console, answer)
    _trainings(console, answer)
    _sources(console, answer)


def _head(console: Console, answer: PlanAnswer) -> None:
    run, plan, cluster = answer.run, answer.plan, answer.run.cluster
    name, size = run.model.preset or run.model.family, f"{number_text.short(parameter_count(run.model))} parameters"
    console.print(f"[bold]{name}[/bold], {size}, on {machines_line(answer.cluster)}")
    if order := layer_order(run.model):
        console.print(order, markup=False)
    console.print(f"[bold]{plan_name(plan)}[/bold]")
    predicted = plan.predicted
    if predicted is not None:
        console.print(_figures(predicted, cluster.memory_bytes()))
        if run.rl is not None:
            console.print(_rl_words(run, plan))
        if warning := caution(run):
            console.print(f"  {'' if predicted.step_seconds else 'no step time: '}{warning}")
    if answer.plan_from_file:
        console.print(f"the plan of {run.plan}, priced on this cluster")
    else:
        console.print(f"best of {answer.considered:,} layouts and strategies, found in {answer.search_seconds:.2f} s")
    if answer.idle:
        console.print(f"[bold]{answer.idle.sentence}[/bold]")
        console.print(f"  {answer.idle.start}")
    if over := answer.does_not_fit:
        console.print(f"[bold]does not fit[/bold]: {over}")
    if refused := answer.planned_only:
        console.print(f"[bold]planned only[/bold]: {refused}")
    if answer.question.include_untrainable:
        console.print(untrainable_note(answer))


def _rl_words(run: RunSpec, plan: Plan) -> str:
    """The step with `rl` by phases; what is above them is a step of `train.global_batch` rows."""
    assert run.rl is not None
    try:
        phases = rl_seconds(run, plan)
    except BadInput as error:
        return f"a step trains on rows that its answers fill; the time of the answers is not predicted: {error}"
    many = run.train.global_batch * run.rl.samples
    return (
        f"[bold]{seconds_text(phases.total)} a step with its answers[/bold], without rewards, whose time is that of your function:\n"
        f"  hand-over {seconds_text(phases.handover)}, sampling {seconds_text(phases.rollout)} ({many:,} answers of "
        f"{phases.mean_tokens:,.0f} tokens in the mean, the longest {phases.longest:,}), training {seconds_text(phases.training)} "
        f"({phases.rows:,} rows)\n"
        "  lengths are presumed: rl.presumed_question and rl.presumed_answer tell others"
    )


def untrainable_note(answer: PlanAnswer) -> str:
    """A sentence about the faster plan that this release cannot train, or that there is none."""
    other = answer.untrainable
    if other is None:
        return "no plan that this release cannot train is faster"
    return f"[bold]planned only[/bold], {seconds_text(other.seconds)} a step: {short_line(other.plan)}; {untrainable(other.plan)}"


def _figures(predicted: Predicted, memory: int | None) -> str:
    """Speed and memory in two lines, or memory alone if no step time is known."""
    capacity_text = f" of {memory / 1e9:.0f} GB" if memory else ""
    memory_text = f"{bytes_text(predicted.memory_peak_bytes)}{capacity_text} on the fullest rank"
    if not (predicted.step_seconds and predicted.low_seconds and predicted.high_seconds):
        return memory_text
    band = f"{seconds_text(predicted.low_seconds)} to {seconds_text(predicted.high_seconds)}"
    mfu = f", MFU {predicted.mfu:.1%}" if predicted.mfu else ""
    speed = f"{predicted.tokens_per_second:,.0f} tokens/s, {predicted.tokens_per_second_per_gpu:,.0f} a GPU{mfu}"
    return f"[bold]{seconds_text(predicted.step_seconds)} a step[/bold] (80%: {band}), {memory_text}\n{speed}"


def _probes(console: Console, answer: PlanAnswer) -> None:
    if not answer.probes:
        return
    _heading(console, "measured on this machine, next to the prediction")
    table = Table.grid(padding=(0, 2, 0, 0))
    for number, probe in enumerate(answer.probes, 1):
        mark = "[bold]taken[/bold]: " if same_layout(probe.plan, answer.plan) else ""
        table.add_row(f"{number}.", f"{short_line(probe.plan)}\n{mark}{_measured_text(probe)}")
    console.print(Padding(table, (0, 0, 0, 2)))
    if (profile := answer.run.cluster.profile) is not None:
        hint = f"once trained, `meshwright profile --from-run runs/{answer.run.name}` corrects {profile} by it"
        console.print(f"  {hint}", style="dim")


def _measured_text(probe: Probe) -> str:
    """Predicted and measured values of a probe."""
    measured_parts = [f"predicted {seconds_text(probe.predicted_seconds)}"] if probe.predicted_seconds else []
    if probe.measured is not None:
        error_text = f" ({probe.error:+.0%})" if probe.error is not None else ""
        measured_parts.append(f"measured {seconds_text(probe.measured.seconds)}{error_text}")
        expected = f" of {bytes_text(probe.predicted_bytes)} predicted" if probe.predicted_bytes else ""
        measured_parts.append(f"{bytes_text(probe.measured.memory_bytes)}{expected}")
    return ", ".join([*measured_parts, *([probe.ended] if probe.ended else [])])


def _plan(console: Console, answer: PlanAnswer) -> None:
    _heading(console, "plan")
    table = Table.grid(padding=(0, 2, 0, 0))
    for key, value in facts(answer.run, answer.plan):
        table.add_row(key, value)
    console.print(Padding(table, (0, 0, 0, 2)))


def _mesh(console: Console, answer: PlanAnswer) -> None:
    _heading(console, "mesh, outermost axis first")
    table = Table.grid(padding=(0, 2, 0, 0))
    for axis, link, traffic in axes(answer.run, answer.plan):
        table.add_row(axis, f"{'═══' if 'between' in link else '───'} {link}", traffic)
    console.print(Padding(table, (0, 0, 0, 2)))
    picture = Table.grid(padding=(0, 2, 0, 0))
    last = as_nodes(answer.run.cluster).nodes - 1
    chips = chips_by_node(answer.run.cluster)
    for node in range(last + 1) if last < NODES_DRAWN else (*range(NODES_DRAWN - 1), last):
        if node == last >= NODES_DRAWN:
            picture.add_row("…", "", f"{last + 1 - NODES_DRAWN:,} more")
        coordinates, ranks = node_line(answer.run, answer.plan, node)
        picture.add_row(
            f"node {node:,}{f' {chips[node]}' if chips else ''}",
            "▣" * min(ranks, 8) + ("…" if ranks > 8 else ""),
            coordinates,
        )
    console.print(Padding(picture, (0, 0, 0, 2)))


def _memory(console: Console, answer: PlanAnswer) -> None:
    limit = answer.run.cluster.memory_bytes()
    by_rank = memory_by_rank(answer.run, answer.plan)
    full = max(limit or 0, *(sum(memory_parts.values()) for _, memory_parts in by_rank))
    _heading(console, f"memory of each pipeline rank{f', a bar for {full / 1e9:.0f} GB' if limit else ''}")
    names = list(dict.fromkeys(part for _, memory_parts in by_rank for part in memory_parts))
    table = Table.grid(padding=(0, 2, 0, 0))
    width = max(20, min(60, console.width - 44))
    for label, memory_parts in _shown_ranks(by_rank):
        table.add_row(
            label, _bar(memory_parts, full, width), bytes_text(sum(memory_parts.values())) if memory_parts else ""
        )
    console.print(Padding(table, (0, 0, 0, 2)))
    fullest = max(by_rank, key=lambda entry: sum(entry[1].values()))[1]
    shown = [name for name in names if fullest.get(name, 0) >= SMALLEST_SHARE * sum(fullest.values())]
    key = "  ".join(f"{_letter(name)} {name} {bytes_text(fullest[name])}".replace(" ", "\u00a0") for name in shown)
    console.print(Padding(key + (" on the fullest rank" if len(by_rank) > 1 else ""), (0, 0, 0, 2)))


def _shown_ranks(by_rank: Sequence[tuple[str, dict[str, int]]]) -> list[tuple[str, dict[str, int]]]:
    if len(by_rank) <= RANKS_DRAWN:
        return list(by_rank)
    fullest = max(range(len(by_rank)), key=lambda rank: sum(by_rank[rank][1].values()))
    shown = sorted({0, 1, 2, fullest, len(by_rank) - 2, len(by_rank) - 1})
    shown_ranks: list[tuple[str, dict[str, int]]] = []
    for before, index in zip([-1, *shown], shown, strict=False):
        if index > before + 1:
            shown_ranks.append((f"… {index - before - 1} more", {}))
        shown_ranks.append(by_rank[index])
    return shown_ranks


def _bar(memory_parts: Mapping[str, int], full: float, width: int) -> str:
    """A bar with a letter for each part, and dots for free memory."""
    text, before = "", 0.0
    for part, size in memory_parts.items():
        text += _letter(part) * (round((before + size) / full * width) - round(before / full * width))
        before += size
    return text.ljust(width, "·") if memory_parts else ""


def _letter(part: str) -> str:
    return MEMORY_LETTERS.get(part, part[0].upper())


def _time(console: Console, answer: PlanAnswer) -> None:
    predicted = answer.plan.predicted
    if predicted is None or predicted.step_seconds is None:
        return
    _heading(console, "where the step goes")
    table = Table.grid(padding=(0, 2, 0, 0))
    width = max(20, min(60, console.width - 44))
    for name, seconds in _visible_parts(predicted):
        share = seconds / predicted.step_seconds
        table.add_row(name, f"{seconds:.3f} s", f"{share:.1%}", "█" * round(width * share))
    console.print(Padding(table, (0, 0, 0, 2)))


def _visible_parts(predicted: Predicted) -> Iterable[tuple[str, float]]:
    assert predicted.step_seconds is not None
    return [
        (name, seconds) for name, seconds in parts_of(predicted).items() if seconds >= 0.0005 * predicted.step_seconds
    ]


def _runner_ups(console: Console, answer: PlanAnswer) -> None:
    if not answer.others:
        return
    _heading(console, "runner-ups, and why they were not chosen")
    table = Table.grid(padding=(0, 2, 0, 0))
    for number, other in enumerate(answer.others[:MAX_ALTERNATIVES], 2):
        predicted = other.plan.predicted
        mark = "  [bold]planned only[/bold]" if untrainable(other.plan) else ""
        seconds = f"{seconds_text(predicted.step_seconds)}, " if predicted and predicted.step_seconds else ""
        memory = bytes_text(predicted.memory_peak_bytes) if predicted else ""
        table.add_row(
            f"{number}.", f"{short_line(other.plan)} ({seconds}{memory}){mark}\n[dim]{answer.why_not(other)}[/dim]"
        )
    console.print(Padding(table, (0, 0, 0, 2)))


def _samples(console: Console, answer: PlanAnswer) -> None:
    choice = answer.samples
    if choice is None:
        return
    _sentences(console, TITLE, sample_reasons(answer.run, choice))
    if choice.layouts:
        table = Table(*HEADS, box=None, padding=(0, 2, 0, 0))
        for line in sample_lines(choice):
            table.add_row(*line)
        console.print(Padding(table, (0, 0, 0, 2)))
        console.print(
            "  (capacity: tokens of a micro-batch on a rank, and of one with offload; seconds of a step, its mean and quantiles)",
            style="dim",
        )


def _changes(console: Console, answer: PlanAnswer) -> None:
    changes = answer.changes
    if not changes:
        return
    _heading(console, "what a change would gain")
    table = Table.grid(padding=(0, 2, 0, 0))
    for change in changes:
        gain = f"{change.gain:+.1%}" if abs(change.gain) >= SMALLEST_GAIN else "nothing"
        table.add_row(change.name, seconds_text(change.seconds), gain, f"[dim]{change.note}[/dim]")
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print("  (seconds of a step; change in tokens per second)", style="dim")


def _scaling(console: Console, answer: PlanAnswer) -> None:
    points = answer.priced_points
    if not points:
        return
    _heading(console, "the same job on other numbers of GPUs" if answer.points else "cost")
    price, tokens = answer.question.price, answer.tokens
    price = price_of(answer.run.cluster, price).value
    total_columns = ["days", "GPU-hours"] if tokens else []
    total_columns += ["cost"] if tokens and price else []
    table = Table("GPUs", "plan", "step", "tokens/s a GPU", "MFU", *total_columns, "", box=None, padding=(0, 2, 0, 0))
    for point in points:
        if not (point.seconds and point.tokens_per_second and point.answer):
            table.add_row(f"{point.gpus:,}", point.refused)
            continue
        hours = point.gpu_hours(tokens) if tokens else None
        whole_training = [two_digits(hours / point.gpus / 24), two_digits(hours)] if hours else []
        table.add_row(
            f"{point.gpus:,}",
            axes_line(point.answer.best.plan),
            seconds_text(point.seconds),
            f"{point.tokens_per_second / point.gpus:,.0f}",
            f"{point.mfu:.1%}" if point.mfu else "",
            *whole_training,
            *([money(hours or 0.0, price)] if price and tokens else []),
            "◀" if point.gpus == answer.plan.ranks and len(points) > 1 else "",
        )
    console.print(Padding(table, (0, 0, 0, 1)))
    note = f"days and GPU-hours for {tokens:.3g} tokens" if tokens else TOKENS_NEEDED
    console.print(f"  ({note})", style="dim")


CHIP_HEADS = ("chip", "plan", "step", "tokens/s a GPU", "money / M tokens", "kWh / M tokens")
SOFTWARE_HEADS = ("software", "format", "step (80%)", "tokens/s a GPU", "memory", "layout")


def chip_lines(answer: PlanAnswer) -> Iterable[tuple[str, ...]]:
    """A line of the comparison for each chip, under `CHIP_HEADS` and, with known tokens, days and GPU-hours."""
    for entry in answer.chips:
        point, spent = entry.point, entry.expense
        if spent is None or point.answer is None or point.tokens_per_second is None or point.seconds is None:
            yield entry.chip, point.refused or "its rates are not known"
            continue
        cells = [spent.money_per_million_tokens, spent.kwh_per_million_tokens]
        totals = [spent.days, spent.gpu_hours] if answer.tokens else []
        yield (
            entry.chip,
            axes_line(point.answer.best.plan),
            seconds_text(point.seconds),
            f"{point.tokens_per_second / point.gpus:,.0f}",
            *("not known" if value is None else three_digits(value) for value in cells),
            *("" if value is None else two_digits(value) for value in totals),
        )


def _chips(console: Console, answer: PlanAnswer) -> None:
    if not answer.question.chips:
        return
    _heading(console, "the same job on other chips, the cheapest first")
    table = Table(*CHIP_HEADS, *(("days", "GPU-hours") if answer.tokens else ()), box=None, padding=(0, 2, 0, 0))
    for line in chip_lines(answer):
        table.add_row(*line)
    console.print(Padding(table, (0, 0, 0, 1)))


def software_lines(answer: PlanAnswer) -> Iterable[tuple[str, ...]]:
    """A line of the comparison for each software, the fastest first, under `SOFTWARE_HEADS`."""
    for entry in sorted(answer.software, key=lambda entry: entry.seconds or float("inf")):
        if entry.seconds is None or entry.low is None or entry.high is None or entry.memory_bytes is None:
            yield entry.software, "", "", "", "", entry.refused
            continue
        yield (
            entry.software,
            entry.precision,
            f"{seconds_text(entry.seconds)} ({seconds_text(entry.low)} to {seconds_text(entry.high)})",
            f"{entry.tokens_per_second_per_gpu:,.0f}",
            bytes_text(entry.memory_bytes),
            entry.layout,
        )


def _software(console: Console, answer: PlanAnswer) -> None:
    if not answer.question.software:
        return
    _heading(console, "as other software would run it, each with its best layout")
    table = Table(*SOFTWARE_HEADS, box=None, padding=(0, 2, 0, 0))
    for line in software_lines(answer):
        table.add_row(*line)
    console.print(Padding(table, (0, 0, 0, 1)))
    for entry in answer.software:
        console.print(
            f"  {entry.software}: constants of {entry.constants_of:.0f}, {entry.runs:,} published runs; {entry.about}",
            style="dim",
        )


def _features(console: Console, answer: PlanAnswer) -> None:
    if not answer.question.features:
        return
    _heading(console, "what features of other systems' expert parallelism would change")
    if not answer.features:
        console.print("  the model has no experts, or its step time is not known")
        return
    table = Table("feature", "alone", "with those above", box=None, padding=(0, 2, 0, 0))
    for step in answer.features:
        alone = "in this plan" if step.present else seconds_text(step.alone)
        table.add_row(step.feature, alone, seconds_text(step.together))
    console.print(Padding(table, (0, 0, 0, 1)))


def _formats(console: Console, answer: PlanAnswer) -> None:
    if answer.question.precision is None:
        return
    _heading(console, "this plan with matrix products in other formats, the fastest first")
    if not answer.formats:
        console.print("  its step time is not known")
        return
    mixture = answer.plan.experts is not None
    heads = ("dense layers", "experts") if mixture else ("format",)
    table = Table(*heads, "step", "can be trained", box=None, padding=(0, 2, 0, 0))
    shown = [
        entry for entry in answer.formats if entry.dense == entry.experts or "bf16" in (entry.dense, entry.experts)
    ]
    for entry in shown:
        names = (entry.dense, entry.experts) if mixture else (entry.dense,)
        table.add_row(*names, seconds_text(entry.seconds), entry.cannot_train or "yes")
    console.print(Padding(table, (0, 0, 0, 1)))
    _sentences(
        console, "accuracy", [f"{entry.dense}: {entry.accuracy}" for entry in shown if entry.dense == entry.experts]
    )


def money(gpu_hours: float, price: float | None) -> str:
    return two_digits(gpu_hours * price) if price else ""


def efficiencies(points: Sequence[Point]) -> list[float | None]:
    """Tokens per second per GPU, relative to the fewest GPUs that run the job."""
    per_gpu = [point.tokens_per_second / point.gpus if point.tokens_per_second else None for point in points]
    first = next((value for value in per_gpu if value), None)
    return [value / first if value and first else None for value in per_gpu]


def _trainings(console: Console, answer: PlanAnswer) -> None:
    if not answer.trainings:
        return
    _heading(console, f"shortest training to the loss of {answer.tokens:.3g} tokens at the run's own batch")
    price = price_of(answer.run.cluster, answer.question.price).value
    heads = ["GPUs", "batch", "tokens a step", "steps", "step", "days", "GPU-hours", *(["cost"] if price else [])]
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for training in answer.trainings[:LONGEST_TABLE]:
        cost = [money(training.gpu_hours, price)] if price else []
        table.add_row(
            f"{training.point.gpus:,}",
            f"{training.batch:,}",
            f"{training.batch * answer.run.train.seq_len:.3g}",
            f"{training.steps:,.0f}",
            seconds_text(training.point.seconds or 0.0),
            f"{training.seconds / 86400:.3g}",
            f"{two_digits(training.gpu_hours)}",
            *cost,
        )
    console.print(Padding(table, (0, 0, 0, 1)))
    console.print(
        f"  (steps by McCandlish et al. 2018 with a critical batch of {answer.question.critical_batch:.3g} tokens: a larger batch needs "
        "more tokens for the same loss. The days in other tables are those of the run's own batch and tokens.)",
        style="dim",
    )


def _sources(console: Console, answer: PlanAnswer) -> None:
    _heading(console, "where the numbers come from")
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, source in sources_of(answer).items():
        table.add_row(name, source)
    console.print(Padding(table, (0, 0, 0, 2)))


def _sentences(console: Console, title: str, sentences: Iterable[str]) -> None:
    shown = list(sentences)
    if not shown:
        return
    _heading(console, title)
    table = Table.grid(padding=(0, 1, 0, 0))
    for sentence in shown:
        table.add_row("·", sentence)
    console.print(Padding(table, (0, 0, 0, 2)))


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")
