"""`meshwright runs`: lists the runs in a folder, stops them and deletes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from meshwright.cli.columns import aligned
from meshwright.cli.monitor import started_run
from meshwright.cli.options import Json, say
from meshwright.events.terminal import columns_of
from meshwright.spec.errors import BadInput, nearest

if TYPE_CHECKING:
    from meshwright.launch.run_list import ListedRun

DEFAULT_COMMAND = "list"
"""The command that `meshwright runs` without a command means."""


class _ListsByDefault(TyperGroup):
    """Treats `runs` as `runs list`, and `runs FOLDER` as `runs list FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ListsByDefault,
    help="List the runs in a folder, stop them, delete them. Without a command, or with a folder in its place, it lists.",
    rich_markup_mode="markdown",
)
RunArguments = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Runs' folders, or their names under `runs/`.", show_default=False),
]


@app.command("list")
def list_runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder that contains a folder for each run, or folders of them.")
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs in a folder: name, state, step, loss, tokens, age, size, plan.

    A run is running, waiting (for hosts, or for its first step), finished (all steps done), stopped (the command that
    started it continues it) or failed. Age is the time since its last step. Only files are read, so it works beside running jobs.

    Examples:

        meshwright runs

        meshwright runs list runs/my-sweep --json
    """
    from meshwright.launch.run_list import list_run, runs_in

    if not folder.is_dir():
        near = nearest(folder.name, ("list", "stop", "delete"))
        near = near or nearest(folder.name, [path.name for path in folder.parent.glob("*/")])
        raise BadInput(f"{folder}: no such folder" + (f"; nearest: {near}" if near else ""))
    runs = [list_run(path, folder) for path in runs_in(folder)]
    if as_json:
        print(json.dumps({"runs": [asdict(run) for run in runs]}))
    elif not runs:
        print(f"no runs in {folder}; `meshwright train run.yaml` starts one")
    else:
        _print(runs)


def _print(runs: Sequence[ListedRun]) -> None:
    """Print one line for each run."""
    from meshwright.observe import number_text

    heads = ("name", "state", "step", "loss", "val", "tokens", "age", "size", "plan")
    rows = [
        (
            run.name,
            run.state if run.exit_code is None or run.state != "failed" else f"failed ({run.exit_code})",
            f"{run.step:,}" + ("" if run.steps is None else f"/{run.steps:,}"),
            "–" if run.loss is None else f"{run.loss:.4f}",
            "–" if run.validation_loss is None else f"{run.validation_loss:.4f}",
            "–" if run.tokens is None else number_text.short(run.tokens),
            number_text.clock(run.changed_seconds),
            number_text.size(run.bytes),
            run.plan or "–",
        )
        for run in runs
    ]
    for line in aligned([heads, *rows], right=range(2, 8), columns=columns_of(sys.stdout)):
        print(line)


@app.command()
def stop(
    runs: RunArguments,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return at once, while the runs still write their checkpoints.")
    ] = False,
) -> None:
    """Ask running jobs of this host to end after the running step, with a checkpoint, and wait for them.

    It does what SIGTERM does: the command that started the run ends with code 75, and continues the run when it is given again. A
    supervised run on several hosts is stopped on the host of its coordinator. Ctrl-C ends the waiting alone.

    Example:

        meshwright runs stop quickstart
    """
    from meshwright.launch.run_list import await_end, request_stop

    asked = []
    for run in runs:
        folder = started_run(run)
        pid, lease = request_stop(folder)
        asked.append((folder, lease))
        print(f"{folder}: asked process {pid} to stop after its running step, with a checkpoint", flush=True)
    if no_wait:
        return
    for folder, lease in asked:
        figures = await_end(folder, lease)
        saved = f"; checkpoint of step {figures.checkpoint_step:,}" if figures.checkpoint_step else "; no checkpoint"
        print(f"{folder}: {figures.state} after step {figures.step:,}{saved}")


@app.command()
def delete(
    runs: RunArguments,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete runs with their checkpoints, after a question.

    Refused are: a run that is running; a folder that is not a run's, or holds others; and a run that another one beside it
    names as its initial weights (`model.init`), data or plan. Copies in `checkpoint.mirror` stay. Nothing is deleted if one
    of the runs is refused.

    Example:

        meshwright runs delete old-run other-run --yes
    """
    from meshwright.launch.run_list import check_deletable, delete_run, list_run, runs_in
    from meshwright.observe import number_text

    folders = [_deletable_folder(run) for run in runs]
    parents = {folder.resolve().parent for folder in folders}
    chosen = {folder.resolve() for folder in folders}
    others = [path for parent in parents for path in runs_in(parent) if path.resolve() not in chosen]
    for folder in folders:
        check_deletable(folder, others)
    for folder in folders:
        run = list_run(folder)
        print(f"{folder}: {run.state}, step {run.step:,}, {number_text.size(run.bytes)}", flush=True)
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("a question needs a terminal; --yes deletes without one")
        if not typer.confirm(f"Delete {'this run' if len(folders) == 1 else f'these {len(folders)} runs'} for ever?"):
            say("nothing was deleted")
            return
    for folder in folders:
        delete_run(folder)
        print(f"{folder}: deleted")


def _deletable_folder(run: Path) -> Path:
    """Return the folder that `run` names. A folder that is not a run is returned too; it is refused later, with a message of its own."""
    return run if run.is_dir() else started_run(run)
