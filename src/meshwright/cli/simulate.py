"""`meshwright simulate`: simulates one step of a plan. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.effective_time import effective_answer, show_effective
from meshwright.cli.options import Arguments, Json, Runs, check_writable, load, say

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.simulator.timeline import Timeline
    from meshwright.spec.plan import Plan
    from meshwright.spec.run import RunSpec

SMALLEST_SHARE = 0.0005
"""A part with a smaller fraction of the step is not printed; --json has all parts."""
PRINTED = {"compute": "compute", "closing": "norm, optimizer", "idle": "idle"}
"""Labels of the parts of a step that are not communication."""


def simulate(
    arguments: Arguments = None,
    runs: Runs = Path("runs"),
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="File for the timeline, compressed if its name ends in .gz; default: RUN/timelines/simulated.json.gz.",
            show_default=False,
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            "--width", metavar="N", help="Characters per line of the picture; default: the width of the terminal."
        ),
    ] = None,
    failures: Annotated[
        bool,
        typer.Option("--failures", help="Also simulate failures of the run: effective training time, spare hosts."),
    ] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            "--assume",
            metavar="KEY=VALUE",
            help="With --failures: replace an assumption about them, e.g. restart_seconds=60.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate one step of a run's plan on its cluster, and write the timeline as a trace.

    The plan is that of the run file (`plan: FILE`), or the planner's choice with the run's pins (`plan.pipeline=2
    plan.schedule=zbv`), or without pins the planner's choice. Prints step time, tokens per second, bubble, the parts of the step
    time, and compute and memory of each pipeline rank; the trace opens in ui.perfetto.dev. Nothing is trained.

    Examples:

        meshwright simulate run.yaml plan=plan.yaml

        meshwright simulate model=llama3-8b cluster=dgx-h100-16 train.global_batch=512 plan.pipeline=4

        meshwright simulate run.yaml plan.pipeline=2 plan.schedule=zbv --trace zbv.json.gz --json

        meshwright simulate run.yaml supervision.spares=2 --failures --assume restart_seconds=60
    """
    from meshwright.cli.plan_words import remarks
    from meshwright.launch.prepare import plan_for, with_vocabulary
    from meshwright.planner.effective_time import Assumptions, predict_effective_time
    from meshwright.simulator.step_simulation import simulate_plan
    from meshwright.simulator.trace import write_trace

    check_writable("--trace", trace)
    assumed = Assumptions.parse(assume or [])
    run = with_vocabulary(load(arguments, runs, starts=False))
    for remark in remarks(run):
        say(remark)
    plan, candidates = plan_for(run)
    timeline = simulate_plan(run.model, run.train, plan, run.cluster)
    file = trace or runs / run.name / "timelines" / "simulated.json.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_trace(timeline, file, _rank_names(run, plan))
    answer = _answer(run, plan, timeline, chosen=bool(candidates), trace=file)
    effective = predict_effective_time(run, plan, timeline.step_seconds, assumed)
    answer["effective_time"] = effective_answer(effective, played=failures)
    if as_json:
        print(json.dumps(answer))
    else:
        _show(run, plan, timeline, answer, width)
        show_effective(effective, played=failures)


def _answer(run: RunSpec, plan: Plan, timeline: Timeline, *, chosen: bool, trace: Path) -> dict[str, Any]:
    """Return the result of the simulation as JSON values."""
    from meshwright.costs.plan_costs import STACK, band, band_and_source
    from meshwright.planner.candidate import slot_run
    from meshwright.planner.checkpoint_cost import checkpoint_cost
    from meshwright.simulator.step_simulation import memory_of
    from meshwright.spec.fields import to_plain
    from meshwright.spec.plan_keys import plain_keys

    seconds = timeline.step_seconds
    low, high = band(seconds, run.cluster, plan)
    memory = memory_of(run.model, slot_run(run, plan).train, plan, cpu=run.cluster.is_cpu)
    layers = _layers(run, plan)
    ranks = [
        {
            "rank": rank,
            "layers": layers[rank],
            "compute_seconds": timeline.compute_seconds[rank],
            "exposed_seconds": timeline.exposed_seconds[rank],
            "peak_in_flight": timeline.peak_in_flight[rank],
            "memory_bytes": memory[rank],
        }
        for rank in range(timeline.schedule.ranks)
    ]
    return {
        "plan": plain_keys(plan),
        "chosen_by_planner": chosen,
        "step_seconds": seconds,
        "low_seconds": low,
        "high_seconds": high,
        "constants": STACK,
        "band": band_and_source(run.cluster, plan)[1],
        "tokens_per_second": run.train.global_batch * run.train.seq_len / seconds,
        "bubble": timeline.bubble,
        "breakdown": _breakdown(run, plan, timeline),
        "ranks": ranks,
        "checkpoint": to_plain(checkpoint_cost(run, plan, seconds)),
        "trace": str(trace),
    }


