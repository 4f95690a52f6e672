"""The errors a user can meet, each with the exit code its command ends with.

Exit codes (docs/getting-started.md lists them for users): 0 done, 1 internal error, 2 bad input, 3 out of resources,
4 data or checkpoint damaged, 5 communication failure or hang, 6 numerical failure, 7 the same failure repeated,
75 preempted with a checkpoint written, 130 interrupted with a checkpoint written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

EXIT_DONE = 0
EXIT_INTERNAL = 1
EXIT_BAD_INPUT = 2
EXIT_NO_RESOURCES = 3
EXIT_DAMAGED = 4
EXIT_COMMUNICATION = 5
EXIT_NUMERICAL = 6
EXIT_REPEATED = 7
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class MeshwrightError(Exception):
    """A failure with a message for people and an exit code for scripts."""

    exit_code = EXIT_INTERNAL


class BadInput(MeshwrightError):
    """What the user gave cannot be used; the message names where, what was expected and the nearest valid thing."""

    exit_code = EXIT_BAD_INPUT


class OutOfResources(MeshwrightError):
    """Memory, disk or the search for a feasible plan ran out."""

    exit_code = EXIT_NO_RESOURCES


class Damaged(MeshwrightError):
    """Data or a checkpoint does not match its own record."""

    exit_code = EXIT_DAMAGED


class CommunicationFailure(MeshwrightError):
    """A rank was lost or a collective did not finish in time."""

    exit_code = EXIT_COMMUNICATION


class NumericalFailure(MeshwrightError):
    """A loss or gradient is not finite."""

    exit_code = EXIT_NUMERICAL


class Preempted(MeshwrightError):
    """The scheduler asked the run to stop; a checkpoint was written and the run may be queued again."""

    exit_code = EXIT_PREEMPTED


class Interrupted(MeshwrightError):
    """A person pressed Ctrl-C; a checkpoint was written."""

    exit_code = EXIT_INTERRUPTED


CLASS_OF_CODE: dict[int, type[MeshwrightError]] = {
    kind.exit_code: kind
    for kind in (
        MeshwrightError, BadInput, OutOfResources, Damaged, CommunicationFailure, NumericalFailure, Preempted, Interrupted,
    )
}  # fmt: skip
"""Exit code → the class of error that ends with it."""


@dataclass(frozen=True)
class Mistake:
    """One thing wrong in a user's configuration.

    `line` and `column` count from 1; both are None for a command-line override, whose `file` is "command line".
    """

    file: str
    line: int | None
    column: int | None
    key: str
    expected: str
    got: str
    nearest: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        hint = f" (nearest: {self.nearest})" if self.nearest else ""
        return f"{place}: {self.key}: expected {self.expected}, got {self.got}{hint}"


class BadConfig(BadInput):
    """Every mistake found in a configuration, reported together."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))

    def as_plain(self) -> list[dict[str, Any]]:
        """The mistakes as plain dicts with the keys of `meshwright check --json`."""
        return [asdict(mistake) for mistake in self.mistakes]


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, or None when nothing is close."""
    found = get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None
