"""`meshwright incidents`: lists the failures of a run, with the rank that caused each and the evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.options import Json, show
from meshwright.cli.report import find_run

_PLACES = {"start": " as it started", "end": " as it ended"}
"""How a line names what a rank did outside of its steps."""


def incidents(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under `runs/`.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """List the failures of a run: which rank caused each, what it did, what followed, and where the evidence is.

    The evidence has the stacks of all ranks.

    Example:

        meshwright incidents runs/quickstart
    """
    from meshwright.launch.incidents import read_incidents

    records = read_incidents(find_run(run))
    if as_json:
        print(json.dumps({"incidents": records}))
        return
    for record in records:
        show("\n".join(incident_lines(record)))
    if not records:
        print("no incidents")


def incident_lines(record: Mapping[str, Any]) -> list[str]:
    """Describe one incident in lines of text. `record` is an entry of `launch.incidents.read_incidents`."""
    moment = datetime.fromtimestamp(record["time"]).astimezone().isoformat(" ", "seconds")
    where = "before the first step" if record["step"] is None else f"step {record['step']}"
    known = record["rank"] is not None
    # A rank that raised an error has ended its work when the error is recorded.
    raised = known and record["cause"] == "failure" and record["action"] == "end"
    rank = f"rank {record['rank']} on {record['host']}" if known else "no single rank"
    if known and not raised:
        rank += _PLACES.get(record["action"], f" in {record['action']}")
    return [
        f"{moment}  {where}, attempt {record['attempt']}: {record['cause']}",
        f"  {'first to fail' if raised else 'cause'} ({record['confidence']}): {rank}",
        f"  {record['reason']}",
        f"  {record['answer']}",
        f"  evidence in {record['evidence']}",
    ]
