"""`StateParts`: the pieces of one tensor of training state that this rank has. Used by optimizers, offload, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from meshwright.spec.layout import Box

READ_ELEMENTS = 1 << 24
"""Number of elements of encoded state that are in memory at a time when all of it is read."""


def weight_name(parameter: str) -> str:
    """Return the name under which a parameter's master weight is stored."""
    return f"model.{parameter}"


def moment_name(moment: str, parameter: str) -> str:
    """Return the name under which an optimizer's moment (such as "exp_avg") of a parameter is stored."""
    return f"optimizer.{moment}.{parameter}"


def average_name(parameter: str) -> str:
    """Return the name under which the moving average of a parameter is stored."""
    return f"ema.{parameter}"


class EncodedState(Protocol):
    """State whose form in memory differs from the values in checkpoints, such as packed optimizer state in host memory.

    A part of such state is represented by a tensor on the meta device, with the part's shape and dtype. The storage offset
    of this tensor, in elements, tells which elements are meant.
    """

    def read(self, part: Tensor) -> Tensor:
        """Return the values of `part`, as a copy in host memory."""
        ...

    def write(self, part: Tensor, values: Tensor) -> None:
        """Store `values` as the values of `part`. Several threads may call it."""
        ...


@dataclass(frozen=True)
class StateParts:
    """This rank's pieces of the tensor `name`, whose shape over all ranks is `shape`.

    The pieces follow each other along dimension 0 of `local`. `boxes` has the size of each piece, and its offset in the
    whole tensor. A rank without a piece has no boxes and an empty `local`. The optimizer updates the state in the memory
    of `local`; snapshots read it, and loads write to it.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    local: Tensor
    memory: Literal["device", "host"] = "device"
    """`host` if the optimizer keeps this state in host memory (`plan.offload`), otherwise `device`."""
    encoded: EncodedState | None = None
    """Reads and writes the state if `local` only identifies its elements; None if `local` has the values."""

    @classmethod
    def of_whole(cls, name: str, tensor: Tensor) -> StateParts:
        """Return the parts of a tensor that this rank has as a whole."""
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
        """Return the values of this rank's pieces: `local` itself, or a copy of encoded state."""
        return self.local if self.encoded is None else self.encoded.read(self.local)

    def write(self, values: Tensor) -> None:
        """Overwrite the values of this rank's pieces."""
        if self.encoded is None:
            self.local.copy_(values)
        else:
            self.encoded.write(self.local, values)

    def is_finite(self) -> bool:
        """Return whether all values are finite. Encoded state is read in parts."""
        parts = [self.local] if self.encoded is None else self.local.reshape(-1).split(READ_ELEMENTS)
        return all(bool((part if self.encoded is None else self.encoded.read(part)).isfinite().all()) for part in parts)

    def pieces(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield (box, elements) of each piece. The elements share the memory of `local`."""
        return ((box, self._elements(box)) for box in self.boxes)

    def piece(self, offsets: Sequence[int]) -> Tensor:
        """Return the elements of the box that begins at `offsets` of the whole tensor. They share the memory of `local`."""
        return self._elements(next(box for box in self.boxes if box.offsets == tuple(offsets)))

    def _elements(self, box: Box) -> Tensor:
        return self.local.narrow(0, box.first_row, box.sizes[0]) if box.sizes else self.local
