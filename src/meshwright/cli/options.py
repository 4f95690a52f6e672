"""Arguments and options that several commands share, and functions to read and check them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.events.terminal import fitted, write_line
from meshwright.spec.errors import BadInput, nearest
from meshwright.spec.foreign_words import no_folder_hint

if TYPE_CHECKING:
    from meshwright.config.reading import RunReading
    from meshwright.spec.run import RunSpec


def _require_arguments(context: typer.Context, arguments: list[str] | None) -> list[str] | None:
    if not arguments:
        context.fail(
            "name a run file, or at least one KEY=VALUE, e.g. model=llama3-1b; `meshwright quickstart` needs neither"
        )
    return arguments


_METAVAR = "[RUN.yaml] [KEY=VALUE]..."
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar=_METAVAR,
        help="A run file, and values that replace its own, e.g. `train.steps=200 model=llama3-8b`. Without a file the values alone "
        "describe the run; the values assumed for other keys are printed first.",
        show_default=False,
        callback=_require_arguments,
    ),
]
QuickstartArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar=_METAVAR, help="Values that replace the quick start's, or a run file.", show_default=False),
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder that contains a folder for each run.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")]


def split_arguments(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """Split the arguments into the run file, if there is one, and the overrides KEY=VALUE. Raises BadInput if there are two files."""
    files = [word for word in arguments or [] if "=" not in word]
    if len(files) > 1:
        raise BadInput(
            f"a single run file is expected, got {len(files)}: {' '.join(files)}; overrides are written key=value"
        )
    return (Path(files[0]) if files else None), [word for word in arguments or [] if "=" in word]


def read(arguments: list[str] | None, runs: Path = Path("runs"), *, otherwise: Path | None = None) -> RunReading:
    """Read the run that the command line describes. The result has its values and all mistakes in them.

    `runs` is the folder in which `model.init: checkpoint:NAME` looks for the run NAME. `otherwise` is the run file to
    read if the arguments name none.
    """
    from meshwright.config.load import read_run
    from meshwright.families.folder import folder_spec
    from meshwright.launch.machine import found_cluster

    path, overrides = split_arguments(arguments)
    check_runs(runs)
    return read_run(path or otherwise, overrides, runs=runs, detect=found_cluster, model_reader=folder_spec)


def load(
    arguments: list[str] | None, runs: Path = Path("runs"), *, otherwise: Path | None = None, starts: bool = True
) -> RunSpec:
    """Read the run that the command line describes, with the arguments of `read`. Raises BadConfig with every mistake.

    The first rank of a job prints the assumed values on stderr. If the command does not start the run (`starts` is
    False), it prints only those on which a plan depends.
    """
    reading = read(arguments, runs, otherwise=otherwise)
    run = reading.run()
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        for note in reading.notes(starts=starts):
            say(note)
    return run


def say(text: str) -> None:
    """Print a remark on stderr. Standard output contains only the result of a command."""
    write_line(fitted(text))


def check_runs(runs: Path) -> None:
    """Raise BadInput if the value of `--runs` is a file, or is inside of a file."""
    above = next((folder for folder in (runs, *runs.parents) if os.path.lexists(folder)), Path())
    if not above.is_dir():
        raise BadInput(f"--runs {runs}: expected a folder, and {above} is a file; name another folder")


def show(text: str) -> None:
    """Print lines of a result on stdout. On a terminal, long lines are broken between words."""
    print(fitted(text, sys.stdout))


def print_now(text: str) -> None:
    """Print a line of progress on stdout like `show`, and flush it, because ranks in other processes also print there.

    If stdout is closed, nothing happens.
    """
    write_line(fitted(text, sys.stdout), sys.stdout)


def check_writable(option: str, file: Path | None) -> None:
    """Raise BadInput if `file`, the value of `option`, cannot be written.

    Commands call it first, so that they do not compute a result that cannot be stored.
    """
    if file is None:
        return
    if not file.parent.is_dir():
        near = nearest(file.parent.name, [folder.name for folder in file.parent.parent.glob("*/")])
        hint = f"; nearest: {file.parent.parent / near}" if near else ""
        raise BadInput(f"{option} {file}: there is no folder {file.parent}{hint}")
    if file.is_dir():
        raise BadInput(f"{option} {file}: expected a file, and this is a folder; name a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise BadInput(f"{option} {file}: expected a writable path, and this one is read-only")


def model_folder(text: Path, runs: Path = Path("runs")) -> Path:
    """Return the folder `text`, or the run of that name in `runs`. If there is neither, raises BadInput that names the nearest folder."""
    for folder in (text, runs / text):
        if folder.is_dir():
            return folder
    run_folders = {
        path.parent.name: path.parent
        for folder in (runs, text.parent)
        # The first is in the folder of a run, the second in a Hugging Face folder.
        for name in ("config.yaml", "config.json")
        for path in folder.glob(f"*/{name}")
    }
    near = nearest(text.name, run_folders)
    what = "a file; expected a folder" if text.exists() else "no such folder"
    hint = no_folder_hint(str(text)) or (f"; nearest: {run_folders[near]}" if near else "")
    raise BadInput(f"{text}: {what}{hint}")
