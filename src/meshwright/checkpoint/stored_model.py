"""A model on disk: its dimensions, and its weights by rows. For inference and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.checkpoint.adapters import BASE, base_digest, check_base, deltas_of, merged
from meshwright.checkpoint.hf import import_hf
from meshwright.checkpoint.initial import checkpoint_weights
from meshwright.checkpoint.inventory import newest_checkpoint
from meshwright.checkpoint.peft import CONFIG, StoredAdapter, read_peft
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.config.load import load_resolved, load_resolved_model
from meshwright.models.decoder import Decoder
from meshwright.spec.errors import BadInput
from meshwright.spec.inference_layout import Piece, piece_dimension, rank_pieces
from meshwright.spec.layout import WHOLE, Part
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters, without_adapter

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class StoredModel:
    """An open model. `read_rows(parameter, start, stop)` returns rows [start, stop) of dimension 0, on the CPU."""

    spec: ModelSpec
    read_rows: Callable[[ParameterSpec, int, int], torch.Tensor]
    verify: Callable[[], None]
    """Reads all weights of a checkpoint and raises Damaged if a byte differs from what was written.

    A Hugging Face folder has no digests; its headers and sizes were checked when it was opened.
    """

    def tensors(self, part: Part = WHOLE, experts: Part = WHOLE) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and value of each parameter: of all, or of the part of a tensor or expert rank of the inference engine."""
        for parameter in parameters(self.spec):
            if pieces := rank_pieces(self.spec, parameter, part, experts):
                yield parameter.name, self._combined(parameter, pieces)

    @torch.no_grad()
    def copy_to(self, model: Decoder, part: Part = WHOLE, experts: Part = WHOLE) -> None:
        """Copy the weights into the parameters of `model`, in place; the parts are those of `tensors`."""
        weights = dict(model.named_parameters())
        for name, value in self.tensors(part, experts):
            weights[name].copy_(value)

    def _combined(self, parameter: ParameterSpec, pieces: Sequence[Piece]) -> torch.Tensor:
        """Pieces that follow one another along one dimension, as one tensor."""
        values = []
        for piece in pieces:
            rows = self.read_rows(parameter, piece.offsets[0], piece.offsets[0] + piece.sizes[0])
            for dim, (start, size) in enumerate(zip(piece.offsets[1:], piece.sizes[1:], strict=True), 1):
                rows = rows.narrow(dim, start, size)
            values.append(rows)
        return values[0] if len(values) == 1 else torch.cat(values, dim=piece_dimension(parameter))


@contextmanager
def open_model(
    folder: Path, *, contents: bool = True, predictions: int = 0, adapter: Path | None = None
) -> Iterator[StoredModel]:
    """The model in `folder`: a run (its newest good checkpoint), one checkpoint, or a Hugging Face folder.

    Of the modules that predict further tokens it has the first `predictions`, or all if there are fewer: only speculative decoding uses
    them. `adapter` is merged into the weights: a folder in peft's files, or a run or a checkpoint with adapters. With `contents` a
    checkpoint is good if all its bytes are; else by the names and sizes of its files. Raises BadInput if the
    folder is none of these, and Damaged if no checkpoint is good.
    """
    if (folder / "config.json").exists():
        spec, weights = import_hf(folder)
        yield _with_adapter(
            StoredModel(_with_predictions(spec, predictions), weights.read_rows, lambda: None), adapter, folder
        )
        return
    checkpoint = newest_checkpoint(folder, contents=contents)
    spec = _with_predictions(without_adapter(load_resolved_model(checkpoint / "config.yaml")), predictions)
    with checkpoint_weights(checkpoint) as weights:
        yield _with_adapter(StoredModel(spec, weights.read_rows, weights.verify), adapter, folder)


def _with_adapter(base: StoredModel, adapter: Path | None, folder: Path) -> StoredModel:
    """The model with an adapter merged into it."""
    if adapter is None:
        return base
    stored = open_adapter(adapter, base.spec)
    for note in stored.notes:
        log.warning("%s", note)
    if stored.base is not None:
        check_base(stored.base, base_digest(base.spec, base.read_rows), str(adapter), str(folder))
    return replace(base, read_rows=merged(base.read_rows, stored.deltas))


def open_adapter(folder: Path, spec: ModelSpec) -> StoredAdapter:
    """The adapters in `folder` for the model `spec`: in peft's files, or the newest good checkpoint of a run with adapters."""
    if (folder / CONFIG).exists():
        return read_peft(folder, spec)
    checkpoint = newest_checkpoint(folder, contents=False)
    run = load_resolved(checkpoint / "config.yaml")
    if run.model.adapter is None:
        raise BadInput(f"{folder} has no adapters: expected a folder with {CONFIG}, or a run with model.adapter")
    with CheckpointReader(checkpoint) as reader:
        return StoredAdapter(deltas_of(run.model, lambda name: reader.read(f"model.{name}")), reader.state().get(BASE))


def _with_predictions(spec: ModelSpec, most: int) -> ModelSpec:
    """The model with its first `most` prediction modules."""
    return replace(spec, prediction_depth=min(spec.prediction_depth, most))
