"""The errors that a user can meet. Each class has the exit code of the command.

Exit codes (docs/reference/exit-codes.md lists them for users): 0 done, 1 internal error, 2 bad input, 3 out of
resources, 4 data or checkpoint damaged, 5 communication failure, hang or corrupt state, 6 numerical failure, 7 the same
failure repeated, 75 preempted with a checkpoint written, 130 interrupted with a checkpoint written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

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

T = TypeVar("T")


class MeshwrightError(Exception):
    """A failure with a message for people and an exit code for scripts.

    `key` is the dotted key of the run file to which the failure belongs; None if there is none.
    """

    exit_code = EXIT_INTERNAL

    def __init__(self, *parts: object, key: str | None = None) -> None:
        super().__init__(*parts)
        self.key = key


class BadInput(MeshwrightError):
    """Invalid input; the message names its position, what was expected and the nearest valid value."""

    exit_code = EXIT_BAD_INPUT


class OutOfResources(MeshwrightError):
    """Memory or disk is exhausted, or no plan fits."""

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


class StateCorrupted(MeshwrightError):
    """State on a rank changed without an update, or differs from its copies, and there is no checkpoint.

    A restart may help.
    """

    exit_code = EXIT_COMMUNICATION


class Preempted(MeshwrightError):
    """The scheduler asked the run to stop; a checkpoint was written and the run may be queued again."""

    exit_code = EXIT_PREEMPTED


class Interrupted(MeshwrightError):
    """A person pressed Ctrl-C; a checkpoint was written."""

    exit_code = EXIT_INTERRUPTED


ERROR_CLASS_BY_EXIT_CODE: dict[int, type[MeshwrightError]] = {
    error_class.exit_code: error_class
    for error_class in (
        MeshwrightError,
        BadInput,
        OutOfResources,
        Damaged,
        CommunicationFailure,
        NumericalFailure,
        Preempted,
        Interrupted,
    )
}
"""Error class by exit code."""


@contextmanager
def attach_key(key: str) -> Iterator[None]:
    """Set `key` on the errors that the `with` block raises, unless they have a key already."""
    try:
        yield
    except MeshwrightError as error:
        for each in single_errors(error):
            each.key = each.key or key
        raise


class SeveralErrors(BadInput):
    """Several errors of independent checks. `exit_code` is the highest of their exit codes."""

    def __init__(self, errors: Sequence[MeshwrightError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = tuple(errors)
        self.exit_code = max(error.exit_code for error in errors)


def single_errors(error: MeshwrightError) -> tuple[MeshwrightError, ...]:
    """Return the errors of a SeveralErrors; for any other error, the error itself."""
    return error.errors if isinstance(error, SeveralErrors) else (error,)


def call_all(*calls: Callable[[], T]) -> list[T]:
    """Call all functions, which must not depend on each other, and return their results.

    Raises all their errors together (`raise_together`).
    """
    results = []
    errors = []
    for call in calls:
        try:
            results.append(call())
        except MeshwrightError as error:
            errors.append(error)
    raise_together(errors)
    return results


def raise_together(errors: Iterable[MeshwrightError]) -> None:
    """Raise a single error as it is, and several errors as one: BadConfig if all of them are BadConfig, else
    SeveralErrors.
    """
    found = [single for error in errors for single in single_errors(error)]
    configs = [error for error in found if isinstance(error, BadConfig)]
    if len(found) == 1:
        raise found[0]
    if found and len(configs) == len(found):
        mistakes = chain.from_iterable(error.mistakes for error in configs)
        raise BadConfig(mistakes, max(error.exit_code for error in configs))
    if found:
        raise SeveralErrors(found)


@dataclass(frozen=True)
class Mistake:
    """A mistake in a configuration."""

    file: str
    """Name of the file; "command line" for an override."""
    line: int | None
    """Line, counted from 1; None for an override on the command line."""
    column: int | None
    """Column, counted from 1; None for an override on the command line."""
    key: str
    """Dotted key with the mistake."""
    expected: str
    """What is valid there."""
    got: str
    """What is there."""
    nearest: str | None = None
    """The nearest valid value, if one is known."""

    @property
    def position(self) -> str:
        """Return FILE:LINE:COLUMN, or FILE if there is no line."""
        return self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"

    def __str__(self) -> str:
        hint = f" (nearest: {self.nearest})" if self.nearest else ""
        return f"{self.position}: {shorten(self.key)}: expected {self.expected}, got {self.got}{hint}"


class WrongKey(NamedTuple):
    """A value of a model that does not fit other values of it."""

    key: str
    """Key of the model with the value."""
    found: str
    """The value, as text."""
    expected: str
    """What was expected. It may name other keys in braces.

    Example: "a divisor of {heads}" with `beside` (("heads", 4),) becomes "a divisor of heads (4)", and in a run file "a
    divisor of model.heads = 4".
    """
    near: str | None = None
    """The nearest valid value, if one is known."""
    beside: tuple[tuple[str, Any], ...] = ()
    """Names and values of the keys in braces."""

    def expected_with(self, named: Callable[[str, Any], str]) -> str:
        """Return `expected`, in which `named` writes each key in braces with its value."""
        return (
            self.expected.format(**{key: named(key, value) for key, value in self.beside})
            if self.beside
            else self.expected
        )

    def __str__(self) -> str:
        hint = f"; nearest: {self.near}" if self.near else ""
        return f"{self.key} is {self.found}: expected {self.expected_with(lambda key, value: f'{key} ({value})')}{hint}"


def shorten(text: str) -> str:
    """Return `text`, cut to the length that a message shows."""
    return text if len(text) <= 100 else f"{text[:97]}..."


class Refusal(Mistake):
    """A mistake that was found by reading data or weights, by the devices or by the planner.

    `got` is the whole sentence.
    """

    def __str__(self) -> str:
        sentence = self.got
        last = self.key.rpartition(".")[2]
        for prefix in (f"{self.key}: ", f"{self.key} ", f"{self.key.removeprefix('data.mix.')}: ", f"{last}: "):
            sentence = sentence.removeprefix(prefix)
        hint = f" (nearest: {self.nearest})" if self.nearest else ""
        return f"{self.position}: {shorten(self.key)}: {sentence}{hint}"


class MissingFile(Mistake):
    """The mistake of a file that does not exist. `nearest` is the name of another file in its folder."""

    def __str__(self) -> str:
        hint = f"; nearest: {PurePath(self.file).with_name(self.nearest)}" if self.nearest else ""
        return f"no file {self.file}{hint}"


COMPARED_CHARACTERS = 200
"""Number of characters of a word that are compared with valid words."""
MOST_LISTED = 100
"""Maximum number of mistakes that one report lists; it states the number of the others."""


class BadConfig(BadInput):
    """All mistakes in a configuration, reported together. `exit_code` is the highest of their exit codes."""

    def __init__(self, mistakes: Iterable[Mistake], exit_code: int = EXIT_BAD_INPUT) -> None:
        self.mistakes = tuple(mistakes)
        self.exit_code = exit_code
        listed = [str(mistake) for mistake in self.mistakes[:MOST_LISTED]]
        super().__init__("\n".join([*listed, *([f"… and {self.unlisted} more"] if self.unlisted else [])]))

    @property
    def unlisted(self) -> int:
        """Return the number of mistakes that the message and `as_plain` do not list."""
        return max(0, len(self.mistakes) - MOST_LISTED)

    def as_plain(self) -> list[dict[str, Any]]:
        """Return the listed mistakes as plain dicts with the keys of `meshwright check --json`."""
        return [asdict(mistake) for mistake in self.mistakes[:MOST_LISTED]]


def nearest_file(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate file whose name is most similar to `name`.

    All candidates have the same extension, which is not compared.
    """
    names = {PurePath(candidate).stem: candidate for candidate in candidates}
    close = nearest(PurePath(name).stem, names)
    return names[close] if close else None


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate that is most similar to `word` but not equal to it.

    None if no similarity is at least `cutoff` (0: different, 1: equal).
    """
    others = [candidate for candidate in candidates if candidate != word]
    matches = get_close_matches(word[:COMPARED_CHARACTERS], others, n=1, cutoff=cutoff)
    return matches[0] if matches else None
