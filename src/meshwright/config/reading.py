"""The result of reading a file: its values with their positions, and the mistakes in them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from meshwright.config.schema import accepts, annotation_at, literal_options, validate
from meshwright.config.value_sources import COMMAND_LINE
from meshwright.config.yaml_positions import KeyPath, YamlDocument, dotted
from meshwright.spec.errors import BadConfig, MeshwrightError, Mistake, Refusal, raise_together, single_errors
from meshwright.spec.fields import from_plain, hints_of
from meshwright.spec.run import RunSpec

T = TypeVar("T")
_OF_A_PLAN = ("model.", "cluster.", "train.global_batch", "train.seq_len", "train.optimizer")
"""Beginnings of the keys that a plan depends on."""


@dataclass(frozen=True)
class RunReading:
    """The result of reading a run file, the files that it extends, and the command line."""

    document: YamlDocument
    """The merged values, with their positions."""
    shown: str
    """Name of the file in messages."""
    mistakes: tuple[Mistake, ...]
    """All mistakes, not yet sorted."""
    unusable: frozenset[KeyPath]
    """Paths that have no usable value."""
    derived_notes: tuple[str, ...] = ()
    """One sentence for each derived value."""
    assumed: tuple[tuple[KeyPath, str], ...] = ()
    """(path, value as text) of each key that the quick start gives to a run without a file."""

    def notes(self, *, starts: bool = True) -> tuple[str, ...]:
        """Return one sentence for each assumption. If the command starts no run (`starts` is False), values that do not
        change a plan are left out.
        """
        relevant = [
            f"{dotted(path)}={text}" for path, text in self.assumed if starts or dotted(path).startswith(_OF_A_PLAN)
        ]
        return (*self.derived_notes, *([f"no run file: {' '.join(relevant)} assumed"] if relevant else ()))

    def run(self) -> RunSpec:
        """Return the run. Raises BadConfig with every mistake."""
        if self.mistakes:
            raise BadConfig(in_reading_order(self.mistakes, self.shown))
        return from_plain(RunSpec, validate(RunSpec, self.document.data)[0])

    def is_sound(self, *keys: str) -> bool:
        """Return whether there is no mistake at these dotted keys, in the sections around them, and in the keys below them."""
        wrong = {*self.unusable, *(tuple(mistake.key.split(".")) for mistake in self.mistakes)}
        paths = [tuple(key.split(".")) for key in keys]
        return not self.document.partial and not any(
            path[: len(bad)] == bad[: len(path)] for path in paths for bad in wrong
        )

    def sound_part(self) -> RunSpec | None:
        """Return the run with an arbitrary valid value in place of each unusable one, so that the valid keys can be checked.

        None if no such run exists, or if a part of the file could not be read.
        """
        data = copy.deepcopy(self.document.data)
        for path in sorted(self.unusable, key=len, reverse=True):
            _remove(data, path)
        run, schema_mistakes = validate(RunSpec, data)
        for wrong in schema_mistakes:
            if wrong.problem != "missing":
                return None
            _put(data, wrong.path, _any_value(annotation_at(RunSpec, wrong.path)))
        return from_plain(RunSpec, run or validate(RunSpec, data)[0]) if not self.document.partial else None

    def refusal(self, error: MeshwrightError, key: str, expected: str) -> Refusal:
        """Turn `error` into a Refusal with a position in the file.

        The position is that of `error.key`. If the message begins with a longer key below it, that key counts. An error
        without a key has the position of `key`. `expected` says what was expected.
        """
        key = error.key or key
        first = next(iter(str(error).split()), "").rstrip(":")
        if first.startswith(f"{key}.") and self.document.has(tuple(first.split("."))):
            key = first
        path = _path_in(self.document, key)
        position = self.document.value_position(path)
        if path[:2] == ("data", "mix"):  # The name of a source is itself a key.
            position = self.document.key_position(path)
        return Refusal(position.file, position.line, position.column, key, expected, str(error))


@dataclass(frozen=True)
class LocatedValues(Generic[T]):
    """Values in which each single key is valid, and the positions of the keys."""

    value: T
    """The values."""
    document: YamlDocument
    """The file from which they were read."""

    def at_keys(self) -> AbstractContextManager[None]:
        """A context: errors in its block that name a key of these values are reported at the position of the key (`errors_at_keys`)."""
        return errors_at_keys(self.document, type(self.value))


@contextmanager
def errors_at_keys(document: YamlDocument, cls: type) -> Iterator[None]:
    """A context: errors in its block that name a key of `cls` become BadConfig at the position of that key in `document`.

    It is for mistakes that show only in later work: between several keys, or between keys and a model or a machine. If
    several errors name the same key, only the first is reported. An error that names no key stays as it is. So does a
    single error whose key is neither in the file nor on the command line; among several errors, such a key has the
    position "command line".
    """
    try:
        yield
    except MeshwrightError as error:
        errors = single_errors(error)
        placed = [_at_key(document, cls, each, alone=len(errors) == 1) for each in errors]
        if placed == [error]:
            raise
        try:
            raise_together(placed)
        except BadConfig as found:
            first: dict[str, Mistake] = {}
            for mistake in found.mistakes:
                first.setdefault(mistake.key, mistake)
            raise BadConfig(in_reading_order(first.values(), document.top.file), found.exit_code) from error


def _at_key(document: YamlDocument, cls: type, error: MeshwrightError, *, alone: bool) -> MeshwrightError:
    """Turn an error into BadConfig at the position of the key that it names. If that is not possible, return the error itself."""
    key = error.key or ""
    path: KeyPath = tuple(int(step) if step.isdigit() else step for step in key.split("."))
    if isinstance(error, BadConfig) or path[0] not in (*hints_of(cls), *document.data):
        return error
    position = document.value_position(path)
    if alone and position.line is None and not document.has(path[:1]):
        return error
    return BadConfig([Refusal(position.file, position.line, position.column, key, "", str(error))], error.exit_code)


def in_reading_order(mistakes: Iterable[Mistake], first: str) -> list[Mistake]:
    """Return each mistake once, in the order in which a person reads.

    The order is: the file `first`, other files, the command line, each from the top.
    """

    def order(mistake: Mistake) -> tuple[int, str, int, int]:
        rank = {first: 0, COMMAND_LINE: 2}.get(mistake.file, 1)
        return rank, mistake.file, mistake.line or 0, mistake.column or 0

    return sorted(dict.fromkeys(mistakes), key=order)


def _path_in(document: YamlDocument, key: str) -> KeyPath:
    """Return the path of a dotted key in `document`. The name of a data source may itself contain dots."""
    if key.startswith("data.mix."):
        return ("data", "mix", key.removeprefix("data.mix."))
    path: KeyPath = tuple(key.split("."))
    return path if document.has(path) else path[:1]


def _remove(data: Any, path: KeyPath) -> None:
    for step in path[:-1]:
        data = data.get(step) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data.pop(path[-1], None)


def _put(data: Any, path: KeyPath, value: Any) -> None:
    for step in path[:-1]:
        data = data.setdefault(step, {})
    data[path[-1]] = value


def _any_value(annotation: Any) -> Any:
    """Return an arbitrary valid value of a required key."""
    options = literal_options(annotation)
    if options:
        return options[0]
    if accepts(annotation, int):
        return 1
    return "none" if accepts(annotation, str) else {}
