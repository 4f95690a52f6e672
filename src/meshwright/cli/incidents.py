"""`meshwright incidents`: the failures of a run, with the rank that caused each and the evidence."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import Json
from meshwright.cli.report import find_run


def incidents(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under `runs/`.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """List the failures of a run: which rank caused each, what it did, and where the stacks of all ranks are.

    Example: meshwright incidents runs/quickstart
    """
    from meshwright.launch.incidents import read_incidents

    records = read_incidents(find_run(run))
    if as_json:
        print(json.dumps({"incidents": records}))
        return
    for record in records:
        moment = datetime.fromtimestamp(record["time"]).astimezone().isoformat(" ", "seconds")
        where = "before the first step" if record["step"] is None else f"step {record['step']}"
        print(f"{moment}  {where}, attempt {record['attempt']}: {record['cause']}")
        rank = "no rank" if record["rank"] is None else f"rank {record['rank']} on {record['host']}, {record['action']}"
        print(f"  {record['confidence']}: {rank}")
        print(f"  {record['reason']}")
        print(f"  {record['answer']}")
        print(f"  evidence in {record['evidence']}")
    if not records:
        print("no incidents")
