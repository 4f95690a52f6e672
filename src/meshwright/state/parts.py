"""`StateParts`: this rank's pieces of one logical tensor of training state, for optimizers, offload and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from meshwright.spec.layout import Box

READ_ELEMENTS = 1 << 24
"""Elements of encoded state that are in memory at once where all of it is read."""


def weight_name(parameter: str) -> str:
    """The logical name of a parameter's master weight."""
    return f"model.{parameter}"


def moment_name(moment: str, parameter: str) -> str:
    """The logical name of an optimizer's moment of a parameter."""
    return f"optimizer.{moment}.{parameter}"


def average_name(parameter: str) -> str:
    """The logical name of the moving average of a parameter."""
    return f"ema.{parameter}"


class EncodedState(Protocol):
    """State that is not in memory as it is stored in checkpoints. A part of it is a tensor on the meta device.

    The storage offset of such a tensor, in elements, identifies the elements; it has their shape and dtype.
    """

    def read(self, part: Tensor) -> Tensor:
        """The values of `part`, a copy in host memory."""
        ...

    def write(self, part: Tensor, values: Tensor) -> None:
        """Store the values of `part`. May be called from several threads."""
        ...


@dataclass(frozen=True)
class StateParts:
    """This rank's pieces of the logical tensor `name` of `shape`.

    The pieces are contiguous along dimension 0 of `local`; `boxes` has the size of each and its offset in the logical tensor.
    A rank without a piece has no boxes and an empty `local`. `local` is the memory in which the optimizer updates the state:
    snapshots read it, loading writes to it.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    local: Tensor
    memory: Literal["device", "host"] = "device"
    """`host` if the optimizer keeps this state in host memory (`plan.offload`), else `device`."""
    encoded: EncodedState | None = None
    """Reader and writer of the state where `local` only identifies its elements."""

    @classmethod
    def of_whole(cls, name: str, tensor: Tensor) -> StateParts:
        """The parts of a tensor that this rank has whole."""
        shape = tuple(tensor.shape)
        return cls(name, shape, (Box((0,) * len(shape), shape),), tensor.detach())

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device if self.encoded is None else torch.device("cpu")

    @property
    def is_meta(self) -> bool:
        return self.local.is_meta and self.encoded is None

    def read(self) -> Tensor:
        """The values of this rank's pieces: `local`, or a copy of encoded state."""
        return self.local if self.encoded is None else self.encoded.read(self.local)

    def write(self, values: Tensor) -> None:
        """Overwrite this rank's pieces."""
        if self.encoded is None:
            self.local.copy_(values)
        else:
            self.encoded.write(self.local, values)

    def is_finite(self) -> bool:
        """Whether all values are finite; encoded state is read in parts."""
        parts = [self.local] if self.encoded is None else self.local.reshape(-1).split(READ_ELEMENTS)
        return all(bool((part if self.encoded is None else self.encoded.read(part)).isfinite().all()) for part in parts)

    def pieces(self) -> Iterator[tuple[Box, Tensor]]:
        """(box, elements) of each piece; the elements share the memory of `local`."""
        return ((box, self._elements(box)) for box in self.boxes)

    def piece(self, offsets: Sequence[int]) -> Tensor:
        """The elements of the box that begins at `offsets` in the logical tensor, sharing the memory of `local`."""
        return self._elements(next(box for box in self.boxes if box.offsets == tuple(offsets)))

    def _elements(self, box: Box) -> Tensor:
        return self.local.narrow(0, box.first_row, box.sizes[0]) if box.sizes else self.local
