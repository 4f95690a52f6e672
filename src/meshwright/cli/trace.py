"""`meshwright trace`: writes the recorded spans of all ranks of a run as one trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import Json
from meshwright.cli.report import find_run
from meshwright.cli.train import parse_steps


def trace(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under `runs/`.", show_default=False)
    ],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B; by default all that are kept.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; by default `RUN/traces/spans.json.gz`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the spans of every rank, on one clock, as a trace for https://ui.perfetto.dev.

    It reads the files that the ranks of the newest start write all the time, also while they run and after they died. It prints the error
    bound of the common clock.

    Example:

        meshwright trace runs/quickstart --steps 10:20
    """
    from meshwright.observe.span_trace import write_span_trace

    wanted = parse_steps("--steps", steps)
    folder = find_run(run)
    file = out or folder / "traces" / "spans.json.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    figures = write_span_trace(folder, file, wanted)
    if as_json:
        print(json.dumps({"trace": str(file), **figures}))
        return
    first, last = figures["steps"]
    error = figures["largest_clock_error_ns"]
    bound = "unknown: some hosts share no message or collective" if error is None else f"{error / 1e3:,.1f} µs"
    for note in figures["missing"]:
        print(f"left out: {note}")
    print(f"{file}: {figures['spans']:,} spans of {figures['ranks']} ranks, steps {first} to {last}")
    print(f"error bound of the clocks: {bound}")
