"""Reads initial weights (`model.init`) from a Hugging Face folder or from another run's checkpoint.

They are compared with the model first. A checkpoint of a run with adapters is read as the merged model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from meshwright.checkpoint.format.inventory import choose_newest
from meshwright.checkpoint.models.adapters import (
    BASE,
    ReadRows,
    base_digest,
    check_base,
    deltas_of,
    merged,
    random_base,
)
from meshwright.checkpoint.models.hf import import_hf
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.config.load import load_resolved
from meshwright.spec.blocks.table import ADAPTER
from meshwright.spec.errors import BadInput
from meshwright.spec.model import SCORE, ModelSpec, ParameterSpec, parameters, without_adapter
from meshwright.spec.run import RunSpec

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Initial:
    """The model's initial weights. `read_rows(parameter, start, stop)` returns rows [start, stop) of dimension 0."""

    read_rows: ReadRows
    notes: tuple[str, ...] = ()
    """Sentences for the user: settings in the folder's config.json that are ignored, or newer checkpoints that are damaged."""
    without_score: bool = False
    """Whether these are a language model's weights for a reward model. They lack the score's weight."""


@contextmanager
def initial_weights(spec: ModelSpec, init: str, key: str = "model.init") -> Iterator[Initial | None]:
    """Yield the weights that `init` names; they are open within the `with` block. Yields None for `scratch`.

    `init` is the value of a run's `key`: `hf:FOLDER`, `checkpoint:FOLDER` or `scratch`. Raises BadInput if the weights do
    not exist or do not fit the model, and Damaged if a file is damaged.
    """
    source, _, folder = init.partition(":")
    spec = without_adapter(spec)
    if source == "hf":
        stored_spec, weights = _find_weights(f"{key} {init}", import_hf, folder)
        shapes = {parameter.name: parameter.shape for parameter in parameters(stored_spec)}
        notes = tuple(f"{folder}: {note}" for note in weights.notes)
        yield _initial(f"{key} {init}", spec, shapes, weights.read_rows, notes)
    elif source == "checkpoint":
        newest = _find_weights(f"{key} {init}", partial(choose_newest, contents=False), folder)
        notes = () if newest.warning is None else (f"{key}: {newest.warning}",)
        with checkpoint_weights(newest.path) as weights:
            yield _initial(f"{key} {init}", spec, weights.shapes, weights.read_rows, notes)
    else:
        yield None


def _initial(
    named: str, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], read_rows: ReadRows, notes: tuple[str, ...]
) -> Initial:
    """Return the stored weights as the initial weights of `spec`. `shapes` are their shapes by name.

    A reward model may begin with a language model's weights, except those of the head. `named` begins error messages.
    """
    if spec.head != "score" or SCORE in shapes:
        _check_shapes(named, spec, shapes)
        return Initial(read_rows, notes)
    ours = {parameter.name: parameter.shape for parameter in parameters(spec)}
    _check_shapes(
        named, spec, {name: shape for name, shape in shapes.items() if name != "head.weight"} | {SCORE: ours[SCORE]}
    )
    return Initial(read_rows, notes, without_score=True)


@contextmanager
def base_weights(spec: ModelSpec, init: str, seed: int) -> Iterator[Initial]:
    """Yield the frozen weights of a run with adapters: those that `init` names, or random ones from the run's seed."""
    with initial_weights(spec, init) as initial:
        yield Initial(random_base(seed)) if initial is None else initial


@dataclass(frozen=True)
class CheckpointWeights:
    """The weights of an open checkpoint. Of a run with adapters they are the merged weights, in fp32."""

    reader: CheckpointReader
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter by name."""
    read_rows: ReadRows
    names: tuple[str, ...]
    """Names of the checkpoint's tensors that the weights consist of."""

    def verify(self) -> None:
        """Read all weights of the checkpoint. Raises Damaged if a byte differs from what was written."""
        self.reader.verify(self.names)


@contextmanager
def checkpoint_weights(path: Path, prefix: str = "model") -> Iterator[CheckpointWeights]:
    """Yield the weights of one checkpoint; with the prefix `ema` the moving averages.

    Adapters are merged into their base, which the checkpoint's `config.yaml` names. Raises BadInput if the base does not
    exist, or if it has other weights than those with which the adapters were trained.
    """
    with CheckpointReader(path) as reader:
        names = tuple(reader.names(f"{prefix}."))
        shapes = {name.removeprefix(f"{prefix}."): reader.tensors[name].shape for name in names}
        if not any(f".{ADAPTER}." in name for name in names):

            def read_rows(parameter: ParameterSpec, start: int, stop: int) -> torch.Tensor:
                return reader.read_rows(f"{prefix}.{parameter.name}", start, stop)

            yield CheckpointWeights(reader, shapes, read_rows, names)
            return
        run = load_resolved(path / "config.yaml")
        with base_weights(run.model, run.model.init, run.seed) as base:
            found = base_digest(run.model, base.read_rows)
            check_base(reader.state().get(BASE), found, str(path), _base_name(run))
            deltas = deltas_of(run.model, lambda name: reader.read(f"{prefix}.{name}"))
            shapes = {parameter.name: parameter.shape for parameter in parameters(without_adapter(run.model))}
            yield CheckpointWeights(reader, shapes, merged(base.read_rows, deltas), names)


def _base_name(run: RunSpec) -> str:
    return f"a model from seed {run.seed}" if run.model.init == "scratch" else f"model.init {run.model.init}"


def check_initial(spec: ModelSpec, init: str, key: str = "model.init") -> None:
    """Raise the error that `initial_weights` would raise, so that it appears before training starts."""
    with initial_weights(spec, init, key):
        pass


def _find_weights(named: str, find: Callable[[Path], Weights], folder: str) -> Weights:
    """Call `find` with the folder. If it raises BadInput, the message gets the prefix `named`: the key and its value."""
    try:
        return find(Path(folder))
    except BadInput as error:
        raise BadInput(f"{named}: {error}") from error


def _check_shapes(named: str, spec: ModelSpec, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadInput unless the model's parameters and the stored weights have the same names and shapes.

    The model may have fewer prediction modules than are stored.
    """
    expected = {parameter.name: parameter.shape for parameter in parameters(spec)}
    further = [name for name in stored if name in expected or not name.startswith("predictions.")]
    wrong = next((name for name in [*expected, *further] if expected.get(name) != stored.get(name)), None)
    if wrong is not None:
        there = stored.get(wrong, "missing")
        here = expected.get(wrong, "missing")
        raise BadInput(f"{named}: {wrong} is {there} there and {here} in this run's model")
