"""`meshwright stragglers`: finds which rank or stage slows the steps down, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.options import Json, show
from meshwright.cli.report import find_run
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from meshwright.diagnosis.stragglers import Diagnosis

SHOWN = 5
"""Maximum number of entries of each table that are printed."""


def stragglers(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|TRACE.parquet",
            help="A run's folder or its name under `runs/`, or a trace.",
            show_default=False,
        ),
    ],
    meta: Annotated[
        Path | None,
        typer.Option(
            "--meta", metavar="FILE", help="YAML file with `dp_size`, `pp_size` and the other sizes of the trace's job."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Name the straggler: how much slower steps are than with ideal durations, by which cause, rank and stage.

    Of a run it analyses the last 100 steps.

    Example:

        meshwright stragglers runs/quickstart
    """
    diagnosis = _diagnose(source, meta)
    if as_json:
        print(json.dumps(diagnosis.as_plain()))
    else:
        _print(diagnosis)


def _diagnose(source: Path, meta: Path | None) -> Diagnosis:
    """Analyse a run or a trace. Raises BadInput if --meta is missing for a trace, or given for a run."""
    from meshwright.diagnosis.stragglers import diagnose_run, diagnose_trace

    if source.suffix == ".parquet":
        if meta is None:
            raise BadInput(
                f"{source.name}: a trace needs --meta FILE, the YAML file with dp_size and pp_size of its job"
            )
        return diagnose_trace(source, meta)
    if meta is not None:
        raise BadInput(f"{source}: --meta describes a trace; a run's folder needs none")
    return diagnose_run(find_run(source))


def _print(diagnosis: Diagnosis) -> None:
    """Print the finding and the largest slowdowns by type of operation, by rank and by stage."""
    show(diagnosis.sentence)
    show(f"{len(diagnosis.steps)} steps of {diagnosis.step_seconds:.3g} s, ideal {diagnosis.ideal_seconds:.3g} s")
    tables = {"type": diagnosis.by_type, "rank": diagnosis.by_rank, "stage": diagnosis.by_stage}
    for title, slowdowns in tables.items():
        largest = sorted(slowdowns.items(), key=lambda item: -item[1])[:SHOWN]
        show(f"slowdown by {title}: " + ", ".join(f"{name} {slowdown:.3f}" for name, slowdown in largest))
    for note in diagnosis.notes:
        show(note)
