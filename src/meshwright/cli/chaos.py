"""`meshwright chaos`: disturbs a short run on purpose, and tells whether the promise about that disturbance was kept."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import Json, Runs, load
from meshwright.spec.errors import BadInput


def chaos(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.yaml] [KEY=VALUE]...", help="A run file, and values that replace its own.", show_default=False
        ),
    ] = None,
    scenario: Annotated[str | None, typer.Option("--scenario", metavar="NAME", help="What disturbs the run.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Print all scenarios with what they promise.")] = False,
    steps: Annotated[int, typer.Option("--steps", min=12, help="The run is shortened to this number of steps.")] = 60,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Disturb a short run on purpose, and check that the system keeps its promise.

    Trains the run twice for --steps steps in RUNS/chaos/: with the disturbance, and undisturbed. On a GPU there is no undisturbed run:
    the losses of steps that a restart repeats are compared instead. Progress is printed on stderr. Exit code 0 if the promise was
    kept, else 1.

    Examples:

        meshwright chaos --list

        meshwright chaos run.yaml --scenario kill-rank
    """
    from meshwright.chaos.scenarios import SCENARIOS
    from meshwright.chaos.suite import Suite, scenario_named, undo_on_sigterm

    if list_all:
        entries = [{"scenario": entry.name, "promise": entry.promise} for entry in SCENARIOS]
        print(
            json.dumps({"scenarios": entries})
            if as_json
            else "\n".join(f"{e['scenario']:22}{e['promise']}" for e in entries)
        )
        return
    if not arguments or scenario is None:
        raise BadInput("name a run file (or KEY=VALUE arguments) and --scenario NAME; --list names all scenarios")
    chosen = scenario_named(scenario)
    undo_on_sigterm()
    verdict = Suite(load(arguments, runs), arguments, runs / "chaos", steps, show=_progress()).run(chosen)
    if as_json:
        print(json.dumps(verdict.as_plain()))
    else:
        print(f"{verdict.scenario}: {'kept' if verdict.ok else 'NOT KEPT'}")
        print(f"  promise:  {verdict.promise}\n  observed: {verdict.observed}\n  files:    {runs / 'chaos'}")
    sys.exit(0 if verdict.ok else 1)


def _progress() -> Callable[[str], None]:
    """Return a function that prints a line on stderr at once. Each line begins with the seconds since this call."""
    began = time.monotonic()
    return lambda text: print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)
