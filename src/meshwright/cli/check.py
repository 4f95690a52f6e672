"""`meshwright check`: everything that can be found wrong before a run starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.options import Json, Runs, Words, load, say
from meshwright.spec.errors import BadConfig, MeshwrightError, Mistake

if TYPE_CHECKING:
    from meshwright.spec.run import RunSpec


def check(words: Words = None, runs: Runs = Path("runs"), as_json: Json = False) -> None:
    """Check a run without starting it: configuration, data, divisibility, plan, disk, and what it would resume.

    Every mistake is reported, not only the first. The exit code is that of the gravest: 2 bad input, 3 out of resources, 4 damaged data.

    Example:

        meshwright check run.yaml --json
    """
    from meshwright.spec.load import mistakes_as_json

    mistakes, code = find_mistakes(words, runs)
    if as_json:
        print(json.dumps(mistakes_as_json(mistakes)))
    else:
        for mistake in mistakes:
            print(mistake, file=sys.stderr)
        print(f"{len(mistakes)} mistake{'s' * (len(mistakes) > 1)}" if mistakes else "ok", file=sys.stderr)
    sys.exit(code)


def find_mistakes(words: list[str] | None, runs: Path) -> tuple[list[Mistake], int]:
    """Everything wrong with the run the words describe, and the exit code it would end with."""
    try:
        run = load(words, runs)
    except BadConfig as error:
        return list(error.mistakes), error.exit_code
    file = next((word for word in words or [] if "=" not in word), "built-in run")
    found = [(mistake, error.exit_code) for error, mistake in _run_checks(run, runs, file)]
    return [mistake for mistake, _ in found], max((code for _, code in found), default=0)


def _run_checks(run: RunSpec, runs: Path, file: str) -> list[tuple[MeshwrightError, Mistake]]:
    from meshwright.launch import prepare
    from meshwright.launch.folder import continues
    from meshwright.observe.sinks import check_sinks

    wrong: list[tuple[MeshwrightError, Mistake]] = []

    def attempt(key: str, expected: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except MeshwrightError as error:
            wrong.append((error, Mistake(file, None, None, key, expected, str(error))))
            return False
        return True

    attempt("observe", "packages that are installed", lambda: check_sinks(run.observe))
    resolved = run
    data = "prepared data with a tokenizer the model fits"
    if not prepare.lacks_stdlib(run) and attempt("data", data, lambda: prepare.resolve_data(run, _quiet)):
        resolved = prepare.resolve_data(run, _quiet)
    complete, folder = prepare.with_vocabulary(resolved), runs / run.name
    # Without a vocabulary every earlier run would seem to differ in it.
    known = bool(resolved.model.vocab_size)
    named = "a new name, or a run with the same configuration"
    if not known or (attempt("name", named, lambda: continues(resolved, folder)) and not continues(resolved, folder)):
        attempt("model.init", "weights of this model", lambda: prepare.check_init(complete, _quiet))
    attempt("plan", "a plan that fits the cluster", lambda: prepare.training_plan(complete, say))
    attempt("checkpoint", "room for one checkpoint", lambda: prepare.check_disk(complete, folder))
    return wrong


def _quiet(text: str) -> None:
    del text
