"""The entry point `meshwright`: collects the commands, and turns errors into messages and exit codes."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from meshwright import __version__
from meshwright.cli.command import Command
from meshwright.cli.streams import complete_streams
from meshwright.events.terminal import fitted, write_line
from meshwright.spec.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, BadConfig, MeshwrightError, MissingFile
from meshwright.spec.failures import COMMAND_MEMORY_HINT, as_meshwright_error

GROUPS = {
    "Runs": (
        "quickstart",
        "train",
        "rl",
        "coordinate",
        "launch",
        "check",
        "host",
        "chaos",
        "runs",
        "compare",
        "sweep",
        "report",
        "trace",
        "monitor",
        "incidents",
        "stragglers",
    ),
    "Plans": ("plan", "simulate", "profile", "predict"),
    "Models": ("eval", "bench", "generate", "chat", "serve", "route", "cache", "bench-serve"),
    "Data and checkpoints": ("data", "tokenizer", "checkpoint"),
    "Schemas": ("schema",),
}
"""The commands by subject, in the order in which the help and docs/reference/cli.md show them."""
COMMANDS = {name: name for names in GROUPS.values() for name in names} | {
    "eval": "evaluate",
    "bench-serve": "bench_serve",
}
"""The module of each command in this package. A module has a function of its own name, or an `app` with several commands."""

HELP_COLUMNS = 120
"""Largest width of a help text. A narrower terminal gets narrower lines."""


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Build the command line.

    If `arguments` begin with the name of a command, only this command is built, because importing and building all of
    them takes time.
    """
    app = typer.Typer(
        name="meshwright",
        help="Train large language models from one plan.\n\n"
        "Start with `meshwright quickstart`, or write a run file and `meshwright train run.yaml`.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_COLUMNS},
        # click 8.4 suggests near names by itself. A typer that contains its own copy of click leaves this to the
        # setting.
        suggest_commands=find_spec("typer._click") is not None,
    )
    app.callback()(_root)
    panels = {name: group for group, names in GROUPS.items() for name in names}
    for name in arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS:
        module = import_module(f"meshwright.cli.{COMMANDS[name]}")
        if hasattr(module, "app"):
            for command in module.app.registered_commands:
                command.cls = Command
            app.add_typer(module.app, name=name, rich_help_panel=panels[name])
        else:
            app.command(name, cls=Command, rich_help_panel=panels[name])(getattr(module, COMMANDS[name]))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Plan and train large language models, from a laptop's CPU to thousands of GPUs."""
    del version


def main() -> None:
    """Run the command line and end the process with an exit code of docs/reference/exit-codes.md."""
    _collect_rarely()
    complete_streams()
    failure: MeshwrightError | None = None
    try:
        app_for(_arguments_to_complete() or sys.argv[1:])(prog_name="meshwright")
    except BadConfig as error:
        count = len(error.mistakes)
        only_missing = all(isinstance(mistake, MissingFile) for mistake in error.mistakes)
        head = "" if only_missing else f"{count} mistake{'s' * (count > 1)} in the configuration:\n"
        _say(f"{head}{error}", error)
    except MeshwrightError as error:
        _say(str(error), error)
    except (KeyboardInterrupt, SystemExit) as end:
        cause = end.__context__.__cause__ if end.__context__ is not None else None
        # Typer turns a KeyboardInterrupt into a SystemExit.
        if isinstance(end, SystemExit) and not isinstance(cause, KeyboardInterrupt):
            raise
        print("meshwright: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        failure = as_meshwright_error(error, memory_hint=COMMAND_MEMORY_HINT)
        if failure.exit_code == EXIT_INTERNAL:
            traceback.print_exc()
    # This is not inside the `except` block, because there the traceback still keeps the objects of its frames alive. If
    # memory has run out, the message itself could fail.
    if failure is not None:
        _say(str(failure), failure)


def _collect_rarely() -> None:
    """Let the garbage collector scan the objects of imported modules less often, and not when the process ends.

    With torch there are hundreds of thousands of objects. To scan them takes a third of the time of a short command.
    """
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)


def _arguments_to_complete() -> list[str]:
    """Return the arguments after `meshwright` on the line that a shell asks to complete. Empty if this is no completion."""
    if "_MESHWRIGHT_COMPLETE" not in os.environ:
        return []
    return os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", "")).split()[1:]


def _say(message: str, error: MeshwrightError) -> None:
    """Print the message on stderr and exit with the error's code. With --json, also print it as a JSON object on stdout."""
    if "--json" in sys.argv:
        mistakes = error.as_plain() if isinstance(error, BadConfig) else []
        print(json.dumps({"ok": False, "error": message, "errors": mistakes}))
    write_line(fitted(f"meshwright: {message}"))
    sys.exit(error.exit_code)
