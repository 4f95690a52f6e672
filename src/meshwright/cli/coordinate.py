"""`meshwright coordinate`: coordinates the agents of a run on several hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.check import report_all_mistakes
from meshwright.cli.options import Arguments, Runs, load, print_now


def coordinate(
    arguments: Arguments = None,
    runs: Runs = Path("runs"),
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            envvar="MESHWRIGHT_COORDINATOR",
            help="Address at which agents reach this process.",
        ),
    ] = "127.0.0.1:29400",
) -> None:
    """Coordinate the agents of a run: start attempts on their hosts, detect failures, restart.

    Agents (`meshwright train --agent`) start the coordinator themselves if MESHWRIGHT_COORDINATOR names their host. This command runs it
    elsewhere, or again after it died. It continues the job whose state is in the run's folder. MESHWRIGHT_TOKEN_FILE names the file with
    the job token.

    Examples:

        meshwright coordinate run.yaml --listen 10.0.0.1:29400
    """
    from meshwright.cli.train import announce
    from meshwright.launch.control import coordinator_address
    from meshwright.launch.hosts import run_coordinator

    with report_all_mistakes(arguments, runs):
        run = load(arguments, runs)
        code = run_coordinator(run, runs, coordinator_address(listen), print_now, announce)
    sys.exit(code)
