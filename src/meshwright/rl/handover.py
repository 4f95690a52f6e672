"""Gives an engine beside the trainer the trainer's weights, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.ranks import Ranks
from meshwright.spec.layout import Box
from meshwright.spec.model import ModelSpec, parameters
from meshwright.state.parts import StateParts


class WeightHandover:
    """Collects whole weights from the parts that ranks train. Collective, also when it is made.

    `weights` are this rank's parts by parameter. `group` moves the weights, `ranks` what describes them. Where several ranks hold a part,
    the first of them sends it. `dtype` is the engine's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, StateParts],
        ranks: Ranks,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        self._weights, self._ranks, self._group, self._dtype = weights, ranks, group, dtype
        self._shapes = {parameter.name: parameter.shape for parameter in parameters(spec)}
        held = ranks.run_on_all("hand over weights", lambda: {name: parts.boxes for name, parts in weights.items()})
        self._senders = {name: _senders(name, held) for name in self._shapes}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each parameter; a tensor is valid until the next."""
        for name, shape in self._shapes.items():
            yield name, self._whole(name, shape)

    @torch.no_grad()
    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
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


def _senders(name: str, held: list[dict[str, tuple[Box, ...]]]) -> list[tuple[Box, int]]:
    """The boxes of a parameter, each with the first rank that has it."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Box, int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes.get(name, ()):
            first.setdefault((box.offsets, box.sizes), (box, rank))
    return list(first.values())


def _elements(whole: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole
