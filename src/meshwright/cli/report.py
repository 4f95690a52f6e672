"""`meshwright report`: writes report.html of a run again from the files in the run's folder."""

from __future__ import annotations

import json as json_module
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from meshwright.spec.errors import BadInput, nearest


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under `runs/`.", show_default=False)
    ],
    open_page: Annotated[bool, typer.Option("--open", help="Show it in the web browser.")] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: the path, steps, predicted and measured figures, goodput, stragglers, missing parts.",
        ),
    ] = False,
) -> None:
    """Write report.html for a run and print its path.

    One self-contained file: loss, throughput, step time, memory, what was predicted, goodput, slow ranks, the pipeline's timeline, the
    plan, samples, configuration. It opens from disk, needs no network, and is written from metrics.jsonl and its
    neighbours, so it also serves a run that is still going or was stopped.

    Example:

        meshwright report runs/quickstart
    """
    from meshwright.cli.span_findings import span_findings
    from meshwright.observe.report import write_report
    from meshwright.observe.runfolder import read_run
    from meshwright.spec.fields import to_plain

    folder = find_run(run)
    findings = span_findings(folder)
    path = write_report(folder, findings)
    if open_page:
        webbrowser.open(path.resolve().as_uri())
    if json:
        content = read_run(folder)
        steps = content.steps[-1]["step"] if content.steps else 0
        answer = {
            "report": str(path),
            "steps": steps,
            "prediction_check": to_plain(content.prediction_check),
            "goodput": content.goodput.as_plain() if content.goodput else None,
            "stragglers": findings.stragglers,
            "missing": [*content.notes, *findings.notes],
        }
        print(json_module.dumps(answer))
    else:
        print(path)


def find_run(run: Path) -> Path:
    """Return the folder of the run that `run` names: a path, or a name in `runs/`. The folder must have metrics.jsonl.

    If there is none, raises BadInput that names the nearest run.
    """
    choices = [run, Path("runs") / run]
    chosen = next((folder for folder in choices if (folder / "metrics.jsonl").is_file()), None)
    if chosen:
        return chosen
    other_runs = sorted(path.parent for root in {run.parent, Path("runs")} for path in root.glob("*/metrics.jsonl"))
    close = nearest(run.name, [folder.name for folder in other_runs])
    hint = next((f"; did you mean {folder}?" for folder in other_runs if folder.name == close), "")
    other_runs_hint = (
        f"; runs here: {', '.join(str(folder) for folder in other_runs[:5])}" if other_runs and not hint else ""
    )
    reason = "has no metrics.jsonl" if run.is_dir() else "is not a folder"
    raise BadInput(f"{run}: {reason}; expected a run's folder, as in runs/NAME{hint}{other_runs_hint}")
