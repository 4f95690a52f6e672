"""`meshwright sweep`: trains runs that differ in some keys, and shows which is best."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.columns import aligned
from meshwright.cli.compare import compared_runs, plain_run
from meshwright.cli.options import Json, Runs, check_runs, print_now, say
from meshwright.spec.errors import BadInput, nearest

if TYPE_CHECKING:
    from meshwright.launch.sweep import Sweep
    from meshwright.observe.comparison import ComparedRun

PAGE = "sweep.html"
"""Name of the page in the folder of the sweep."""


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="SWEEP.yaml", help="The sweep: a run file, and the keys to vary.", show_default=False),
    ],
    runs: Runs = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, and start none.")] = False,
    as_json: Json = False,
) -> None:
    """Train runs that differ in some keys, rank them, and write a page with their curves.

    The file names a run file and the values of keys: `grid` for every combination, `list` for chosen ones. All runs are checked
    before the first one starts. The same command continues a sweep that was interrupted, and trains what was added to the file;
    finished runs are not repeated, failed ones are tried again.

    A sweep file (`meshwright schema --sweep` lists all keys):

        run: run.yaml

        grid: {train.learning_rate: [1e-3, 3e-4], seed: [0, 1]}

        parallel: auto

        stop_early: {steps: [100, 500]}

    Examples:

        meshwright sweep sweep.yaml --dry-run

        meshwright sweep sweep.yaml

    Each run is a folder in runs/SWEEP, where `meshwright runs`, `compare` and `monitor` find it; RUN.log there has what its command
    prints. Ctrl-C ends the sweep and its runs with checkpoints; a second one ends them at once.
    """
    from meshwright.config.sweep_file import describe, load_sweep
    from meshwright.durable.lock import locked
    from meshwright.launch.sweep import Sweep

    check_runs(runs)
    if not file.is_file():
        near = nearest(file.name, [path.name for path in file.parent.glob("*.yaml")])
        raise BadInput(f"{file}: no such file" + (f"; nearest: {file.with_name(near)}" if near else ""))
    spec = load_sweep(file)
    if dry_run:
        found = Sweep(spec, file, runs)
        if as_json:
            print(
                json.dumps(
                    {
                        "folder": str(found.folder),
                        "runs": [vars(run.swept) | {"outcome": run.outcome} for run in found.runs],
                    }
                )
            )
        else:
            for line in describe([run.swept for run in found.runs]):
                print(line)
        return
    with locked(runs / spec.name, wait=False, alternative="give this sweep another `name`"):
        found = Sweep(spec, file, runs)
        code = found.train(say if as_json else print_now, lambda: _write_page(found))
        page = _write_page(found)
    ranked = list(_ranked(found))
    if as_json:
        best = next((run.name for run in ranked if run.figures["loss"] is not None), None)
        outcomes = {
            run.name: {"outcome": run.outcome, "why": run.why, "values": run.swept.values} for run in found.runs
        }
        print(
            json.dumps(
                {"page": str(page), "best": best, "runs": [{**plain_run(run), **outcomes[run.name]} for run in ranked]}
            )
        )
    else:
        for line in aligned(_ranking(found, ranked)):
            print(line)
        print(page)
    sys.exit(code)


def _ranked(sweep: Sweep) -> Iterator[ComparedRun]:
    """Yield the runs that have begun, the best first. Runs without the metric of the ranking come last."""
    from meshwright.launch.run_list import is_run

    begun = [run for run in sweep.runs if is_run(run.folder)]
    found = compared_runs([run.folder for run in begun]) if begun else []
    compared = [replace(one, name=run.name, state=run.outcome) for one, run in zip(found, begun, strict=True)]
    metric = sweep.spec.metric
    if all(run.figures[metric] is None for run in compared):
        metric = "loss"

    def key(run: ComparedRun) -> tuple[bool, float]:
        value = run.figures[metric]
        return value is None, value or 0.0

    yield from sorted(compared, key=key)


def _ranking(sweep: Sweep, ranked: list[ComparedRun]) -> list[list[str]]:
    """Return a table: the heads of the columns, and one row for each run that has begun, the best first."""
    values = {run.name: run.swept.values for run in sweep.runs}
    keys = list(dict.fromkeys(key for run in values.values() for key in run))
    rows = [["", *keys, "validation loss", "loss", "step", "outcome"]]
    for place, run in enumerate(ranked, start=1):
        losses = [run.figures[name] for name in ("validation_loss", "loss")]
        texts = ["–" if loss is None else f"{loss:.4f}" for loss in losses]
        step = run.figures["step"]
        chosen = [json.dumps(values[run.name][key]) if key in values[run.name] else "–" for key in keys]
        rows.append([str(place), *chosen, *texts, "–" if step is None else f"{step:,.0f}", run.state])
    return rows


def _write_page(sweep: Sweep) -> Path:
    """Write the page with the present state of the sweep and return its path."""
    from meshwright.durable.writes import write_durable
    from meshwright.observe.comparison import MOST_CURVES, comparison_page, ranking_table

    ranked = list(_ranked(sweep))
    heads, *rows = _ranking(sweep, ranked)
    ended = sum(run.outcome in ("finished", "stopped early") for run in sweep.runs)
    note = f"{ended} of {len(sweep.runs)} have ended"
    if len(ranked) > MOST_CURVES:
        note += f" · curves and figures of the best {MOST_CURVES}"
    path = sweep.folder / PAGE
    page = comparison_page(sweep.spec.name, ranked[:MOST_CURVES], above=[ranking_table(heads, rows)], note=note)
    write_durable(path, page)
    return path
