"""Initial weights (`model.init`) from a Hugging Face folder or another run's checkpoint, compared with the model first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from meshwright.checkpoint.hf import import_hf
from meshwright.checkpoint.inventory import choose_newest
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Initial:
    """The model's initial weights; `read_rows(parameter, start, stop)` returns rows [start, stop) of dimension 0."""

    read_rows: Callable[[ParameterSpec, int, int], torch.Tensor]
    notes: tuple[str, ...] = ()
    """Sentences for the user: settings in the folder's config.json that this program ignores, or damaged newer checkpoints."""


@contextmanager
def initial_weights(spec: ModelSpec, init: str) -> Iterator[Initial | None]:
    """The weights that `init` (a run's `model.init`) names, open within a `with` block; None for `scratch`.

    Raises BadInput when they do not exist or do not fit the model, and Damaged when a file is damaged.
    """
    source, _, folder = init.partition(":")
    if source == "hf":
        stored_spec, weights = _find_weights(init, import_hf, folder)
        _check_shapes(init, spec, {parameter.name: parameter.shape for parameter in parameters(stored_spec)})
        yield Initial(weights.read_rows, tuple(f"{folder}: {note}" for note in weights.notes))
    elif source == "checkpoint":
        newest = _find_weights(init, partial(choose_newest, contents=False), folder)
        notes = () if newest.warning is None else (f"model.init: {newest.warning}",)
        with CheckpointReader(newest.path) as reader:
            names = reader.names("model.")
            _check_shapes(init, spec, {name.removeprefix("model."): reader.tensors[name].shape for name in names})
            yield Initial(
                lambda parameter, start, stop: reader.read_rows(f"model.{parameter.name}", start, stop), notes
            )
    else:
        yield None


def check_initial(spec: ModelSpec, init: str) -> None:
    """Raise the error that `initial_weights` would raise, before training starts."""
    with initial_weights(spec, init):
        pass


def _find_weights(init: str, find: Callable[[Path], Weights], folder: str) -> Weights:
    """Call `find` with the folder; add the key `model.init` to the message of a BadInput."""
    try:
        return find(Path(folder))
    except BadInput as error:
        raise BadInput(f"model.init {init}: {error}") from error


def _check_shapes(init: str, spec: ModelSpec, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadInput for the first parameter that only the model or only the stored weights have, or of another shape.

    The model may have fewer prediction modules.
    """
    expected = {parameter.name: parameter.shape for parameter in parameters(spec)}
    further = [name for name in stored if name in expected or not name.startswith("predictions.")]
    wrong = next((name for name in [*expected, *further] if expected.get(name) != stored.get(name)), None)
    if wrong is not None:
        there, here = stored.get(wrong, "missing"), expected.get(wrong, "missing")
        raise BadInput(f"model.init {init}: {wrong} is {there} there and {here} in this run's model")
