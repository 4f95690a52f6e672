"""Copies the trainer's weights in place into an engine on the same device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.models.adapters import deltas_of, merged
from meshwright.checkpoint.ranks import RankGroup
from meshwright.spec.layout import Box
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters, without_adapter
from meshwright.state.parts import StateParts


class WeightHandover:
    """Collects whole weights from the shards on all ranks, with adapters merged into the model.

    The constructor and `tensors` are collective.

    `weights` are this rank's shards by parameter, both trained and frozen. `group` transfers the weights, `ranks` the descriptions of
    shards. If several ranks have the same shard, the first of them sends it. `dtype` is the engine's type.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, StateParts],
        ranks: RankGroup,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._ranks = ranks
        self._group = group
        self._dtype = dtype
        self._shapes = {parameter.name: parameter.shape for parameter in parameters(spec)}
        boxes_by_rank = ranks.run_on_all(
            "hand over weights", lambda: {name: parts.boxes for name, parts in weights.items()}
        )
        self._senders = {name: _senders(name, boxes_by_rank) for name in self._shapes}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each parameter of the model without adapters. A tensor is valid until the next one is yielded."""
        read = self._read if self._spec.adapter is None else merged(self._read, deltas_of(self._spec, self._adapter))
        for parameter in parameters(without_adapter(self._spec)):
            yield parameter.name, read(parameter, 0, parameter.shape[0])

    def _read(self, parameter: ParameterSpec, start: int, stop: int) -> Tensor:
        """The whole parameter. `merged` must ask for all of its rows."""
        assert (start, stop) == (0, parameter.shape[0])
        return self._whole(parameter.name)

    def _adapter(self, name: str) -> Tensor:
        """A parameter of an adapter, rounded to the type in which the trainer uses it."""
        return self._whole(name).to(self._dtype)

    @torch.no_grad()
    def _whole(self, name: str) -> Tensor:
        """Collect a whole parameter on all ranks. Collective."""
        shape = self._shapes[name]
        parts = self._weights.get(name)
        if self._ranks.is_single:
            assert parts is not None, "a single rank has all parameters"
            return parts.read()
        device = next(iter(self._weights.values())).device
        whole = torch.empty(shape, dtype=self._dtype, device=device)
        for box, rank in self._senders[name]:
            place = _elements(whole, box)
            piece = torch.empty(place.shape, dtype=self._dtype, device=device)
            if rank == self._ranks.rank:
                assert parts is not None
                piece.copy_(parts.piece(box.offsets).view(place.shape))
            dist.broadcast(piece, group=self._group, group_src=rank)
            place.copy_(piece)
        return whole


def _senders(name: str, boxes_by_rank: list[dict[str, tuple[Box, ...]]]) -> list[tuple[Box, int]]:
    """The boxes (ranges of elements) into which a parameter is divided, each with the first rank that has it."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Box, int]] = {}
    for rank, boxes in enumerate(boxes_by_rank):
        for box in boxes.get(name, ()):
            first.setdefault((box.offsets, box.sizes), (box, rank))
    return list(first.values())


def _elements(whole: Tensor, box: Box) -> Tensor:
    """The view of `whole` that a box covers."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole
