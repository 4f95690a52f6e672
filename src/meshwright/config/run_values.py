"""The values of a run file, as the rules between keys read them."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.config.schema import annotation_at, literal_options, section_of
from meshwright.config.yaml_positions import Document, KeyPath, format_value
from meshwright.spec.errors import Mistake
from meshwright.spec.run import RunSpec


class RunValues:
    """The values of a run file by dotted key, defaults included; None for a key without a usable value."""

    def __init__(self, document: Document, unusable: set[KeyPath]) -> None:
        self.document = document
        self.unusable = unusable
        self.above_unusable = {bad[:length] for bad in unusable for length in range(len(bad))}

    def __call__(self, key: str) -> Any:
        path: KeyPath = tuple(key.split("."))
        if path in self.above_unusable or any(path[:length] in self.unusable for length in range(len(path) + 1)):
            return None
        if not self.document.has(path):
            return self._default(path)
        value = self.document.get(path)
        is_literal = "none" in literal_options(annotation_at(RunSpec, path))
        return None if value == "none" and not is_literal else value

    def _default(self, path: KeyPath) -> Any:
        section = section_of(annotation_at(RunSpec, path[:-1])) if len(path) > 1 else RunSpec
        defaults = {f.name: f.default for f in dataclasses.fields(section)} if section else {}
        value = defaults.get(str(path[-1]), dataclasses.MISSING)
        return None if value is dataclasses.MISSING or self.document.partial else value

    def mistake(self, key: str, expected: str, near: str | None = None, got: str | None = None) -> Mistake:
        path: KeyPath = tuple(key.split("."))
        return self.document.mistake(path, expected, format_value(self(key)) if got is None else got, near)
