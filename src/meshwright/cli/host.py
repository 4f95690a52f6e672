"""`meshwright host`: checks this host before a job starts."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

app = typer.Typer(help="Check this host before a job starts.", no_args_is_help=True)


@app.callback()
def _host() -> None:
    """Check this host before a job starts."""


@app.command()
def check(
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=0, help="Only the first visible GPUs; 0 for none. [default: all]", show_default=False
        ),
    ] = None,
) -> None:
    """Read the health of the host and its GPUs for two seconds, and print one JSON object.

    It has `verdict`, `findings` with their actions and sources, `notes` about what cannot be read, and the `values`. Exit code 0: healthy,
    1: with warnings, 2: a job should not start here.

    Examples:

        meshwright host check

        meshwright host check --gpus 0 | jq -r .verdict
    """
    from meshwright.launch.health_reader import ALL
    from meshwright.launch.host_check import check_host

    code, answer = check_host(ALL if gpus is None else gpus)
    print(json.dumps(answer))
    sys.exit(code)
