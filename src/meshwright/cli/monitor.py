"""`meshwright monitor`: shows a run in a terminal, while it runs or later."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.options import Json
from meshwright.cli.report import find_run

if TYPE_CHECKING:
    from meshwright.launch.run_snapshot import RunSnapshot, SnapshotReader

REFRESH_SECONDS = 1.0
"""Seconds between two pictures."""
MARKS = ("metrics.jsonl", "config.yaml", "supervision.jsonl", "lease.json")
"""Files that identify the folder of a run. It has at least one of them even at the start of the run."""
JSON_ROWS = 64
"""Maximum number of rows of the heat map in JSON output."""
JSON_COLUMNS = 100
"""Maximum number of columns of the heat map in JSON output."""


def monitor(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under `runs/`.", show_default=False)
    ],
    once: Annotated[bool, typer.Option("--once", help="Print one picture and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a run: progress, speed, goodput, slow ranks, expert loads, what ranks do and wait for, incidents.

    It reads only files in the run's folder and may start and stop at any time. It ends with q or Ctrl-C.
    Without a terminal on stdout it prints one picture, as with --once.

    Example:

        meshwright monitor runs/quickstart
    """
    from meshwright.launch.run_snapshot import SnapshotReader, snapshot_as_plain

    reader = SnapshotReader(started_run(run))
    if as_json:
        print(json.dumps(snapshot_as_plain(reader.read(complete=True), JSON_ROWS, JSON_COLUMNS)))
    elif once or not sys.stdout.isatty():
        _print_once(reader.read(complete=True))
    else:
        _watch(reader)


def started_run(run: Path) -> Path:
    """Return the folder of the run that `run` names. The run need not have written metrics yet. Raises BadInput if there is none."""
    for folder in (run, Path("runs") / run):
        if any((folder / name).is_file() for name in MARKS):
            return folder
    return find_run(run)


def _print_once(snapshot: RunSnapshot) -> None:
    from rich.console import Console

    from meshwright.cli.monitor_frame import frame

    console = Console(highlight=False)
    console.print(frame(snapshot, console), soft_wrap=True)


def _watch(reader: SnapshotReader) -> None:
    """Draw the picture again and again until q or Ctrl-C is pressed."""
    from rich.console import Console
    from rich.live import Live

    from meshwright.cli.monitor_frame import frame

    console = Console(highlight=False)
    try:
        with _keyboard() as wait_for_key, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                began = time.monotonic()
                live.update(frame(reader.read(), console), refresh=True)
                took = time.monotonic() - began
                if wait_for_key(max(REFRESH_SECONDS - took, took)) in ("q", "Q", "\x03"):
                    return
    except KeyboardInterrupt:
        return


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """A context that gives a function `wait(seconds)`: it waits for a key and returns it, or an empty string if none was pressed.

    In the context, the terminal does not show the keys that are pressed.
    """
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait_for_key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield wait_for_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
