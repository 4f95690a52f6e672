"""`meshwright compare`: compares several runs side by side, in the terminal and on an HTML page."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.columns import aligned
from meshwright.cli.monitor import started_run
from meshwright.cli.options import Json, check_writable
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from meshwright.observe.comparison import ComparedRun

PAGE = "compare.html"
"""Default name of the page. It is written into the folder that contains the first run."""


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Two runs' folders or more, or their names under `runs/`.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"The page [default: {PAGE} beside the first run]", show_default=False),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the web browser.")] = False,
    as_json: Json = False,
) -> None:
    """Compare runs: the keys that differ, a table of figures, and a page with their curves over one another.

    The curves are training and validation loss (of each source of a mixture too), throughput, gradient norm and learning rate, by
    steps, tokens, training time or FLOPs. The page is one file, needs no network, and shows the first 8 runs' curves. Runs may
    still be going.

    Examples:

        meshwright compare runs/quickstart runs/quickstart-2

        meshwright compare runs/lr-* --out lr.html --json
    """
    from meshwright.durable.writes import write_durable
    from meshwright.observe.comparison import comparison_page, differing_keys, table_rows

    folders = [started_run(run) for run in runs]
    distinct = list(dict.fromkeys(folder.resolve() for folder in folders))
    if len(distinct) < 2:
        raise BadInput(f"expected two runs or more, got {len(distinct)}; `meshwright runs` lists them")
    check_writable("--out", out)
    compared = compared_runs(folders)
    names = [run.name for run in compared]
    keys = differing_keys(compared)
    path = out or folders[0].parent / PAGE
    write_durable(path, comparison_page(" · ".join(names) if len(names) < 4 else f"{len(names)} runs", compared))
    if open_page:
        webbrowser.open(path.resolve().as_uri())
    if as_json:
        answer = {
            "page": str(path),
            "runs": [plain_run(run) for run in compared],
            "differences": {key: dict(zip(names, texts, strict=True)) for key, texts in keys},
        }
        print(json.dumps(answer))
        return
    print_beside(names, [*table_rows(compared), *((key, texts) for key, texts in keys)])
    print(path)


def compared_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs in these folders with their present state and figures. A folder that is named twice appears once."""
    from meshwright.launch.run_figures import RunFigureReader
    from meshwright.launch.run_list import run_state
    from meshwright.observe.comparison import ComparedRun, names_of
    from meshwright.observe.runfolder import read_run

    distinct = list({folder.resolve(): folder for folder in folders}.values())
    return [
        ComparedRun.of(name, read_run(folder), run_state(folder, RunFigureReader(folder).read()))
        for name, folder in zip(names_of(distinct), distinct, strict=True)
    ]


def plain_run(run: ComparedRun) -> dict[str, object]:
    """Return a compared run as JSON values."""
    results = [{"task": result.get("task"), "metrics": result["metrics"]} for result in run.folder.benchmarks]
    return {"name": run.name, "folder": str(run.folder.path), "state": run.state, **run.figures, "benchmarks": results}


def print_beside(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print a table with one column for each run. A row is its label and one text for each run."""
    for line in aligned([("", *names), *((label, *texts) for label, texts in rows)], right=range(1, len(names) + 1)):
        print(line)
