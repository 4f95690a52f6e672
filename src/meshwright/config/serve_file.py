"""Loads the settings of the HTTP server or the router from a file and the command line, or reports every mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshwright.config.deployment_file import PlannedSetting, refuse_question
from meshwright.config.mistakes import schema_mistakes
from meshwright.config.reading import LocatedValues, errors_at_keys, in_reading_order
from meshwright.config.value_sources import COMMAND_LINE
from meshwright.config.yaml_positions import Position, YamlDocument, read_yaml
from meshwright.spec.errors import BadConfig, call_all
from meshwright.spec.fields import from_plain, hints_of
from meshwright.spec.route import RouteSpec
from meshwright.spec.serve import ServeSpec

T = TypeVar("T", ServeSpec, RouteSpec)


def load_settings(
    settings: type[T],
    path: Path | None,
    options: Mapping[str, Any],
    planned: Mapping[str, PlannedSetting] | None = None,
    check: Callable[[Mapping[str, Any]], Any] = lambda values: None,
) -> LocatedValues[T]:
    """Load settings from the file at `path`.

    - `settings`: the class of the settings.
    - `options`: settings from the command line. They replace those of `planned`, and those replace the settings of the
      file.
    - `planned`: settings from a deployment file. Those that are no fields of `settings` appear only in the document of
      the result.
    - `check`: receives all given values, and raises errors with keys for mistakes between them.

    Raises BadConfig with every mistake in single keys. If there is none, it raises BadConfig with the mistakes between
    keys.
    """
    document = YamlDocument({}, Position(COMMAND_LINE)) if path is None else read_yaml(path)
    refuse_question(document, "settings of a server or router; `meshwright plan` and `bench-serve` read this file")
    keys = hints_of(settings)
    others = dict[str, PlannedSetting]()
    for key, (value, position) in (planned or {}).items():
        if key in keys:
            document.put((key,), value, position)
        else:
            others[key] = PlannedSetting(value, position)
    for key, value in options.items():
        document.put((key,), value, Position(COMMAND_LINE))
    values, mistakes, _ = schema_mistakes(settings, document)
    mistakes += document.mistakes
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, COMMAND_LINE if path is None else str(path)))
    for key, (value, position) in others.items():
        document.put((key,), value, position)
    with errors_at_keys(document, settings):
        given = {**values, **{key: setting.value for key, setting in others.items()}}
        spec, _ = call_all(lambda: from_plain(settings, values), lambda: check(given))
        return LocatedValues(spec, document)
