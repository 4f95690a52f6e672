"""What the descriptions of a block's parts have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from meshwright.spec.blocks.table import Op, Value
from meshwright.spec.errors import WrongKey


@dataclass(frozen=True, kw_only=True)
class BodyPlace:
    """Where a body is in a block: the width around it, the names of its module and its input, and the deviation of its
    initial weights.
    """

    hidden: int
    """Width of the residual stream."""
    prefix: str
    """Name of the body's module inside the block, such as `attention`."""
    reads: str
    """Name of the value that the body reads: the output of a norm, or the residual stream."""
    std: float
    """Standard deviation of initial weights."""
    residual_std: float
    """Standard deviation of the initial weights of projections back into the residual stream."""
    spread: bool = False
    """Whether the experts of a layer are on several ranks, which send rows to each other."""

    @property
    def output(self) -> Value:
        """Return the value that the body writes."""
        return Value(f"{self.prefix}.output", self.hidden)

    def name(self, inside: str) -> str:
        """Return the name of a module or a value inside the body."""
        return f"{self.prefix}.{inside}"


class BlockBody(Protocol):
    """Attention or a feed-forward network: an immutable description with its checks and its operations."""

    MODULE: ClassVar[str]
    """Name of the body's module in a block."""
    NORM: ClassVar[str]
    """Name of the norm before the body."""
    OUTPUT_NORM: ClassVar[str]
    """Name of the norm of the body's output, in blocks that have one."""

    def operations(self, place: BodyPlace) -> Iterator[Op]:
        """Yield the operations of the body at a place. One of them writes `place.output`."""

    def mistakes(self) -> Iterator[WrongKey]:
        """Yield what is wrong with the body. Mistakes name keys of `model`."""
