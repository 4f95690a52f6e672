"""Initial weights from a Hugging Face folder or another run, located and compared with the model before reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from meshwright.checkpoint.hf import import_hf
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.verify import newest_checkpoint
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Initial:
    """Weights of the model that was asked about; `read_rows` gives rows [first, last) of dimension 0 of a parameter."""

    read_rows: Callable[[ParameterSpec, int, int], torch.Tensor]
    notes: tuple[str, ...] = ()
    """What their folder says that the model does without."""


@contextmanager
def initial_weights(spec: ModelSpec, init: str) -> Iterator[Initial | None]:
    """The weights that `init` (a run's `model.init`) names, open for the length of a `with` block; None for `scratch`.

    Raises BadInput when they are not there or not this model's, and Damaged as their readers do.
    """
    kind, _, folder = init.partition(":")
    if kind == "hf":
        found, weights = _find_weights(init, import_hf, folder)
        _check_shapes(init, spec, {row.name: row.shape for row in parameters(found)})
        yield Initial(weights.read_rows, tuple(f"{folder}: {note}" for note in weights.notes))
    elif kind == "checkpoint":
        newest = _find_weights(init, partial(newest_checkpoint, contents=False), folder)
        with CheckpointReader(newest) as reader:
            names = reader.names("model.")
            _check_shapes(init, spec, {name.removeprefix("model."): reader.tensors[name].shape for name in names})
            yield Initial(lambda row, first, last: reader.read_rows(f"model.{row.name}", first, last))
    else:
        yield None


def check_initial(spec: ModelSpec, init: str) -> None:
    """Raise what `initial_weights` would."""
    with initial_weights(spec, init):
        pass


def _find_weights(init: str, find: Callable[[Path], Weights], folder: str) -> Weights:
    """What is found in the folder; where it is of no use, the message says which key named it."""
    try:
        return find(Path(folder))
    except BadInput as error:
        raise BadInput(f"model.init {init}: {error}") from error


def _check_shapes(init: str, spec: ModelSpec, theirs: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadInput for the first weight that only one side has, or that has another shape."""
    ours = {row.name: row.shape for row in parameters(spec)}
    wrong = next((name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)), None)
    if wrong is not None:
        there, here = theirs.get(wrong, "missing"), ours.get(wrong, "missing")
        raise BadInput(f"model.init {init}: {wrong} is {there} there and {here} in this run's model")
