"""Gives the rules access to the values of a run file and of the plan file that it names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from meshwright.config.schema import annotation_at, literal_options, section_of
from meshwright.config.yaml_positions import KeyPath, YamlDocument, format_value
from meshwright.spec.errors import Mistake
from meshwright.spec.plan_keys import FILE_DEFAULTS, STRATEGY_KEYS, PlanKeys
from meshwright.spec.run import RunSpec


@dataclass
class Values:
    """The values of one file. No rule reads values at the paths in `unusable`."""

    document: YamlDocument
    unusable: set[KeyPath] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.above_unusable = {bad[:length] for bad in self.unusable for length in range(len(bad))}

    def has(self, path: KeyPath) -> bool:
        return self.document.has(path)

    def usable(self, path: KeyPath) -> bool:
        bad = (path[:length] in self.unusable for length in range(len(path) + 1))
        return path not in self.above_unusable and not any(bad)

    def get(self, cls: type, path: KeyPath) -> Any:
        """Return the value at `path` of a file of class `cls`. The word `none` becomes None, unless it is one of the key's choices."""
        value = self.document.get(path)
        return None if value == "none" and "none" not in literal_options(annotation_at(cls, path)) else value


class RunValues:
    """The values of a run file by dotted key, such as `run("train.steps")`.

    Includes defaults. None for a key without a usable value.

    If the run names a plan file, keys of the section `plan` are read from that file, where a key that is left out has a
    default. In the section of a run file it has none, because the planner will choose it.
    """

    def __init__(self, document: YamlDocument, unusable: set[KeyPath], plan_file: Values | None = None) -> None:
        self.document = document
        self.unusable = unusable
        self.plan_file = plan_file
        self._run = Values(document, unusable)

    def __call__(self, key: str) -> Any:
        return self.at(tuple(key.split(".")))

    def at(self, path: KeyPath) -> Any:
        """Return the value at `path`."""
        if path[0] == "plan" and len(path) > 1 and self.plan_file is not None:
            inside = path[1:]
            if not self.plan_file.usable(inside):
                return None
            return self.plan_file.get(PlanKeys, inside) if self.plan_file.has(inside) else self._plan_default(inside)
        if not self._run.usable(path):
            return None
        return self._run.get(RunSpec, path) if self._run.has(path) else self._default(path)

    def rule_value(self, key: str) -> Any:
        """Return the value of a key in the notation of the rules of plans: a key without a dot is one of the section `plan`."""
        if key == "in a plan file":
            return self.plan_file is not None
        return self(key if "." in key else f"plan.{key}")

    def given(self, key: str) -> bool:
        """Return whether the file that should contain the key does."""
        values, path = self._of(tuple(key.split(".")))
        return values.has(path)

    def _of(self, path: KeyPath) -> tuple[Values, KeyPath]:
        """Return the file that has the key at `path`, and the path inside that file."""
        in_plan_file = path[0] == "plan" and self.plan_file is not None
        return (self.plan_file, path[1:]) if in_plan_file and self.plan_file else (self._run, path)

    def _plan_default(self, path: KeyPath) -> Any:
        if len(path) > 1:
            return _default_of(PlanKeys, path)
        by_range = self.plan_file is not None and self.plan_file.has(("layers",)) and path[0] in STRATEGY_KEYS
        return None if by_range else FILE_DEFAULTS.get(str(path[0]))

    def _default(self, path: KeyPath) -> Any:
        return None if self.document.partial else _default_of(RunSpec, path)

    def mistake(self, key: str, expected: str, near: str | None = None, got: str | None = None) -> Mistake:
        """Return a mistake at the value of `key`, in the file that contains it.

        `got` describes the value; None shows the value itself.
        """
        return self.mistake_at(tuple(key.split(".")), expected, near, got)

    def mistake_at(self, path: KeyPath, expected: str, near: str | None = None, got: str | None = None) -> Mistake:
        """Like `mistake`, for a path that may contain list indices."""
        values, inside = self._of(path)
        return values.document.mistake(inside, expected, format_value(self.at(path)) if got is None else got, near)


def _default_of(cls: type, path: KeyPath) -> Any:
    """Return the default of the key at `path` in a file of class `cls`. None if it has none."""
    section = section_of(annotation_at(cls, path[:-1])) if len(path) > 1 else cls
    defaults = {f.name: f.default for f in dataclasses.fields(section)} if section else {}
    value = defaults.get(str(path[-1]), dataclasses.MISSING)
    return None if value is dataclasses.MISSING else value
