"""`meshwright check`: finds every mistake that can be found before a run starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.options import Arguments, Json, Runs, read, say, show, split_arguments
from meshwright.spec.errors import EXIT_BAD_INPUT, BadConfig, MeshwrightError, Mistake

if TYPE_CHECKING:
    from meshwright.config.reading import RunReading
    from meshwright.launch.refusals import Refusals
    from meshwright.spec.model import ModelSpec


def check(arguments: Arguments = None, runs: Runs = Path("runs"), as_json: Json = False) -> None:
    """Check a run without starting it: configuration, data, divisibility, plan, disk, and what it would resume.

    Every mistake is reported, not only the first. The exit code is that of the gravest: 2 bad input, 3 out of resources, 4 damaged data.

    Without a run file, and with keys of the model alone, only the model is checked, from config.json if it is a folder. The answer says
    with which axes and formats it can be trained and served, and with which not, with why (with --json: `support`, also of a run).

    Examples:

        meshwright check run.yaml --json

        meshwright check model.init=hf:FOLDER
    """
    from meshwright.config.load import mistakes_as_json
    from meshwright.launch.refusals import Refusals
    from meshwright.spec.support import support_as_plain

    reading = read(arguments, runs)
    model_only = _asks_for_the_model(arguments)
    if model_only:
        mistakes = [each for each in reading.mistakes if each.key.partition(".")[0] == "model"]
        code = EXIT_BAD_INPUT * bool(mistakes)
        say("no run file: only the model is checked; its weights, a corpus, memory and disk are not")
    else:
        mistakes, code = _mistakes_of(reading, Refusals(reading, runs, say))
    run = reading.sound_part() if reading.is_sound("model") else None
    if as_json:
        support = {"support": support_as_plain(run.model)} if run else {}
        print(json.dumps({**mistakes_as_json(mistakes), **support}))
    else:
        if mistakes:
            say(str(BadConfig(mistakes)))
            say(f"{len(mistakes)} mistake{'s' * (len(mistakes) > 1)}")
        else:
            if model_only and run is not None:
                _show_model(run.model)
            print("ok")
    sys.exit(code)


def _asks_for_the_model(arguments: list[str] | None) -> bool:
    """Return whether there is no run file, and every KEY=VALUE is a key of the model."""
    path, overrides = split_arguments(arguments)
    return path is None and all(text.partition("=")[0].partition(".")[0] == "model" for text in overrides)


def _show_model(spec: ModelSpec) -> None:
    """Print what a model can be trained and served with, and what its folder format cannot hold."""
    from meshwright.families.folder import export_obstacle
    from meshwright.spec.support import support_lines

    for line in support_lines(spec):
        show(line)
    if obstacle := export_obstacle(spec):
        show(f"{spec.family} can be trained but not exported to a Hugging Face folder: {obstacle}")


def find_mistakes(
    arguments: list[str] | None,
    runs: Path,
    known: MeshwrightError | None = None,
    *,
    note: Callable[[str], None] = say,
    fresh: bool = False,
) -> tuple[list[Mistake], int]:
    """Return every mistake of the run that the command line describes, and the exit code of the gravest.

    `known` is an error that was raised already; `note` and `fresh` are as in `Refusals`.
    """
    from meshwright.launch.refusals import Refusals

    reading = read(arguments, runs)
    return _mistakes_of(reading, Refusals(reading, runs, note, known, fresh=fresh))


def _mistakes_of(reading: RunReading, refusals: Refusals) -> tuple[list[Mistake], int]:
    """Return the mistakes in the keys and those that only a start would find, in the order of the file, and the exit code."""
    from meshwright.config.reading import in_reading_order

    mistakes = in_reading_order([*reading.mistakes, *refusals.refusals], reading.shown)
    return mistakes, max(EXIT_BAD_INPUT * bool(reading.mistakes), refusals.exit_code)


@contextmanager
def report_all_mistakes(arguments: list[str] | None, runs: Path, *, fresh: bool = False) -> Iterator[None]:
    """A context: if its block raises an error about the run, all mistakes of the run are reported, as `check` does."""
    try:
        yield
    except MeshwrightError as error:
        if not isinstance(error, BadConfig) and error.key is None:
            raise
        mistakes, code = find_mistakes(arguments, runs, error, note=lambda text: None, fresh=fresh)
        if not mistakes:
            if error.key is None:
                raise
            mistakes = [read(arguments, runs).refusal(error, error.key, "")]
            code = error.exit_code
        raise BadConfig(mistakes, code) from error