def _breakdown(run: RunSpec, plan: Plan, timeline: Timeline) -> dict[str, float]:
    """Return the seconds of a rank's step by part.

    The simulation counts communication of tensor and context axes, and launches by the host, as compute. Here they are
    separate parts.
    """
    from meshwright.simulator.step_simulation import exposed_in_compute

    inside = exposed_in_compute(run.model, run.train, plan, run.cluster)
    parts = timeline.breakdown
    return {"compute": parts.pop("compute") - sum(inside.values()), **inside, **parts}


def _layers(run: RunSpec, plan: Plan) -> list[str]:
    """Return the layers of each pipeline rank as text, in the order of its virtual stages."""
    from meshwright.spec.layout import stage_table

    table = stage_table(plan.schedule, plan.axis_size("pipeline"), run.model.layers)
    return [" ".join(f"{s.start}-{s.stop - 1}" if len(s) > 1 else f"{s.start}" for s in stages) for stages in table]


def _rank_names(run: RunSpec, plan: Plan) -> dict[int, str]:
    return {rank: f"pipeline rank {rank}: layers {layers}" for rank, layers in enumerate(_layers(run, plan))}


def _show(run: RunSpec, plan: Plan, timeline: Timeline, answer: dict[str, Any], width: int | None) -> None:
    """Print the result of the simulation, with a picture of the pipeline if it fits the width."""
    from rich.console import Console

    from meshwright.cli.plan_words import caution, plan_line, seconds_text
    from meshwright.planner.checkpoint_cost import CheckpointCost, checkpoint_sentences
    from meshwright.simulator.picture import draw_within

    console = Console(highlight=False)
    step, low, high = (seconds_text(answer[f"{name}_seconds"]) for name in ("step", "low", "high"))
    origin = " (the planner's choice; `meshwright plan` explains it)" if answer["chosen_by_planner"] else ""
    console.print(f"plan: {plan_line(run, plan)}{origin}")
    console.print(
        f"step: [bold]{step}[/bold] (80%: {low} to {high}, {answer['band']}); "
        f"{answer['tokens_per_second']:,.0f} tokens/s, bubble {answer['bubble']:.1%}"
    )
    if warning := caution(run):
        console.print(f"  {warning}")
    for name, seconds in answer["breakdown"].items():
        share = seconds / answer["step_seconds"]
        if share >= SMALLEST_SHARE:
            label = PRINTED.get(name, f"exposed {name}")
            console.print(f"  {label:18s} {seconds:9.3f} s {share:6.1%} {'█' * round(40 * share)}")
    _show_ranks(console, run, answer)
    if answer["checkpoint"] is not None:
        console.print(f"checkpoints: {'; '.join(checkpoint_sentences(run, CheckpointCost(**answer['checkpoint'])))}")
    picture = draw_within(timeline, width or console.width)
    if picture is not None:
        print(picture)
    else:
        console.print(
            "The picture needs a wider terminal (or --width N): a forward is less than one character in this one"
        )
    console.print(f"trace: {answer['trace']} (open it in ui.perfetto.dev)")


def _show_ranks(console: Console, run: RunSpec, answer: dict[str, Any]) -> None:
    """Print a table with compute time, micro-batches in flight and memory of each pipeline rank."""
    from rich.table import Table

    from meshwright.cli.plan_words import bytes_text

    budget = run.cluster.memory_bytes()
    heads = ("rank", "layers", "compute", "in flight", "memory")
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for rank in answer["ranks"]:
        total = sum(rank["memory_bytes"].values())
        full = f" of {budget / 1e9:.0f} GB" if budget else ""
        layers = rank["layers"] if len(rank["layers"]) <= 40 else rank["layers"][:37] + "…"
        table.add_row(
            str(rank["rank"]),
            layers,
            f"{rank['compute_seconds']:.3f} s",
            f"{rank['peak_in_flight']:g}",
            bytes_text(total) + full,
        )
    console.print(table)
