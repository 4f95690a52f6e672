"""Loads settings of the HTTP server or the router from a file and the command line, or reports every mistake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshwright.config.mistakes import schema_mistakes
from meshwright.config.reading import in_reading_order
from meshwright.config.value_sources import COMMAND_LINE
from meshwright.config.yaml_positions import Document, Position, read_yaml
from meshwright.spec.errors import BadConfig
from meshwright.spec.fields import from_plain
from meshwright.spec.route import RouteSpec
from meshwright.spec.serve import ServeSpec

T = TypeVar("T", ServeSpec, RouteSpec)


def load_settings(settings: type[T], path: Path | None, options: Mapping[str, Any]) -> T:
    """The settings in the file at `path`, with `options` of the command line instead of its own.

    Raises BadConfig with every mistake.
    """
    document = Document({}, Position(COMMAND_LINE)) if path is None else read_yaml(path)
    for key, value in options.items():
        document.put((key,), value, Position(COMMAND_LINE))
    values, mistakes, _ = schema_mistakes(settings, document)
    mistakes += document.mistakes
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, COMMAND_LINE if path is None else str(path)))
    return from_plain(settings, values)
