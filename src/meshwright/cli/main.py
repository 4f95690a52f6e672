"""`meshwright`: the commands gathered, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Annotated

import typer

from meshwright import __version__
from meshwright.cli import (
    check,
    checkpoint,
    data,
    evaluate,
    generate,
    plan,
    predict,
    profile,
    quickstart,
    report,
    schema,
    simulate,
    tokenizer,
    train,
)
from meshwright.spec.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, BadConfig, MeshwrightError

app = typer.Typer(
    name="meshwright",
    help="Train large language models from one plan.\n\n"
    "Start with `meshwright quickstart`, or write a run file and `meshwright train run.yaml`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(quickstart.quickstart)
app.command()(train.train)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(predict.predict)
app.command()(profile.profile)
app.command()(check.check)
app.add_typer(data.app, name="data")
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("eval")(evaluate.evaluate)
app.command()(generate.generate)
app.command()(report.report)
app.command()(schema.schema)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train large language models from one plan: a laptop's CPU to thousands of GPUs."""
    del version


def main() -> None:
    """Run the command line; ends the process with the exit codes of docs/getting-started.md."""
    try:
        app()
    except BadConfig as error:
        _say(f"{len(error.mistakes)} mistake{'s' * (len(error.mistakes) > 1)} in the configuration:\n{error}", error)
    except MeshwrightError as error:
        _say(str(error), error)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        traceback.print_exc()
        print(f"meshwright: internal error: {error}", file=sys.stderr)
        sys.exit(EXIT_INTERNAL)


def _say(message: str, error: MeshwrightError) -> None:
    """The message on stderr and, when one JSON object was asked for, the same on stdout."""
    if "--json" in sys.argv:
        mistakes = error.as_plain() if isinstance(error, BadConfig) else []
        print(json.dumps({"ok": False, "error": message, "errors": mistakes}))
    print(f"meshwright: {message}", file=sys.stderr)
    sys.exit(error.exit_code)
