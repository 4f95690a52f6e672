"""`meshwright plan`: how a run would be laid out, what it needs, and why. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import Json, Words, load

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from meshwright.costs.of_plan import PlanTime
    from meshwright.planner.candidate import Candidate
    from meshwright.spec.plan import LayerStrategy, Plan
    from meshwright.spec.run import RunSpec

SHOWN = 8
"""Alternatives printed."""
DRAWN = 4
"""Lines of the mesh's picture."""

CAUTION = "Meshwright's own runs are not fitted yet: good for comparing plans and networks, not as a promise"


def plan(
    words: Words = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the chosen plan as YAML, to edit and pass back.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose a plan for a run and show what it needs, without starting anything.

    The planner chooses replicas × shards, micro-batch, resharding and recompute, with an estimate of memory; for a pinned pipeline also the
    schedule, by simulated step time. No file is needed for a question.

    Examples:

        meshwright plan run.yaml

        meshwright plan model=llama3-8b cluster.gpu=H100 cluster.nodes=4 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=64

        meshwright plan run.yaml plan.recompute=full --out plan.yaml

        meshwright plan run.yaml plan.pipeline=2
    """
    from meshwright.launch.prepare import plan_for, plan_yaml, with_vocabulary
    from meshwright.spec.fields import to_plain

    run = with_vocabulary(load(words))
    chosen, candidates = plan_for(run)
    if out is not None:
        out.write_text(plan_yaml(chosen), encoding="utf-8")
    if as_json:
        answer = to_plain(chosen)
        alternatives = [{"fits": c.fits, "plan": to_plain(c.plan)} for c in candidates[1:]]
        body = {"plan": answer, "predicted": answer["predicted"], "cost_model": to_plain(_time(run, chosen))}
        print(json.dumps({**body, "alternatives": alternatives}))
    else:
        _show(run, chosen, candidates)


def _show(run: RunSpec, chosen: Plan, candidates: tuple[Candidate, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from meshwright.spec.model import parameter_count

    console = Console()
    console.print(
        f"[bold]{run.model.preset or run.model.family}[/bold], {parameter_count(run.model) / 1e9:.3g} B parameters, on {_cluster(run)}"
    )
    console.print(_picture(chosen))
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in _facts(run, chosen):
        facts.add_row(key, value)
    console.print(facts)
    _show_memory(console, run, chosen)
    _show_time(console, run, chosen)
    for reason in chosen.why:
        console.print(f"  · {reason}")
    if len(candidates) > 1:
        console.print(_alternatives(candidates[0], candidates[1 : SHOWN + 1]))


def _cluster(run: RunSpec) -> str:
    cluster = run.cluster
    return f"{cluster.nodes} × {cluster.gpus_per_node} {cluster.gpu}"


def plan_line(run: RunSpec, plan: Plan | dict[str, Any]) -> str:
    """A plan in one line: mesh, schedule, batch, layer strategies. Takes the plan or its plain form."""
    from meshwright.spec.fields import from_plain
    from meshwright.spec.plan import Plan

    known = from_plain(Plan, plan) if isinstance(plan, dict) else plan
    mesh = " × ".join(f"{axis.axis} {axis.size}" for axis in known.mesh)
    order = f", {known.schedule.name}" if known.axis_size("pipeline") > 1 or known.layered else ""
    batch = known.batch
    layers = "; ".join(_strategy(strategy) for strategy in known.layers)
    return (
        f"{mesh}{order}, {batch.accumulate} micro-batches of {batch.micro_batch} × {run.train.seq_len} tokens, {layers}"
    )


def _strategy(strategy: LayerStrategy) -> str:
    where = "" if strategy.range == "all" else f"{strategy.range}: "
    whole = ", gradients whole" if strategy.gradients == "whole" else ""
    return f"{where}recompute {strategy.recompute}, {'reshard' if strategy.reshard else 'keep gathered'}{whole}"


def _picture(plan: Plan) -> str:
    """The mesh as one line per pipeline rank and replica, `▣` per shard."""
    shards, replicas, pipeline = (plan.axis_size(axis) for axis in ("shard", "replicate", "pipeline"))
    row = "▣ " * min(shards, 32) + (f"… {shards} shards" if shards > 32 else "")
    lines = [
        f"  {f'pipeline rank {rank}, ' if pipeline > 1 else ''}replica {index}: {row}"
        for rank in range(pipeline)
        for index in range(replicas)
    ]
    more = f"  … {replicas} replicas" + (f" on {pipeline} pipeline ranks" if pipeline > 1 else "")
    return "\n".join(lines[:DRAWN] + ([more] if len(lines) > DRAWN else []))


def _facts(run: RunSpec, plan: Plan) -> list[tuple[str, str]]:
    layers = "; ".join(
        f"{s.range}: recompute {s.recompute}, {'reshard' if s.reshard else 'keep gathered'}"
        + (", gradients whole" if s.gradients == "whole" else "")
        for s in plan.layers
    )
    schedule = []
    if plan.axis_size("pipeline") > 1 or plan.layered:
        schedule.append(("schedule", plan.schedule.name))
        schedule += [(f"  rank {rank}", f"layers {_stages(row)}") for rank, row in enumerate(plan.schedule.stages)]
    return [
        ("mesh", " × ".join(f"{axis.axis} {axis.size} (crosses {axis.crosses}s)" for axis in plan.mesh)),
        *schedule,
        (
            "batch",
            f"{plan.batch.global_batch} sequences of {run.train.seq_len}: {plan.batch.micro_batch} at a time, "
            f"{plan.batch.accumulate} times on each of {plan.data_ranks} {'ranks' if plan.data_ranks == plan.ranks else 'data ranks'}",
        ),
        ("layers", layers),
        ("precision", f"compute {plan.precision.compute}, reduce {plan.precision.reduce}"),
        ("compile", "each block" if plan.compile else "no"),
    ]


def _stages(ranges: tuple[str, ...]) -> str:
    """Layer ranges in a row; of many, the first few."""
    shown = [single if single == last else text for text in ranges for single, _, last in [text.partition("-")]]
    return ", ".join(shown[:8]) + (f", … ({len(shown)} stages)" if len(shown) > 8 else "")


def _show_memory(console: Console, run: RunSpec, plan: Plan) -> None:
    if plan.predicted is None:
        return
    peak, budget = plan.predicted.memory_peak_bytes, run.cluster.memory_bytes()
    console.print(
        f"memory a rank: [bold]{peak / 1e9:.2f} GB[/bold] (estimate)" + (f" of {budget / 1e9:.0f} GB" if budget else "")
    )
    for kind, size in plan.predicted.memory_bytes.items():
        console.print(f"  {kind:12s} {size / 1e9:8.2f} GB {'█' * round(40 * size / peak)}")


def _show_time(console: Console, run: RunSpec, plan: Plan) -> None:
    """What the cost model says, and whose constants it says it with."""
    from meshwright.costs.of_plan import STACK

    time = _time(run, plan)
    if time is None:
        return
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in time.breakdown.items() if seconds >= 0.005)
    console.print(
        f"step time: {time.low:.2f} to {time.high:.2f} s by the cost model with {STACK}'s constants ({parts} s)"
    )
    console.print(f"  {CAUTION}")


def _time(run: RunSpec, plan: Plan) -> PlanTime | None:
    """The closed form; simulated where a schedule is at stake, which the closed form does not know."""
    from meshwright.costs.of_plan import PlanTime, band, plan_time
    from meshwright.simulator.of_plan import simulate_plan

    time = plan_time(run.model, run.train, plan, run.cluster)
    if time is None or (plan.axis_size("pipeline") == 1 and not plan.layered):
        return time
    timeline = simulate_plan(run.model, run.train, plan, run.cluster)
    parts = {f"exposed {name}" if name in timeline.exposed else name: s for name, s in timeline.breakdown.items()}
    return PlanTime(timeline.step_seconds, *band(timeline.step_seconds), parts)


def _alternatives(best: Candidate, others: tuple[Candidate, ...]) -> Table:
    from rich.table import Table

    staged = best.seconds is not None
    heads = ["mesh", "micro", "reshard", "recompute", "memory", "why not"]
    if staged:
        heads[1:1], heads[4:4] = ["schedule"], ["gradients"]
    table = Table(*heads, title="alternatives", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for candidate in others:
        plan = candidate.plan
        assert plan.predicted is not None
        table.add_row(
            " × ".join(f"{axis.axis} {axis.size}" for axis in plan.mesh),
            *([plan.schedule.name] if staged else []),
            str(plan.batch.micro_batch),
            "yes" if plan.layers[0].reshard else "no",
            *([plan.layers[0].gradients] if staged else []),
            plan.layers[0].recompute,
            f"{plan.predicted.memory_peak_bytes / 1e9:.1f} GB",
            best.reason_over(candidate),
        )
    return table
