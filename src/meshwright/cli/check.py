"""`meshwright check`: everything that can be found wrong before a run starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshwright.cli.options import Json, Runs, Words, load, say
from meshwright.spec.errors import BadConfig, BadInput, MeshwrightError, Mistake
from meshwright.spec.sources import COMMAND_LINE

if TYPE_CHECKING:
    from meshwright.spec.run import RunSpec

T = TypeVar("T")


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
    file = next((word for word in words or [] if "=" not in word), COMMAND_LINE)
    found = [(mistake, error.exit_code) for error, mistake in _run_checks(run, runs, file)]
    return [mistake for mistake, _ in found], max((code for _, code in found), default=0)


def _run_checks(run: RunSpec, runs: Path, file: str) -> list[tuple[MeshwrightError, Mistake]]:
    from meshwright.launch.machine import check_devices
    from meshwright.launch.prepare import check_start

    wrong: list[tuple[MeshwrightError, Mistake]] = []

    def attempt(key: str, expected: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except MeshwrightError as error:
            wrong.append((error, Mistake(file, None, None, key, expected, str(error))))
            return None

    check_start(run, runs, attempt, say, build_stdlib=False)
    try:
        check_devices(run.cluster)
    except BadInput as error:  # no mistake: a run may be checked on another machine than its own
        say(f"on this machine `train` would stop: {error}")
    return wrong
