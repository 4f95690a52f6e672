"""A model on disk: its dimensions, and its weights by rows. For inference and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.checkpoint.hf import import_hf
from meshwright.checkpoint.initial import checkpoint_weights
from meshwright.checkpoint.inventory import newest_checkpoint
from meshwright.config.load import load_resolved_model
from meshwright.models.decoder import Decoder
from meshwright.spec.inference_layout import Piece, piece_dimension, rank_pieces
from meshwright.spec.layout import WHOLE, Part
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters, without_adapter


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
def open_model(folder: Path, *, contents: bool = True, predictions: int = 0) -> Iterator[StoredModel]:
    """The model in `folder`: a run (its newest good checkpoint), one checkpoint, or a Hugging Face folder.

    Of the modules that predict further tokens it has the first `predictions`, or all if there are fewer: only speculative decoding uses
    them. With `contents` a checkpoint is good if all its bytes are; else by the names and sizes of its files. Raises BadInput if the
    folder is none of these, and Damaged if no checkpoint is good.
    """
    if (folder / "config.json").exists():
        spec, weights = import_hf(folder)
        yield StoredModel(_with_predictions(spec, predictions), weights.read_rows, lambda: None)
        return
    checkpoint = newest_checkpoint(folder, contents=contents)
    spec = _with_predictions(without_adapter(load_resolved_model(checkpoint / "config.yaml")), predictions)
    with checkpoint_weights(checkpoint) as weights:
        yield StoredModel(spec, weights.read_rows, weights.verify)


def _with_predictions(spec: ModelSpec, most: int) -> ModelSpec:
    """The model with its first `most` prediction modules."""
    return replace(spec, prediction_depth=min(spec.prediction_depth, most))
