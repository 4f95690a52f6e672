"""Rules about the optimizer: the learning rate, and patterns of parameter names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fnmatch import fnmatchcase

from meshwright.config.run_values import RunValues
from meshwright.config.yaml_positions import format_value
from meshwright.spec.errors import Mistake
from meshwright.spec.fields import from_plain, hints_of
from meshwright.spec.model import ModelSpec, parameters

LEAST_FRACTION = 0.001
"""Smallest value of `train.min_learning_rate` other than 0. The key is a fraction of the peak learning rate."""
MOST_LAYERS = 10_000
"""Patterns are not checked for models with more layers than this, because every parameter's name would be compared."""
REQUIRED = {
    field.name
    for field in dataclasses.fields(ModelSpec)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
}
"""Fields of ModelSpec without a default."""


def final_learning_rate(run: RunValues) -> Iterator[Mistake]:
    """Yield a mistake if `train.min_learning_rate` is so small that it must be meant as a learning rate, as in other programs."""
    fraction = run("train.min_learning_rate")
    peak = run("train.learning_rate")
    if fraction and fraction < LEAST_FRACTION:
        near = f"{fraction / peak:.3g}" if peak and LEAST_FRACTION <= fraction / peak <= 1 else str(LEAST_FRACTION)
        expected = f"a fraction of train.learning_rate, 0 or at least {LEAST_FRACTION}, and no learning rate"
        yield run.mistake("train.min_learning_rate", expected, near)


def decay_patterns(run: RunValues) -> Iterator[Mistake]:
    """Yield a mistake for each pattern of `train.decay_groups` that matches no parameter of the model."""
    groups = run("train.decay_groups")
    values = {name: run(f"model.{name}") for name in hints_of(ModelSpec)} if groups and run("model") else {}
    given = {name: value for name, value in values.items() if value is not None}
    if not given.keys() >= REQUIRED or given["layers"] > MOST_LAYERS:
        return
    names = [parameter.name for parameter in parameters(from_plain(ModelSpec, given))]
    for index, group in enumerate(groups):
        pattern = group.get("names") if isinstance(group, dict) else None
        if isinstance(pattern, str) and not any(fnmatchcase(name, pattern) for name in names):
            expected = "a pattern that matches a parameter's name, such as embed.* or layers.*.mlp.*"
            yield run.document.mistake(("train", "decay_groups", index, "names"), expected, format_value(pattern))
