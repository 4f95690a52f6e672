"""A model on disk for inference and evaluation: its dimensions, and its weights by rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from meshwright.checkpoint.format.inventory import newest_checkpoint
from meshwright.checkpoint.models.adapters import BASE, adapter_values, base_digest, check_base, deltas_of, merged
from meshwright.checkpoint.models.hf import CPU, HFReader, import_hf
from meshwright.checkpoint.models.initial import checkpoint_weights
from meshwright.checkpoint.models.peft import CONFIG, StoredAdapter, read_peft
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.config.load import load_resolved, load_resolved_model
from meshwright.kernels.row_quantize import RoundedMatrix, rounded_matrix
from meshwright.models.decoder import Decoder
from meshwright.spec.errors import BadInput
from meshwright.spec.inference_layout import ParameterBox, piece_dimension, rank_pieces
from meshwright.spec.layout import WHOLE, AxisPart
from meshwright.spec.model import SCORE, ModelSpec, ParameterSpec, parameters, with_score, without_adapter
from meshwright.spec.weight_scheme import FP8_BLOCK, LayerFormat

log = logging.getLogger("meshwright")


NO_FORMATS: Mapping[str, LayerFormat] = {}
"""For `StoredModel.tensors`: no parameter is read in 8 bits."""


@dataclass(frozen=True)
class StoredModel:
    """An open model. `read_rows(parameter, start, stop)` returns rows [start, stop) of dimension 0, on the CPU.

    Rows of quantised weights are on the device on which `open_model` unpacks them.
    """

    spec: ModelSpec
    read_rows: Callable[[ParameterSpec, int, int], torch.Tensor]
    verify: Callable[[], None]
    """Reads all weights of a checkpoint. Raises Damaged if a byte differs from what was written.

    For a Hugging Face folder it does nothing: such a folder has no digests, and its headers and sizes were checked when it
    was opened.
    """

    quantised: HFReader | None = None
    """The reader of a Hugging Face folder with quantised weights, which can also be read as stored; else None."""

    def tensors(
        self, part: AxisPart = WHOLE, experts: AxisPart = WHOLE, formats: Mapping[str, LayerFormat] = NO_FORMATS
    ) -> Iterator[tuple[str, torch.Tensor | RoundedMatrix]]:
        """Yield the name and value of each parameter, or of the part that a rank of the inference engine needs.

        `part` is the rank's part along the tensor-parallel axis, `experts` along the expert-parallel axis. `formats` has
        the 8-bit format in which a parameter is wanted. If the folder stores it in that format, its 8-bit numbers and
        their scales are yielded as stored (`RoundedMatrix`); all other parameters are yielded as ordinary tensors.
        """
        for parameter in parameters(self.spec):
            if not (pieces := rank_pieces(self.spec, parameter, part, experts)):
                continue
            wanted = formats.get(parameter.name)
            if wanted is not None and self.format_of(parameter.name, part.count) == wanted:
                yield parameter.name, self._as_stored(parameter, pieces, wanted)
            else:
                yield parameter.name, self._combined(parameter, pieces)

    def format_of(self, name: str, ranks: int = 1) -> LayerFormat | None:
        """Return the 8-bit format in which a parameter is stored; None if it cannot be used as stored.

        It cannot if the folder does not store it in 8 bits, or if blocks would have to be cut to divide it among `ranks`
        tensor ranks (`cuts_blocks`).
        """
        if self.quantised is None or self.cuts_blocks(name, ranks):
            return None
        return self.quantised.native(self._parameters[name])

    def cuts_blocks(self, name: str, ranks: int = 1) -> bool:
        """Return whether blocks of a parameter would have to be cut to divide it among `ranks` tensor ranks.

        A block of 128 × 128 is cut if it belongs to several ranks, or if one of the fused weights begins within it.
        """
        parameter = self._parameters[name]
        if self.quantised is None or self.quantised.native(parameter) != "fp8 blocks":
            return False
        # A block is cut by an edge that is no multiple of its size. The blocks of each stored tensor begin at its first row.
        edges = self.quantised.first_rows(parameter)
        for index in range(ranks):
            pieces = rank_pieces(self.spec, parameter, AxisPart(index, ranks))
            # The first element of each piece. Where a piece ends, another one or another stored tensor begins.
            edges += [offset for piece in pieces for offset in piece.offsets]
            # The rank joins its pieces. Within its part, a piece begins after the rows of all pieces before it.
            edges += [piece.sizes[0] for piece in pieces[:-1]]
        return any(edge % FP8_BLOCK for edge in edges)

    @cached_property
    def _parameters(self) -> dict[str, ParameterSpec]:
        return {parameter.name: parameter for parameter in parameters(self.spec)}

    @torch.no_grad()
    def copy_to(self, model: Decoder, part: AxisPart = WHOLE, experts: AxisPart = WHOLE) -> None:
        """Copy the weights into the parameters of `model`, in place. `part` and `experts` are those of `tensors`."""
        weights = dict(model.named_parameters())
        for name, value in self.tensors(part, experts):
            assert isinstance(value, torch.Tensor), "without `formats`"
            weights[name].copy_(value)

    def _combined(self, parameter: ParameterSpec, pieces: Sequence[ParameterBox]) -> torch.Tensor:
        """Read pieces of a parameter and join them along the dimension in which they follow each other."""
        values = [_without_other_columns(self.read_rows(parameter, *_rows_of(piece)), piece) for piece in pieces]
        return _joined(values, parameter)

    def _as_stored(
        self, parameter: ParameterSpec, pieces: Sequence[ParameterBox], number_format: LayerFormat
    ) -> RoundedMatrix:
        """Return the same as `_combined`, in the 8-bit format in which it is stored.

        In the format "fp8 blocks", the pieces must not cut a block (`cuts_blocks`). In the other formats they may lie
        anywhere, because each output has one scale for all its inputs.
        """
        assert self.quantised is not None
        values = []
        scales = []
        for piece in pieces:
            rows = self.quantised.read_rounded(parameter, *_rows_of(piece))
            values.append(_without_other_columns(rows.values, piece))
            if number_format == "fp8 blocks":
                first_block = piece.offsets[1] // FP8_BLOCK
                blocks = -(-piece.sizes[1] // FP8_BLOCK)
                scales.append(rows.scale[:, first_block : first_block + blocks])
            else:
                scales.append(_without_other_columns(rows.scale, piece, all_inputs=True))
        return rounded_matrix(_joined(values, parameter), _joined(scales, parameter), number_format)


def _rows_of(piece: ParameterBox) -> tuple[int, int]:
    """Return the first row of a piece, and the row after the last one."""
    return piece.offsets[0], piece.offsets[0] + piece.sizes[0]


def _without_other_columns(rows: torch.Tensor, piece: ParameterBox, *, all_inputs: bool = False) -> torch.Tensor:
    """Return the elements of a piece, given all columns of its rows.

    With `all_inputs`, the last dimension is left as it is: it is that of the inputs, for which a scale has size 1.
    """
    dimensions = len(piece.sizes) - 1 if all_inputs else len(piece.sizes)
    for dim in range(1, dimensions):
        rows = rows.narrow(dim, piece.offsets[dim], piece.sizes[dim])
    return rows


def _joined(values: list[torch.Tensor], parameter: ParameterSpec) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.cat(values, dim=piece_dimension(parameter))


@contextmanager
def open_model(
    folder: Path,
    *,
    contents: bool = True,
    predictions: int = 0,
    adapter: Path | None = None,
    device: torch.device = CPU,
) -> Iterator[StoredModel]:
    """Yield the model in `folder`: a run (its newest good checkpoint), one checkpoint, or a Hugging Face folder.

    `contents`: True checks all bytes to find a good checkpoint; False only names and sizes of files.
    `predictions`: the model gets the first `predictions` of its modules that predict further tokens, or all if it has
        fewer. Only speculative decoding uses them.
    `adapter`: adapters that are merged into the weights: a folder with peft's files, or a run or checkpoint with adapters.
    `device`: where quantised weights are unpacked, and where their rows then are.

    Raises BadInput if the folder is none of these, and Damaged if no checkpoint is good.
    """
    if (folder / "config.json").exists():
        spec, weights = import_hf(folder, CPU if adapter is not None else device)
        quantised = None if weights.quantization is None else weights
        base = StoredModel(_with_predictions(spec, predictions), weights.read_rows, lambda: None, quantised)
        yield _with_adapter(base, adapter, folder)
        return
    checkpoint = newest_checkpoint(folder, contents=contents)
    spec = _with_predictions(without_adapter(load_resolved_model(checkpoint / "config.yaml")), predictions)
    with checkpoint_weights(checkpoint) as weights:
        yield _with_adapter(StoredModel(spec, weights.read_rows, weights.verify), adapter, folder)


def check_head(spec: ModelSpec, folder: Path, *, scores: bool = False) -> None:
    """Raise BadInput for a reward model, as it cannot write text; with `scores` for a model that is no reward model."""
    if scores and spec.head != "score":
        raise BadInput(f"{folder}: is a language model; expected a reward model, as preference.loss: reward trains it")
    if not scores and spec.head == "score":
        raise BadInput(
            f"{folder}: is a reward model, which gives texts scores and writes none; `meshwright serve` serves it at /score"
        )


def _with_adapter(base: StoredModel, adapter: Path | None, folder: Path) -> StoredModel:
    """Return the model with the adapters in the folder `adapter` merged into it, or unchanged if that is None."""
    if adapter is None:
        return base
    stored = open_adapter(adapter, base.spec)
    for note in stored.notes:
        log.warning("%s", note)
    spec = with_score(base.spec) if SCORE in stored.deltas else base.spec
    if stored.base is not None:
        check_base(stored.base, base_digest(spec, base.read_rows), str(adapter), str(folder))
    return replace(base, spec=spec, read_rows=merged(base.read_rows, stored.deltas), quantised=None)


def open_adapter(folder: Path, spec: ModelSpec) -> StoredAdapter:
    """Return the adapters in `folder` for the model `spec`.

    They are in peft's files, or in the newest good checkpoint of a run with adapters. Raises BadInput if there are none.
    """
    if (folder / CONFIG).exists():
        return read_peft(folder, spec)
    checkpoint = newest_checkpoint(folder, contents=False)
    run = load_resolved(checkpoint / "config.yaml")
    if run.model.adapter is None:
        raise BadInput(f"{folder} has no adapters: expected a folder with {CONFIG}, or a run with model.adapter")
    with CheckpointReader(checkpoint) as reader:
        return StoredAdapter(deltas_of(run.model, lambda name: reader.read(f"model.{name}")), reader.state().get(BASE))


def check_adapters(spec: ModelSpec) -> tuple[str, ...]:
    """Raise the error that a start with `spec.adapter.init` would raise. Return sentences about settings that are not used."""
    if spec.adapter is None or spec.adapter.init is None:
        return ()
    try:
        stored = open_adapter(Path(spec.adapter.init), spec)
    except BadInput as error:
        raise BadInput(f"model.adapter.init: {error}") from error
    adapter_values(spec, stored.deltas, spec.adapter.init)
    return stored.notes


def _with_predictions(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the model with only its first `count` prediction modules, or with all if it has fewer."""
    return replace(spec, prediction_depth=min(spec.prediction_depth, count))
